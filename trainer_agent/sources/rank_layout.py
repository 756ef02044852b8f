"""Messages that the ranks exchange when a source is built, and the layout that follows from them. Pure data, no torch.

Every rank sends one `RankLayout`, or a `LayoutRefusal` when it cannot serve its part. All ranks then compute the same
result from all messages: the same error everywhere, or the rank that each shard is read from.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weightbus.dataplane.errors import ManifestError
from weightbus.dataplane.tensors import Shards, TensorSpec, coverage as cover

from ..source import RanksDisagree


class PipelineStage(msgspec.Struct, frozen=True):
    """Layers of a pipelined model that one chunk of a rank holds: `count` consecutive ones, by `layer_number`."""

    chunk: int
    """Index of the chunk in its rank's virtual pipeline."""
    pipeline_rank: int = msgspec.field(name="place")
    """Index of the rank's pipeline stage."""
    first: int
    """`layer_number` of its first layer, counted from 1."""
    count: int


class RankLayout(msgspec.Struct, frozen=True, tag="Roster"):
    """The part of a model that one rank holds."""

    facts: dict[str, str]
    """Readable values that must be the same on every rank: config, dtype, sizes of groups."""
    shards: bytes = msgspec.field(name="pieces")
    """`Shards.encode()`, with the rank as their holder."""
    stages: tuple[PipelineStage, ...] = ()


class LayoutRefusal(msgspec.Struct, frozen=True, tag="Refusal"):
    """The reason why a rank cannot serve its part."""

    reason: str


def encode(statement: RankLayout | LayoutRefusal) -> bytes:
    """The bytes that a rank sends."""
    return msgspec.msgpack.encode(statement)


def check_layouts(statements: Sequence[bytes]) -> tuple[RankLayout, ...]:
    """Decode the layouts of all ranks. Raises `RanksDisagree` unless every rank serves its part of the same model."""
    layouts: list[RankLayout] = []
    for rank, blob in enumerate(statements):
        statement = msgspec.msgpack.decode(blob, type=RankLayout | LayoutRefusal)
        if isinstance(statement, LayoutRefusal):
            raise RanksDisagree(f"rank {rank} cannot serve its part: {statement.reason}")
        layouts.append(statement)
    first = layouts[0].facts
    for rank, layout in enumerate(layouts):
        found = layout.facts
        keys = {**first, **found}
        odd = [f"{key}={found.get(key)} (rank 0: {first.get(key)})" for key in keys if found.get(key) != first.get(key)]
        if odd:
            raise RanksDisagree(f"rank {rank} has {', '.join(odd)}: give every rank the same model, config and dtype")
    return tuple(layouts)


def distinct_shards(layouts: Sequence[RankLayout], tensors: Sequence[TensorSpec]) -> Shards:
    """Every element of every tensor once, with the rank that it is read from: of replicas, the lowest rank's.

    Raises `RanksDisagree` when the ranks together do not hold all of `tensors`.
    """
    try:
        shards = cover.drop_replicas(Shards.decode([layout.shards for layout in layouts], tensors))
        cover.check_exact_cover(shards)
    except ManifestError as error:
        raise RanksDisagree(
            f"{error}; build the source on every rank, with all of its model chunks and the config that is trained"
        ) from error
    return shards
