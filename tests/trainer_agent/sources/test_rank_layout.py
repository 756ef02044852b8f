"""What ranks conclude from each other's rosters."""

import pytest

from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shard, Shards, ShardView
from weightbus.trainer_agent.source import RanksDisagree
from weightbus.trainer_agent.sources.collective_source import (
    LayoutRefusal,
    RankLayout,
    check_layouts,
    distinct_shards,
    encode,
)

TENSORS = (TensorSpec("norm", "bfloat16", (4,)), TensorSpec("embedding", "bfloat16", (8, 4)))
NORM = Shard("norm", Box((0,), (4,)), "bfloat16", ShardView(0, 0, (1,)))


def half(which: int) -> Shard:
    return Shard("embedding", Box((4 * which, 0), (4 * which + 4, 4)), "bfloat16", ShardView(1, 0, (4, 1)))


def roster(rank: int = 0, **facts: str) -> RankLayout:
    held = Shards.of(TENSORS, [NORM, half(rank % 2)], rank)
    return RankLayout({"layers": "1", "dtype": "'bfloat16'", **facts}, held.encode())


def test_rosters_travel_unchanged() -> None:
    """What a rank said is what the others read."""
    rosters = (roster(0), roster(1))
    assert check_layouts([encode(each) for each in rosters]) == rosters


def test_one_refusal_is_everybodys_error() -> None:
    """All ranks learn which rank cannot serve, and why."""
    with pytest.raises(RanksDisagree, match="rank 1 cannot serve its part: UnknownParameter: no rule"):
        check_layouts([encode(roster(0)), encode(LayoutRefusal("UnknownParameter: no rule"))])


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (roster(1, dtype="'float32'"), "dtype='float32' .rank 0: 'bfloat16'."),
        (roster(1, tp="4"), "tp=4 .rank 0: None."),
        (roster(1, layers="2"), "layers=2 .rank 0: 1."),
    ],
)
def test_ranks_of_different_models_are_told_apart(other: RankLayout, part: str) -> None:
    """The message names the facts that differ, and nothing else."""
    with pytest.raises(RanksDisagree, match=f"rank 1 has {part}: give"):
        check_layouts([encode(roster(0)), encode(other)])


def test_copies_are_read_from_the_lowest_rank() -> None:
    """Norms are on every tensor rank and everything on every replica: each element is read once."""
    pieces = distinct_shards([roster(rank) for rank in range(4)], TENSORS)
    read = {(int(pieces.rank[row]), pieces.at(row).tensor) for row in range(len(pieces))}
    assert read == {(0, "norm"), (0, "embedding"), (1, "embedding")}


def test_a_missing_rank_is_noticed() -> None:
    """A stage or tensor rank that did not take part shows as a part of a tensor that nobody holds."""
    with pytest.raises(RanksDisagree, match=r"'embedding'.*held by no rank.*build the source on every rank"):
        distinct_shards([roster(0), roster(2)], TENSORS)


def test_ranks_that_describe_other_tensors_are_told() -> None:
    """Pieces are numbers: of other tensors they would mean something else."""
    with pytest.raises(RanksDisagree, match="of other tensors"):
        distinct_shards([roster(0), roster(1)], TENSORS[:1])
