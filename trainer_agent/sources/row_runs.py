"""Runs: consecutive rows of served tensors, one after another in what ranks share. Pure arithmetic.

Megatron's fused parameters and DTensor's shards are both sequences of runs, of which a rank holds a stretch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec


class RowRun(msgspec.Struct, frozen=True):
    """`length` indexes of a tensor from `start` on, which are those from `at` on in the sequence."""

    start: int
    length: int
    at: int = 0
    tensor: int = 0
    """Which one, where a sequence is of several tensors."""


def in_sequence(runs: Iterable[RowRun]) -> tuple[RowRun, ...]:
    """The same runs, each behind the one before it."""
    found: list[RowRun] = []
    at = 0
    for run in runs:
        found.append(RowRun(run.start, run.length, at, run.tensor))
        at += run.length
    return tuple(found)


def extent(runs: Sequence[RowRun]) -> int:
    """How many indexes they are."""
    return sum(run.length for run in runs)


def stretch(runs: Sequence[RowRun], start: int, length: int) -> tuple[RowRun, ...]:
    """`length` indexes of a sequence, from the one at `start` on, as a sequence of its own."""
    found: list[RowRun] = []
    for run in runs:
        first = max(run.at, start)
        last = min(run.at + run.length, start + length)
        if first < last:
            found.append(RowRun(run.start + first - run.at, last - first, first - start, run.tensor))
    return tuple(found)
