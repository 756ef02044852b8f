"""What the coordinator knows of one engine between rounds, and whether it may serve what it holds. Pure.

Without a policy only the committed version is served. With `Policy.max_lag` an engine that a round left behind goes on
with what it has, until that is further behind than the trainer allowed; then it gets no requests before a round took it
in again. What is told apart are digest tables, not numbers: after a rollback a number may stand for other weights.
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
from .participant import Participant
from .reply_cache import YES, Decision
from .states import EnginePhase

GENERATES: Final = frozenset({None, EnginePhase.PREPARING, EnginePhase.PREPARED, EnginePhase.SERVING, EnginePhase.LEFT})
_SERVING: Final = EnginePhase.SERVING
_LEFT: Final = EnginePhase.LEFT
_CLEAN: Final = EngineHealth.CLEAN
"""Names of their own: members of an enum are looked up through their class, which takes longer than what is done."""
_STRANGE: Final = "serves another version than it was known to hold"
_IN_ROUND: Final[Mapping[EnginePhase | None, Decision]] = {
    phase: Decision(RefusalCode.NOT_ALLOWED, f"in a round: {phase}") for phase in EnginePhase
}


class VersionWindow(msgspec.Struct, frozen=True):
    """What engines of a channel may serve."""

    committed: HeldVersion | None = None
    max_lag: int = 0
    """Of the round that committed it. A coordinator that was restarted allows nothing but the committed version."""
    past: tuple[HeldVersion | None, ...] = ()
    """Those committed before it that are not too far behind, newest first; None for the weights of a launch."""

    def after(self, held: HeldVersion, max_lag: int, *, rollback: bool) -> VersionWindow:
        """Once `held` is committed. A channel that goes back breaks with what it had."""
        before = () if rollback or self.committed is None else (self.committed, *self.past)
        past = tuple(each for each in before if each and 0 < held.version - each.version <= max_lag)
        return VersionWindow(held, max_lag, past)

    def also(self, held: HeldVersion | None) -> VersionWindow:
        """For an engine that may serve `held` too, for as long as it waits for its turn."""
        return msgspec.structs.replace(self, past=(*self.past, held))

    def allows(self, held: HeldVersion | None) -> bool:
        """Whether requests may be answered from `held`; None stands for the weights of a launch.

        Before anything is committed those may. A version that the channel does not know may not, whoever claims it.
        """
        return held == self.committed or held in self.past

    def against(self, held: HeldVersion | None) -> str:
        """Why not, for people."""
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
    """It said so, and nothing since speaks against it."""
    strange: bool = False
    """What it said to serve is not what it was known to hold: what that is, its next heartbeat says."""
    alive: bool = True
    lost_at: float = 0.0
    reason: str = ""
    last_epoch: Epoch = Epoch(0)
    """At which it answered last."""
    settled_at: Epoch = Epoch(0)
    """At which it was settled last."""
    seen: Epoch = Epoch(0)
    """The highest that it has seen, as it says. It is deaf to all that is below."""
    heard: bool = False
    """It has said which that is, since its `Hello`."""
    topology: Topology | None = None
    """What its agent said last of where it is, if it did."""
    took_by: TransportKind | None = None
    """How it got the version that it took last, in this life of agent and coordinator."""
    took_s: float = 0.0
    fell: HeldVersion | None = None
    """With which version it served no more, though it had been made to stand still for nothing else."""
    owes: bool = False
    """A round ended without its answer, and it has said nothing since."""
    today: EngineInfo | None = None
    """`as_info`, as it was asked for last."""
    lent: bool = False
    """It has given its weights' memory back, and has not taken it again."""
    lent_at: HeldVersion | None = None
    """What was committed when it said so: it is not brought that, only what is committed later."""

    @classmethod
    def of(cls, agent: Agent) -> EngineRecord:
        """An engine as it described itself."""
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
    def untold(self) -> bool:
        """It has said that it has seen no epoch. So nobody has paused it, in whatever life, and nothing late can.

        A `Pause` is said to who has answered a `Prepare`, and would have seen the epoch of that.
        """
        return self.heard and not self.seen

    def as_info(self) -> EngineInfo:
        """The description with what is known today."""
        known = self.today
        if known is None or known.health is not self.health or known.held != self.held or known.lent is not self.lent:
            known = self.today = msgspec.structs.replace(self.info, health=self.health, held=self.held, lent=self.lent)
        return known

    def lends(self, committed: HeldVersion | None, *, lent: bool) -> None:
        """It said whether its memory is given back; `committed` is what the channel is at."""
        if lent and not self.lent:
            self.lent_at = committed
        self.lent = lent

    def waits(self, committed: HeldVersion | None) -> bool:
        """Its memory is somebody else's until another version than `committed` comes."""
        return self.lent and self.lent_at == committed

    def absorb(self, message: EngineMessage, member: Participant, committed: HeldVersion | None) -> bool:
        """Take over what an answer to a round says of the engine. Returns whether it may have changed its readiness."""
        phase, health, serving = member.phase, self.health, self.serving
        if phase is _SERVING:
            self.health, self.serving, self.held, self.reason = _CLEAN, True, committed, ""
            self.took_by, self.took_s = member.transport, member.seconds.get("transfer", 0.0)
            return True
        self.reason = member.reason
        if phase is _LEFT:
            self.health, self.serving = _CLEAN, True
            if isinstance(message, Serving):
                self.serves(message.version)
        else:
            if isinstance(message, Failed):
                self.health = message.health
            if phase not in GENERATES:
                self.serving = False
        return health is not self.health or serving is not self.serving or self.strange

    def serves(self, version: Version | None) -> None:
        """It said so; null stands for the weights of its launch."""
        self.strange = version != (self.held.version if self.held else None)


def readiness(engine: EngineRecord, phase: EnginePhase | None, window: VersionWindow) -> Decision:
    """Whether requests may be sent to the engine, and why not."""
    if not engine.alive:
        return Decision(RefusalCode.NOT_ALLOWED, engine.reason or "not here")
    if engine.health is not _CLEAN:
        return Decision(
            RefusalCode.NOT_ALLOWED, f"{engine.health.value}: {engine.reason or 'waits for a verified version'}"
        )
    if phase not in GENERATES:
        return _IN_ROUND[phase]
    if not window.allows(engine.held):
        return Decision(RefusalCode.NOT_ALLOWED, window.against(engine.held))
    if not engine.serving or engine.strange:
        reason = _STRANGE if engine.strange else engine.reason or "has not said yet that it serves"
        return Decision(RefusalCode.NOT_ALLOWED, reason)
    return YES
