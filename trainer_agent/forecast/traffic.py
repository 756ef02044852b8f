"""Who gives what to whom: the choice of dataplane/plan.py among replicas, for all readers of a fleet at once. Pure.

A worker takes every element from the nearest rank that holds it: its own GPU, its host, any other; equally near ones
take turns in the order of their numbers, by the number of the tensor plus that of the worker. Holders being a series
with equal steps, the one whose turn it is is found without looking at the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weightbus.dataplane.boxes import Boxes, Column, intersect

from .fleet import FleetError, Ground, Placed, Way
from .holdings import Holdings
from .needs import Needs
from .tensors import Tensors


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes by pair, each pair once: trainer rank (which is the number of its GPU), GPU of a worker."""

    source: Column
    target: Column
    nbytes: Column

    @classmethod
    def of(cls, source: Column, target: Column, nbytes: Column) -> Traffic:
        """Sums by pair; pairs without bytes are left out."""
        width = int(max(source.max(initial=0), target.max(initial=0))) + 1
        pairs, where = np.unique(source * width + target, return_inverse=True)
        sums = np.zeros(len(pairs), np.int64)
        np.add.at(sums, where, nbytes)
        kept = sums > 0
        return cls(pairs[kept] // width, pairs[kept] % width, sums[kept])

    @classmethod
    def join(cls, parts: list[Traffic]) -> Traffic:
        """The traffic of all groups."""
        if not parts:
            nothing = np.empty(0, np.int64)
            return cls(nothing, nothing, nothing)
        columns = (np.concatenate([getattr(part, name) for part in parts]) for name in ("source", "target", "nbytes"))
        return cls.of(*columns)


@dataclass(frozen=True, eq=False)
class Overlaps:
    """What every worker needs of every distinct box: one row for each overlap, the same for all engines of a group."""

    worker: Column
    row: Column
    """Of the holdings."""
    space: Column
    nbytes: Column


def overlaps(tensors: Tensors, held: Holdings, needed: Needs) -> Overlaps:
    """All of them. What is needed is held: both describe the same tensors, whole."""
    rows, others, common = intersect(needed.boxes, held.boxes)
    found = np.zeros(len(needed.boxes), np.int64)
    np.add.at(found, rows, common.sizes)
    assert bool((found == needed.boxes.sizes).all()), "a part of an engine's tensors is held by no rank"
    return Overlaps(needed.worker[rows], others, common.space, common.sizes * tensors.item[common.space])


def by_parts(ground: Ground, group: Placed, held: Holdings, found: Overlaps) -> Traffic:
    """What the workers of a group get, each its own part."""
    world = ground.trainer.gpus
    base, stride, count = held.base[found.row], held.stride[found.row], held.count[found.row]
    turn = found.space + found.worker
    anywhere = in_order(base, stride, count, turn)
    host = np.array(ground.host, np.int64)
    near = {host[gpu] for gpu in range(world)}
    parts: list[Traffic] = []
    for gpus in group.gpu:
        gpu = np.array(gpus, np.int64)[found.worker]
        source = anywhere
        if group.way is not Way.SENDS or near & {host[each] for each in gpus}:
            per = ground.trainer.gpus_per_host
            first = host[gpu] * per
            here = within(base, stride, count, first, np.minimum(first + per, world))
            own = within(base, stride, count, gpu, np.minimum(gpu + 1, world))
            source = np.where(here[1] > 0, in_order(here[0], stride, here[1], turn), source)
            source = np.where(own[1] > 0, own[0], source)
        if group.way is Way.DIRECT and bool((host[source] != host[gpu]).any()):
            raise FleetError("direct cannot read parts that only other hosts hold: use sends or nearest")
        parts.append(Traffic.of(source, gpu, found.nbytes))
    return Traffic.join(parts)


def in_order(base: Column, stride: Column, count: Column, turn: Column) -> Column:
    """Of each series of holders the one whose place in it is `turn`, again and again."""
    return base + stride * (turn % np.maximum(count, 1))


def within(base: Column, stride: Column, count: Column, low: Column, high: Column) -> tuple[Column, Column]:
    """The part of each series from `low` on and below `high`: where it begins, and how many."""
    first = np.maximum(0, -(-(low - base) // stride))
    last = np.minimum(count, -(-(high - base) // stride))
    return base + stride * first, np.maximum(0, last - first)


def assembled(tensors: Tensors, held: Holdings) -> Column:
    """(ranks,): what each rank sends of whole tensors that the first one puts together; of replicas the lowest's."""
    return _sums(held.base, _sizes(tensors, held.boxes))


def digested(tensors: Tensors, held: Holdings) -> Column:
    """(ranks,): what each rank reads for the digests, in turn (dataplane/shares.py)."""
    space = held.boxes.space
    return _sums(in_order(held.base, held.stride, held.count, space), _sizes(tensors, held.boxes))


def _sizes(tensors: Tensors, boxes: Boxes) -> Column:
    return boxes.sizes * tensors.item[boxes.space]


def _sums(holder: Column, nbytes: Column) -> Column:
    sums = np.zeros(int(holder.max()) + 1, np.int64)
    np.add.at(sums, holder, nbytes)
    return sums
