"""What ranks agree on: one rank's failure is all ranks', layouts make one model, groups wait for so long."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import msgspec
import pytest

from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shard, Shards, ShardView
from weightbus.trainer_agent.source import LayoutMismatch, RanksDisagree, SourceError
from weightbus.trainer_agent.sources.collective_source import (
    TENSORS as TENSORS_FACT,
    LayoutRefusal,
    RankGroup,
    RankLayout,
    check_layouts,
    check_on_all_ranks,
    distinct_shards,
    encode,
    on_all_ranks,
)


class Two:
    """Rank 0 of two; rank 1 says what it is told to."""

    rank = 0

    def __init__(self, other: RankLayout | LayoutRefusal) -> None:
        self.other = encode(other)
        self.said: list[bytes] = []

    def gather(self, blob: bytes) -> list[bytes]:
        self.said.append(blob)
        return [blob, self.other]


FINE = RankLayout({"layers": "1"}, b"")


def raises(error: Exception) -> Callable[[], tuple[RankLayout, int]]:
    def attempt() -> tuple[RankLayout, int]:
        raise error

    return attempt


def test_what_all_found_is_returned() -> None:
    """With what is this rank's own."""
    assert on_all_ranks(cast(RankGroup, Two(FINE)), lambda: (FINE, 7)) == ((FINE, FINE), 7)


@pytest.mark.parametrize(
    "error", [KeyError("v_head_dim"), AttributeError("no such thing"), RuntimeError(), MemoryError()]
)
def test_an_error_that_is_nobodys_is_told_to_the_others_before_it_is_raised(error: Exception) -> None:
    """As a source's error, with what it was: they would wait for their timeout."""
    ranks = Two(FINE)
    with pytest.raises(SourceError, match=type(error).__name__) as told:
        on_all_ranks(cast(RankGroup, ranks), raises(error))
    assert told.value.__cause__ is error
    assert ranks.said == [encode(LayoutRefusal(f"SourceError: {told.value}"))]


def test_a_sources_error_is_raised_as_it_is() -> None:
    """And told by its name."""
    ranks, error = Two(FINE), LayoutMismatch("another model")
    with pytest.raises(LayoutMismatch) as told:
        on_all_ranks(cast(RankGroup, ranks), raises(error))
    assert told.value is error
    assert ranks.said == [encode(LayoutRefusal("LayoutMismatch: another model"))]


def test_what_the_other_rank_could_not_do_is_raised_here() -> None:
    """Whether anything is found or only checked."""
    other = LayoutRefusal("LayoutMismatch: replaced")
    with pytest.raises(RanksDisagree, match="rank 1 cannot serve its part: LayoutMismatch: replaced"):
        on_all_ranks(cast(RankGroup, Two(other)), lambda: (FINE, 7))
    with pytest.raises(RanksDisagree, match="replaced"):
        check_on_all_ranks(cast(RankGroup, Two(other)), lambda: None)


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


class TwoLists(Two):
    """Rank 1 of two, whose rank 0 lists what it is told to."""

    rank = 1

    def __init__(self, other: RankLayout, listed: dict[str, str]) -> None:
        super().__init__(other)
        self.listed = listed

    def gather(self, blob: bytes) -> list[bytes]:
        self.said.append(blob)
        return [self.other if len(self.said) == 1 else b"", blob]

    def broadcast(self, blob: bytes | None) -> bytes:
        assert blob is None, "only the root's list travels"
        return msgspec.msgpack.encode(self.listed)


ALIKE = {spec.name: f"{spec.dtype} {spec.shape}" for spec in TENSORS}


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        (ALIKE | {"head": "x", "a": "x", "b": "x", "c": "x"}, "it lacks 'head', 'a', 'b' and 1 others: give"),
        ({"norm": ALIKE["norm"]}, "it has 'embedding': give"),
        (
            ALIKE | {"norm": "float32 (4,)"},
            r"it holds 'norm' in bfloat16 \(4,\) \(rank 0: float32 \(4,\)\): give",
        ),
        (dict(reversed(ALIKE.items())), "it lists the same tensors in another order: give"),
        ({"embeddings": "x", "norm": ALIKE["norm"]}, "it lacks 'embeddings'; has 'embedding': give"),
    ],
)
def test_ranks_built_differently_are_told_the_rank_and_the_first_names(listed: dict[str, str], words: str) -> None:
    """Not digests of lists; and only where these differ do lists travel."""
    ranks = TwoLists(RankLayout({TENSORS_FACT: "other"}, b""), listed)
    mine = RankLayout({TENSORS_FACT: "mine"}, b"")
    with pytest.raises(RanksDisagree, match=f"rank 1 was built differently from rank 0: {words}"):
        on_all_ranks(cast(RankGroup, ranks), lambda: (mine, TENSORS), lambda own: own)


def test_lists_do_not_travel_where_they_are_alike() -> None:
    """One gather, as many as ever."""
    ranks = Two(RankLayout({TENSORS_FACT: "mine"}, b""))
    on_all_ranks(cast(RankGroup, ranks), lambda: (RankLayout({TENSORS_FACT: "mine"}, b""), TENSORS), lambda own: own)
    assert len(ranks.said) == 1


def test_many_differences_are_counted_and_not_listed() -> None:
    """Every layer of two models differs; three are named."""
    other = {f"layers.{index} (not sharded)": "1" for index in range(9)}
    with pytest.raises(RanksDisagree, match=r"layers\.2 .*rank 0: 0\) and 6 others: broadcast replicas"):
        check_layouts([encode(RankLayout(dict.fromkeys(other, "0"), b"")), encode(RankLayout(other, b""))])


def test_what_lies_on_meshes_apart_is_equal_or_refused() -> None:
    """Ranks in the same place of two meshes hold replicas, or parts that nothing tells apart."""
    layouts = [RankLayout({}, b"", replicas={f"'w' (4,), part {rank % 2} of 2": str(rank % 2)}) for rank in range(4)]
    assert len(check_layouts([encode(each) for each in layouts])) == 4
    layouts[3] = RankLayout({}, b"", replicas={"'w' (4,), part 1 of 2": "another"})
    with pytest.raises(RanksDisagree, match=r"rank 3 and rank 1, .* hold different values of 'w' \(4,\), part 1 of 2"):
        check_layouts([encode(each) for each in layouts])


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


PROGRAM = Path(__file__).parents[2] / "kit" / "plain_ranks.py"


@pytest.mark.real
@pytest.mark.timeout(180)
def test_overlapping_groups_speak_and_are_built_again(tmp_path: Path) -> None:
    """Sources over parts of the world and over all of it live beside each other, and after a close new ones work."""
    command = [sys.executable, str(PROGRAM)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for process in ranks:
            said, _ = process.communicate(timeout=150)
            assert process.returncode == 0, said
            assert said.endswith("spoke\n")
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
