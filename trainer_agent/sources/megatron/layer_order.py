"""Whether layers are where their numbers say: within a chunk, and along the pipeline. Pure, no torch.

A layer's place in the model is known to itself alone, by its `layer_number`; names count from 0 in every chunk. By a
wrong number a layer would be served as another one of the same shape, and no proof of coverage could tell. But Megatron
numbers the layers of a chunk one after another, and chunks go along the pipeline in order: first all ranks' first
chunks, then all their second ones.
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


def roots_of(rosters: Sequence[RankLayout], pieces: Shards) -> tuple[int, ...]:
    """By tensor of `pieces`, which hold every element once: the first rank of the stage that it is read from.

    That of its lowest holder: replicas in other stages, such as tied embeddings, are not read.
    """
    first: dict[int, int] = {}
    places = [roster.stages[0].place if roster.stages else 0 for roster in rosters]
    for rank, place in enumerate(places):
        first.setdefault(place, rank)
    lowest = np.full(len(pieces.tensors), len(rosters), np.int64)
    np.minimum.at(lowest, pieces.boxes.space, pieces.holder)
    holders: list[int] = lowest.tolist()
    return tuple(first[places[holder]] for holder in holders)


def check_order(rosters: Sequence[RankLayout]) -> None:
    """Raise `RanksDisagree` unless the stages of all ranks follow each other along the pipeline.

    Ranks at one place of it, which are replicas or shards of each other, must hold the same layers.
    """
    holders: dict[tuple[int, int], tuple[int, PipelineStage]] = {}
    for rank, roster in enumerate(rosters):
        for stage in roster.stages:
            first, known = holders.setdefault((stage.chunk, stage.place), (rank, stage))
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
    return f"rank {rank}, at place {stage.place} of the pipeline with its chunk {stage.chunk}, {_layers(stage)}"


def _layers(stage: PipelineStage) -> str:
    return f"holds layers {stage.first} to {stage.first + stage.count - 1}" if stage.count else "holds no layers"
