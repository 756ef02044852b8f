"""What a publication finds in the weights themselves: elements that are no numbers, and replicas that are not equal.

Plain values, for reports and errors. The data plane finds them (digest/nonfinite.py, reshard/replica_digests.py).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Final, Self

import msgspec

SHOWN: Final = 8
"""Tensors that a report names."""
_IN_A_LINE: Final = 3


class OnNonFinite(enum.StrEnum):
    """What becomes of a version with elements that are NaN or infinite."""

    WARN = "warn"
    """It is published; report, log and a metric say so."""
    REFUSE = "refuse"
    """It is not published: `publish` raises `WeightsNotFinite` before any engine hears of the version."""


class OnDifference(enum.StrEnum):
    """What becomes of a version whose replicas of a parameter differ between ranks."""

    OFF = "off"
    """Replicas are not compared."""
    WARN = "warn"
    """One rank's are published; report, log and a metric say so."""
    REFUSE = "refuse"
    """It is not published: `publish` raises `ReplicasDiffer` before any engine hears of the version."""


class NonFiniteTensor(msgspec.Struct, frozen=True):
    """A tensor with elements that are NaN or infinite."""

    name: str
    elements: int


class NonFinite(msgspec.Struct, frozen=True):
    """Elements of one version, as it is served, that are NaN or infinite."""

    elements: int = 0
    tensors: int = 0
    """Tensors with such elements."""
    first: tuple[NonFiniteTensor, ...] = ()
    """The first of them, in the order of the manifest."""

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> Self:
        """From the elements of each tensor that has some, in the order of the manifest."""
        first = tuple(NonFiniteTensor(name, counts[name]) for name in islice(counts, SHOWN))
        return cls(sum(counts.values()), len(counts), first)

    def __str__(self) -> str:
        shown = ", ".join(f"{each.name}: {each.elements}" for each in self.first[:_IN_A_LINE])
        return f"{self.elements} elements NaN or infinite, in {_tensors(self.tensors)} ({shown}{_more(self.tensors)})"


class DifferingReplicas(msgspec.Struct, frozen=True):
    """A tensor whose replicas are not equal."""

    name: str
    ranks: tuple[tuple[int, ...], ...]
    """Ranks that hold the first unequal part of it, those that agree side by side."""

    def __str__(self) -> str:
        return f"{self.name}: {' / '.join(_ranks(each) for each in self.ranks)}"


class ReplicasCompared(msgspec.Struct, frozen=True):
    """A comparison of all parts of parameters that several ranks hold."""

    parts: int
    """Parts that were compared, each on all of its ranks."""
    seconds: float = 0.0
    """Seconds that it took, on rank 0."""
    differing: int = 0
    """Tensors with a part that is not the same on all of its ranks."""
    first: tuple[DifferingReplicas, ...] = ()
    """The first of them."""

    def __str__(self) -> str:
        shown = ", ".join(str(each) for each in self.first[:_IN_A_LINE])
        return f"replicas of {_tensors(self.differing)} differ ({shown}{_more(self.differing)})"


def _tensors(count: int) -> str:
    return f"{count} tensor{'' if count == 1 else 's'}"


def _more(count: int) -> str:
    return f" and {count - _IN_A_LINE} more" if count > _IN_A_LINE else ""


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, runs of them shortened."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    found = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'' if len(ranks) == 1 else 's'} {found}"
