"""The states of a round and of an engine in it, and every legal move, as data. Decides nothing.

PROTOCOL.md draws its diagrams from these tables; a test compares.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from ..protocol import IllegalMove


class RoundState(enum.StrEnum):
    """Where the round of a channel stands. Every state but IDLE has a deadline."""

    __hash__ = str.__hash__  # that of enums is written in Python, and asked for with every answer

    IDLE = "idle"
    """No round. Engines serve what they hold."""
    PREPARING = "preparing"
    """Engines compare the manifest with their servers, while they serve."""
    OFFERING = "offering"
    """The trainer opens its half of the transports. Engines that are not driven again still serve."""
    PAUSING = "pausing"
    """Engines stop generating, and each begins to take the version as soon as it stands still, or all do."""
    TRANSFERRING = "transferring"
    """All stand still, bytes travel. An engine that fails from its pause on may hold mixed weights."""
    VERIFYING = "verifying"
    """The trainer's half is over; engines compare what they hold with the digest table."""
    COMMITTING = "committing"
    """Enough engines are verified; the version is on its way to disk. No engine knows yet."""
    RESUMING = "resuming"
    """The version is durable and cannot be taken back. Verified engines are told until they serve it."""
    ABORTING = "aborting"
    """The round came to nothing. Clean engines resume the old version, others stay paused."""


class EnginePhase(enum.StrEnum):
    """Where one engine of a round stands."""

    __hash__ = str.__hash__

    PREPARING = "preparing"
    """Was sent `Prepare`."""
    PREPARED = "prepared"
    """Fits the manifest; still serves."""
    PAUSING = "pausing"
    """Was sent `Pause` and, unless all are waited for, `Transfer`."""
    PAUSED = "paused"
    """Generates nothing, holds its old weights, and waits for the others."""
    TRANSFERRING = "transferring"
    """Generates nothing and takes the version; its weights may be mixed."""
    TRANSFERRED = "transferred"
    """Loaded every bucket; not compared yet."""
    VERIFIED = "verified"
    """Holds exactly the new version; paused, labeled with the old one."""
    BROKEN = "broken"
    """Failed in the transfer; may be sent everything again."""
    RESUMING = "resuming"
    """Was sent `Commit`."""
    LEAVING = "leaving"
    """Was sent `Abort`."""
    SERVING = "serving"
    """Serves the new version."""
    LEFT = "left"
    """Serves the old version again."""
    QUARANTINED = "quarantined"
    """Does not serve before a complete verified transfer."""
    LOST = "lost"
    """Stopped answering."""


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
"""PREPARING -> COMMITTING: a channel without engines. VERIFYING -> OFFERING: a re-drive. OFFERING -> COMMITTING: a
re-drive that could not begin. PAUSING -> VERIFYING: one whose trainer was lost. RESUMING -> OFFERING: the next wave of
a rolling round. Where the version is durable already, as in a later wave or a catch-up, RESUMING follows when there is
no more to wait for. There is no way from there to ABORTING: what is durable rolls forward."""

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
"""Under which name the seconds of a state are reported."""

SENDING: Final = frozenset({RoundState.PAUSING, RoundState.TRANSFERRING})
"""The trainer's half stands, and engines come to it as they are paused."""

BARRIER_PHASES: Final[Mapping[RoundState, tuple[EnginePhase, ...]]] = {
    RoundState.PREPARING: (EnginePhase.PREPARED,),
    RoundState.PAUSING: (EnginePhase.PAUSED, EnginePhase.TRANSFERRING, EnginePhase.TRANSFERRED, EnginePhase.VERIFIED),
    RoundState.TRANSFERRING: (EnginePhase.VERIFIED,),
    RoundState.VERIFYING: (EnginePhase.VERIFIED,),
    RoundState.RESUMING: (EnginePhase.SERVING,),
}
"""The states in which engines are waited for, and the phases of those that have come through.

`StragglerPolicy` says for how long. A late engine leaves the round, as one that ran into the step's deadline does.
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
"""Phases from which an engine does not hold up the end of its round."""

_State = TypeVar("_State", bound=enum.StrEnum)


def move(
    machine: str,
    table: Mapping[_State, frozenset[_State]],
    found: _State,
    wanted: _State,
    event_trace: Sequence[object] = (),
) -> _State:
    """The state `wanted`, if `table` allows to go there from `found`. Raises `IllegalMove` otherwise."""
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
