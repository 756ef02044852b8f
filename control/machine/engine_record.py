"""One engine between rounds: what the coordinator knows of it, and whether it may serve the version it holds. Pure.

By default only the committed version is served. With `Policy.max_lag` a stale engine goes on serving until its version
is further behind than the trainer allowed; then it gets no requests before it takes a newer version. Versions are
compared by their digest tables, not by their numbers: after a rollback a number may stand for other weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from ..protocol import (
    AgentId,
    EngineHealth,
    EngineInfo,
    EngineMessage,
    Epoch,
    Failed,
    HeldVersion,
    Incarnation,
    RefusalCode,
    Serving,
    Topology,
    TransportKind,
    Version,
)
from .membership import Agent
from .participants import Participant
from .reply_cache import YES, Decision
from .states import GENERATING, EnginePhase

_SERVING: Final = EnginePhase.SERVING
_LEFT: Final = EnginePhase.LEFT
_CLEAN: Final = EngineHealth.CLEAN
"""Names of their own: the lookup of an enum's member takes longer than the work of an answer."""
_IN_DOUBT: Final = "serves another version than it was known to hold"
_IN_ROUND: Final[Mapping[EnginePhase | None, Decision]] = {
    phase: Decision(RefusalCode.NOT_ALLOWED, f"in a round: {phase}") for phase in EnginePhase
}


class AllowedVersions(msgspec.Struct, frozen=True):
    """Versions that engines of a channel may serve. `Channel.make_current` replaces it."""

    committed: HeldVersion | None = None
    """The current version; None before the first commit."""
    max_lag: int = 0
    """`Policy.max_lag` of the round that committed it; 0 after a restart of the coordinator."""
    older: tuple[HeldVersion | None, ...] = ()
    """Earlier versions within `max_lag`, newest first; None stands for the weights with which a server started."""

    def advanced_to(self, held: HeldVersion, max_lag: int, *, rollback: bool) -> AllowedVersions:
        """The allowed versions once `held` is current. A rollback allows no earlier version."""
        before = () if rollback or self.committed is None else (self.committed, *self.older)
        past = tuple(each for each in before if each and 0 < held.version - each.version <= max_lag)
        return AllowedVersions(held, max_lag, past)

    def including(self, held: HeldVersion | None) -> AllowedVersions:
        """These versions and `held`, for an engine that waits for its wave."""
        return msgspec.structs.replace(self, older=(*self.older, held))

    def allows(self, held: HeldVersion | None) -> bool:
        """Whether an engine may serve `held`; None stands for the weights with which its server started.

        Those are allowed until a version is committed. A version unknown to the channel is never allowed.
        """
        return held == self.committed or held in self.older

    def why_not(self, held: HeldVersion | None) -> str:
        """Why `held` is not allowed."""
        found = f"version {held.version}" if held else "the weights of its launch"
        if self.committed is None:
            return f"holds {found}, which this channel has not committed"
        allowed = f", and max_lag is {self.max_lag}" if self.max_lag else ""
        return f"holds {found}, committed is {self.committed.version}{allowed}"


class EngineRecord(msgspec.Struct, kw_only=True):
    """One engine of a channel."""

    name: AgentId
    incarnation: Incarnation
    info: EngineInfo
    health: EngineHealth
    held: HeldVersion | None
    serving: bool = False
    """True while it says that it serves."""
    version_in_doubt: bool = False
    """True if it serves another version than it was known to hold; its next heartbeat says which."""
    alive: bool = True
    lost_at: float = 0.0
    reason: str = ""
    """Why it does not serve; empty otherwise."""
    last_epoch: Epoch = Epoch(0)
    """Epoch of its last answer."""
    settled_epoch: Epoch = Epoch(0)
    """Epoch of the last command that settled it."""
    seen_epoch: Epoch = Epoch(0)
    """Highest epoch that it has seen, by its heartbeats. It ignores messages of lower ones."""
    epoch_reported: bool = False
    """True once a heartbeat since its `Hello` has reported `seen_epoch`."""
    topology: Topology | None = None
    """Its last topology report."""
    last_transport: TransportKind | None = None
    """Transport of the last version that it took, since its agent and the coordinator started."""
    last_transfer_s: float = 0.0
    """Seconds of that transfer."""
    downed_by: HeldVersion | None = None
    """Version whose round paused it and left it not serving."""
    unacknowledged: bool = False
    """True if a round ended without its answer to the last command."""
    _info: EngineInfo | None = None
    """Last result of `as_info`."""
    memory_released: bool = False
    """True while its weights' memory is released to another user."""
    released_at: HeldVersion | None = None
    """Version that was current when it released its memory: the engine is brought only later ones."""

    @classmethod
    def of(cls, agent: Agent) -> EngineRecord:
        """The record of an engine that said `Hello`."""
        if agent.engine is None:
            raise ValueError(f"{agent.name} is no engine")
        info = agent.engine
        return cls(
            name=agent.name,
            incarnation=agent.incarnation,
            info=info,
            health=info.health,
            held=info.held,
            topology=agent.topology,
        )

    @property
    def never_commanded(self) -> bool:
        """True if the engine reports that it has seen no epoch, so no coordinator has ever paused it.

        Nor will a late message: only an engine that has seen the epoch of a `Prepare` is sent a `Pause`.
        """
        return self.epoch_reported and not self.seen_epoch

    def as_info(self) -> EngineInfo:
        """The engine's description, with its present health and version."""
        known = self._info
        if (
            known is None
            or known.health is not self.health
            or known.held != self.held
            or known.memory_released is not self.memory_released
        ):
            known = self._info = msgspec.structs.replace(
                self.info, health=self.health, held=self.held, memory_released=self.memory_released
            )
        return known

    def note_memory(self, committed: HeldVersion | None, *, released: bool) -> None:
        """Record whether its memory is released; `committed` is the current version."""
        if released and not self.memory_released:
            self.released_at = committed
        self.memory_released = released

    def awaits_newer(self, committed: HeldVersion | None) -> bool:
        """True if its memory stays released until a later version than `committed`."""
        return self.memory_released and self.released_at == committed

    def absorb(self, message: EngineMessage, participant: Participant, committed: HeldVersion | None) -> bool:
        """Apply an answer to a round's command. Returns True if readiness may have changed."""
        phase, health, serving = participant.phase, self.health, self.serving
        if phase is _SERVING:
            self.health, self.serving, self.held, self.reason = _CLEAN, True, committed, ""
            self.last_transport, self.last_transfer_s = participant.transport, participant.seconds.get("transfer", 0.0)
            return True
        self.reason = participant.reason
        if phase is _LEFT:
            self.health, self.serving = _CLEAN, True
            if isinstance(message, Serving):
                self.note_served(message.version)
        else:
            if isinstance(message, Failed):
                self.health = message.health
            if phase not in GENERATING:
                self.serving = False
        return health is not self.health or serving is not self.serving or self.version_in_doubt

    def note_served(self, version: Version | None) -> None:
        """The engine says that it serves `version`; None stands for the weights with which its server started."""
        self.version_in_doubt = version != (self.held.version if self.held else None)


def readiness(engine: EngineRecord, phase: EnginePhase | None, window: AllowedVersions) -> Decision:
    """Whether requests may be sent to the engine, and why not."""
    if not engine.alive:
        return Decision(RefusalCode.NOT_ALLOWED, engine.reason or "not here")
    if engine.health is not _CLEAN:
        return Decision(
            RefusalCode.NOT_ALLOWED, f"{engine.health.value}: {engine.reason or 'waits for a verified version'}"
        )
    if phase not in GENERATING:
        return _IN_ROUND[phase]
    if not window.allows(engine.held):
        return Decision(RefusalCode.NOT_ALLOWED, window.why_not(engine.held))
    if not engine.serving or engine.version_in_doubt:
        reason = _IN_DOUBT if engine.version_in_doubt else engine.reason or "has not said yet that it serves"
        return Decision(RefusalCode.NOT_ALLOWED, reason)
    return YES
