"""The states of a round and the phases of an engine in it, with every legal move, as tables.

PROTOCOL.md draws its diagrams from these tables; a test compares.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from ..protocol import IllegalMove


class RoundState(enum.StrEnum):
    """States of a round. Every state but IDLE has a deadline."""

    __hash__ = str.__hash__  # the one of enums is written in Python, and called for every answer

    IDLE = "idle"
    """No round is running. Engines serve the version that they hold."""
    PREPARING = "preparing"
    """Engines compare the manifest with their servers, while they serve."""
    OFFERING = "offering"
    """The trainer opens its half of the transports. Engines serve, except those of a retry."""
    PAUSING = "pausing"
    """Engines of the wave pause. Each takes the version once it is paused, or once all are (`Policy.min_engines`)."""
    TRANSFERRING = "transferring"
    """All engines of the wave are paused and receive bytes. A failing engine may hold mixed weights."""
    VERIFYING = "verifying"
    """The trainer's half is over. Engines compare their weights with the digest table."""
    COMMITTING = "committing"
    """Enough engines are verified, and the commit is on its way to the journal. No engine is told yet."""
    RESUMING = "resuming"
    """The version is durable and cannot be taken back. Verified engines are told until they serve it."""
    ABORTING = "aborting"
    """The round failed. Clean engines resume the previous version; others stay paused."""


class EnginePhase(enum.StrEnum):
    """Phases of one engine in a round."""

    __hash__ = str.__hash__

    PREPARING = "preparing"
    """It was sent `Prepare`, and serves."""
    PREPARED = "prepared"
    """It fits the manifest, serves, and waits for its wave."""
    PAUSING = "pausing"
    """It was sent `Pause` and, unless all must pause first, `Transfer`."""
    PAUSED = "paused"
    """It generates nothing, holds its old weights, and waits for the others of its wave to pause."""
    TRANSFERRING = "transferring"
    """It generates nothing and takes the version; its weights may be mixed."""
    TRANSFERRED = "transferred"
    """It has loaded everything, and not verified it yet."""
    VERIFIED = "verified"
    """It holds exactly the new version; it is paused, and labeled with the old version."""
    BROKEN = "broken"
    """It failed in the transfer, and waits for a retry."""
    RESUMING = "resuming"
    """It was sent `Commit`, and resumes with the new version."""
    LEAVING = "leaving"
    """It was sent `Abort`, and resumes with its old version if it is clean."""
    SERVING = "serving"
    """It serves the new version."""
    LEFT = "left"
    """It serves the old version, or had no part in the round."""
    QUARANTINED = "quarantined"
    """It does not serve before a complete verified transfer."""
    LOST = "lost"
    """It stopped answering."""


ROUND_MOVES: Final[Mapping[RoundState, frozenset[RoundState]]] = {
    RoundState.IDLE: frozenset({RoundState.PREPARING}),
    RoundState.PREPARING: frozenset(
        {RoundState.OFFERING, RoundState.COMMITTING, RoundState.RESUMING, RoundState.ABORTING}
    ),
    RoundState.OFFERING: frozenset(
        {RoundState.PAUSING, RoundState.COMMITTING, RoundState.RESUMING, RoundState.ABORTING}
    ),
    RoundState.PAUSING: frozenset(
        {RoundState.TRANSFERRING, RoundState.VERIFYING, RoundState.RESUMING, RoundState.ABORTING}
    ),
    RoundState.TRANSFERRING: frozenset({RoundState.VERIFYING, RoundState.RESUMING, RoundState.ABORTING}),
    RoundState.VERIFYING: frozenset(
        {RoundState.OFFERING, RoundState.COMMITTING, RoundState.RESUMING, RoundState.ABORTING}
    ),
    RoundState.COMMITTING: frozenset({RoundState.RESUMING, RoundState.ABORTING}),
    RoundState.RESUMING: frozenset({RoundState.IDLE, RoundState.OFFERING}),
    RoundState.ABORTING: frozenset({RoundState.IDLE}),
}
"""PREPARING -> COMMITTING: a channel without engines. VERIFYING -> OFFERING: a retry. OFFERING -> COMMITTING: a retry
that could not begin. PAUSING -> VERIFYING: the trainer was lost during a retry. RESUMING -> OFFERING: the next wave of
a rolling round. If the version is durable already, in a later wave or a resync, RESUMING follows once there is no more
to wait for. No move leads from RESUMING to ABORTING: a durable version only goes forward."""

BEFORE_COMMIT: Final = frozenset(RoundState) - {
    RoundState.IDLE,
    RoundState.COMMITTING,
    RoundState.RESUMING,
    RoundState.ABORTING,
}
TIMED_AS: Final[Mapping[RoundState, str]] = {
    RoundState.PREPARING: "prepare",
    RoundState.OFFERING: "offer",
    RoundState.PAUSING: "pause",
    RoundState.TRANSFERRING: "transfer",
    RoundState.VERIFYING: "verify",
    RoundState.COMMITTING: "commit",
    RoundState.RESUMING: "resume",
    RoundState.ABORTING: "abort",
}
"""Name of each state in `RoundDone.seconds`."""

SENDING: Final = frozenset({RoundState.PAUSING, RoundState.TRANSFERRING})
"""States in which the trainer's half is open and engines receive from it."""

BARRIER_PHASES: Final[Mapping[RoundState, tuple[EnginePhase, ...]]] = {
    RoundState.PREPARING: (EnginePhase.PREPARED,),
    RoundState.PAUSING: (EnginePhase.PAUSED, EnginePhase.TRANSFERRING, EnginePhase.TRANSFERRED, EnginePhase.VERIFIED),
    RoundState.TRANSFERRING: (EnginePhase.VERIFIED,),
    RoundState.VERIFYING: (EnginePhase.VERIFIED,),
    RoundState.RESUMING: (EnginePhase.SERVING,),
}
"""Phases that have reached the barrier of each state that waits for engines.

`StragglerPolicy` says for how long. A straggler is excluded, as if it had missed the deadline of the state.
"""

ENGINE_MOVES: Final[Mapping[EnginePhase, frozenset[EnginePhase]]] = {
    EnginePhase.PREPARING: frozenset({EnginePhase.PREPARED, EnginePhase.LEAVING, EnginePhase.LOST}),
    EnginePhase.PREPARED: frozenset({EnginePhase.PAUSING, EnginePhase.LEAVING, EnginePhase.LOST}),
    EnginePhase.PAUSING: frozenset(
        {
            EnginePhase.PAUSED,
            EnginePhase.TRANSFERRING,
            EnginePhase.BROKEN,
            EnginePhase.LEAVING,
            EnginePhase.LOST,
        }
    ),
    EnginePhase.PAUSED: frozenset(
        {EnginePhase.TRANSFERRING, EnginePhase.BROKEN, EnginePhase.LEAVING, EnginePhase.LOST}
    ),
    EnginePhase.TRANSFERRING: frozenset(
        {
            EnginePhase.TRANSFERRED,
            EnginePhase.VERIFIED,
            EnginePhase.BROKEN,
            EnginePhase.LEAVING,
            EnginePhase.LOST,
        }
    ),
    EnginePhase.TRANSFERRED: frozenset(
        {EnginePhase.VERIFIED, EnginePhase.BROKEN, EnginePhase.LEAVING, EnginePhase.LOST}
    ),
    EnginePhase.VERIFIED: frozenset({EnginePhase.RESUMING, EnginePhase.BROKEN, EnginePhase.LEAVING, EnginePhase.LOST}),
    EnginePhase.BROKEN: frozenset({EnginePhase.PAUSING, EnginePhase.LEAVING, EnginePhase.LOST}),
    EnginePhase.RESUMING: frozenset({EnginePhase.SERVING, EnginePhase.QUARANTINED, EnginePhase.LOST}),
    EnginePhase.LEAVING: frozenset({EnginePhase.LEFT, EnginePhase.QUARANTINED, EnginePhase.LOST}),
    EnginePhase.SERVING: frozenset(),
    EnginePhase.LEFT: frozenset(),
    EnginePhase.QUARANTINED: frozenset(),
    EnginePhase.LOST: frozenset(),
}

FINISHED: Final = frozenset({EnginePhase.SERVING, EnginePhase.LEFT, EnginePhase.QUARANTINED, EnginePhase.LOST})
"""Final phases: the round does not wait for an engine in one of them."""

_State = TypeVar("_State", bound=enum.StrEnum)


def move(
    machine: str,
    table: Mapping[_State, frozenset[_State]],
    found: _State,
    wanted: _State,
    event_trace: Sequence[object] = (),
) -> _State:
    """The state `wanted`, if `table` has a move to it from `found`. Raises `IllegalMove` otherwise."""
    if wanted not in table[found]:
        raise IllegalMove(machine, found.value, f"a move to {wanted.value}", event_trace)
    return wanted


def diagram(table: Mapping[_State, frozenset[_State]]) -> str:
    """The table as a Mermaid state diagram, in the order of the enum."""
    lines = ["stateDiagram-v2"]
    for source, targets in table.items():
        lines.extend(f"    {source.name} --> {target.name}" for target in type(source) if target in targets)
    return "\n".join(lines)


GENERATING: Final = frozenset(
    {None, EnginePhase.PREPARING, EnginePhase.PREPARED, EnginePhase.SERVING, EnginePhase.LEFT}
)
