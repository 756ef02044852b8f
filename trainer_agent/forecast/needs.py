"""What the workers of an SGLang server keep of a served model: its own layout, by the rules that cut a trainer's.

Heads, rows and vocabulary are cut over tensor parallel workers, output projections by columns, KV heads are copied
where there are fewer of them than workers, experts go to expert parallel groups and are cut over the workers of each.
Prediction layers are not read: that is a speculating server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

from weightbus.dataplane.boxes import Box, Boxes, Column
from weightbus.dataplane.manifest import TensorSpec

from ..rules import Cut, Fusion, Norm, Rule
from ..served import Model
from .fleet import Engines, FleetError
from .tensors import AXES, Block, Tensors

_PADDED: Final = 64
"""SGLang's padding of the vocabulary."""
Part = tuple[int, int, Box]
"""A target's position in its block (of its expert), the worker (of its expert's group) and the box."""


@dataclass(frozen=True, eq=False)
class Needs:
    """Boxes of all workers of one engine."""

    boxes: Boxes
    worker: Column


def needs(tensors: Tensors, engines: Engines) -> Needs:
    """What each worker keeps. Raises `FleetError` where the engine could not be started so."""
    model = tensors.model
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
    return Needs(Boxes(table[:, 0], table[:, 2 : 2 + AXES], table[:, 2 + AXES :]), table[:, 1])


def _parts(model: Model, block: Block, workers: int, *, experts: bool) -> Iterator[Part]:
    position = 0
    for rule in block.rules:
        if ("{e}" in rule.served[0].name) is not experts:
            continue
        for index, target in enumerate(rule.served):
            spec = model.spec(target, "", "bfloat16", 0)
            for worker in range(workers):
                for box in _kept(model, rule, index, spec, worker, workers):
                    yield position + index, worker, box
        position += len(rule.served)


def _kept(model: Model, rule: Rule, index: int, spec: TensorSpec, worker: int, workers: int) -> Iterator[Box]:
    """What one worker keeps of one tensor."""
    rows = spec.shape[0]
    wide_norm = rule.cut is Cut.ROWS_OR_NONE and rule.served[index].norm is not Norm.NOT
    if rule.cut is Cut.COLUMNS:
        yield _axis(spec, 1, *_share(spec, 1, worker, workers))
    elif rule.fusion is Fusion.VOCABULARY:
        padded = -(-rows // _PADDED) * _PADDED
        if padded % workers:
            raise FleetError(f"a vocabulary of {padded} rows cannot be cut for engine tp = {workers}: choose another")
        first, last = (min(rows, end * (padded // workers)) for end in (worker, worker + 1))
        if first < last:
            yield _axis(spec, 0, first, last)
    elif rule.cut is Cut.NONE or (rule.cut is Cut.ROWS_OR_NONE and not wide_norm):
        yield Box.whole(spec.shape)
    elif rule.fusion in {Fusion.QKV, Fusion.GATED_QKV} and index and model.heads.groups < workers:
        groups, size = model.heads.groups, model.heads.head_dim
        if workers % groups:
            raise FleetError(f"{groups} KV heads for engine tp = {workers}: one must be a multiple of the other")
        group = worker * groups // workers
        yield _axis(spec, 0, group * size, (group + 1) * size)
    elif rule.fusion is Fusion.DELTA_CONVOLUTION:
        heads = model.heads
        key, value = heads.key_heads * heads.key_dim, heads.value_heads * heads.value_dim
        for begin, extent in ((0, key), (key, key), (2 * key, value)):
            yield _axis(spec, 0, begin + worker * extent // workers, begin + (worker + 1) * extent // workers)
    elif rule.fusion is Fusion.GATED and len(rule.served) == 1:
        half = rows // 2
        for begin in (0, half):
            yield _axis(spec, 0, begin + worker * half // workers, begin + (worker + 1) * half // workers)
    else:
        yield _axis(spec, 0, *_share(spec, 0, worker, workers))


def _share(spec: TensorSpec, axis: int, worker: int, workers: int) -> tuple[int, int]:
    extent = spec.shape[axis]
    if extent % workers:
        raise FleetError(
            f"{spec.name!r} {spec.shape} cannot be cut along axis {axis} for {workers} workers: choose another engine"
            " tp or ep"
        )
    return worker * extent // workers, (worker + 1) * extent // workers


def _axis(spec: TensorSpec, axis: int, first: int, last: int) -> Box:
    start, stop = [0] * len(spec.shape), list(spec.shape)
    start[axis], stop[axis] = first, last
    return Box(tuple(start), tuple(stop))


def _wide(box: Box) -> tuple[int, ...]:
    missing = AXES - len(box.start)
    return (*box.start, *(0,) * missing, *box.stop, *(1,) * missing)
