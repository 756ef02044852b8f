"""The shards of the workers of an SGLang server: its own layout, by the mapping rules that cut a trainer's.

Heads, rows and vocabulary are cut over tensor parallel workers, output projections by columns, KV heads are copied
where there are fewer of them than workers, experts go to expert parallel groups and are cut over the workers of each.
Prediction layers are not read: that is a speculating server. The second copy that SGLang keeps of a latent attention's
`kv_b_proj`, in another form, is left out: it is less than a thousandth of a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from weightbus.dataplane.tensors import Box, Boxes, Column, TensorSpec

from ..sources.megatron import Fusion, HeadCounts, HFModel, MappingRule, Norm, ParallelRank, TensorCut
from .fleet import Engines, FleetError
from .tensor_blocks import AXES, Block, Tensors

_PADDED: Final = 64
"""SGLang's padding of the vocabulary."""
Part = tuple[int, int, Box]
"""A target's position in its block (of its expert), the worker (of its expert's group) and the box."""


@dataclass(frozen=True, eq=False)
class EngineShards:
    """Boxes of all workers of one engine."""

    boxes: Boxes
    worker: Column


def engine_shards(tensors: Tensors, engines: Engines) -> EngineShards:
    """The boxes of each worker. Raises `FleetError` for a layout that the engine could not be started with."""
    model = tensors.model
    if model.heads.heads % engines.tp:
        raise FleetError(
            f"the model has {model.heads.heads} heads, engine tp = {engines.tp} does not divide them: change it"
        )
    if engines.ep > 1 and (not model.family.experts or model.sizes["experts"] % engines.ep):
        found = model.sizes["experts"] if model.family.experts else 0
        raise FleetError(f"the model has {found} experts, engine ep = {engines.ep} does not divide them: change it")

    @cache
    def parts(kind: str, *, experts: bool) -> Column:
        block = next(each for each in tensors.blocks if each.kind == kind)
        found = _parts(model, block, engines.tp // engines.ep if experts else engines.tp, experts=experts)
        rows = [(target, worker, *_wide(box)) for target, worker, box in found]
        return np.array(rows, np.int64).reshape(len(rows), 2 + 2 * AXES)

    tables: list[Column] = []
    for block in tensors.blocks:
        if not block.read:
            continue
        plain = parts(block.kind, experts=False).copy()
        plain[:, 0] += block.first
        tables.append(plain)
        if block.experts:
            of_one = parts(block.kind, experts=True)
            expert = np.repeat(np.arange(block.experts), len(of_one))
            rows = np.tile(of_one, (block.experts, 1))
            rows[:, 0] += block.first + block.plain + expert * block.each
            rows[:, 1] += expert // (block.experts // engines.ep) * (engines.tp // engines.ep)
            tables.append(rows)
    table = np.concatenate(tables)
    return EngineShards(Boxes(table[:, 0], table[:, 2 : 2 + AXES], table[:, 2 + AXES :]), table[:, 1])


def _parts(model: HFModel, block: Block, workers: int, *, experts: bool) -> Iterator[Part]:
    position = 0
    for rule in block.rules:
        if ("{e}" in rule.targets[0].name) is not experts:
            continue
        for index, target in enumerate(rule.targets):
            spec = model.spec(target, "", "bfloat16", 0)
            for worker in range(workers):
                for box in _boxes_of(model, rule, index, spec, ParallelRank(worker, workers)):
                    yield position + index, worker, box
        position += len(rule.targets)


def _boxes_of(model: HFModel, rule: MappingRule, index: int, spec: TensorSpec, share: ParallelRank) -> Iterator[Box]:
    """The boxes of one tensor on one worker."""
    heads = model.heads
    if _is_copied(rule, index):
        yield Box.whole(spec.shape)
    elif rule.fusion is Fusion.VOCABULARY:
        yield from _vocabulary(spec, share)
    elif rule.fusion in {Fusion.QKV, Fusion.GATED_QKV} and index and heads.groups < share.ranks:
        if share.ranks % heads.groups:
            raise FleetError(f"{heads.groups} KV heads for engine tp = {share.ranks}: it must be a multiple of them")
        group = share.rank * heads.groups // share.ranks
        yield _axis(spec, 0, group * heads.head_dim, (group + 1) * heads.head_dim)
    else:
        axis = 1 if rule.cut is TensorCut.COLUMNS else 0
        for begin, extent in _sections(rule, spec.shape[axis], heads):
            if extent % share.ranks:
                raise FleetError(
                    f"{spec.name!r} {spec.shape} cannot be cut along axis {axis} for {share.ranks} workers: choose"
                    " another engine tp or ep"
                )
            each = extent // share.ranks
            yield _axis(spec, axis, begin + share.rank * each, begin + (share.rank + 1) * each)


def _is_copied(rule: MappingRule, index: int) -> bool:
    """True where every worker has the whole tensor, as of latent down projections but not of norms over all heads."""
    wide_norm = rule.targets[index].norm is not Norm.NOT
    return rule.cut is TensorCut.NONE or (rule.cut is TensorCut.ROWS_OR_NONE and not wide_norm)


def _vocabulary(spec: TensorSpec, share: ParallelRank) -> Iterator[Box]:
    rows = spec.shape[0]
    padded = -(-rows // _PADDED) * _PADDED
    if padded % share.ranks:
        raise FleetError(f"a vocabulary of {padded} rows cannot be cut for engine tp = {share.ranks}: choose another")
    first, last = (min(rows, end * (padded // share.ranks)) for end in (share.rank, share.rank + 1))
    if first < last:
        yield _axis(spec, 0, first, last)


def _sections(rule: MappingRule, extent: int, heads: HeadCounts) -> tuple[tuple[int, int], ...]:
    """Begin and extent of each section that is cut by itself."""
    if rule.fusion is Fusion.DELTA_CONVOLUTION:
        key, value = heads.key_heads * heads.key_dim, heads.value_heads * heads.value_dim
        return (0, key), (key, key), (2 * key, value)
    if rule.fusion is Fusion.GATED and len(rule.targets) == 1:
        return (0, extent // 2), (extent // 2, extent // 2)
    return ((0, extent),)


def _axis(spec: TensorSpec, axis: int, first: int, last: int) -> Box:
    start, stop = [0] * len(spec.shape), list(spec.shape)
    start[axis], stop[axis] = first, last
    return Box(tuple(start), tuple(stop))


def _wide(box: Box) -> tuple[int, ...]:
    missing = AXES - len(box.start)
    return (*box.start, *(0,) * missing, *box.stop, *(1,) * missing)
