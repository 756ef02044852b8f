"""Between processes: sockets and frames, deadlines, threads, process groups and the stores they meet in."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import process_groups as process_groups, torch_threads as torch_threads
    from .background_init import BackgroundInit as BackgroundInit
    from .connection_pool import ConnectionPool as ConnectionPool, PooledConnection as PooledConnection
    from .deadline import Deadline as Deadline
    from .frames import FrameListener as FrameListener, Frames as Frames, dead_among as dead_among
    from .host_facts import (
        files_identity as files_identity,
        folder_identity as folder_identity,
        host_identity as host_identity,
        interfaces as interfaces,
        network_identity as network_identity,
    )
    from .mac_frames import (
        MacFrames as MacFrames,
        MacListener as MacListener,
        address_towards as address_towards,
        bracketed as bracketed,
        family_of as family_of,
        host_and_port as host_and_port,
        new_token as new_token,
    )
    from .process_groups import backend_for as backend_for, taken_s as taken_s
    from .rendezvous_store import (
        ask_for_names as ask_for_names,
        join_store as join_store,
        reach_store as reach_store,
        serve_store as serve_store,
    )
    from .thread_latency import prompt as prompt, without_slack as without_slack
    from .unix_sockets import (
        default_runtime_dir as default_runtime_dir,
        not_private as not_private,
        open_runtime_dir as open_runtime_dir,
        peer_of as peer_of,
    )
    from .wire_message import WireMessage as WireMessage, decode as decode
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
