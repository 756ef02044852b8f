"""The rendezvous store of a group: serving it, and connecting to one whose server may have ended."""

from __future__ import annotations

import functools
import socket
import threading
from datetime import timedelta

# torch.distributed has these names only where it was built with it, and type checkers do not see them there.
from torch._C import _distributed_c10d as c10d

# torch.distributed has this name only where it was built with it, and type checkers do not see it there.
from torch._C._distributed_c10d import TCPStore

from ..errors import DeadlineExceeded, PeerLost
from . import torch_threads
from .deadline import Deadline
from .mac_frames import listen_tcp, parse_tcp_address


def connect_store(address: str, deadline: Deadline) -> TCPStore:
    """A client of the store at ``tcp://host:port``, whose waits for keys end with `deadline`.

    Raises `PeerLost`, `DeadlineExceeded`, `TransferFailed` for another kind of address. To be called on a thread of
    torch_threads.py, because it cannot be cancelled.
    """
    host, port = parse_tcp_address(address)
    _knock(host, port, deadline)
    left = timedelta(seconds=deadline.check("the group's store"))
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=left)
    except RuntimeError as error:
        raise DeadlineExceeded("the group's store", deadline.seconds) from error


@functools.cache
def warm_up_name_resolution() -> threading.Thread:
    """Have torch make its first store now, on a thread of its own; once in a process.

    Torch resolves the host name of every peer of a store. Without a name server it waits 10 s for each, and only the
    first time: otherwise in the middle of the process's first round.
    """
    return torch_threads.start(_make_a_store, "weightbus-names")


def _make_a_store() -> None:
    TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _knock(host: str, port: int, deadline: Deadline) -> None:
    """Connect once: torch would retry an ended store for twice its deadline, and cannot be cancelled meanwhile."""
    try:
        socket.create_connection((host, port), deadline.check("the group's store")).close()
    except TimeoutError as error:
        raise DeadlineExceeded("the group's store", deadline.seconds) from error
    except OSError as error:
        raise PeerLost(f"the group's store at {host}:{port} does not answer: {error}") from error


def serve_store(host: str) -> c10d.TCPStore:
    """A rendezvous store on an ephemeral port of `host` alone. Raises `TransferFailed` where there can be none."""
    listener = listen_tcp(host)
    port: int = listener.getsockname()[1]
    return c10d.TCPStore(
        host, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )


def join_store(server: c10d.TCPStore) -> c10d.TCPStore:
    """A client of `server`. It keeps no server alive: the last reference to `server` ends the store for all."""
    return c10d.TCPStore(server.host, server.port, is_master=False, wait_for_workers=False)
