"""In which parts a rank makes all that it quantizes, so that readers may begin before it has ended. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from weightbus.dataplane.memory import READY_FLAG_BYTES
from weightbus.dataplane.tensors import ITEM_BYTES

from .quantization_plan import QuantizeJob, RankWork

SHARES: Final = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Of the arena, where parts end. It is made about three times as fast as a peer copies it: whoever has copied one part
finds the next ones made, and only the first is waited for."""
_ALIGNMENT: Final = 16


class ReadyPart(NamedTuple):
    """What is made up to a mark."""

    jobs: int
    """Of the first bucket's jobs, so many; all that is done, for the last part."""
    end: int
    """Bytes of the arena that are there then, from its beginning."""


def ready_parts_of(work: RankWork, shares: Sequence[float] = SHARES) -> tuple[ReadyPart, ...]:
    """The parts of what stays in one arena. None where nothing is made.

    Jobs that need nobody else are the first ones, and lie in the arena in their order; what is gathered first, and what
    is written once, lies behind them and is in the last part. Jobs of one weight, whose sums are cleared together, are
    in one part.
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


def marks_at(work: RankWork) -> int:
    """Where the marks begin: behind everything else in the arena."""
    return -(-work.arena_bytes // _ALIGNMENT) * _ALIGNMENT


def bytes_with_marks(work: RankWork, parts: Sequence[ReadyPart]) -> int:
    """Of the arena."""
    return marks_at(work) + len(parts) * READY_FLAG_BYTES if parts else work.arena_bytes


def _end(job: QuantizeJob) -> int:
    ends = (place.offset + _items(place.shape) * ITEM_BYTES[place.dtype] for place in job.targets if place.arena)
    return max(ends, default=0)


def _items(shape: Sequence[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
