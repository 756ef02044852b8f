"""What the ranks tell each other when a source is built, and what they conclude from it. Pure data, no torch.

Every rank sends one `Roster`, or a `Refusal` when it cannot serve its part, and then works out the same conclusion from
all of them: the same error everywhere, or who holds what.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from weightbus.dataplane.manifest import TensorSpec

from .naming import Dense
from .pieces import Piece, pieces
from .source import RanksDisagree


class Shard(msgspec.Struct, frozen=True):
    """One local parameter, by its global name."""

    name: str
    shape: tuple[int, ...]


class Roster(msgspec.Struct, frozen=True, tag=True):
    """What one rank holds, in the order of its list of parameters."""

    model: Dense
    dtype: str
    tp_rank: int
    tp_ranks: int
    shards: tuple[Shard, ...]

    def pieces_of(self, shard: Shard, served: dict[str, TensorSpec]) -> tuple[Piece, ...]:
        """What `shard` holds of the served tensors. Raises `LayoutMismatch`."""
        return pieces(shard.name, shard.shape, served, self.model, rank=self.tp_rank, ranks=self.tp_ranks)


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """Why one rank cannot serve its part."""

    reason: str


def encode(statement: Roster | Refusal) -> bytes:
    """What travels."""
    return msgspec.msgpack.encode(statement)


def check(statements: Sequence[bytes]) -> tuple[Roster, ...]:
    """The rosters of all ranks. Raises `RanksDisagree` unless every rank serves its part of the same model."""
    rosters: list[Roster] = []
    for rank, blob in enumerate(statements):
        statement = msgspec.msgpack.decode(blob, type=Roster | Refusal)
        if isinstance(statement, Refusal):
            raise RanksDisagree(f"rank {rank} cannot serve its part: {statement.reason}")
        rosters.append(statement)
    first = _agreed(rosters[0])
    for rank, roster in enumerate(rosters):
        found = _agreed(roster)
        odd = [f"{key}={found[key]!r} (rank 0: {first[key]!r})" for key in first if found[key] != first[key]]
        if odd:
            raise RanksDisagree(f"rank {rank} has {', '.join(odd)}: give every rank the same model, config and dtype")
    return tuple(rosters)


def holdings(rosters: Sequence[Roster], tensors: Sequence[TensorSpec]) -> dict[int, tuple[tuple[int, Piece], ...]]:
    """What is read from each rank: of a piece that several ranks hold, the lowest rank's copy."""
    served = {spec.name: spec for spec in tensors}
    claimed: set[tuple[str, int, int]] = set()
    held: dict[int, tuple[tuple[int, Piece], ...]] = {}
    for rank, roster in enumerate(rosters):
        mine: list[tuple[int, Piece]] = []
        for index, shard in enumerate(roster.shards):
            for piece in roster.pieces_of(shard, served):
                place = (piece.tensor, piece.served_row, piece.column)
                if place not in claimed:
                    claimed.add(place)
                    mine.append((index, piece))
        if mine:
            held[rank] = tuple(mine)
    return held


def _agreed(roster: Roster) -> dict[str, object]:
    return {**msgspec.structs.asdict(roster.model), "dtype": roster.dtype, "tp": roster.tp_ranks}
