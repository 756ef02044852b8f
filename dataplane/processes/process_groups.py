"""torch's process groups and the stores they meet in: the default group, its timeouts and registry stay untouched."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
from collections.abc import Callable, Generator, Mapping
from datetime import timedelta
from typing import Final, Protocol, cast

import torch

# torch.distributed has these names only where it was built with it, and type checkers do not see them there.
from torch._C import _distributed_c10d as c10d

from ..errors import DeadlineExceeded, PeerLost, Unsupported
from .connections import Deadline, listen_tcp, parse_tcp_address
from .threads import start_thread

_UNWATCHED: Final = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # by which it is told of no work
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # a watchdog that hangs in the driver would end the process too
}
_MAKING: Final = threading.Lock()
"""Held while a group is constructed: its environment variables are those of the whole process meanwhile."""
_ABORT_S: Final = 5.0
"""Seconds for NCCL to abort a group before its thread is left alone."""
_AT_ONCE: Final = timedelta(milliseconds=1)
_ABORT_TAG: Final = 0x7FFFFFFF
"""A tag that no message has."""


class NcclAbort(Protocol):
    """The part of ProcessGroupNCCL that torch's stubs leave out."""

    def abort(self) -> None:
        """Torch's own."""


class GlooReceive(Protocol):
    """The part of ProcessGroupGloo that torch's stubs leave out."""

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> c10d.Work:  # noqa: N803
        """Torch's own."""
        ...


def break_gloo(backend: GlooReceive, rank: int, size: int) -> None:
    """Close all connections of `rank`, which ends every wait at their other ends, and of other threads here.

    Gloo has no abort (2.13: a no-op), but a receive that times out closes them. A receive from a rank that has ended
    fails in another way and closes nothing, so each peer is tried.
    """
    for peer in range(size):
        if peer != rank:
            with contextlib.suppress(RuntimeError):  # that it runs out of time is what it is for
                backend.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(_AT_ONCE)


def make_gloo_group(store: c10d.Store, host: str, rank: int, size: int, timeout: timedelta) -> object:
    """A ``ProcessGroupGloo`` that peers reach at `host`. Blocks until all ranks have joined; raises RuntimeError."""
    make = cast("Callable[..., object]", c10d.ProcessGroupGloo)  # the stubs know only its form without options
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001  # pyright: ignore[reportUnknownMemberType]
    options._timeout = timeout  # noqa: SLF001
    return make(store, rank, size, options)


def make_nccl_group(store: c10d.Store, rank: int, size: int, deadline: Deadline) -> object:
    """A ``ProcessGroupNCCL`` that torch's watchdog leaves alone. It connects at its first call.

    Our deadlines decide. A watchdog that sees an error of NCCL's, which a peer's death is, keeps ``abort`` waiting for
    a minute while it dumps its state, and has the monitor of the process's first group end the process eight minutes
    later. It is not told of the works of a group in blocking-wait mode.

    One group is constructed at a time; raises `DeadlineExceeded` when another one takes too long. A group that the
    program constructs on another thread at the same moment gets our settings too.
    """
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)  # noqa: SLF001
    if not _MAKING.acquire(timeout=deadline.check("a group to be made")):
        raise DeadlineExceeded("another group to be made", deadline.seconds)
    try:
        with _environment(_UNWATCHED):
            return c10d.ProcessGroupNCCL(store, rank, size, options)
    finally:
        _MAKING.release()


def abort_nccl(backend: NcclAbort, seconds: float = _ABORT_S) -> None:
    """Abort a group and wait up to `seconds`: NCCL's part may take as long as the driver likes."""
    run_aside(backend.abort).join(seconds)


def run_aside(function: Callable[[], None]) -> threading.Thread:
    """Run `function` on a thread of its own and ignore its RuntimeError: the end of a group that is of no more use."""

    def quietly() -> None:
        with contextlib.suppress(RuntimeError):
            function()

    return start_thread(quietly, "weightbus-nccl-end")


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Generator[None, None, None]:
    """Set environment variables: torch reads these when a group is constructed, and nowhere else."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def process_group_backend(device: torch.device) -> str:
    """``make_gloo_group`` or ``make_nccl_group``. Raises `Unsupported` when the environment would make NCCL hang."""
    if device.type != "cuda":
        return "gloo"
    found = os.environ.get("NCCL_CUMEM_ENABLE")
    if found != "0":
        # SGLang sets 0 in its workers; with another value on this side the first broadcast hangs (seen on H200s).
        raise Unsupported(
            f"NCCL_CUMEM_ENABLE is {found!r} in the trainer, SGLang's workers run with '0' and the first "
            "broadcast would hang: start the trainer with NCCL_CUMEM_ENABLE=0"
        )
    return "nccl"


def connect_store(address: str, deadline: Deadline) -> c10d.TCPStore:
    """A client of the store at ``tcp://host:port``, whose waits for keys end with `deadline`.

    Raises `PeerLost`, `DeadlineExceeded`, `TransferFailed` for another kind of address. To be called on a thread of
    threads.py, because it cannot be cancelled.
    """
    host, port = parse_tcp_address(address)
    _knock(host, port, deadline)
    left = timedelta(seconds=deadline.check("the group's store"))
    try:
        return c10d.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=left)
    except RuntimeError as error:
        raise DeadlineExceeded("the group's store", deadline.seconds) from error


@functools.cache
def warm_up_name_resolution() -> threading.Thread:
    """Have torch make its first store now, on a thread of its own; once in a process.

    Torch resolves the host name of every peer of a store. Without a name server it waits 10 s for each, and only the
    first time: otherwise in the middle of the process's first round.
    """
    return start_thread(_make_a_store, "weightbus-names")


def _make_a_store() -> None:
    c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


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
