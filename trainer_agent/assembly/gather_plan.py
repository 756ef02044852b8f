"""Gather plan: which rank sends what for one bucket, and where it lands. Computed once per manifest, as plain data.

For each bucket every rank has one *contribution* for its root: its shards, in the order in which they lie in the
bucket. All buckets have one root, or each that of the pipeline stage that holds its tensors. A contribution travels as
few messages:

    zero-copy   a long run of bytes that lies in the bucket as it was sent: received in place
    packed      all other shards (columns of row-parallel weights, small tensors), one message, unpacked by the root

Whole experts and whole pipeline stages are zero-copy; of a tensor-parallel shard, the rows are. A zero-copy message of
one contiguous shard is not staged by its sender either: it is sent from the parameter's own memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from math import prod
from typing import Final

import msgspec
import numpy as np

from weightbus.dataplane.tensors import (
    ITEM_BYTES,
    Column,
    Manifest,
    Shards,
    contiguous_strides,
    coverage as cover,
)

ZERO_COPY_BYTES: Final = 1 << 20
"""Minimum bytes of a zero-copy message: for fewer, a message of its own costs more than the copy."""

_ALIGNMENT: Final = 16


class StridedCopy(msgspec.Struct, frozen=True):
    """One strided copy: from local tensor `storage` into a contribution, contiguous there, and into the bucket."""

    storage: int
    dtype: str
    """Served dtype; the local tensor may have another."""
    shape: tuple[int, ...]
    offset: int
    """Elements from the first of the local tensor, as `strides`."""
    strides: tuple[int, ...]
    contribution_offset: int
    """Bytes from the start of the contribution."""
    bucket_offset: int
    """Bytes from the start of the bucket."""
    bucket_strides: tuple[int, ...]
    """Elements."""
    shift: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes in the served dtype."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class GatherMessage(msgspec.Struct, frozen=True):
    """Consecutive bytes of a contribution that travel together."""

    offset: int
    """Bytes from the start of the contribution."""
    nbytes: int
    placements: tuple[StridedCopy, ...]
    bucket_offset: int | None
    """Where all of a zero-copy message lies in the bucket; None for a packed message."""
    staged: bool
    """False if the message is sent from the parameter's memory; true if it is first copied."""


class GatherContribution(msgspec.Struct, frozen=True):
    """What one rank sends for one bucket."""

    messages: tuple[GatherMessage, ...]
    """In the order in which they are sent; messages that are not staged come last."""
    nbytes: int
    staged_bytes: int
    """Bytes that the rank needs beyond its parameters, if those are where the bucket is."""
    packed_bytes: int
    """Bytes that the root needs beyond the bucket."""


BucketPlan = dict[int, GatherContribution]
"""Contributions by rank, ascending; ranks that send nothing are absent."""


def plan(
    manifest: Manifest,
    shards: Shards,
    *,
    rank: int,
    roots: Sequence[int] | None = None,
    zero_copy_bytes: int = ZERO_COPY_BYTES,
) -> tuple[BucketPlan, ...]:
    """Contributions to every bucket: all of them on its root, the own one on another rank.

    `roots` is, by bucket, the rank that it is assembled on; rank 0 where nothing is said. `shards` hold every element
    exactly once (`cover.once`, `cover.prove`) and describe the manifest's tensors, in whatever order; the same on every
    rank.
    """
    joined = cover.merge_adjacent(shards)
    bucket_of, _, _ = _places(manifest, joined)
    at_root = np.array([0] * len(manifest.buckets) if roots is None else roots, np.int64)[bucket_of] == rank
    mine = joined.take(np.flatnonzero((joined.rank == rank) | at_root[joined.boxes.space]))
    rows = _rows(manifest, mine)
    plans: list[BucketPlan] = [{} for _ in manifest.buckets]
    for (bucket, holder), group in groupby(rows, key=lambda row: (row.bucket, row.holder)):
        plans[bucket][holder] = _contribution(list(group), zero_copy_bytes)
    return tuple(plans)


class _Row(msgspec.Struct):
    """One shard on its way into a bucket."""

    bucket: int
    holder: int
    tensor: int
    zero_copy: bool
    """Its bytes follow each other in the bucket."""
    as_served: bool
    """They do so in memory, too, and nothing is cast or added."""
    placement: StridedCopy


def _rows(manifest: Manifest, shards: Shards) -> list[_Row]:
    """Every shard with its place in the manifest, ordered by bucket, holder and place."""
    if not len(shards):  # a rank that sends nothing, such as the only one, which quantizes everything
        return []
    bucket_of, offset_of, row_of = _places(manifest, shards)
    item = np.array([ITEM_BYTES[spec.dtype] for spec in shards.tensors], np.int64)
    packed = [contiguous_strides(spec.shape) for spec in shards.tensors]
    strides = np.zeros((len(packed), shards.boxes.start.shape[1]), np.int64)
    for index, tight in enumerate(packed):
        strides[index, : len(tight)] = tight
    space = shards.boxes.space
    begin = offset_of[space] + np.sum(shards.boxes.start * strides[space], axis=1) * item[space]
    last = np.sum((shards.boxes.extents - 1) * strides[space], axis=1) + 1
    zero_copy = last == shards.boxes.sizes
    order = np.lexsort((begin, row_of[space], shards.rank, bucket_of[space]))
    rows: list[_Row] = []
    for index in order.tolist():
        shard = shards.at(index)
        tensor = int(space[index])
        placement = StridedCopy(
            storage=shard.view.storage,
            dtype=shards.tensors[tensor].dtype,
            shape=shard.box.shape,
            offset=shard.view.offset,
            strides=shard.view.strides,
            contribution_offset=0,
            bucket_offset=int(begin[index]),
            bucket_strides=packed[tensor],
            shift=shard.shift,
        )
        both = zip(shard.box.shape, shard.view.strides, contiguous_strides(shard.box.shape), strict=True)
        dense = all(extent == 1 or found == step for extent, found, step in both)
        as_served = shard.dtype == placement.dtype and not shard.shift and dense
        bucket, holder, whole = int(bucket_of[tensor]), int(shards.rank[index]), bool(zero_copy[index])
        rows.append(_Row(bucket, holder, tensor, whole, as_served, placement))
    return rows


def _places(manifest: Manifest, shards: Shards) -> tuple[Column, Column, Column]:
    """By tensor of `shards`: its bucket, the byte in it where it begins, its row in the manifest."""
    number = {spec.name: index for index, spec in enumerate(shards.tensors)}
    bucket_of, offset_of, row_of = (np.zeros(len(number), np.int64) for _ in range(3))
    for bucket, spec in enumerate(manifest.buckets):
        offsets = manifest.offsets_of(bucket)
        for row in range(spec.first, spec.last):
            index = number[manifest.tensors[row].name]
            bucket_of[index], offset_of[index], row_of[index] = bucket, offsets[row - spec.first], row
    return bucket_of, offset_of, row_of


def _contribution(rows: Sequence[_Row], zero_copy_bytes: int) -> GatherContribution:
    runs, packed = _runs(rows, zero_copy_bytes)
    # What needs no packing comes last, so that no memory is set aside for it.
    drafts: list[tuple[list[_Row], int | None]] = [(packed, None)] if packed else []
    drafts += sorted(((run, run[0].placement.bucket_offset) for run in runs), key=lambda draft: _in_place(draft[0]))
    messages: list[GatherMessage] = []
    at = 0
    for members, bucket_offset in drafts:
        placements: list[StridedCopy] = []
        size = 0
        for placement in _progressions(members):
            placements.append(msgspec.structs.replace(placement, contribution_offset=at + size))
            size += placement.nbytes
        staged = bucket_offset is None or not _in_place(members)
        messages.append(GatherMessage(at, size, tuple(placements), bucket_offset, staged))
        at += _padded(size)
    staged_bytes = max((each.offset + each.nbytes for each in messages if each.staged), default=0)
    packed_bytes = sum(_padded(each.nbytes) for each in messages if each.bucket_offset is None)
    return GatherContribution(tuple(messages), at, staged_bytes, packed_bytes)


def _runs(rows: Sequence[_Row], zero_copy_bytes: int) -> tuple[list[list[_Row]], list[_Row]]:
    """Runs of bytes that follow each other in the bucket and are long enough, and all other shards."""
    runs: list[list[_Row]] = []
    end = -1
    for row in rows:
        if row.zero_copy and row.placement.bucket_offset == end:
            runs[-1].append(row)
        else:
            runs.append([row])
        end = row.placement.bucket_offset + row.placement.nbytes if row.zero_copy else -1
    long = [run for run in runs if run[0].zero_copy and sum(row.placement.nbytes for row in run) >= zero_copy_bytes]
    taken = {id(row) for run in long for row in run}
    return long, [row for row in rows if id(row) not in taken]


def _in_place(run: Sequence[_Row]) -> bool:
    """True for one shard in memory as it is served: it is sent without a copy."""
    return len(run) == 1 and run[0].as_served


def _progressions(rows: Sequence[_Row]) -> Iterable[StridedCopy]:
    """Merge equal copies at equal distances into one with one more axis: the groups of a fused QKV, for example."""
    at = 0
    while at < len(rows):
        count, step = 1, None
        while at + count < len(rows):
            here = _distance(rows[at + count - 1], rows[at + count])
            if here is None or step not in {None, here}:
                break
            count, step = count + 1, here
        placement = rows[at].placement
        if step is not None:
            offset, bucket_offset = step
            placement = msgspec.structs.replace(
                placement,
                shape=(count, *placement.shape),
                strides=(offset, *placement.strides),
                bucket_strides=(bucket_offset // ITEM_BYTES[placement.dtype], *placement.bucket_strides),
            )
        yield placement
        at += count


def _distance(before: _Row, after: _Row) -> tuple[int, int] | None:
    """Distance of two equal copies of one tensor, in elements of the storage and bytes of the bucket."""
    a, b = before.placement, after.placement
    if before.tensor != after.tensor or a.storage != b.storage or a.shape != b.shape:
        return None
    if a.strides != b.strides or a.shift != b.shift or b.offset < a.offset:
        return None
    return b.offset - a.offset, b.bucket_offset - a.bucket_offset


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
