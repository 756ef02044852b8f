"""Boxes: half-open index ranges along every axis of a tensor, one at a time and by the million. Pure arithmetic.

`Box` is one, for building and for messages. `Boxes` are many as columns, each in its own index space (a tensor's
number), and answer for all at once: which overlap, and whether they cover their spaces exactly once. A model of 20,000
tensors on 64 ranks is a million boxes, so nothing here loops over them in Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int64]

_PAIRS_AT_ONCE: Final = 1 << 22
"""Candidate pairs compared in one step: about 200 MB of temporaries."""


class Box(msgspec.Struct, frozen=True):
    """The indexes ``start[axis] <= i < stop[axis]`` on every axis. A scalar's box has no axes and one element."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent along each axis."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def fits(self, shape: Sequence[int]) -> bool:
        """True when not empty, and inside a tensor of `shape`."""
        return len(self.start) == len(self.stop) == len(shape) and all(
            0 <= start < stop <= extent for start, stop, extent in zip(self.start, self.stop, shape, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """The common part; None when it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def subtract(self, other: Box) -> tuple[Box, ...]:
        """The part outside of `other`, as disjoint boxes: at most two for each axis."""
        common = self.intersect(other)
        if common is None:
            return (self,)
        rest: list[Box] = []
        start, stop = list(self.start), list(self.stop)
        for axis in range(len(start)):
            if start[axis] < common.start[axis]:
                rest.append(Box(tuple(start), (*stop[:axis], common.start[axis], *stop[axis + 1 :])))
            if common.stop[axis] < stop[axis]:
                rest.append(Box((*start[:axis], common.stop[axis], *start[axis + 1 :]), tuple(stop)))
            start[axis], stop[axis] = common.start[axis], common.stop[axis]
        return tuple(rest)


def subtract_all(box: Box, others: Sequence[Box]) -> tuple[Box, ...]:
    """The part of `box` outside of all `others`, as disjoint boxes."""
    rest = [box]
    for other in others:
        rest = [part for each in rest for part in each.subtract(other)]
    return tuple(rest)


@dataclass(frozen=True, eq=False)
class Boxes:
    """Many boxes as columns. Tensors with fewer axes than the columns have extent 1 on the further ones."""

    space: Column
    """(boxes,): index of the tensor."""
    start: Column
    """(boxes, axes): first index."""
    stop: Column
    """(boxes, axes): index behind the last one."""

    def __len__(self) -> int:
        return len(self.space)

    @property
    def extents(self) -> Column:
        """(boxes, axes): indexes along each axis."""
        return self.stop - self.start

    @property
    def sizes(self) -> Column:
        """(boxes,): elements."""
        extents = self.extents
        sizes = np.ones(len(self), np.int64)
        for axis in range(extents.shape[1]):
            sizes *= extents[:, axis]
        return sizes

    def at(self, index: int) -> Box:
        """The box of row `index`, with all axes of the columns."""
        return Box(tuple(self.start[index].tolist()), tuple(self.stop[index].tolist()))

    def take(self, rows: Column) -> Boxes:
        """The boxes of these rows, in their order."""
        if is_identity(rows, len(self)):
            return self
        return Boxes(self.space[rows], self.start[rows], self.stop[rows])


def is_identity(rows: Column, count: int) -> bool:
    """True when `rows` are 0, 1, .. `count` - 1: taking them changes nothing."""
    return len(rows) == count and np.array_equal(rows, np.arange(count))


def pad_axes(column: Column, axes: int, fill: int) -> Column:
    """Columns for further axes: `fill` is 0 for a start or a stride, and 1 for a stop."""
    rows, known = column.shape
    if known >= axes:
        return column
    wide = np.full((rows, axes), fill, np.int64)
    wide[:, :known] = column
    return wide


def intersect(a: Boxes, b: Boxes) -> tuple[Column, Column, Boxes]:
    """All overlapping pairs of a box of `a` and a box of `b`: rows of `a`, rows of `b`, and the common parts.

    Ordered by row of `a`, then of `b`. Takes time in the number of pairs, not of all products: a space with one box of
    `b` is a lookup; in the others boxes are sorted along the axis that `b` is cut along most, and only neighbors on it
    are compared.
    """
    axes = max(a.start.shape[1], b.start.shape[1])
    a = Boxes(a.space, pad_axes(a.start, axes, 0), pad_axes(a.stop, axes, 1))
    b = Boxes(b.space, pad_axes(b.start, axes, 0), pad_axes(b.stop, axes, 1))
    rows, others = _ordered([(rows, others) for rows, others in _pairs(a, b) if len(rows)], len(b))
    common = Boxes(a.space[rows], np.maximum(a.start[rows], b.start[others]), np.minimum(a.stop[rows], b.stop[others]))
    return rows, others, common


def find_overlap(boxes: Boxes) -> tuple[int, int] | None:
    """Two rows that overlap; None when every element of every space is in at most one box."""
    rows, others, _ = intersect(boxes, boxes)
    double = np.flatnonzero(rows != others)
    return (int(rows[double[0]]), int(others[double[0]])) if len(double) else None


def volumes(boxes: Boxes, spaces: int) -> Column:
    """(spaces,): elements of the boxes of each space, common ones counted for each box."""
    total = np.zeros(spaces, np.int64)
    np.add.at(total, boxes.space, boxes.sizes)
    return total


def _pairs(a: Boxes, b: Boxes) -> Iterator[tuple[Column, Column]]:
    """Overlapping pairs."""
    if not len(a) or not len(b):
        return
    spaces = int(max(a.space.max(), b.space.max())) + 1
    count = np.bincount(b.space, minlength=spaces)[a.space]
    place = np.zeros(spaces, np.int64)
    place[b.space] = np.arange(len(b))
    rows = np.flatnonzero(count == 1)
    others = place[a.space[rows]]
    overlap = _overlap(a, rows, b, others)
    yield rows[overlap], others[overlap]
    crowded = np.flatnonzero(count > 1)
    if len(crowded):
        for some, found in _candidates(a.take(crowded), b):
            yield crowded[some], found


def _ordered(pairs: Sequence[tuple[Column, Column]], count: int) -> tuple[Column, Column]:
    """All pairs by their first row, then by the second, which is less than `count`."""
    rows = np.concatenate([pair[0] for pair in pairs]) if pairs else np.empty(0, np.int64)
    others = np.concatenate([pair[1] for pair in pairs]) if pairs else np.empty(0, np.int64)
    key = rows * count + others
    if (key[1:] > key[:-1]).all():
        return rows, others
    order = np.argsort(key, kind="stable")
    return rows[order], others[order]


def _overlap(a: Boxes, rows: Column, b: Boxes, others: Column) -> npt.NDArray[np.bool_]:
    """(pairs,) bool: which of these pairs overlap."""
    apart = (a.start[rows] >= b.stop[others]) | (b.start[others] >= a.stop[rows])
    found = np.ones(len(rows), bool)
    for axis in range(apart.shape[1]):
        found &= ~apart[:, axis]
    return found


def _candidates(a: Boxes, b: Boxes) -> Iterator[tuple[Column, Column]]:
    """Overlapping pairs, a bounded number of comparisons at a time."""
    axis_of = _cut_axis(b, int(max(a.space.max(), b.space.max())) + 1)
    span = int(max(a.stop.max(), b.stop.max())) + 1
    a_from, a_to = (_key(a, column, axis_of, span) for column in (a.start, a.stop))
    b_from, b_to = (_key(b, column, axis_of, span) for column in (b.start, b.stop))
    order = np.argsort(b_from, kind="stable")
    reach = np.maximum.accumulate(b_to[order])  # how far any box up to here goes, which grows
    first = np.searchsorted(reach, a_from, side="right")
    count = np.maximum(np.searchsorted(b_from[order], a_to, side="left") - first, 0)
    ends = np.cumsum(count)
    at = 0
    while at < len(a):
        limit = (ends[at - 1] if at else 0) + _PAIRS_AT_ONCE
        until = max(at + 1, int(np.searchsorted(ends, limit, side="right")))
        rows = np.repeat(np.arange(at, until), count[at:until])
        within = np.arange(len(rows)) - np.repeat(
            ends[at:until] - count[at:until] - (ends[at] - count[at]), count[at:until]
        )
        others = order[first[rows] + within]
        overlap = _overlap(a, rows, b, others)
        yield rows[overlap], others[overlap]
        at = until


def _key(boxes: Boxes, column: Column, axis_of: Column, span: int) -> Column:
    """One number for space and position along the space's axis, in that order."""
    return boxes.space * span + column[np.arange(len(boxes)), axis_of[boxes.space]]


def _cut_axis(boxes: Boxes, spaces: int) -> Column:
    """(spaces,): the axis along which the boxes of each space begin at the most different places."""
    distinct = np.zeros((spaces, boxes.start.shape[1]), np.int64)
    for axis in range(boxes.start.shape[1]):
        order = np.lexsort((boxes.start[:, axis], boxes.space))
        space, start = boxes.space[order], boxes.start[order, axis]
        new = np.ones(len(space), bool)
        new[1:] = (space[1:] != space[:-1]) | (start[1:] != start[:-1])
        np.add.at(distinct[:, axis], space[new], 1)
    axes: Column = np.argmax(distinct, axis=1)
    return axes
