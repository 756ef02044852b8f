"""The reshard plan: what one engine worker copies from which trainer rank, as a table. Pure, by column.

It is the intersection of the trainer's shards with a load trace, made once for a pair of layouts and used until either
changes. Both sides make it from the same inputs, and compare digests before a byte moves: neither trusts the other's
arithmetic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import msgspec
import numpy as np

from ..copy import CopySide, CopyTable, make_copy_table, merge_copy_rows
from ..errors import CoverageError, ManifestError
from ..memory import ExportMap
from ..tensors import (
    DTYPES,
    Boxes,
    Column,
    Shard,
    Shards,
    TensorSpec,
    choose_replicas,
    intersect,
    served_dtypes,
    volumes,
    whole_tensor_shard,
)
from .load_trace import LoadTrace

_ALIGNMENT: Final = 16
_FAR: Final = 2
_UNREACHABLE: Final = 3
"""Distance of a rank that the reader cannot open. `sends` may send from it."""


class PlanReader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The worker that a plan is for, as far as the choice among replicas depends on it."""

    rank: int
    host: str
    device: str
    """``cpu``, or the uuid of its GPU."""
    peers: tuple[str, ...] = ()
    """uuids of the GPUs that it can read directly, without its own."""
    sent_to: bool = False
    """True over `sends`: the worker opens no memory, and ranks on any host send to it."""


class SourceRegion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One region that a plan reads: source region number `index` of its tables."""

    rank: int = msgspec.field(name="holder")
    region: int


@dataclass(frozen=True, eq=False)
class ReshardPlan:
    """The copies of one worker in every round."""

    reader: PlanReader
    trace: str
    """Digest of the load trace that it was made for."""
    sources: tuple[SourceRegion, ...]
    """The regions to open. `copies.source` and `staging.source` number these."""
    copies: CopyTable
    """Copies into the trace's targets."""
    staging: CopyTable
    """Copies of whole tensors for the engine's own loader into one packed buffer, target region 0."""
    staged: tuple[int, ...]
    """The tensors in that buffer, one after another, each beginning on a multiple of 16 bytes."""
    staging_bytes: int

    def digest(self) -> str:
        """SHA-256, hexadecimal: the name of exactly these copies. Computed once."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        parts = (self.trace.encode(), msgspec.msgpack.encode((self.reader, self.sources, self.staged)))
        rows = (self.copies.encode(), self.staging.encode())
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in (*parts, *rows))).hexdigest()


def make_plan(shards: Shards, exports: Sequence[ExportMap], trace: LoadTrace, reader: PlanReader) -> ReshardPlan:
    """The plan of one worker.

    `shards` are those of all ranks, replicas included; `rank` names an entry of `exports`. Every element of every
    traced copy comes from one of them: the nearest, and equally near ones give as many bytes. Raises `CoverageError`
    for a part that no rank holds within the reader's reach, `ManifestError` when tensors or dtypes do not fit.
    """
    if shards.tensors != trace.tensors:
        raise ManifestError("trainer and engine speak of different tensors: record again with the current manifest")
    staged = trace.staged
    staging, staging_bytes = staging_layout(shards.tensors, staged)
    count = len(shards.tensors)
    wanted = volumes(trace.copies.boxes, count) + volumes(staging.boxes, count)
    chosen = _chosen(shards.take(np.flatnonzero(wanted[shards.boxes.space])), exports, reader, wanted)
    regions = _Regions(exports)
    copies = _table(trace.copies, chosen, regions)
    # Staged tensors lie one behind another in region 0: there `storage` is a place, and no number.
    to_buffer = _table(staging, chosen, regions, begin=staging.storage)
    both = np.concatenate([copies.source, to_buffer.source])
    used, numbers = np.unique(both, return_inverse=True)
    return ReshardPlan(
        reader=reader,
        trace=trace.digest(),
        sources=regions.sources(used),
        copies=merge_copy_rows(replace(copies, source=numbers[: len(copies)])),
        staging=merge_copy_rows(replace(to_buffer, source=numbers[len(copies) :])),
        staged=staged,
        staging_bytes=staging_bytes,
    )


class _Regions:
    """All regions of all ranks, numbered one after another, and where local tensors begin in them."""

    def __init__(self, exports: Sequence[ExportMap]) -> None:
        self._exports = exports
        ranks = max((each.rank for each in exports), default=-1) + 1
        self._first_place = np.zeros(ranks, np.int64)
        self._places = np.zeros(ranks, np.int64)
        columns: list[tuple[Column, Column]] = []
        self._ends = np.cumsum([len(each.regions) for each in exports], dtype=np.int64)
        """(exports,): regions of the exports up to each."""
        places = 0
        for each, end in zip(exports, self._ends.tolist(), strict=True):
            region, offset = each.columns()
            columns.append((region + end - len(each.regions), offset))
            self._first_place[each.rank], self._places[each.rank] = places, len(region)
            places += len(region)
        self._region = np.concatenate([pair[0] for pair in columns]) if columns else np.empty(0, np.int64)
        self._offset = np.concatenate([pair[1] for pair in columns]) if columns else np.empty(0, np.int64)

    def of(self, shards: Shards) -> tuple[Column, Column]:
        """(shards,), (shards,): region and byte at which each shard's local tensor begins."""
        if bool((shards.storage >= self._places[shards.rank]).any()):
            raise ManifestError("a shard lies in a local tensor that its rank does not export")
        at = self._first_place[shards.rank] + shards.storage
        return self._region[at], self._offset[at]

    def sources(self, numbers: Column) -> tuple[SourceRegion, ...]:
        """Regions by their numbers."""
        which = np.searchsorted(self._ends, numbers, side="right")
        rank = np.array([each.rank for each in self._exports], np.int64)[which]
        first = self._ends - np.array([len(each.regions) for each in self._exports], np.int64)
        return tuple(map(SourceRegion, rank.tolist(), (numbers - first[which]).tolist()))


def staging_layout(tensors: Sequence[TensorSpec], staged: Sequence[int]) -> tuple[Shards, int]:
    """Whole tensors in one buffer, as shards whose `storage` is the byte at which each begins; and its bytes."""
    shards: list[Shard] = []
    at = 0
    for index in staged:
        shards.append(whole_tensor_shard(tensors[index], tensors[index].dtype, at))
        at += -(-tensors[index].nbytes // _ALIGNMENT) * _ALIGNMENT
    return Shards.of(tensors, shards), at


def rank_distances(exports: Sequence[ExportMap], reader: PlanReader) -> tuple[int, ...]:
    """Distance of each rank from the reader. Readers of one rank with equal distances have plans of the same copies."""
    far = [_UNREACHABLE] * (max((each.rank for each in exports), default=0) + 1)
    for each in exports:
        far[each.rank] = _distance(each, reader)
    return tuple(far)


def _chosen(shards: Shards, exports: Sequence[ExportMap], reader: PlanReader, wanted: Column) -> Shards:
    """Every element once, from ranks within reach. `wanted`, (tensors,), is how many elements the reader reads."""
    far = np.array(rank_distances(exports, reader), np.int64)
    ranks = int(shards.rank.max()) + 1 if len(shards) else 0
    far = np.concatenate([far, np.full(max(ranks - len(far), 0), _UNREACHABLE)])
    return choose_replicas(shards.take(np.flatnonzero(far[shards.rank] < _UNREACHABLE)), reader.rank, far, wanted)


def _distance(export: ExportMap, reader: PlanReader) -> int:
    """0 for the reader's own device, 1 for one that it reads directly, more for one that sends."""
    devices = {region.device for region in export.regions}
    if not devices:
        return _UNREACHABLE
    beyond = _FAR if reader.sent_to else _UNREACHABLE
    if export.host != reader.host:
        return beyond
    if devices == {reader.device}:
        return 0
    return 1 if devices <= {reader.device, *reader.peers} else beyond


def _table(wanted: Shards, chosen: Shards, regions: _Regions, begin: Column | None = None) -> CopyTable:
    """Copies into `wanted`. A target's region is its `storage`, or region 0 from byte `begin` on, (wanted,)."""
    rows, others, common = intersect(wanted.boxes, chosen.boxes)
    _prove(wanted, rows, common)
    target, source = wanted.within(common, rows), chosen.within(common, others)
    _check_dtypes(source, target)
    region, at = regions.of(source)
    zeros = np.zeros(len(rows), np.int64)
    there = CopySide.of(target, target.storage, zeros) if begin is None else CopySide.of(target, zeros, begin[rows])
    return make_copy_table(common.extents, CopySide.of(source, region, at), there)


def _prove(wanted: Shards, rows: Column, common: Boxes) -> None:
    """Raise `CoverageError` unless every element of every wanted box is found. The chosen shards are disjoint."""
    found = np.zeros(len(wanted), np.int64)
    np.add.at(found, rows, common.sizes)
    short = np.flatnonzero(found != wanted.boxes.sizes)
    if len(short):
        shard = wanted.at(int(short[0]))
        raise CoverageError(
            shard.tensor,
            f"{found[short[0]]} of {shard.box.size} elements of {shard.box} are held where this engine can read them",
        )


def _check_dtypes(source: Shards, target: Shards) -> None:
    """A copy converts at most once, and ends as the stock path would: by way of the served dtype."""
    served = served_dtypes(source)
    odd = np.flatnonzero((source.shift != 0) | ((source.dtype != served) & (target.dtype != served)))
    if len(odd):
        shard = source.at(int(odd[0]))
        raise ManifestError(
            f"{shard.tensor!r} is held as {shard.dtype} with shift {shard.shift}, served as {DTYPES[served[odd[0]]]} "
            f"and stored as {DTYPES[target.dtype[odd[0]]]}: stage it in the served dtype before it is exported"
        )
