"""Between processes: sockets and frames, deadlines, threads, process groups and the stores they meet in."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import process_groups as process_groups, torch_threads as torch_threads
    from .background_init import BackgroundInit as BackgroundInit
    from .connection_pool import ConnectionPool as ConnectionPool, PooledConnection as PooledConnection
    from .deadline import Deadline as Deadline
    from .frames import FrameListener as FrameListener, Frames as Frames, find_ended_peer as find_ended_peer
    from .host_facts import (
        files_identity as files_identity,
        folder_identity as folder_identity,
        host_identity as host_identity,
        network_identity as network_identity,
        network_interfaces as network_interfaces,
    )
    from .mac_frames import (
        MacFrames as MacFrames,
        MacListener as MacListener,
        address_family as address_family,
        bracket_ipv6 as bracket_ipv6,
        local_address_towards as local_address_towards,
        new_token as new_token,
        parse_tcp_address as parse_tcp_address,
    )
    from .process_groups import bucket_timeout_s as bucket_timeout_s, process_group_backend as process_group_backend
    from .rendezvous_store import (
        connect_store as connect_store,
        join_store as join_store,
        serve_store as serve_store,
        warm_up_name_resolution as warm_up_name_resolution,
    )
    from .thread_latency import (
        gc_paused as gc_paused,
        low_latency_threads as low_latency_threads,
        without_timer_slack as without_timer_slack,
    )
    from .unix_sockets import (
        default_runtime_dir as default_runtime_dir,
        open_runtime_dir as open_runtime_dir,
        peer_pid as peer_pid,
        why_not_private as why_not_private,
    )
    from .wire_message import WireEnd as WireEnd, WireMessage as WireMessage
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
