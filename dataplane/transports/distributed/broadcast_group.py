"""A rank of ours in the collective group that SGLang's workers can join: formed, used and aborted under deadlines.

SGLang forms its side with ``init_custom_process_group``: a TCPStore client, wrapped in a PrefixStore of the group's
name, given to torch's ``_new_process_group_helper``, which wraps it twice more. The same prefixes are applied here, and
the backend object is built directly: the trainer's default group, its timeouts and torch's registry stay as they are.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Final, Protocol, cast

import torch

# torch.distributed has these names only where it was built with it, and type checkers do not see them there.
from torch._C import _distributed_c10d as c10d

from ...errors import DeadlineExceeded, TransferFailed
from ...processes import Deadline, bucket_timeout_s, process_groups as backends
from .source_watchdog import Connections, SourceWatchdog, connections_of

ROOT: Final = 0
"""SGLang's workers broadcast from rank 0 of the group, always."""

_POLL_S: Final = 0.001


def to_be_taken(memory: torch.Tensor, deadline: Deadline) -> Deadline:
    """The deadline of a broadcast of `memory`, whichever member stalls."""
    return Deadline(min(deadline.left(), bucket_timeout_s(memory.nbytes)))


class _Backend(backends.GlooReceive, Protocol):
    """What torch's stubs leave out of ProcessGroupGloo and ProcessGroupNCCL."""

    def broadcast(self, tensors: list[torch.Tensor], opts: c10d.BroadcastOptions) -> c10d.Work: ...

    def abort(self) -> None: ...


class BroadcastGroup:
    """The root of a group of `world_size` ranks, or another rank of it, which receives."""

    def __init__(  # noqa: PLR0917  what it is made of
        self,
        name: str,
        device: torch.device,
        world_size: int,
        backend: _Backend,
        connections: Connections | None = None,
        rank: int = ROOT,
    ) -> None:
        """`connections` are those with the other ranks, where they can be had."""
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.connections = connections or Connections()
        self._device = device
        self._backend: _Backend | None = backend
        self._stand_in: SourceWatchdog | None = None

    @classmethod
    def form(  # noqa: PLR0917
        cls,
        store: c10d.Store,
        name: str,
        host: str,
        device: torch.device,
        world_size: int,
        deadline: Deadline,
        *,
        rank: int = ROOT,
        connect: bool = False,
    ) -> BroadcastGroup:
        """Blocks until every rank has come; over NCCL, which connects at the first broadcast, only to `connect`.

        That broadcast is one more, so that all ranks have to do it, which SGLang's workers do not.
        """
        timeout = timedelta(seconds=deadline.check("the group to form"))
        prefixed = c10d.PrefixStore(f"{device.type}/", c10d.PrefixStore(f"{name}/", c10d.PrefixStore(name, store)))
        try:
            if device.type == "cuda":
                found = cast("_Backend", backends.make_nccl_group(prefixed, rank, world_size, deadline))
                group = cls(name, device, world_size, found, rank=rank)
                if connect:
                    try:
                        group._carry(torch.zeros(1, dtype=torch.uint8, device=device), deadline)
                    except BaseException:
                        group.abort()  # no other holds it
                        raise
                return group
            backend = cast("_Backend", backends.make_gloo_group(prefixed, host, rank, world_size, timeout))
        except (RuntimeError, ValueError) as error:
            raise TransferFailed(f"group {name} of {world_size} ranks did not form: {error}") from error
        connections = connections_of(prefixed, rank, world_size) if rank == ROOT else None
        return cls(name, device, world_size, backend, connections, rank)

    @property
    def hung_up(self) -> bool:
        """Its connections were ended while this process stood still."""
        return self._stand_in is not None and self._stand_in.hung_up

    def use(self, used: bool) -> None:
        """Whether servers wait in it from now on: they are let go when this process stands still meanwhile (gloo)."""
        if self._stand_in is None and used and self.connections.files:
            self._stand_in = SourceWatchdog([self.connections])
        if self._stand_in is not None:
            self._stand_in.use(used)

    def broadcast(self, memory: torch.Tensor, deadline: Deadline) -> None:
        """Send `memory` to every rank, or receive it; returns when it may be written again, or read."""
        self._carry(memory, to_be_taken(memory, deadline) if self.rank == ROOT else deadline)

    def _carry(self, memory: torch.Tensor, deadline: Deadline) -> None:
        work = self.begin(memory, deadline)
        try:
            if self._device.type == "cuda":
                self._wait(work, deadline)
            else:
                work.wait(timedelta(seconds=deadline.check("a broadcast to end")))
        except RuntimeError as error:
            raise self._broke(error) from error

    def begin(self, memory: torch.Tensor, deadline: Deadline) -> c10d.Work:
        """Begin to send `memory` to every rank, or to receive it; `ended` says when that is over."""
        if self._backend is None:
            raise TransferFailed(f"{self.name} was broken off")
        options = c10d.BroadcastOptions()
        options.rootRank = ROOT
        options.rootTensor = 0
        options.timeout = timedelta(seconds=deadline.check("a broadcast to begin"))
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            return self._backend.broadcast([memory], options)
        except RuntimeError as error:
            raise self._broke(error) from error

    def ended(self, work: c10d.Work) -> bool:
        """Whether what `begin` began has ended well. Raises `TransferFailed` if it broke."""
        if not work.is_completed():
            return False
        try:
            work.wait()  # at once: it is completed, and raises what broke it
        except RuntimeError as error:
            raise self._broke(error) from error
        return True

    def _broke(self, error: RuntimeError) -> TransferFailed:
        return TransferFailed(f"the broadcast over {self.name} broke: {error}")

    def _wait(self, work: c10d.Work, deadline: Deadline) -> None:
        while not work.is_completed():
            if not deadline.left():
                raise DeadlineExceeded(f"every rank of {self.name} to take a broadcast", deadline.seconds)
            time.sleep(_POLL_S)
        work.wait()
        if self._backend is None:  # to a work of NCCL's, an abort looks like its end
            raise TransferFailed(f"{self.name} was broken off")

    def abort(self) -> None:
        """Break it off, also while another thread is in `broadcast`. The group is of no use afterwards.

        NCCL returns from everything at once; of gloo the connections are closed, which frees the other ranks.
        """
        backend, self._backend = self._backend, None
        if backend is None:
            return
        if self._device.type == "cuda":
            backends.abort_nccl(backend)
            return
        backends.break_gloo(backend, self.rank, self.world_size)
        self.connections.end()  # which another process has, too
        if self._stand_in is not None:
            self._stand_in.close()
