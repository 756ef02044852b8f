"""Quantization plan: which rank quantizes which weight, from what, into what. Computed once per manifest. No torch.

A rank whose shards of a weight all lie on the grain of its scheme quantizes them for itself: experts and whole rows
once, at their owner. The results are shards like any other, of another tensor, and travel as gather messages do. A
weight that is cut across its blocks is gathered by the root first, in the dtype in which it would be served.

    jobs       what a rank quantizes for one bucket: from its own memory, or on the root from gathered weights
    raw        the layout in which the root gathers: one bucket for each set of buckets that its weights end up in
    shards     everything that travels: results in the arena of a rank, and unquantized tensors where they lie

The root's own results go straight into the bucket. Those of the other ranks lie in an *arena*, memory that is reused
for the next bucket; it is numbered behind the local tensors, once for each dtype.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from weightbus.dataplane.quantize import QuantizedPart, Scheme, WordLayout, word_layout
from weightbus.dataplane.tensors import (
    DTYPES,
    ITEM_BYTES,
    Box,
    BucketSpec,
    Manifest,
    Shard,
    Shards,
    ShardView,
    TensorSpec,
    contiguous_strides,
    coverage as cover,
)

_ALIGNMENT: Final = 16


class QuantizedWeight(msgspec.Struct, frozen=True):
    """A weight that is quantized, and the tensors it becomes."""

    spec: TensorSpec
    scheme: Scheme
    parts: tuple[QuantizedPart, ...]
    outputs: tuple[TensorSpec, ...]
    """The tensors of `parts`, in their order."""

    @property
    def computed(self) -> tuple[tuple[QuantizedPart, TensorSpec], ...]:
        """Parts that are computed from its elements: all but ``weight_shape``."""
        both = zip(self.parts, self.outputs, strict=True)
        return tuple((part, spec) for part, spec in both if part.cell[0])


class WeightPlace(msgspec.Struct, frozen=True):
    """Destination of a rectangle of a tensor: bytes from the start of the bucket or the arena, strides in elements."""

    arena: bool
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class QuantizeJob(msgspec.Struct, frozen=True):
    """One quantization on one rank."""

    weight: int
    shape: tuple[int, ...]
    held: Shard | None
    """Own memory that it reads; None if it reads a gathered weight."""
    raw: tuple[int, int]
    """The raw bucket with the gathered weight, and its first byte there."""
    targets: tuple[WeightPlace, ...]
    """Destinations of every part but ``weight_shape``."""
    sums: tuple[int, WordLayout] | None = None
    """Number of the checksums that its elements are added to, and where they lie in their tensor."""


class CopyJob(msgspec.Struct, frozen=True):
    """A gathered tensor that is not quantized: copied from a raw bucket into the bucket. Root only."""

    raw: tuple[int, int]
    target: WeightPlace


class WeightShape(msgspec.Struct, frozen=True):
    """The numbers of a ``weight_shape``. Root only."""

    numbers: tuple[int, ...]
    target: WeightPlace


class BucketWork(msgspec.Struct, frozen=True):
    """Work of one rank for one bucket, before gather messages travel."""

    raws: tuple[int, ...]
    """Raw buckets that it needs, on every rank alike."""
    jobs: tuple[QuantizeJob, ...]
    copies: tuple[CopyJob, ...]
    shapes: tuple[WeightShape, ...]


class RankWork(msgspec.Struct, frozen=True):
    """One rank's part in every bucket of a manifest."""

    buckets: tuple[BucketWork, ...]
    raw: Manifest | None
    """Layout of gathered weights; None if none are gathered."""
    arena_bytes: int
    base: int
    """Number of the arena's first storage: the storage of dtype `d` is ``base + DTYPES.index(d)``."""


class ResidentWork(NamedTuple):
    """One rank's part in all buckets at once, for an arena that stays in memory."""

    work: RankWork
    results: Sequence[Shard]
    """Shards in the arena."""
    summed: Sequence[Shard]
    """Shards of `results` whose checksums are accumulated by jobs."""
    sums: Sequence[str]
    """Tensors of the checksums, by number."""


class WeightDivision:
    """Which weights are divided among their holders and which are gathered; the same on every rank."""

    def __init__(
        self,
        manifest: Manifest,
        weights: Sequence[QuantizedWeight],
        shards: Shards | None,
        roots: Sequence[int] | None = None,
    ) -> None:
        """`shards` hold every raw element once; None gathers everything. `manifest` is of what the weights become.

        `roots` is, by bucket, the rank that it is assembled on, rank 0 where nothing is said; all that a weight becomes
        has one root.
        """
        self.manifest, self.weights = manifest, tuple(weights)
        self.shards = None if shards is None else cover.merge_adjacent(shards)
        """None if the places of shards are unknown."""
        self.rows = _rows_by_tensor(self.shards)
        """Rows of `shards` by raw tensor."""
        self.places = places = _places(manifest)
        """By tensor of the manifest: its bucket, and the byte in it where it begins."""
        self.gathered = frozenset(
            index for index, each in enumerate(weights) if not _divisible(each, self.shards, self.rows)
        )
        """Weights that no holder can quantize alone."""
        self.local = _local(weights, self.gathered, self.shards, self.rows)
        """By rank: weights, and the rows of their shards that it quantizes for itself."""
        made = {spec.name for weight in weights for spec in weight.outputs}
        self.plain = () if shards is not None else tuple(spec for spec in manifest.tensors if spec.name not in made)
        """Tensors that are gathered although they are not quantized, because their place is unknown."""
        groups: dict[tuple[int, ...], list[TensorSpec]] = defaultdict(list)
        for index in sorted(self.gathered):
            key = sorted({places[spec.name][0] for _, spec in weights[index].computed})
            groups[tuple(key)].append(weights[index].spec)
        for spec in self.plain:
            groups[places[spec.name][0],].append(spec)
        self.serves = tuple(sorted(groups))
        """By raw bucket: the buckets that need it."""
        self.raw = _grouped(manifest.model, [groups[key] for key in self.serves])
        """Layout of gathered weights: a bucket for each set of buckets that its weights end up in."""
        self.raw_places = {} if self.raw is None else _places(self.raw)
        self.roots = (0,) * len(manifest.buckets) if roots is None else tuple(roots)
        """By bucket: the rank on which it is assembled."""
        self.raw_roots = tuple(self.roots[buckets[0]] for buckets in self.serves)
        """By raw bucket: the rank on which it is gathered."""

    def raw_shards(self) -> Shards | None:
        """Shards of the gathered weights; None if their places are unknown."""
        if self.shards is None:
            return None
        rows = sorted(row for index in self.gathered for row in self.rows[self.weights[index].spec.name])
        return self.shards.take(np.array(rows, np.int64))

    def raws_of(self, bucket: int) -> tuple[int, ...]:
        """Raw buckets with weights that end up, or in part, in `bucket`."""
        return tuple(number for number, buckets in enumerate(self.serves) if bucket in buckets)

    def work(self, rank: int) -> RankWork:
        """Work of `rank`."""
        return _WorkBuilder(self, rank).work()

    def resident_work(self, rank: int, base: int) -> ResidentWork:
        """Work of `rank` where its results stay in memory; `base` numbers the arena's first storage."""
        draft = _WorkBuilder(self, rank, base)
        return ResidentWork(draft.work(), draft.results, draft.summed, tuple(draft.sums))

    def traveling(self) -> Shards:
        """Shards of the manifest's tensors: those quantized elsewhere than on their root, and those not quantized."""
        held: dict[int, list[Shard]] = defaultdict(list)
        if self.shards is not None:
            quantized = {weight.spec.name for weight in self.weights}
            for name, rows in self.rows.items():
                for row in rows if name not in quantized else ():
                    held[int(self.shards.rank[row])].append(self.shards.at(row))
            for rank in sorted(set(self.shards.rank.tolist())):
                held[rank].extend(_WorkBuilder(self, rank).results)
        return Shards.join([Shards.of(self.manifest.tensors, held[rank], rank) for rank in sorted({0, *held})])


class _WorkBuilder:
    """Builds one rank's work."""

    def __init__(self, division: WeightDivision, rank: int, keeps: int | None = None) -> None:
        """`keeps`: results stay in an arena, which begins with this storage."""
        self._of = division
        self._rank = rank
        self._resident_arena = keeps is not None
        self._jobs: list[list[QuantizeJob]] = [[] for _ in division.manifest.buckets]
        self.results: list[Shard] = []
        """Shards that it quantizes for other ranks, in its arena."""
        self.summed: list[Shard] = []
        self.sums: dict[str, int] = {}
        """Number of the checksums, by tensor."""
        self._ends = [0] * len(self._jobs)
        mine = None if division.shards is None else division.shards.of_rank(rank)
        first = int(mine.storage.max()) + 1 if mine is not None and len(mine) else 0
        self._base = first if keeps is None else keeps
        self._copies: list[list[CopyJob]] = [[] for _ in self._jobs]
        self._shapes: list[list[WeightShape]] = [[] for _ in self._jobs]
        for index, row in division.local.get(rank, ()):
            assert division.shards is not None
            shard = division.shards.at(row)
            self._job(index, division.weights[index], shard.box, shard, (0, 0))
        if rank in division.roots:
            self._take_gathered()

    def work(self) -> RankWork:
        of = self._of
        every = enumerate(zip(self._jobs, self._copies, self._shapes, strict=True))
        buckets = (
            BucketWork(of.raws_of(index), tuple(jobs), tuple(copies), tuple(shapes))
            for index, (jobs, copies, shapes) in every
        )
        return RankWork(tuple(buckets), of.raw, max(self._ends, default=0), self._base)

    def _job(self, index: int, weight: QuantizedWeight, box: Box, held: Shard | None, raw: tuple[int, int]) -> None:
        """Add a job for each bucket that a part of the weight is in: nearly always one."""
        made = weight.computed
        buckets = sorted({self._of.places[spec.name][0] for _, spec in made})
        if self._resident_arena:  # jobs that need no other rank at once, the rest as weights are gathered
            buckets = [0] if held is not None else buckets[:1]
        if held is None:
            buckets = [bucket for bucket in buckets if self._at_root(bucket)]
        for bucket in buckets:
            targets = tuple(self._target(bucket, part, spec, part.box(box)) for part, spec in made)
            sums = self._summed(weight, box, held, len(made)) if self._resident_arena else None
            self._jobs[bucket].append(QuantizeJob(index, box.shape, held, raw, targets, sums))

    def _summed(
        self, weight: QuantizedWeight, box: Box, held: Shard | None, parts: int
    ) -> tuple[int, WordLayout] | None:
        """Number of the checksums that a job's elements are added to; None if they are not.

        Refers to the job whose `parts` were placed last.
        """
        words = word_layout(weight.scheme, box, weight.spec.shape)
        if words is None or (held is not None and held.view.strides[-1] != 1):
            return None
        elements = self.results[-parts]
        self.summed.append(elements)
        return self.sums.setdefault(elements.tensor, len(self.sums)), words

    def _target(self, bucket: int, part: QuantizedPart, spec: TensorSpec, box: Box) -> WeightPlace:
        """Destination in the bucket on its root; in the arena on other ranks, and for parts of another bucket."""
        home, begin = self._of.places[spec.name]
        if self._at_root(bucket) and home == bucket and not self._resident_arena:
            strides = contiguous_strides(spec.shape)
            first = sum(at * step for at, step in zip(box.start, strides, strict=True))
            return WeightPlace(False, begin + first * ITEM_BYTES[part.dtype], part.dtype, box.shape, strides)
        resident = self._resident_arena
        return self._in_arena(0 if resident else bucket, spec, box, result=home == bucket or resident)

    def _in_arena(self, bucket: int, spec: TensorSpec, box: Box, *, result: bool) -> WeightPlace:
        """Reserve memory for `box` of a tensor, behind the data of the same bucket."""
        item = ITEM_BYTES[spec.dtype]
        offset = self._ends[bucket]
        self._ends[bucket] += -(-box.size * item // _ALIGNMENT) * _ALIGNMENT
        strides = contiguous_strides(box.shape)
        if result:
            view = ShardView(self._base + DTYPES.index(spec.dtype), offset // item, strides)
            self.results.append(Shard(spec.name, box, spec.dtype, view))
        return WeightPlace(True, offset, spec.dtype, box.shape, strides)

    def _take_gathered(self) -> None:
        """Add a root's jobs on gathered weights, and the tensors that are not computed."""
        for index in sorted(self._of.gathered):
            weight = self._of.weights[index]
            raw = self._of.raw_places[weight.spec.name]
            self._job(index, weight, Box.whole(weight.spec.shape), None, raw)
        places = self._of.places
        for spec in self._of.plain:
            copy = CopyJob(self._of.raw_places[spec.name], self._whole(spec))
            self._copies[places[spec.name][0]].append(copy)
        for weight in self._of.weights:
            for part, spec in zip(weight.parts, weight.outputs, strict=True):
                if not part.cell[0]:
                    shape = WeightShape(weight.spec.shape, self._whole(spec))
                    self._shapes[places[spec.name][0]].append(shape)

    def _at_root(self, bucket: int) -> bool:
        return self._of.roots[bucket] == self._rank

    def _whole(self, spec: TensorSpec) -> WeightPlace:
        if self._resident_arena:
            return self._in_arena(0, spec, Box.whole(spec.shape), result=True)
        return WeightPlace(False, self._of.places[spec.name][1], spec.dtype, spec.shape, contiguous_strides(spec.shape))


def _places(manifest: Manifest) -> dict[str, tuple[int, int]]:
    """By name: the bucket of a tensor, and the byte in it where it begins."""
    return {
        spec.name: (index, at)
        for index in range(len(manifest.buckets))
        for spec, at in zip(manifest.tensors_of(index), manifest.offsets_of(index), strict=False)
    }


def _rows_by_tensor(shards: Shards | None) -> Mapping[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    if shards is not None:
        spaces: list[int] = shards.boxes.space.tolist()
        for row, tensor in enumerate(spaces):
            found[shards.tensors[tensor].name].append(row)
    return found


def _divisible(weight: QuantizedWeight, shards: Shards | None, rows: Mapping[str, Sequence[int]]) -> bool:
    """True if every holder of a shard can quantize it alone."""
    if shards is None:
        return False
    found = [shards.at(row) for row in rows[weight.spec.name]]
    return all(not each.shift and weight.scheme.alone(each.box, weight.spec.shape) for each in found)


def _local(
    weights: Sequence[QuantizedWeight],
    gathered: frozenset[int],
    shards: Shards | None,
    rows: Mapping[str, Sequence[int]],
) -> Mapping[int, Sequence[tuple[int, int]]]:
    """By rank: the shards that it quantizes for itself."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    holders: list[int] = [] if shards is None else shards.rank.tolist()
    for index, weight in enumerate(weights):
        for row in () if index in gathered else rows[weight.spec.name]:
            found[holders[row]].append((index, row))
    return found


def _grouped(model: str, groups: Sequence[Sequence[TensorSpec]]) -> Manifest | None:
    """A manifest with a bucket for each group."""
    if not groups:
        return None
    tensors: list[TensorSpec] = []
    buckets: list[BucketSpec] = []
    for group in groups:
        first = len(tensors)
        tensors.extend(sorted(group, key=lambda spec: -ITEM_BYTES[spec.dtype]))
        buckets.append(BucketSpec(first, len(tensors), sum(spec.nbytes for spec in group)))
    return Manifest(model, tuple(tensors), tuple(buckets))
