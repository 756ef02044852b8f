"""A Hugging Face model as blocks: its tensors by number, and the parts that its layers repeat. Pure.

A model of 70,000 tensors has a few kinds of layers. Shards of trainer ranks and engine workers are computed for one
block of each kind, by the mapping rules that read a real trainer, and repeated over layers and experts by arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from weightbus.dataplane.tensors import ITEM_BYTES, Column, TensorSpec

from ..source import LayoutMismatch, UnsupportedModel
from ..sources.megatron import (
    HFModel,
    LayerMapping,
    MappingRule,
    body,
    decoder_layer,
    head,
    hf_tensors,
    prediction_layer,
    prediction_parts,
)
from .fleet import FleetError

MOST_TENSORS: Final = 1 << 20
"""Most tensors of a model. Each is looked at; the largest known model has a tenth of it."""
MOST_BYTES: Final = 1 << 50
AXES: Final = 3
"""Most dimensions of any tensor."""


@dataclass(frozen=True, eq=False)
class Block:
    """Mapping rules of consecutive tensors: a layer, or a part that the model has once."""

    kind: str
    """Blocks of one kind have the same parts."""
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
        model = HFModel.parse(config)
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
    first = 0
    for kind, place, depth, read in _places(model):
        targets = [target for rule in place.rules for target in rule.targets]
        each = sum("{e}" in target.name for target in targets)
        experts = model.sizes["experts"] if each else 0
        plain = len(targets) - each
        yield Block(kind, place.rules, first, plain, each, experts, depth, read)
        first += plain + each * experts


def _places(model: HFModel) -> Iterator[tuple[str, LayerMapping, int, bool]]:
    """In the order of `hf_tensors`."""
    embedding, norm = body(model).rules
    last = len(model.layers)
    yield "embedding", LayerMapping((embedding,), ""), -1, True
    for index, layer in enumerate(model.layers):
        yield f"layer {layer.linear} {layer.experts}", decoder_layer(model, index), index, True
    yield "norm", LayerMapping((norm,), ""), last, True
    yield "head", head(model), last, True
    for index in range(model.predictions):
        yield "prediction", prediction_parts(model, index), last, False
        yield "prediction layer", prediction_layer(model, index), last, False
