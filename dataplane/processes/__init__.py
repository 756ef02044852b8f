"""Between processes: sockets and frames, deadlines, threads, process groups and the stores they meet in."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import process_groups as process_groups
    from .connections import (
        MAX_FDS as MAX_FDS,
        ConnectionPool as ConnectionPool,
        Deadline as Deadline,
        FrameListener as FrameListener,
        Frames as Frames,
        MacFrames as MacFrames,
        MacListener as MacListener,
        PacketFrames as PacketFrames,
        PooledConnection as PooledConnection,
        WireEnd as WireEnd,
        WireMessage as WireMessage,
        address_family as address_family,
        bracket_ipv6 as bracket_ipv6,
        bucket_timeout_s as bucket_timeout_s,
        default_runtime_dir as default_runtime_dir,
        find_ended_peer as find_ended_peer,
        local_address_towards as local_address_towards,
        new_token as new_token,
        open_runtime_dir as open_runtime_dir,
        parse_tcp_address as parse_tcp_address,
        why_not_private as why_not_private,
    )
    from .host_facts import (
        files_identity as files_identity,
        folder_identity as folder_identity,
        host_identity as host_identity,
        network_identity as network_identity,
        network_interfaces as network_interfaces,
    )
    from .process_groups import (
        connect_store as connect_store,
        join_store as join_store,
        process_group_backend as process_group_backend,
        serve_store as serve_store,
        warm_up_name_resolution as warm_up_name_resolution,
    )
    from .threads import (
        BackgroundInit as BackgroundInit,
        SerialCalls as SerialCalls,
        gc_paused as gc_paused,
        low_latency_threads as low_latency_threads,
        run_all_within as run_all_within,
        start_thread as start_thread,
        without_timer_slack as without_timer_slack,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
