"""A process group of one epoch in which ranks send to and receive from each other, under deadlines: gloo or NCCL.

The trainer's ranks come first, then the workers of the engines. The group is formed for one transfer and forgotten: its
name and the address of its store are new in every epoch, so that nobody of an earlier one can be in it.

Who gives up breaks the group for all that take part: NCCL by `abort`. Gloo has none (2.13: a no-op), but a wait that
runs out of time closes all connections of its process, and whoever waits at their other ends does the same. `abort`
makes one run out of time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Protocol, cast

import torch

# torch.distributed has these names only where it was built with it, and type checkers do not see them there.
from torch._C import _distributed_c10d as c10d

from . import backends
from .deadline import Deadline
from .errors import DeadlineExceeded, PeerLost, TransferFailed

_POLL_S: Final = 0.0005
_AT_ONCE: Final = timedelta(milliseconds=1)
_ABORT_TAG: Final = 0x7FFFFFFF
"""No message has it."""


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """One message, as one of its ends sees it."""

    memory: torch.Tensor
    """1-D uint8: what is sent, or where it is received."""
    peer: int
    """Rank of the other end."""


class _Backend(Protocol):
    """What torch's stubs leave out of ProcessGroupGloo and ProcessGroupNCCL."""

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> c10d.Work: ...  # noqa: N803

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> c10d.Work: ...  # noqa: N803

    def allreduce(self, tensors: list[torch.Tensor]) -> c10d.Work: ...

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> c10d.Work: ...

    def abort(self) -> None: ...


class PairGroup:
    """One rank of the group. `exchange` is called by one thread, `abort` by any."""

    def __init__(self, backend: _Backend, device: torch.device, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._backend = backend
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._broken = ""

    @classmethod
    def form(  # noqa: PLR0917
        cls, store: c10d.Store, name: str, host: str, device: torch.device, rank: int, size: int, deadline: Deadline
    ) -> PairGroup:
        """Join as `rank`; returns when all have. `host` is the address at which the others reach this process."""
        prefixed = c10d.PrefixStore(name, store)
        try:
            if device.type == "cuda":
                group = cls(cast("_Backend", backends.nccl(prefixed, rank, size)), device, rank, size)
                group._connect(deadline)
                return group
            timeout = timedelta(seconds=deadline.check("the group to form"))
            backend = cast("_Backend", backends.gloo(prefixed, host, rank, size, timeout))
            return cls(backend, device, rank, size)
        except (RuntimeError, ValueError) as error:
            raise TransferFailed(f"group {name} of {size} ranks did not form: {_short(error)}") from error

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel], deadline: Deadline) -> None:
        """Move all of these; returns when memory that is sent may be written, and memory that is received read.

        Two ranks match their messages in the order in which both name them. Raises `PeerLost`, `DeadlineExceeded`; the
        group is broken then, for everybody.
        """
        if not sends and not receives:
            return
        try:
            if self._stream is not None:
                self._exchange_on(self._stream, sends, receives, deadline)
            else:
                self._exchange_here(sends, receives, deadline)
        except DeadlineExceeded:
            self.abort("a peer did not move")
            raise
        except RuntimeError as error:
            late = not deadline.left()
            self.abort(_short(error))
            if late:
                raise DeadlineExceeded("a peer to send or take its messages", deadline.seconds) from error
            raise PeerLost(f"the group broke: {self._broken}") from error

    def abort(self, reason: str = "it was broken off") -> None:
        """Break the group, also while another thread is in `exchange`: that raises, here and at every peer."""
        if self._broken:
            return
        self._broken = reason
        if self._stream is not None:
            self._backend.abort()
            return
        other = (self.rank + 1) % self.size
        with contextlib.suppress(RuntimeError):  # that it runs out of time is what it is for
            self._backend.recv([torch.empty(1, dtype=torch.uint8)], other, _ABORT_TAG).wait(_AT_ONCE)

    def _exchange_here(self, sends: Sequence[Parcel], receives: Sequence[Parcel], deadline: Deadline) -> None:
        if self._broken:
            raise RuntimeError(self._broken)
        works = [self._backend.recv([each.memory], each.peer, 0) for each in receives]
        works += [self._backend.send([each.memory], each.peer, 0) for each in sends]
        for work in works:
            work.wait(timedelta(seconds=deadline.check("a peer to send or take its messages")))

    def _exchange_on(
        self, stream: torch.cuda.Stream, sends: Sequence[Parcel], receives: Sequence[Parcel], deadline: Deadline
    ) -> None:
        """All of them as one group of NCCL, whose kernels run beside those of the other streams."""
        if self._broken:
            raise RuntimeError(self._broken)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            self._backend._start_coalescing()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            for each in receives:
                self._backend.recv([each.memory], each.peer, 0)
            for each in sends:
                self._backend.send([each.memory], each.peer, 0)
            work = self._backend._end_coalescing()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            self._finish(work, deadline)
            stream.synchronize()

    def _connect(self, deadline: Deadline) -> None:
        """NCCL connects at the first call, which all members have to make."""
        assert self._stream is not None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._finish(self._backend.allreduce([torch.zeros(1, device=self._device)]), deadline)

    def _finish(self, work: c10d.Work, deadline: Deadline) -> None:
        while not work.is_completed():
            deadline.check("a peer to send or take its messages")
            time.sleep(_POLL_S)
        work.wait()


def _short(error: BaseException) -> str:
    """Torch's errors end in a page of advice."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
