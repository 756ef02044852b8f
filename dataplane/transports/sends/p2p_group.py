"""A process group of one epoch in which ranks send to and receive from each other, under deadlines: gloo or NCCL.

The trainer's ranks come first, then the workers of the engines. The name of a group and the address of its store are
new in every epoch, so that no member of an earlier one can be in it; one that served without a fault may serve the same
members again (group_transfer.py).

A member that gives up breaks the group for all: NCCL by `abort`, gloo by `break_gloo` (process_groups.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Protocol, cast

import torch

# torch.distributed has these names only where it was built with it, and type checkers do not see them there.
from torch._C import _distributed_c10d as c10d

from ...errors import ChunkTimeout, DeadlineExceeded, PeerLost, TransferFailed
from ...processes import Deadline, process_groups as backends


class OwnStream:
    """The stream of one device; on a CPU there is none, and everything happens where it is called."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def lane(self) -> Generator[None, None, None]:
        """Where copies into and out of messages are launched: in front of what is posted next."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def settle(self) -> None:
        """Wait for the operations that were launched in the lane."""
        if self._stream is not None:
            self._stream.synchronize()


_POLL_S: Final = 0.00005
_WARM_S: Final = 20.0
MOVED: Final = (
    "a peer to send or take its messages: either it stands still, or the link does not carry a turn's bytes in that"
    " time (up to 2 GB of a rank on GPUs, 256 MB on CPUs; the next attempt takes an eighth of what this one took, down"
    " to 1 MB a pair); over one that is too slow for that, too, let the engine take distributed or disk"
)
"""What is waited for in a turn."""


NO_RANKS: Final[frozenset[int]] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class P2PChunk:
    """One message, as one of its ends sees it."""

    memory: torch.Tensor
    """1-D uint8: what is sent, or where it is received."""
    peer: int
    """Rank of the other end."""


class _P2PBackend(backends.GlooReceive, Protocol):
    """What torch's stubs leave out of ProcessGroupGloo and ProcessGroupNCCL."""

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> c10d.Work: ...  # noqa: N803

    def allreduce(self, tensors: list[torch.Tensor]) -> c10d.Work: ...

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> c10d.Work: ...

    def abort(self) -> None: ...

    def shutdown(self) -> None: ...


class Posted(Protocol):
    """Messages that are under way."""

    def wait(self, deadline: Deadline) -> None:
        """Return when memory that is sent may be written, and memory that is received read.

        Raises `PeerLost`, `ChunkTimeout`; the group is broken then, for all members.
        """
        ...


class P2PGroup(OwnStream):
    """One rank of the group. `post` and `exchange` are called by one thread, `abort` by any."""

    def __init__(self, backend: _P2PBackend, device: torch.device, rank: int, size: int) -> None:
        super().__init__(device)
        self.rank = rank
        self.size = size
        self._backend = backend
        self._broken = ""

    @classmethod
    def form(  # noqa: PLR0917
        cls,
        store: c10d.Store,
        name: str,
        host: str,
        device: torch.device,
        rank: int,
        size: int,
        deadline: Deadline,
        *,
        to: frozenset[int] = NO_RANKS,
        from_: frozenset[int] = NO_RANKS,
    ) -> P2PGroup:
        """Join as `rank`; returns when all have. `host` is the address at which the others reach this process.

        NCCL connects a pair at its first message, which takes longer than the message: members that will be sent `to`,
        and received `from_`, are connected here. Both ends must name the pair.
        """
        prefixed = c10d.PrefixStore(name, store)
        try:
            if device.type == "cuda":
                group = cls(
                    cast("_P2PBackend", backends.make_nccl_group(prefixed, rank, size, deadline)), device, rank, size
                )
                try:
                    group._connect(to, from_, deadline)
                except BaseException:
                    group.abort("it did not form")
                    raise
                return group
            timeout = timedelta(seconds=deadline.check("the group to form"))
            backend = cast("_P2PBackend", backends.make_gloo_group(prefixed, host, rank, size, timeout))
            return cls(backend, device, rank, size)
        except (RuntimeError, ValueError) as error:
            raise TransferFailed(f"group {name} of {size} ranks did not form: {_short(error)}") from error

    def exchange(self, sends: Sequence[P2PChunk], receives: Sequence[P2PChunk], deadline: Deadline) -> None:
        """Move all of these. Raises as `Posted.wait`."""
        self.post(sends, receives).wait(deadline)

    def post(self, sends: Sequence[P2PChunk], receives: Sequence[P2PChunk]) -> Posted:
        """Begin to move all of these, on a GPU after what `lane` holds by now.

        Two ranks match their messages in the order in which both name them. Raises `PeerLost`: the group is broken.
        """
        with self._breaking(None):
            if self._stream is not None:
                return _Posted(self, self._post_on(self._stream, sends, receives))
            works = [self._backend.recv([each.memory], each.peer, 0) for each in receives]
            works += [self._backend.send([each.memory], each.peer, 0) for each in sends]
            return _Posted(self, works)

    def abort(self, reason: str = "it was broken off") -> None:
        """Break the group, also while another thread waits for messages: that raises, here and at every peer."""
        if self._broken:
            return
        self._broken = reason or "it was broken off"
        if self._stream is not None:
            backends.abort_nccl(self._backend)
            return
        backends.break_gloo(self._backend, self.rank, self.size)

    def close(self) -> None:
        """Everything has moved. NCCL keeps memory and threads until it is told so; gloo does not.

        Ending is polite, so that the last bytes of a peer are not cut off, and it is not waited for.
        """
        if self._stream is not None and not self._broken:
            self._broken = "it has ended"
            backends.run_aside(self._backend.shutdown)

    @property
    def broken(self) -> bool:
        """It is of no use any more."""
        return bool(self._broken)

    def drop(self) -> None:
        """Let go of a group in which nothing moves, without a word to the others: some may be dead, or have it still.

        Gloo's connections close with the last reference to it. NCCL's shutdown would wait for all; abort does not.
        """
        if not self._broken:
            self._broken = "it was let go of"
            if self._stream is not None:
                backends.run_aside(self._backend.abort)

    def check(self) -> None:
        """Raise RuntimeError when the group was broken. To a work of NCCL's, an abort looks like its end."""
        if self._broken:
            raise RuntimeError(self._broken)

    def finish(self, works: Sequence[c10d.Work], deadline: Deadline) -> None:
        """Wait for `works`. Raises RuntimeError, `DeadlineExceeded`."""
        for work in works:
            left = timedelta(seconds=deadline.check(MOVED))
            if self._stream is None:
                work.wait(left)
                continue
            while not work.is_completed():
                deadline.check(MOVED)
                time.sleep(_POLL_S)
            work.wait()  # raises what broke it: a work that failed is completed, too
        self.check()

    @contextlib.contextmanager
    def _breaking(self, deadline: Deadline | None) -> Generator[None, None, None]:
        """Whatever goes wrong within breaks the group."""
        try:
            self.check()
            yield
        except DeadlineExceeded as error:
            self.abort("a peer did not move")
            raise ChunkTimeout(error.waiting_for, error.seconds) from error
        except RuntimeError as error:
            late = deadline is not None and not deadline.left()
            self.abort(_short(error))
            if late and deadline is not None:
                raise ChunkTimeout(MOVED, deadline.seconds) from error
            raise PeerLost(f"the group broke: {self._broken}") from error

    def _post_on(
        self, stream: torch.cuda.Stream, sends: Sequence[P2PChunk], receives: Sequence[P2PChunk]
    ) -> list[c10d.Work]:
        """All of them as one group of NCCL, whose kernels run beside those of the other streams."""
        if not sends and not receives:
            return []
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            self._backend._start_coalescing()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            for each in receives:
                self._backend.recv([each.memory], each.peer, 0)
            for each in sends:
                self._backend.send([each.memory], each.peer, 0)
            return [self._backend._end_coalescing()]  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    def _connect(self, to: frozenset[int], from_: frozenset[int], deadline: Deadline) -> None:
        """NCCL connects at the first call, which all members have to make, and pairs at their first message."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        with self.lane():
            self.finish([self._backend.allreduce([torch.zeros(1, device=self._device)])], deadline)
        sends, receives = ([P2PChunk(byte.clone(), peer) for peer in sorted(peers)] for peers in (to, from_))
        try:
            self.exchange(sends, receives, deadline)
        except ChunkTimeout as error:  # this is no turn
            raise DeadlineExceeded("its peers to connect", error.seconds) from error


def warm(device: torch.device) -> None:
    """What a process's first group takes longer for than others, alone: NCCL, and what it has a GPU load.

    Raises `TransferFailed`, RuntimeError. On a CPU there is nothing to do.
    """
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    deadline = Deadline(_WARM_S)
    alone = P2PGroup(cast("_P2PBackend", backends.make_nccl_group(c10d.HashStore(), 0, 1, deadline)), device, 0, 1)
    try:
        alone._connect(frozenset({0}), frozenset({0}), deadline)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    finally:
        alone.drop()


@dataclass(frozen=True, slots=True)
class _Posted:
    group: P2PGroup
    works: Sequence[c10d.Work]

    def wait(self, deadline: Deadline) -> None:
        with self.group._breaking(deadline):  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            self.group.finish(self.works, deadline)


def _short(error: BaseException) -> str:
    """Torch's errors end in a page of advice."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
