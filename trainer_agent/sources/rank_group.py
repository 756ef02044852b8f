"""The process group of one source: small messages between its ranks, on gloo, wherever the weights are.

Over the whole world a source opens groups of its own, so that its collectives cannot interleave with the training
loop's, and every wait ends after the timeout. Over a part of the world it cannot: torch needs every rank of the world
for a new group, and without them (`use_local_synchronization`) it names the group after the number of groups a rank is
in already, which differs between ranks. There the caller's group is used, with the caller's timeout.
Messages are bytes, not pickles.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Final, cast

import torch
import torch.distributed as dist

from ..source import AssemblyFailed

# torch leaves parts of its collectives untyped.
# pyright: reportUnknownMemberType=false

DEFAULT_TIMEOUT_S: Final = 1800.0
"""Seconds that a rank waits for another: longer than a round, in which rank 0 waits for the engines."""

_HEADER_BYTES: Final = 8
_PAGE_BYTES: Final = 1024
"""Largest message, header included, that is broadcast in one call."""


class RankGroup:
    """All ranks of a source; rank 0 is the root."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        """Open a control group over the world, or take `group` for it. Collective."""
        self._timeout = dt.timedelta(seconds=timeout_s)
        self._groups: list[dist.ProcessGroup] = []
        self.global_ranks: tuple[int, ...] = tuple(
            range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)
        )
        if dist.get_rank() not in self.global_ranks:
            raise ValueError(f"rank {dist.get_rank()} is not in the group {self.global_ranks} of the source it builds")
        self.rank: int = self.global_ranks.index(dist.get_rank())
        self._own = len(self.global_ranks) == dist.get_world_size()
        if group is not None and not self._own:
            if "cpu:gloo" not in (backends := dist.get_backend_config(group)):
                raise ValueError(
                    f"a group of a part of the world must carry CPU tensors too, this one is {backends!r}: "
                    f"make it with backend='cpu:gloo,cuda:nccl', or 'gloo' for a model on the CPU"
                )
            self._control = group
        else:
            self._control = self._open(self.global_ranks, "gloo")

    def gather(self, blob: bytes) -> list[bytes]:
        """Blobs of all ranks, by rank. Collective."""
        size = torch.tensor([len(blob)])
        sizes = [torch.zeros_like(size) for _ in self.global_ranks]
        try:
            dist.all_gather(sizes, size, group=self._control)
            lengths = [int(each) for each in sizes]
            page = torch.zeros(max(1, *lengths), dtype=torch.uint8)
            page[: len(blob)] = _tensor(blob)
            pages = [torch.zeros_like(page) for _ in lengths]
            dist.all_gather(pages, page, group=self._control)
        except RuntimeError as error:
            raise self._broken("every rank to describe its part of the model", error) from error
        return [_bytes(each[:length]) for each, length in zip(pages, lengths, strict=True)]

    def broadcast(self, blob: bytes | None) -> bytes:
        """Return the root's `blob` on every rank; the others pass None. Collective."""
        if (blob is not None) != (self.rank == 0):
            raise ValueError(f"rank {self.rank}: the root, and only the root, gives what is agreed")
        page = torch.zeros(_PAGE_BYTES, dtype=torch.uint8)
        if blob is not None:
            head = len(blob).to_bytes(_HEADER_BYTES, "little") + blob[: _PAGE_BYTES - _HEADER_BYTES]
            page[: len(head)] = _tensor(head)
        try:
            dist.broadcast(page, src=self.global_ranks[0], group=self._control)
            size = int.from_bytes(_bytes(page[:_HEADER_BYTES]), "little")
            first = _bytes(page[_HEADER_BYTES : _HEADER_BYTES + size])
            if len(first) == size:
                return first
            rest = torch.zeros(size - len(first), dtype=torch.uint8)
            if blob is not None:
                rest.copy_(_tensor(blob[len(first) :]))
            dist.broadcast(rest, src=self.global_ranks[0], group=self._control)
        except RuntimeError as error:
            raise self._broken("the root's decision", error) from error
        return first + _bytes(rest)

    def subgroup(self, ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup | None:
        """A group in which `ranks` exchange tensors of `device`; None on the others. Collective over all ranks."""
        member = self.rank in ranks
        if device.type != "cuda":
            return self._control if member else None
        group = self._open([self.global_ranks[rank] for rank in ranks], "nccl") if self._own else self._control
        if member or not self._own:
            # NCCL connects at the first call, which every member must make; a bucket concerns only some of them.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        return group if member else None

    def close(self) -> None:
        """Destroy the groups that this one opened. Collective."""
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups.clear()

    def _open(self, members: Sequence[int], backend: str) -> dist.ProcessGroup:
        """Open a group for `members`. Called by every rank of the world, in the same order."""
        group = dist.new_group(list(members), timeout=self._timeout, backend=backend)
        if dist.get_rank() in members:
            self._groups.append(cast("dist.ProcessGroup", group))
        return cast("dist.ProcessGroup", group)  # elsewhere torch's NON_GROUP_MEMBER, an int

    def _broken(self, waiting_for: str, error: RuntimeError) -> AssemblyFailed:
        return AssemblyFailed(
            f"rank {self.rank} waited for {waiting_for}, and a peer failed or took more than "
            f"{self._timeout.total_seconds():.0f} s ({error}): find the rank that failed first"
        )


class SingleRank:
    """The group of a source on one process, which needs no process group of torch."""

    rank: Final = 0
    global_ranks: Final = (0,)

    def gather(self, blob: bytes) -> list[bytes]:
        """`blob`, as the list of one rank."""
        return [blob]

    def broadcast(self, blob: bytes | None) -> bytes:
        """Return `blob`. Raises `ValueError` for None."""
        if blob is None:
            raise ValueError("rank 0: the root, and only the root, gives what is agreed")
        return blob

    def subgroup(self, ranks: Sequence[int], device: torch.device) -> None:
        """None: no tensors are exchanged."""
        del ranks, device

    def close(self) -> None:
        """Do nothing."""


def _tensor(blob: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8) if blob else torch.zeros(0, dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()
