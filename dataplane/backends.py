"""torch's process group backends, built directly: its default group, its timeouts and its registry stay as they are."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Final, Protocol, cast

import torch

# torch.distributed has these names only where it was built with it, and type checkers do not see them there.
from torch._C import _distributed_c10d as c10d

_AT_ONCE: Final = timedelta(milliseconds=1)
_ABORT_TAG: Final = 0x7FFFFFFF
"""No message has it."""


class Receiving(Protocol):
    """What torch's stubs leave out of ProcessGroupGloo."""

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> c10d.Work:  # noqa: N803
        """Torch's own."""
        ...


def break_gloo(backend: Receiving, rank: int, size: int) -> None:
    """Close all connections of `rank`, which frees whoever waits at their other ends, and here in another thread.

    Gloo has no abort (2.13: a no-op), but a receive that runs out of time does that. One from a rank that has ended
    fails in another way, which closes nothing; so each of the others is tried.
    """
    for peer in range(size):
        if peer != rank:
            with contextlib.suppress(RuntimeError):  # that it runs out of time is what it is for
                backend.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(_AT_ONCE)


def gloo(store: c10d.Store, host: str, rank: int, size: int, timeout: timedelta) -> object:
    """A ``ProcessGroupGloo`` that others reach at `host`. Blocks until all ranks have come; raises RuntimeError."""
    make = cast("Callable[..., object]", c10d.ProcessGroupGloo)  # the stubs know only its form without options
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001  # pyright: ignore[reportUnknownMemberType]
    options._timeout = timeout  # noqa: SLF001
    return make(store, rank, size, options)


def nccl(store: c10d.Store, rank: int, size: int) -> object:
    """A ``ProcessGroupNCCL``. It connects at its first call."""
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)  # noqa: SLF001  our deadlines decide; torch's watchdog would end the process
    with (
        _environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"),
        _environment("TORCH_NCCL_ENABLE_MONITORING", "0"),  # a watchdog that hangs in the driver would end it too
    ):
        return c10d.ProcessGroupNCCL(store, rank, size, options)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Generator[None, None, None]:
    """Torch reads this setting from the environment when a group is made, and nowhere else."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
