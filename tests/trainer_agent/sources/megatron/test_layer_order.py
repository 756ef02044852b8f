"""Layers that are not where their numbers say: refused, because one of the same shape would be served for another."""

from __future__ import annotations

import itertools

import pytest

from weightbus.trainer_agent.source import LayoutMismatch, RanksDisagree
from weightbus.trainer_agent.sources.collective_source import PipelineStage, RankLayout
from weightbus.trainer_agent.sources.megatron.megatron_source import check_numbers, check_order, check_part


def rosters(*ranks: tuple[PipelineStage, ...]) -> list[RankLayout]:
    return [RankLayout({}, b"", stages) for stages in ranks]


@pytest.mark.parametrize("numbers", [[], [1], [1, 2, 3], [7, 8]])
def test_the_layers_of_a_chunk_follow_each_other(numbers: list[int]) -> None:
    """From any number on: which one is for the pipeline to say."""
    check_numbers(numbers)


@pytest.mark.parametrize("numbers", [[2, 1], [1, 1], [1, 3], [1, 3, 2, 4]])
def test_layers_that_were_exchanged_are_refused(numbers: list[int]) -> None:
    """With the layer, the number it has and the one that its place gives."""
    with pytest.raises(LayoutMismatch, match=r"decoder\.layers\.1 has layer_number=\d, [23] is expected"):
        check_numbers(numbers)


def test_a_layer_and_its_parts_have_one_number() -> None:
    """Attention and experts are numbered when a layer is built; only one of them is changed by accident."""
    check_part("decoder.layers.0", 3, "self_attention", 3)
    with pytest.raises(LayoutMismatch, match=r"decoder\.layers\.0 has layer_number=4, its self_attention has 3"):
        check_part("decoder.layers.0", 4, "self_attention", 3)


def test_stages_follow_each_other_along_the_pipeline() -> None:
    """Chunk after chunk over all ranks, stages of any size, some without layers, with replicas."""
    first = (PipelineStage(0, 0, 1, 2), PipelineStage(1, 0, 4, 1))
    second = (PipelineStage(0, 1, 3, 1), PipelineStage(1, 1, 0, 0))
    check_order(rosters(first, second, first, second))
    check_order(rosters((), ()))


def test_stages_in_any_other_order_are_refused() -> None:
    """Every permutation of four equal stages but the one in which they follow each other."""
    starts = (1, 3, 5, 7)
    for order in itertools.permutations(starts):
        ranks = rosters(*((PipelineStage(0, place, first, 2),) for place, first in enumerate(order)))
        if order == starts:
            check_order(ranks)
            continue
        with pytest.raises(RanksDisagree, match=r"holds layers \d to \d; layer \d is expected to be its first"):
            check_order(ranks)


def test_chunks_in_another_order_are_refused() -> None:
    """The second chunk of a rank does not come before the first of the next."""
    with pytest.raises(RanksDisagree, match=r"rank 1, at place 1 .* chunk 0, holds layers 3 to 3; layer 2 is expected"):
        check_order(
            rosters(
                (PipelineStage(0, 0, 1, 1), PipelineStage(1, 0, 2, 1)),
                (PipelineStage(0, 1, 3, 1), PipelineStage(1, 1, 4, 1)),
            )
        )


def test_replicas_hold_the_same_layers() -> None:
    """Two ranks at one place of the pipeline."""
    with pytest.raises(RanksDisagree, match=r"rank 1, .* holds layers 2 to 2; rank 0, .* same place, holds layers 1"):
        check_order(rosters((PipelineStage(0, 0, 1, 1),), (PipelineStage(0, 0, 2, 1),)))
