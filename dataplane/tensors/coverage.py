"""Which shards to read, as few as possible and evenly from all ranks, and the check that they cover every tensor once.

Pure, by column, and exact. Replicas are balanced so that all of them give as many bytes: the heaviest items are
assigned first, each to the least loaded rank that holds it, and small items even out large ones. Items of one weight
with the same set of replicas are assigned at once, so this takes time in the number of different weights and sets, of
which a model has few, and not in that of items.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Final

import numpy as np

from ..errors import CoverageError
from .shards import (
    Box,
    Boxes,
    Column,
    Shards,
    find_overlap,
    intersect,
    lexsort_rows,
    served_sizes,
    subtract_all,
    volumes,
)

_BITS: Final = 32
"""Bits of readers' numbers."""


@dataclass(frozen=True, eq=False)
class ReplicaSets:
    """Sets of ranks, numbered by first appearance among items: the numbering does not depend on the ranks' names."""

    of: Column
    """(items,): the set of each item."""
    count: Column
    """(sets,): ranks in the set."""
    member: Column
    """(all counts,): the ranks of one set after those of another, ascending within each."""


def factorize(keys: Column) -> tuple[Column, Column]:
    """(items,): equal keys have one number, by first appearance. (numbers,): the item in which each appears first.

    As pandas.factorize, in numpy.
    """
    distinct = np.unique(keys)
    of = np.searchsorted(distinct, keys)
    firsts = np.full(len(distinct), len(keys))
    np.minimum.at(firsts, of, np.arange(len(keys)))
    by_appearance = np.argsort(firsts)
    number = np.empty_like(by_appearance)
    number[by_appearance] = np.arange(len(firsts))
    return number[of], firsts[by_appearance]


def ragged_arange(begin: Column, count: Column, step: Column | int = 1) -> Column:
    """Concatenated ranges: `count` numbers from each `begin` on, `step` apart."""
    place = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(begin, count) + place * (np.repeat(step, count) if isinstance(step, np.ndarray) else step)


def assign_balanced(sets: ReplicaSets, weight: Column, first: int = 0) -> Column:
    """(items,): the rank that gives each item, as its position in the item's set. Weights are positive.

    Of equally loaded ranks it is the next one behind a position that depends on `first`: readers with few items in
    common sets do not all ask the same ranks.
    """
    # As far from those before it as can be, whatever the number of ranks.
    turn = int(f"{first % (1 << _BITS):0{_BITS}b}"[::-1], 2)
    begin = np.cumsum(sets.count) - sets.count
    place = np.zeros(len(sets.of), np.int64)
    given = np.zeros(int(sets.member.max(initial=0)) + 1, np.int64)
    shared = sets.count[sets.of] > 1
    np.add.at(given, sets.member[begin[sets.of[~shared]]], weight[~shared])
    rows = np.flatnonzero(shared)
    if not len(rows):
        return place
    of = sets.of[rows]
    rows = rows[lexsort_rows(np.column_stack((-weight[rows], sets.count[of], of)))]
    weight, of = weight[rows], sets.of[rows]
    alike = np.append(_ends(weight, sets.count[of]), len(rows)).tolist()
    classes = np.append(_ends(weight, of), len(rows))
    at = 0
    for end in alike:
        ends = classes[(classes > at) & (classes <= end)]
        begins = np.append(at, ends[:-1])
        count = int(sets.count[of[at]])
        turned = (np.arange(count) + (turn * count >> _BITS)) % count
        members = sets.member[begin[of[begins]][:, None] + turned]
        # Sets with a rank in common come one after another: what one gives counts for the next.
        apart = len(np.unique(members)) == members.size
        for some in [slice(None)] if apart else [slice(each, each + 1) for each in range(len(ends))]:
            chosen = _by_least(given[members[some]], int(weight[at]), ends[some] - begins[some])
            shared_out = members[some].repeat(ends[some] - begins[some], axis=0)[np.arange(len(chosen)), chosen]
            np.add.at(given, shared_out, int(weight[at]))
            place[rows[begins[some][0] : ends[some][-1]]] = turned[chosen]
        at = end
    return place


def _ends(*columns: Column) -> Column:
    """The rows, but for the first, that differ from the one before."""
    differ = np.zeros(len(columns[0]) - 1, bool)
    for column in columns:
        differ |= column[1:] != column[:-1]
    return np.flatnonzero(differ) + 1


def _by_least(given: Column, weight: int, items: Column) -> Column:
    """(all items,): the position of the least loaded rank at each item's turn; of equals the first.

    `given` is (sets, ranks), of sets that have no rank in common; `items`, (sets,), is how many items of `weight` each
    set has.
    """
    order = np.argsort(given, axis=1, kind="stable")
    given = np.take_along_axis(given, order, axis=1)
    # As high as all stand where what is dealt could be divided: `high`, of the lowest ones that this reaches.
    ranks = np.arange(int(given.shape[1]), dtype=np.int64)
    levels = (items[:, None] * weight + np.cumsum(given, axis=1)) // (ranks + 1)
    last = np.where(given <= levels, ranks, 0).max(axis=1)
    high = np.take_along_axis(levels, last[:, None], axis=1)
    count = np.maximum((high - given) // weight, 0)
    next_ones = np.argsort(given + count * weight, axis=1, kind="stable")
    more = (ranks < (items - count.sum(axis=1))[:, None]).astype(np.int64)
    np.put_along_axis(count, next_ones, np.take_along_axis(count, next_ones, axis=1) + more, axis=1)
    each = count.ravel()
    level = ragged_arange(given.ravel(), each, np.full(len(each), weight))
    if len(items) == 1:
        return np.repeat(order.ravel(), each)[np.argsort(level, kind="stable")]
    return np.repeat(order.ravel(), each)[
        lexsort_rows(np.column_stack((np.repeat(np.arange(len(items)), items), level)))
    ]


_SHOWN: Final = 3
_FRACTION_BITS: Final = 16
"""Precision of the fraction of a tensor that is read."""
_MIXED: Final = ((32, 0x9E3779B97F4A7C15), (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""Shifts and factors of splitmix64."""


def drop_replicas(shards: Shards) -> Shards:
    """Every element from one rank: the lowest of those that hold it.

    Copies of a whole shard are dropped; where shards overlap otherwise, those of higher ranks are cut.
    """
    keys = np.column_stack((shards.boxes.space, shards.boxes.start, shards.boxes.stop, shards.rank))
    order = lexsort_rows(keys)
    first = _begins(keys[order, :-1])
    return _apart(shards.take(np.sort(order[first])))


def _apart(distinct: Shards) -> Shards:
    """`drop_replicas`, of shards of which no two have the same box."""
    rows, others, _ = intersect(distinct.boxes, distinct.boxes)
    earlier = (distinct.rank[others] < distinct.rank[rows]) | (
        (distinct.rank[others] == distinct.rank[rows]) & (others < rows)
    )
    return _cut(distinct, rows[earlier], others[earlier]) if earlier.any() else distinct


def choose_replicas(
    shards: Shards, first: int = 0, distance: Column | None = None, wanted: Column | None = None
) -> Shards:
    """Every element from one rank: the nearest that holds it; equally near ones give as many bytes.

    `first`, a reader's number, rotates the choice among equals, so that not all readers begin with the same rank.
    `distance`, (ranks,), is 0 everywhere unless it is given. `wanted`, (tensors,), is how many elements of each tensor
    are read, all unless it is given.
    """
    if not len(shards):
        return shards
    count = int(shards.rank.max()) + 1
    far = np.zeros(len(shards), np.int64) if distance is None else distance[shards.rank]
    alike = bool((far == far[0]).all())
    box = np.column_stack((shards.boxes.space, shards.boxes.start, shards.boxes.stop))
    order = lexsort_rows(np.column_stack((box, *(() if alike else (far,)), shards.rank)))
    heads = np.flatnonzero(_begins(box[order]))
    several = np.diff(np.append(heads, len(order)))
    rank = shards.rank[order]
    # Few sets, in many boxes: each goes by the sum of its ranks' numbers, made long and without a pattern.
    long = _long(count)[rank]
    if not alike:
        near = far[order] == np.repeat(far[order[heads]], several)
        long[~near] = 0
        several = np.add.reduceat(near, heads, dtype=np.int64)
    of, shown = factorize(np.add.reduceat(long, heads))
    sets = ReplicaSets(of, several[shown], rank[ragged_arange(heads[shown], several[shown])])
    place = assign_balanced(
        sets, expected_read_bytes(shards.boxes.take(order[heads]), *served_sizes(shards.tensors), wanted), first
    )
    rows = np.sort(order[heads + place])
    mine = shards.take(rows)
    far = np.zeros(len(rows), np.int64) if distance is None else distance[mine.rank]
    # What is left in several places is near and far, or cut otherwise by its ranks: those by their numbers.
    by_turn = (far * count + (mine.rank + mine.boxes.space + first % count) % count) * count + mine.rank
    best = (_apart if (far == far[0]).all() else drop_replicas)(replace(mine, rank=by_turn))
    return replace(best, rank=best.rank % count)


def expected_read_bytes(boxes: Boxes, elements: Column, item: Column, wanted: Column | None = None) -> Column:
    """(boxes,): about the bytes that are read of each, at least 1.

    By tensor: `elements` that it has, `item` bytes of one, and `wanted`, how many are read, spread evenly.
    """
    nbytes = boxes.sizes * item[boxes.space]
    if wanted is not None:
        nbytes = nbytes * ((wanted << _FRACTION_BITS) // np.maximum(elements, 1))[boxes.space] >> _FRACTION_BITS
    found: Column = np.maximum(nbytes, 1)
    return found


def merge_adjacent(shards: Shards) -> Shards:
    """Join shards that are neighbors in the tensor and in memory, until none are left. Elements and places stay."""
    before = -1
    while len(shards) != before:
        before = len(shards)
        for axis in range(shards.boxes.start.shape[1]):
            shards = _merge_along(shards, axis)
    return shards


def check_exact_cover(shards: Shards) -> None:
    """Raise `CoverageError` unless every element of every tensor is in exactly one shard.

    No two shards overlap, and together they have as many elements as the tensor: so none is missing.
    """
    double = find_overlap(shards.boxes)
    if double is not None:
        one, other = (shards.at(row) for row in double)
        ranks = " and ".join(str(shards.rank[row]) for row in double)
        raise CoverageError(one.tensor, f"ranks {ranks} both give a part of it, {one.box} and {other.box}")
    held = volumes(shards.boxes, len(shards.tensors))
    wanted = np.array([prod(spec.shape) for spec in shards.tensors], np.int64)
    short = np.flatnonzero(held != wanted)
    if len(short):
        names = ", ".join(shards.tensors[int(index)].name for index in short[1 : _SHOWN + 1])
        more = f"; so are parts of {len(short) - 1} more ({names} ..)" if len(short) > 1 else ""
        first = int(short[0])
        raise CoverageError(shards.tensors[first].name, f"{_hole(shards, first)} is held by no rank{more}")


def _hole(shards: Shards, index: int) -> str:
    """A part of tensor `index` that no shard holds, for a message."""
    shape = shards.tensors[index].shape
    mine = [shards.boxes.at(row) for row in np.flatnonzero(shards.boxes.space == index).tolist()]
    wide = shape + (1,) * (shards.boxes.start.shape[1] - len(shape))
    box = subtract_all(Box.whole(wide), mine)[0]
    return str(Box(box.start[: len(shape)], box.stop[: len(shape)]))


def _long(count: int) -> Column:
    """A pseudorandom number for each rank, so that sums over different sets of ranks differ."""
    numbers = np.arange(1, count + 1, dtype=np.uint64)
    for shift, factor in _MIXED:
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return numbers.view(np.int64)


def _begins(table: Column) -> Column:
    """(rows,) bool: rows that differ from the one before."""
    begins = np.ones(len(table), bool)
    begins[1:] = (table[1:] != table[:-1]).any(axis=1)
    return begins


def _merge_along(shards: Shards, axis: int) -> Shards:
    """Join runs of shards that continue each other along one axis."""
    boxes = shards.boxes
    # What neighbors share: all but the place on the axis, with the element at its index 0 at the same place.
    origin = shards.offset - boxes.start[:, axis] * shards.stride[:, axis]
    starts, stops = boxes.start.copy(), boxes.stop.copy()
    starts[:, axis] = stops[:, axis] = 0
    kind = (boxes.space, shards.rank, shards.storage, shards.dtype, shards.shift, origin, shards.stride)
    shared = np.column_stack((*kind, starts, stops))
    order = lexsort_rows(np.column_stack((shared, boxes.start[:, axis])))
    start, stop = boxes.start[order, axis], boxes.stop[order, axis]
    begins = _begins(shared[order])
    begins[1:] |= start[1:] != stop[:-1]
    if begins.all():
        return shards
    heads = np.flatnonzero(begins)
    joined = shards.take(order[heads])
    ends = joined.boxes.stop.copy()
    ends[:, axis] = stop[np.append(heads[1:], len(order)) - 1]
    return replace(joined, boxes=replace(joined.boxes, stop=ends))


def _cut(shards: Shards, rows: Column, others: Column) -> Shards:
    """Remove from each shard of `rows` its overlap with the shard of `others` at the same position. Few overlap."""
    taken: dict[int, list[Box]] = {}
    for row, other in zip(rows.tolist(), others.tolist(), strict=True):
        taken.setdefault(row, []).append(shards.boxes.at(other))
    parts = [(row, part) for row in taken for part in subtract_all(shards.boxes.at(row), taken[row])]
    untouched = shards.take(np.setdiff1d(np.arange(len(shards)), rows))
    chosen = np.array([row for row, _ in parts], np.int64)
    axes = shards.boxes.start.shape[1]
    starts = np.array([part.start for _, part in parts], np.int64).reshape(len(parts), axes)
    stops = np.array([part.stop for _, part in parts], np.int64).reshape(len(parts), axes)
    remains = shards.within(Boxes(shards.boxes.space[chosen], starts, stops), chosen)
    return Shards.join((untouched, remains))
