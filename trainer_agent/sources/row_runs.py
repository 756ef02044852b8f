"""Row runs: consecutive rows of checkpoint tensors, concatenated in the tensors that ranks share. Pure arithmetic.

Megatron's fused parameters and DTensor's shards are both sequences of runs, of which a rank holds a slice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec


class RowRun(msgspec.Struct, frozen=True):
    """`length` indexes of a tensor from `start` on, at positions from `at` on of the sequence."""

    start: int
    length: int
    at: int = 0
    tensor: int = 0
    """Index of the tensor, in a sequence of several tensors."""


def concatenate(runs: Iterable[RowRun]) -> tuple[RowRun, ...]:
    """The same runs, each placed behind the one before it."""
    found: list[RowRun] = []
    at = 0
    for run in runs:
        found.append(RowRun(run.start, run.length, at, run.tensor))
        at += run.length
    return tuple(found)


def total_length(runs: Sequence[RowRun]) -> int:
    """Sum of the runs' lengths."""
    return sum(run.length for run in runs)


def slice_runs(runs: Sequence[RowRun], start: int, length: int) -> tuple[RowRun, ...]:
    """The runs at positions `start` to `start + length` of a sequence, as a sequence of its own."""
    found: list[RowRun] = []
    for run in runs:
        first = max(run.at, start)
        last = min(run.at + run.length, start + length)
        if first < last:
            found.append(RowRun(run.start + first - run.at, last - first, first - start, run.tensor))
    return tuple(found)
