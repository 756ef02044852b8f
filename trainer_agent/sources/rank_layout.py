"""What the ranks tell each other when a source is built, and what they conclude from it. Pure data, no torch.

Every rank sends one `RankLayout`, or a `LayoutRefusal` when it cannot serve its part, and then works out the same
conclusion from all of them: the same error everywhere, or who holds what.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weightbus.dataplane.errors import ManifestError
from weightbus.dataplane.tensors import Shards, TensorSpec, coverage as cover

from ..source import RanksDisagree


class PipelineStage(msgspec.Struct, frozen=True):
    """Which layers of a pipelined model one chunk of a rank holds, by the numbers that the layers have."""

    chunk: int
    """Of its virtual pipeline."""
    place: int
    """The rank's, in its pipeline."""
    first: int
    """Number of its first layer, from 1 on; so `count` of them follow each other."""
    count: int


class RankLayout(msgspec.Struct, frozen=True, tag="Roster"):
    """What one rank holds."""

    facts: dict[str, str]
    """What must be the same on every rank, readable: config, dtype, sizes of groups."""
    pieces: bytes
    """`Shards.encode()`, with the rank as their holder."""
    stages: tuple[PipelineStage, ...] = ()


class LayoutRefusal(msgspec.Struct, frozen=True, tag="Refusal"):
    """Why one rank cannot serve its part."""

    reason: str


def encode(statement: RankLayout | LayoutRefusal) -> bytes:
    """What travels."""
    return msgspec.msgpack.encode(statement)


def check(statements: Sequence[bytes]) -> tuple[RankLayout, ...]:
    """The rosters of all ranks. Raises `RanksDisagree` unless every rank serves its part of the same model."""
    rosters: list[RankLayout] = []
    for rank, blob in enumerate(statements):
        statement = msgspec.msgpack.decode(blob, type=RankLayout | LayoutRefusal)
        if isinstance(statement, LayoutRefusal):
            raise RanksDisagree(f"rank {rank} cannot serve its part: {statement.reason}")
        rosters.append(statement)
    first = rosters[0].facts
    for rank, roster in enumerate(rosters):
        found = roster.facts
        keys = {**first, **found}
        odd = [f"{key}={found.get(key)} (rank 0: {first.get(key)})" for key in keys if found.get(key) != first.get(key)]
        if odd:
            raise RanksDisagree(f"rank {rank} has {', '.join(odd)}: give every rank the same model, config and dtype")
    return tuple(rosters)


def settle(rosters: Sequence[RankLayout], tensors: Sequence[TensorSpec]) -> Shards:
    """What is read from whom: every element of every tensor once, of copies the lowest rank's.

    Raises `RanksDisagree` when the ranks together do not hold all of `tensors`.
    """
    try:
        pieces = cover.drop_replicas(Shards.decode([roster.pieces for roster in rosters], tensors))
        cover.check_exact_cover(pieces)
    except ManifestError as error:
        raise RanksDisagree(
            f"{error}; build the source on every rank, with all of its model chunks and the config that is trained"
        ) from error
    return pieces
