"""What trainer ranks hold of a model, what engine workers need of it, and the bytes between them. Pure, no torch.

A model of 70,000 tensors has a few kinds of layers. Shards are computed for one block of each kind, by the mapping
rules that read a real trainer, and repeated over layers and experts by arithmetic.

Of a trainer every rank of a stage holds what Megatron's layout gives it. Of an SGLang server heads, rows and vocabulary
are cut over tensor parallel workers, output projections by columns, KV heads are copied where there are fewer of them
than workers, experts go to expert parallel groups and are cut over the workers of each. Prediction layers are not read:
that is a speculating server. The second copy that SGLang keeps of a latent attention's `kv_b_proj`, in another form, is
left out: it is less than a thousandth of a model.

A worker reads every element from the nearest rank that holds it: its own GPU, its host, any other; equally near ranks
give equally many bytes, by the reshard plan's own choice among replicas (dataplane/tensors/coverage.py, with the same
inputs as the planner has). Holders are a series with equal steps: the nearest are found without looking at each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from weightbus.dataplane.tensors import (
    ITEM_BYTES,
    Box,
    Boxes,
    Column,
    ReplicaSets,
    TensorSpec,
    assign_balanced,
    contiguous_strides,
    expected_read_bytes,
    factorize,
    intersect,
    lexsort_rows,
    ragged_arange,
    served_sizes,
    volumes,
)

from ..source import LayoutMismatch, UnsupportedModel
from ..sources.megatron import (
    Fusion,
    HFModel,
    LocalParameter,
    MappingRule,
    Norm,
    ParallelRank,
    TensorCut,
    hf_tensors,
    layer_mappings,
    shards_of,
)
from .fleet import FleetError, ForecastTransport, PlacedEngines, Placement, TrainerSpec

MOST_TENSORS: Final = 1 << 20
"""Most tensors of a model. Each is looked at; the largest known model has a tenth of it."""
MOST_BYTES: Final = 1 << 50
AXES: Final = 3
"""Most dimensions of any tensor."""


@dataclass(frozen=True, eq=False)
class Block:
    """Mapping rules of consecutive tensors: a layer, or a part that the model has once."""

    rules: tuple[MappingRule, ...]
    first: int
    """Number of its first tensor."""
    plain: int
    """Number of tensors of no expert; tensors of experts follow, expert by expert."""
    each: int
    """Tensors of one expert."""
    experts: int
    depth: int
    """Layers before it; -1 for the embedding, the number of layers for parts behind the last one."""
    read: bool
    """False for prediction layers, which engines without speculation do not read."""


@dataclass(frozen=True, eq=False)
class Tensors:
    """All tensors of a model."""

    model: HFModel
    specs: tuple[TensorSpec, ...]
    blocks: tuple[Block, ...]
    item: Column
    """(tensors,): bytes of one element."""
    nbytes: Column
    """(tensors,)."""

    @classmethod
    def parse(cls, config: Mapping[str, object], dtype: str | None = None) -> Tensors:
        """Of a Hugging Face ``config.json``. Raises `UnsupportedModel`, `LayoutMismatch` or `FleetError`."""
        model = HFModel.parse(config, ("experts one by one",))
        named = dtype or model.dtype or "bfloat16"
        if named not in ITEM_BYTES:
            raise FleetError(f"dtype {named!r} is none that is known: give one of {', '.join(ITEM_BYTES)}")
        blocks = tuple(_blocks(model))
        count = blocks[-1].first + blocks[-1].plain + blocks[-1].each * blocks[-1].experts
        if count > MOST_TENSORS:
            raise FleetError(
                f"its config describes {count} tensors, more than the {MOST_TENSORS} that are looked at one by one:"
                " look at its numbers of layers and of experts"
            )
        specs = hf_tensors(model, named)
        if (total := sum(spec.nbytes for spec in specs)) > MOST_BYTES:
            raise FleetError(
                f"its config describes {total:.1e} bytes, more than the {MOST_BYTES:.1e} of any model: look at sizes"
            )
        item = np.array([ITEM_BYTES[spec.dtype] for spec in specs], np.int64)
        nbytes = np.array([spec.nbytes for spec in specs], np.int64)
        return cls(model, specs, blocks, item, nbytes)

    @property
    def total(self) -> int:
        """Bytes of one version."""
        return int(self.nbytes.sum())


def tensors_of(config: Mapping[str, object], dtype: str | None = None) -> Tensors:
    """As `Tensors.parse`; every problem of the config is a `FleetError`."""
    try:
        return Tensors.parse(config, dtype)
    except (LayoutMismatch, UnsupportedModel) as problem:
        raise FleetError(str(problem)) from problem


def _blocks(model: HFModel) -> Iterator[Block]:
    first, layers = 0, len(model.layers)
    for place, mapping in enumerate(layer_mappings(model)):
        targets = [target for rule in mapping.rules for target in rule.targets]
        each = sum("{e}" in target.name for target in targets)
        experts = model.sizes["experts"] if each else 0
        plain = len(targets) - each
        # The embedding, the layers, final norm and output layer, predictions.
        yield Block(mapping.rules, first, plain, each, experts, min(place - 1, layers), place <= layers + 2)
        first += plain + each * experts


_MEGATRON_PADDING: Final = 128
"""Megatron's make_vocab_size_divisible_by."""

Part = tuple[int, int, Box]
"""A target's position in its block (of its expert); its share or worker, -1 for every rank; and the box."""


@dataclass(frozen=True, eq=False)
class HolderSeries:
    """Holders of rows: base + stride * k, k < count."""

    base: Column
    stride: Column
    count: Column

    def take(self, rows: Column) -> HolderSeries:
        """The holders of these rows."""
        return HolderSeries(self.base[rows], self.stride[rows], self.count[rows])


@dataclass(frozen=True, eq=False)
class TrainerShards:
    """Distinct boxes, which make up every tensor exactly once, and the holders of each."""

    boxes: Boxes
    holders: HolderSeries


def trainer_shards(tensors: Tensors, trainer: TrainerSpec) -> TrainerShards:
    """The boxes of the trainer's ranks. Raises `FleetError` where a matrix cannot be cut evenly."""
    model = tensors.model
    if trainer.pp > len(model.layers):
        raise FleetError(f"pp = {trainer.pp} stages for {len(model.layers)} layers: use at most one stage for each")
    _check_cut(model, trainer.tp, trainer.ep, "")

    @cache
    def rows_of(rules: tuple[MappingRule, ...], *, experts: bool) -> Column:
        return _rows(_parts(model, rules, trainer.expert_tp if experts else trainer.tp, experts=experts))

    tables: list[Column] = []
    group = trainer.expert_tp * trainer.ep
    for block in tensors.blocks:
        first = _stage(block.depth, len(model.layers), trainer.pp) * trainer.stage
        rows = rows_of(block.rules, experts=False)
        every = rows[:, 1] < 0
        stride, count = np.where(every, 1, trainer.tp), trainer.stage // np.where(every, 1, trainer.tp)
        base = first + np.maximum(rows[:, 1], 0)
        tables.append(np.column_stack([block.first + rows[:, 0], base, stride, count, rows[:, 2:]]))
        if block.experts:
            rows = _over_experts(rows_of(block.rules, experts=True), block, trainer.ep, trainer.expert_tp)
            if (rows[:, 1] < 0).any():
                raise FleetError(f"a part of an expert that etp = {trainer.expert_tp} does not cut: use etp = 1")
            holders = np.broadcast_to((group, trainer.stage // group), (len(rows), 2))
            tables.append(np.column_stack([rows[:, 0], first + rows[:, 1], holders, rows[:, 2:]]))
    table = np.concatenate(tables)
    boxes = Boxes(table[:, 0], table[:, 4 : 4 + AXES], table[:, 4 + AXES :])
    return TrainerShards(boxes, HolderSeries(table[:, 1], table[:, 2], table[:, 3]))


def _rows(parts: Iterable[Part]) -> Column:
    """(parts, 2 + 2 * AXES): target, share, and the box, padded to `AXES`."""
    found: list[tuple[int, ...]] = []
    for target, share, box in parts:
        missing = AXES - len(box.start)
        found.append((target, share, *box.start, *(0,) * missing, *box.stop, *(1,) * missing))
    return np.array(found, np.int64).reshape(len(found), 2 + 2 * AXES)


def _over_experts(of_one: Column, block: Block, ep: int, width: int) -> Column:
    """The rows of all experts, from those of one: expert e is on the e-th of `ep` shares, each of `width` holders."""
    expert = np.repeat(np.arange(block.experts), len(of_one))
    rows = np.tile(of_one, (block.experts, 1))
    rows[:, 0] += block.first + block.plain + expert * block.each
    rows[:, 1] += expert // (block.experts // ep) * width
    return rows


def _check_cut(model: HFModel, tp: int, ep: int, of: str) -> None:
    if model.sizes["heads"] % tp:
        raise FleetError(f"the model has {model.sizes['heads']} heads, {of}tp = {tp} does not divide them: change it")
    experts = model.sizes["experts"] if model.family.experts else 0
    if ep > 1 and (not experts or experts % ep):
        raise FleetError(f"the model has {experts} experts, {of}ep = {ep} does not divide them: change it")


def _stage(depth: int, layers: int, stages: int) -> int:
    """Layers as even as can be, longer stages first; the embedding on the first, what follows them on the last."""
    if depth < 0:
        return 0
    short, longer = divmod(layers, stages)
    edge = longer * (short + 1)
    index = min(depth, layers - 1)
    return index // (short + 1) if index < edge else longer + (index - edge) // short


def _numbered(rules: Sequence[MappingRule], *, experts: bool) -> Iterator[tuple[int, MappingRule]]:
    """The rules of experts or the others, each with the position of its first target among theirs."""
    position = 0
    for rule in rules:
        if ("{e}" in rule.targets[0].name) is experts:
            yield position, rule
            position += len(rule.targets)


def _parts(model: HFModel, rules: Sequence[MappingRule], ranks: int, *, experts: bool) -> Iterator[Part]:
    """The boxes of all shares, for the rules of experts or for the others."""
    for position, rule in _numbered(rules, experts=experts):
        yield from _parts_of(model, rule, position, ranks, experts=experts)


def _parts_of(model: HFModel, rule: MappingRule, position: int, ranks: int, *, experts: bool) -> Iterator[Part]:
    served = [model.spec(target, "", "bfloat16", 0) for target in rule.targets]
    number = {spec.name: position + index for index, spec in enumerate(served)}
    shares = 1 if _is_copied(rule) else ranks
    rows = sum(spec.shape[0] for spec in served)
    full = (rows, *served[0].shape[1:])
    if rule.fusion is Fusion.VOCABULARY:
        unit = _MEGATRON_PADDING * shares
        full = (-(-rows // unit) * unit, *full[1:])
    axis = 1 if rule.cut is TensorCut.COLUMNS else 0
    uneven = full[axis] % shares or (rule.fusion is Fusion.GATED and any(s.shape[0] % shares for s in served))
    if uneven:
        name = "etp" if experts else "tp"
        raise FleetError(
            f"{rule.megatron_names[0]!r} has {full[axis]} {'columns' if axis else 'rows'}, which {name} = {shares} does"
            f" not divide: choose another {name}"
        )
    shape = tuple(size // shares if at == axis else size for at, size in enumerate(full))
    for share in range(shares):
        local = LocalParameter(rule.megatron_names[0], 0, shape, contiguous_strides(shape), "bfloat16")
        for piece in shards_of(
            rule, local, served, (0,) * len(served), sizes=model.sizes, share=ParallelRank(share, shares)
        ):
            yield number[piece.tensor], -1 if _is_copied(rule) else share, piece.box


_SGLANG_PADDING: Final = 64
"""SGLang's padding of the vocabulary."""


@dataclass(frozen=True, eq=False)
class EngineShards:
    """Boxes of all workers of one engine."""

    boxes: Boxes
    worker: Column


def engine_shards(tensors: Tensors, tp: int, ep: int) -> EngineShards:
    """The boxes of each worker. Raises `FleetError` for a layout that the engine could not be started with."""
    model = tensors.model
    _check_cut(model, tp, ep, "engine ")

    @cache
    def rows_of(rules: tuple[MappingRule, ...], *, experts: bool) -> Column:
        return _rows(_worker_parts(model, rules, tp // ep if experts else tp, experts=experts))

    tables: list[Column] = []
    for block in tensors.blocks:
        if block.read:
            plain = rows_of(block.rules, experts=False).copy()
            plain[:, 0] += block.first
            tables.append(plain)
            if block.experts:
                tables.append(_over_experts(rows_of(block.rules, experts=True), block, ep, tp // ep))
    table = np.concatenate(tables)
    return EngineShards(Boxes(table[:, 0], table[:, 2 : 2 + AXES], table[:, 2 + AXES :]), table[:, 1])


def _worker_parts(model: HFModel, rules: Sequence[MappingRule], workers: int, *, experts: bool) -> Iterator[Part]:
    """The boxes of all workers of one engine, or of one expert's group."""
    for position, rule in _numbered(rules, experts=experts):
        for index, target in enumerate(rule.targets):
            spec = model.spec(target, "", "bfloat16", 0)
            for worker in range(workers):
                for box in _boxes_of(model, rule, index, spec, ParallelRank(worker, workers)):
                    yield position + index, worker, box


def _boxes_of(model: HFModel, rule: MappingRule, index: int, spec: TensorSpec, share: ParallelRank) -> Iterator[Box]:
    """The boxes of one tensor on one worker."""
    sizes = model.sizes
    if _is_copied(rule):
        yield Box.whole(spec.shape)
    elif rule.fusion is Fusion.VOCABULARY:
        yield from _vocabulary(spec, share)
    elif rule.fusion in {Fusion.QKV, Fusion.GATED_QKV} and index and sizes["groups"] < share.ranks:
        if share.ranks % sizes["groups"]:
            raise FleetError(f"{sizes['groups']} KV heads for engine tp = {share.ranks}: it must be a multiple of them")
        group = share.rank * sizes["groups"] // share.ranks
        yield _axis(spec, 0, group * sizes["head_dim"], (group + 1) * sizes["head_dim"])
    else:
        axis = 1 if rule.cut is TensorCut.COLUMNS else 0
        for begin, extent in _worker_sections(rule, spec.shape[axis], sizes):
            if extent % share.ranks:
                raise FleetError(
                    f"{spec.name!r} {spec.shape} cannot be cut along axis {axis} for {share.ranks} workers: choose"
                    " another engine tp or ep"
                )
            each = extent // share.ranks
            yield _axis(spec, axis, begin + share.rank * each, begin + (share.rank + 1) * each)


def _is_copied(rule: MappingRule) -> bool:
    """True where every rank has the whole tensor, as of latent down projections but not of norms over all heads."""
    wide_norm = rule.targets[0].norm is not Norm.NOT
    return rule.cut is TensorCut.NONE or (rule.cut is TensorCut.ROWS_OR_NONE and not wide_norm)


def _vocabulary(spec: TensorSpec, share: ParallelRank) -> Iterator[Box]:
    rows = spec.shape[0]
    padded = -(-rows // _SGLANG_PADDING) * _SGLANG_PADDING
    if padded % share.ranks:
        raise FleetError(f"a vocabulary of {padded} rows cannot be cut for engine tp = {share.ranks}: choose another")
    first, last = (min(rows, end * (padded // share.ranks)) for end in (share.rank, share.rank + 1))
    if first < last:
        yield _axis(spec, 0, first, last)


def _worker_sections(rule: MappingRule, extent: int, sizes: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    """Begin and extent of each section that is cut by itself."""
    if rule.fusion is Fusion.DELTA_CONVOLUTION:
        key, value = (sizes[f"delta_{each}s"] * sizes[f"delta_{each}_dim"] for each in ("key", "value"))
        return (0, key), (key, key), (2 * key, value)
    if rule.fusion is Fusion.GATED and len(rule.targets) == 1:
        return (0, extent // 2), (extent // 2, extent // 2)
    return ((0, extent),)


def _axis(spec: TensorSpec, axis: int, first: int, last: int) -> Box:
    start, stop = [0] * len(spec.shape), list(spec.shape)
    start[axis], stop[axis] = first, last
    return Box(tuple(start), tuple(stop))


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
