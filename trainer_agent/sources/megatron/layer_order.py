"""Checks that layers are numbered in order: within a chunk, and along the pipeline. Pure, no torch.

Only a layer's `layer_number` gives its position in the model; names count from 0 in every chunk. A layer with a wrong
number would be served as another one of the same shape, and no check of coverage could tell. But Megatron numbers the
layers of a chunk one after another, and chunks follow the pipeline in order: first all ranks' first chunks, then all
their second ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from weightbus.dataplane.tensors import Shards

from ...source import LayoutMismatch, RanksDisagree
from ..rank_layout import PipelineStage, RankLayout

_ADVICE: Final = "build the model with its own specs and stages, and change no layer_number afterwards"


def check_numbers(numbers: Sequence[int]) -> None:
    """Raise `LayoutMismatch` unless the layers of a chunk, in their places, are numbered one after another."""
    for at, number in enumerate(numbers):
        if number != numbers[0] + at:
            raise LayoutMismatch(
                f"decoder.layers.{at} has layer_number={number}, {numbers[0] + at} is expected where decoder.layers.0 "
                f"has {numbers[0]}: {_ADVICE}"
            )


def check_part(layer: str, number: int, part: str, found: int) -> None:
    """Raise `LayoutMismatch` unless a part of a layer, which is numbered too, has the layer's number."""
    if found != number:
        raise LayoutMismatch(f"{layer} has layer_number={number}, its {part} has {found}: {_ADVICE}")


def roots_of(layouts: Sequence[RankLayout], shards: Shards) -> tuple[int, ...]:
    """First rank of the pipeline stage that each tensor of `shards` is read from; `shards` hold every element once.

    The stage is that of the lowest holder: replicas in other stages, such as tied embeddings, are not read.
    """
    first: dict[int, int] = {}
    stages = [layout.stages[0].pipeline_rank if layout.stages else 0 for layout in layouts]
    for rank, stage in enumerate(stages):
        first.setdefault(stage, rank)
    lowest = np.full(len(shards.tensors), len(layouts), np.int64)
    np.minimum.at(lowest, shards.boxes.space, shards.rank)
    holders: list[int] = lowest.tolist()
    return tuple(first[stages[holder]] for holder in holders)


def check_order(layouts: Sequence[RankLayout]) -> None:
    """Raise `RanksDisagree` unless the stages of all ranks follow each other along the pipeline.

    Ranks of one stage, which are replicas or shards of each other, must hold the same layers.
    """
    holders: dict[tuple[int, int], tuple[int, PipelineStage]] = {}
    for rank, layout in enumerate(layouts):
        for stage in layout.stages:
            first, known = holders.setdefault((stage.chunk, stage.pipeline_rank), (rank, stage))
            if known != stage:
                raise RanksDisagree(
                    f"{_shown(stage, rank)}; rank {first}, which is in the same place, {_layers(known)}: {_ADVICE}"
                )
    following = 1
    for _, (rank, stage) in sorted(holders.items()):
        if stage.count and stage.first != following:
            raise RanksDisagree(
                f"{_shown(stage, rank)}; layer {following} is expected to be its first, because the stages before it "
                f"hold {following - 1} layers: {_ADVICE}"
            )
        following += stage.count


def _shown(stage: PipelineStage, rank: int) -> str:
    return f"rank {rank}, at place {stage.pipeline_rank} of the pipeline with its chunk {stage.chunk}, {_layers(stage)}"


def _layers(stage: PipelineStage) -> str:
    return f"holds layers {stage.first} to {stage.first + stage.count - 1}" if stage.count else "holds no layers"
