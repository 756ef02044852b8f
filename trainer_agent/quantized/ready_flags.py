"""Ready flags: readers begin with memory that a rank still quantizes.

A rank quantizes into its arena from the beginning on, part by part. Its device sets the flag of a part, which lies
behind all data in the arena, to the number of the round once the part is complete; before it writes anything it clears
all flags. Readers wait for the first part only. Together with deferred digests (publish/deferred_digests.py) that saves
28 ms of a round of 61 GB of FP8 weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch

from weightbus.dataplane.memory import READY_FLAG_BYTES, ArenaParts
from weightbus.dataplane.tensors import ITEM_BYTES

from .quantization_plan import QuantizeJob, RankWork

SHARES: Final = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Shares of the arena at which parts end. A device quantizes about three times as fast as a peer copies: after one part
is copied the next is complete, and readers wait for the first part only."""
_ALIGNMENT: Final = 16


class ReadyPart(NamedTuple):
    """A part of the arena with one flag."""

    jobs: int
    """Number of the first bucket's jobs that precede the flag; for the last part, all work precedes it."""
    end: int
    """Bytes of the arena that are complete when the flag is set, from its beginning."""


class ReadyFlags:
    """Parts and flags of one rank's arena."""

    def __init__(self, work: RankWork, shares: Sequence[float] = SHARES) -> None:
        self.parts = ready_parts_of(work, shares)
        self.offset = -(-work.arena_bytes // _ALIGNMENT) * _ALIGNMENT
        """Byte of the arena at which the flags begin, behind all data."""
        self.arena_bytes = self.offset + len(self.parts) * READY_FLAG_BYTES if self.parts else work.arena_bytes
        """Bytes of the arena with its flags."""

    @property
    def job_cuts(self) -> tuple[int, ...]:
        """Jobs of the first bucket behind which a flag is set; the last flag is set behind all work."""
        return tuple(part.jobs for part in self.parts[:-1])

    def in_memory(self, storage: int) -> ArenaParts | None:
        """Parts and flags as readers are told of them; `storage` is the number of the arena. None without parts."""
        return ArenaParts(storage, tuple(part.end for part in self.parts), self.offset) if self.parts else None

    def of(self, arena: torch.Tensor) -> torch.Tensor:
        """(parts,) int64: the flags in `arena`."""
        return arena[self.offset :].view(torch.int64) if self.parts else arena[:0].view(torch.int64)

    def clear(self, arena: torch.Tensor) -> None:
        """Clear all flags, in stream order."""
        self.of(arena).zero_()

    def set(self, arena: torch.Tensor, part: int, value: int) -> None:
        """Set the flag of `part`, in stream order behind the part's writes."""
        self.of(arena)[part].fill_(value)


def ready_parts_of(work: RankWork, shares: Sequence[float] = SHARES) -> tuple[ReadyPart, ...]:
    """Parts of an arena that stays in memory; empty if nothing is quantized.

    Jobs that need no other rank come first, and lie in the arena in their order. Gathered weights and data that is
    written once lie behind them, in the last part. Jobs of one weight, whose checksums are cleared together, are in one
    part.
    """
    if not work.arena_bytes:
        return ()
    jobs = work.buckets[0].jobs
    own = next((at for at, job in enumerate(jobs) if job.held is None), len(jobs))
    found: list[ReadyPart] = []
    left = [share * work.arena_bytes for share in shares]
    end = 0
    for at, job in enumerate(jobs[:own]):
        end = max(end, _end(job))
        if left and end >= left[0] and (at + 1 == len(jobs) or jobs[at + 1].weight != job.weight):
            found.append(ReadyPart(at + 1, end))
            left = [each for each in left if each > end]
    if found and found[-1].end >= work.arena_bytes:
        found.pop()
    return (*found, ReadyPart(len(jobs), work.arena_bytes))


def _end(job: QuantizeJob) -> int:
    ends = (place.offset + _items(place.shape) * ITEM_BYTES[place.dtype] for place in job.targets if place.arena)
    return max(ends, default=0)


def _items(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
