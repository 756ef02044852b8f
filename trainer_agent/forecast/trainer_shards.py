"""The shards of a Megatron trainer's ranks: every box once, with the ranks that hold it as an arithmetic series.

Ranks are numbered in Megatron's order: tensor parallel first, then expert or data parallel, then pipeline. So the
replicas of a box are `base`, `base + stride`, .. and need not be listed. Left out is the last stage's further
copy of the embedding, which it has where prediction layers are trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Final

import numpy as np

from weightbus.dataplane.tensors import Box, Boxes, Column, contiguous_strides

from ..sources.megatron import Fusion, HFModel, LocalParameter, MappingRule, Norm, ParallelRank, TensorCut, shards_of
from .fleet import FleetError, TrainerSpec
from .tensor_blocks import AXES, Block, Tensors

_PADDED: Final = 128
"""Megatron's make_vocab_size_divisible_by."""

Part = tuple[int, int, Box]
"""A target's position in its block (of its expert), the share that holds it or -1 for every rank, and the box."""


@dataclass(frozen=True, eq=False)
class TrainerShards:
    """Distinct boxes, which make up every tensor exactly once. Holders of row r: base + stride * k, k < count."""

    boxes: Boxes
    base: Column
    stride: Column
    count: Column


def trainer_shards(tensors: Tensors, trainer: TrainerSpec) -> TrainerShards:
    """The boxes of the trainer's ranks. Raises `FleetError` where a matrix cannot be cut evenly."""
    model = tensors.model
    if trainer.pp > len(model.layers):
        raise FleetError(f"pp = {trainer.pp} stages for {len(model.layers)} layers: use at most one stage for each")
    if model.heads.heads % trainer.tp:
        raise FleetError(f"the model has {model.heads.heads} heads, which tp = {trainer.tp} does not divide: change tp")
    if trainer.ep > 1 and (not model.family.experts or model.sizes["experts"] % trainer.ep):
        found = model.sizes["experts"] if model.family.experts else 0
        raise FleetError(f"the model has {found} experts, ep = {trainer.ep} does not divide them: change ep")

    @cache
    def parts(kind: str, *, experts: bool) -> tuple[Part, ...]:
        block = next(each for each in tensors.blocks if each.kind == kind)
        return tuple(_parts(model, block, trainer.expert_tp if experts else trainer.tp, experts=experts))

    tables: list[Column] = []
    for block in tensors.blocks:
        stage = _stage(block.depth, len(model.layers), trainer.pp) * trainer.stage
        tables.append(_plain(parts(block.kind, experts=False), block, stage, trainer))
        if block.experts:
            tables.append(_experts(parts(block.kind, experts=True), block, stage, trainer))
    table = np.concatenate([each for each in tables if len(each)])
    boxes = Boxes(table[:, 0], table[:, 4 : 4 + AXES], table[:, 4 + AXES :])
    return TrainerShards(boxes, table[:, 1], table[:, 2], table[:, 3])


def _stage(depth: int, layers: int, stages: int) -> int:
    """Layers as even as can be, longer stages first; the embedding on the first, what follows them on the last."""
    if depth < 0:
        return 0
    short, longer = divmod(layers, stages)
    edge = longer * (short + 1)
    index = min(depth, layers - 1)
    return index // (short + 1) if index < edge else longer + (index - edge) // short


def _plain(parts: Sequence[Part], block: Block, stage: int, trainer: TrainerSpec) -> Column:
    rows: list[tuple[int, ...]] = []
    for target, share, box in parts:
        holders = (stage, 1, trainer.stage) if share < 0 else (stage + share, trainer.tp, trainer.stage // trainer.tp)
        rows.append((block.first + target, *holders, *_wide(box)))
    return np.array(rows, np.int64).reshape(len(rows), 4 + 2 * AXES)


def _experts(parts: Sequence[Part], block: Block, stage: int, trainer: TrainerSpec) -> Column:
    """The boxes of all experts, from those of one: expert e is on the e-th share of the expert parallel ranks."""
    width, group = trainer.expert_tp, trainer.expert_tp * trainer.ep
    of_one = np.array([(target, max(share, 0), *_wide(box)) for target, share, box in parts], np.int64)
    every = np.array([share < 0 for _, share, _ in parts])
    expert = np.repeat(np.arange(block.experts), len(parts))
    rows = np.tile(of_one, (block.experts, 1))
    alike = np.tile(every, block.experts)
    base = stage + expert // (block.experts // trainer.ep) * width + rows[:, 1]
    space = block.first + block.plain + expert * block.each + rows[:, 0]
    stride = np.full(len(rows), group)
    if alike.any():
        raise FleetError(f"a part of an expert that etp = {width} does not cut: use etp = 1")
    return np.column_stack([space, base, stride, np.full(len(rows), trainer.stage // group), rows[:, 2:]])


def _parts(model: HFModel, block: Block, ranks: int, *, experts: bool) -> Iterator[Part]:
    """The boxes of all shares, for the rules of experts or for the others."""
    position = 0
    for rule in block.rules:
        of_expert = "{e}" in rule.targets[0].name
        if of_expert is not experts:
            continue
        yield from _parts_of(model, rule, position, ranks, experts=experts)
        position += len(rule.targets)


def _parts_of(model: HFModel, rule: MappingRule, position: int, ranks: int, *, experts: bool) -> Iterator[Part]:
    served = [model.spec(target, "", "bfloat16", 0) for target in rule.targets]
    number = {spec.name: position + index for index, spec in enumerate(served)}
    # Norms over all heads are cut with them, latent projections down are not.
    wide_norm = rule.cut is TensorCut.ROWS_OR_NONE and rule.targets[0].norm is not Norm.NOT
    cut = wide_norm or rule.cut in {TensorCut.ROWS, TensorCut.COLUMNS}
    shares = ranks if cut else 1
    rows = sum(spec.shape[0] for spec in served)
    full = (rows, *served[0].shape[1:])
    if rule.fusion is Fusion.VOCABULARY:
        unit = _PADDED * shares
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
            rule, local, served, (0,) * len(served), heads=model.heads, share=ParallelRank(share, shares)
        ):
            yield number[piece.tensor], share if cut else -1, piece.box


def _wide(box: Box) -> tuple[int, ...]:
    missing = AXES - len(box.start)
    assert missing >= 0, prod(box.stop)
    return (*box.start, *(0,) * missing, *box.stop, *(1,) * missing)
