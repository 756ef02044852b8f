"""Bytes between pairs of GPUs: the reshard plan's choice among replicas, for all readers of a fleet at once. Pure.

A worker reads every element from the nearest rank that holds it: its own GPU, its host, any other; equally near ranks
give equally many bytes (dataplane/tensors/coverage.py, with the same inputs as the planner has). Holders are a
series with equal steps, so that the nearest are found without looking at each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weightbus.dataplane.tensors import (
    Boxes,
    Column,
    ReplicaSets,
    assign_balanced,
    expected_read_bytes,
    factorize,
    intersect,
    lexsort_rows,
    ragged_arange,
    served_sizes,
    volumes,
)

from .fleet import FleetError, ForecastTransport, PlacedEngines, Placement
from .shards import EngineShards, HolderSeries, Tensors, TrainerShards


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
        """The traffic of several engines."""
        columns = [(part.source, part.target, part.nbytes) for part in parts] or [(np.empty(0, np.int64),) * 3]
        return cls.of(*(np.concatenate(column) for column in zip(*columns, strict=True)))


@dataclass(frozen=True, eq=False)
class Overlaps:
    """Overlaps of workers' boxes with the trainer's, one row each, the same for all engines of a group."""

    worker: Column
    row: Column
    """Row of the trainer's boxes."""
    nbytes: Column
    dealt: tuple[tuple[Column, Column], ...]
    """By worker: the rows of the holdings of all tensors that it needs anything of, in the order of the planner's
    boxes, and their weights there."""


def overlaps(tensors: Tensors, held: TrainerShards, needed: EngineShards) -> Overlaps:
    """All of them. What is needed is held: both describe the same tensors, whole."""
    rows, others, common = intersect(needed.boxes, held.boxes)
    found = np.zeros(len(needed.boxes), np.int64)
    np.add.at(found, rows, common.sizes)
    assert bool((found == needed.boxes.sizes).all()), "a part of an engine's tensors is held by no rank"
    dealt: list[tuple[Column, Column]] = []
    order = _in_planners_order(held)
    for worker in range(int(needed.worker.max()) + 1):
        wanted = volumes(needed.boxes.take(np.flatnonzero(needed.worker == worker)), len(tensors.specs))
        asked = order[wanted[held.boxes.space[order]] > 0]
        dealt.append((asked, expected_read_bytes(held.boxes.take(asked), *served_sizes(tensors.specs), wanted)))
    return Overlaps(needed.worker[rows], others, common.sizes * tensors.item[common.space], tuple(dealt))


def shard_traffic(
    placement: Placement, group: PlacedEngines, held: TrainerShards, found: Overlaps
) -> tuple[Traffic, ...]:
    """Traffic of a group whose workers get their own shards, engine by engine."""
    world = placement.trainer.gpus
    holders = held.holders
    host = np.array(placement.host, np.int64)
    near = {host[gpu] for gpu in range(world)}
    anywhere: Column | None = None
    parts: list[Traffic] = []
    for gpus in group.gpu:
        gpu = np.array(gpus, np.int64)[found.worker]
        if group.transport is not ForecastTransport.SENDS or near & {host[each] for each in gpus}:
            source = _sources(found, _nearest(holders, placement, gpus))
        else:
            source = anywhere = _sources(found, [holders] * len(gpus)) if anywhere is None else anywhere
        if group.transport is ForecastTransport.DIRECT and bool((host[source] != host[gpu]).any()):
            raise FleetError("direct cannot read parts that only other hosts hold: use sends or nearest")
        parts.append(Traffic.of(source, gpu, found.nbytes))
    return tuple(parts)


def _sources(found: Overlaps, holders: Sequence[HolderSeries]) -> Column:
    """Rank that gives each overlap: (overlaps,). `holders` are the nearest of every trainer's box, by worker."""
    source = np.zeros(len(found.row), np.int64)
    for worker, (rows, weight) in enumerate(found.dealt):
        chosen = np.zeros(len(holders[worker].base), np.int64)
        chosen[rows] = _dealt(holders[worker].take(rows), weight, worker)
        mine = found.worker == worker
        source[mine] = chosen[found.row[mine]]
    return source


def _nearest(holders: HolderSeries, placement: Placement, gpus: Sequence[int]) -> list[HolderSeries]:
    """The holders nearest to each GPU, of each row: the GPU itself, its host's, or all."""
    per, world = placement.trainer.gpus_per_host, placement.trainer.gpus
    of_host: dict[int, HolderSeries] = {}
    for host in {placement.host[gpu] for gpu in gpus}:
        here = within(holders, host * per, min(host * per + per, world))
        base, count = np.where(here.count > 0, (here.base, here.count), (holders.base, holders.count))
        of_host[host] = HolderSeries(base, holders.stride, count)
    found: list[HolderSeries] = []
    for gpu in gpus:
        near = of_host[placement.host[gpu]]
        if gpu < world:
            own = within(near, gpu, gpu + 1).count > 0
            near = HolderSeries(np.where(own, gpu, near.base), near.stride, np.where(own, 1, near.count))
        found.append(near)
    return found


def _dealt(holders: HolderSeries, weight: Column, first: int) -> Column:
    """(rows,): which of its holders gives each, as the planner deals them to the reader with number `first`."""
    stride: Column = np.where(holders.count > 1, holders.stride, 1)
    width = 1 + max(int(each.max(initial=0)) for each in (holders.base, stride, holders.count))
    of, shown = factorize((holders.base * width + stride) * width + holders.count)
    count = holders.count[shown]
    place = assign_balanced(
        ReplicaSets(of, count, ragged_arange(holders.base[shown], count, stride[shown])), weight, first
    )
    found: Column = holders.base + stride * place
    return found


def _in_planners_order(held: TrainerShards) -> Column:
    return lexsort_rows(np.column_stack((held.boxes.space, held.boxes.start, held.boxes.stop)))


def within(holders: HolderSeries, low: int, high: int) -> HolderSeries:
    """The part of each series from `low` on and below `high`."""
    base, stride = holders.base, holders.stride
    first = np.maximum(0, -((base - low) // stride))
    last = np.minimum(holders.count, -((base - high) // stride))
    return HolderSeries(base + stride * first, stride, np.maximum(0, last - first))


def gathered_bytes(tensors: Tensors, held: TrainerShards) -> Column:
    """Bytes that each rank sends for whole tensors on rank 0, of replicas the lowest's: (ranks,)."""
    return _sums(held.holders.base, _sizes(tensors, held.boxes))


def digested_bytes(tensors: Tensors, held: TrainerShards) -> Column:
    """Bytes that each rank reads for the digests (dataplane/reshard/digest_shares.py): (ranks,)."""
    order = _in_planners_order(held)
    boxes, holders = held.boxes.take(order), held.holders.take(order)
    return _sums(_dealt(holders, expected_read_bytes(boxes, *served_sizes(tensors.specs)), 0), _sizes(tensors, boxes))


def _sizes(tensors: Tensors, boxes: Boxes) -> Column:
    return boxes.sizes * tensors.item[boxes.space]


def _sums(holder: Column, nbytes: Column) -> Column:
    sums = np.zeros(int(holder.max()) + 1, np.int64)
    np.add.at(sums, holder, nbytes)
    return sums
