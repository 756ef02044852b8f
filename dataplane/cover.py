"""Which pieces to read, as few as possible, and the proof that they are every tensor exactly once. Pure, by column."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Final

import numpy as np

from .boxes import Box, Boxes, Column, doubly_held, intersect, subtract_all, volumes
from .errors import CoverageError
from .pieces import Pieces, order_of, side_by_side

_SHOWN: Final = 3


def once(pieces: Pieces) -> Pieces:
    """Every element from one holder: of what several hold, the lowest one's.

    Copies of a whole piece are dropped; where pieces overlap otherwise, those of higher holders are cut.
    """
    keys = side_by_side(pieces.boxes.space, pieces.boxes.start, pieces.boxes.stop, pieces.holder)
    order = order_of(keys)
    first = _begins(keys[order, :-1])
    return _apart(pieces.take(np.sort(order[first])))


def _apart(distinct: Pieces) -> Pieces:
    """`once`, of pieces of which no two are the same box."""
    rows, others, _ = intersect(distinct.boxes, distinct.boxes)
    earlier = (distinct.holder[others] < distinct.holder[rows]) | (
        (distinct.holder[others] == distinct.holder[rows]) & (others < rows)
    )
    return _cut(distinct, rows[earlier], others[earlier]) if earlier.any() else distinct


def in_turn(pieces: Pieces, first: int = 0, distance: Column | None = None) -> Pieces:
    """Every element from one holder: of what several hold, the nearest one's, equally near ones taking turns.

    Turns go by tensor, among the holders of a piece in the order of their numbers, and begin with another one for each
    `first`: neither one holder gives everything nor do all readers begin with the same one. `distance`, (holders,), is
    0 everywhere unless it is given.
    """
    if not len(pieces):
        return pieces
    count = int(pieces.holder.max()) + 1
    far = np.zeros(len(pieces), np.int64) if distance is None else distance[pieces.holder]
    keys = side_by_side(far, pieces.boxes.space, pieces.boxes.start, pieces.boxes.stop, pieces.holder)
    order = order_of(keys)
    heads = np.flatnonzero(_begins(keys[order, :-1]))
    sizes = np.diff(np.append(heads, len(order)))
    turn = (pieces.boxes.space[order[heads]] + first) % sizes
    rows = np.sort(order[heads + turn])
    mine, far = pieces.take(rows), far[rows]
    # What is left in several places is near and far, or cut otherwise by its holders: those by their numbers.
    by_turn = (far * count + (mine.holder + mine.boxes.space + first) % count) * count + mine.holder
    best = (_apart if (far == far[0]).all() else once)(replace(mine, holder=by_turn))
    return replace(best, holder=best.holder % count)


def merge(pieces: Pieces) -> Pieces:
    """Join neighbours that are neighbours in memory too, until none are left. Elements and their places stay."""
    before = -1
    while len(pieces) != before:
        before = len(pieces)
        for axis in range(pieces.boxes.start.shape[1]):
            pieces = _merge_along(pieces, axis)
    return pieces


def prove(pieces: Pieces) -> None:
    """Raise `CoverageError` unless every element of every tensor is in exactly one piece.

    No two pieces overlap, and together they have as many elements as the tensor: so none is missing.
    """
    double = doubly_held(pieces.boxes)
    if double is not None:
        one, other = (pieces.at(row) for row in double)
        ranks = " and ".join(str(pieces.holder[row]) for row in double)
        raise CoverageError(one.tensor, f"ranks {ranks} both give a part of it, {one.box} and {other.box}")
    held = volumes(pieces.boxes, len(pieces.tensors))
    wanted = np.array([prod(spec.shape) for spec in pieces.tensors], np.int64)
    short = np.flatnonzero(held != wanted)
    if len(short):
        names = ", ".join(pieces.tensors[int(index)].name for index in short[1 : _SHOWN + 1])
        more = f"; so are parts of {len(short) - 1} more ({names} ..)" if len(short) > 1 else ""
        first = int(short[0])
        raise CoverageError(pieces.tensors[first].name, f"{_hole(pieces, first)} is held by no rank{more}")


def _hole(pieces: Pieces, index: int) -> str:
    """A part of tensor `index` that no piece holds."""
    shape = pieces.tensors[index].shape
    mine = [pieces.boxes.at(row) for row in np.flatnonzero(pieces.boxes.space == index).tolist()]
    wide = shape + (1,) * (pieces.boxes.start.shape[1] - len(shape))
    box = subtract_all(Box.whole(wide), mine)[0]
    return str(Box(box.start[: len(shape)], box.stop[: len(shape)]))


def _begins(table: Column) -> Column:
    """(rows,) bool: rows that differ from the one before."""
    begins = np.ones(len(table), bool)
    begins[1:] = (table[1:] != table[:-1]).any(axis=1)
    return begins


def _merge_along(pieces: Pieces, axis: int) -> Pieces:
    """Join runs of pieces that continue each other along one axis."""
    boxes = pieces.boxes
    # What neighbours share: all but the place on the axis, with the element at its index 0 at the same place.
    origin = pieces.offset - boxes.start[:, axis] * pieces.stride[:, axis]
    starts, stops = boxes.start.copy(), boxes.stop.copy()
    starts[:, axis] = stops[:, axis] = 0
    kind = (boxes.space, pieces.holder, pieces.storage, pieces.dtype, pieces.shift, origin, pieces.stride)
    shared = side_by_side(*kind, starts, stops)
    order = order_of(side_by_side(shared, boxes.start[:, axis]))
    start, stop = boxes.start[order, axis], boxes.stop[order, axis]
    begins = _begins(shared[order])
    begins[1:] |= start[1:] != stop[:-1]
    if begins.all():
        return pieces
    heads = np.flatnonzero(begins)
    joined = pieces.take(order[heads])
    ends = joined.boxes.stop.copy()
    ends[:, axis] = stop[np.append(heads[1:], len(order)) - 1]
    return replace(joined, boxes=replace(joined.boxes, stop=ends))


def _cut(pieces: Pieces, rows: Column, others: Column) -> Pieces:
    """Take out of each piece of `rows` what the piece of `others` in the same place holds. Few do, in any layout."""
    taken: dict[int, list[Box]] = {}
    for row, other in zip(rows.tolist(), others.tolist(), strict=True):
        taken.setdefault(row, []).append(pieces.boxes.at(other))
    parts = [(row, part) for row in taken for part in subtract_all(pieces.boxes.at(row), taken[row])]
    untouched = pieces.take(np.setdiff1d(np.arange(len(pieces)), rows))
    chosen = np.array([row for row, _ in parts], np.int64)
    axes = pieces.boxes.start.shape[1]
    starts = np.array([part.start for _, part in parts], np.int64).reshape(len(parts), axes)
    stops = np.array([part.stop for _, part in parts], np.int64).reshape(len(parts), axes)
    remains = pieces.within(Boxes(pieces.boxes.space[chosen], starts, stops), chosen)
    return Pieces.join((untouched, remains))
