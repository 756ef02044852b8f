"""Load balancing: assigns items to replicas, so that all of them give as many bytes. Pure, by column, and exact.

The heaviest items are assigned first, each to the least loaded rank that holds it: small items even out large ones.
Items of one weight with the same set of replicas are assigned at once, so this takes time in the number of different
weights and sets, of which a model has few, and not in that of items.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from .boxes import Column
from .shards import lexsort_rows

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
