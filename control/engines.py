"""What the coordinator knows of one engine between rounds, and whether it is ready to serve. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from .ids import AgentId, Epoch, Incarnation
from .lease import YES, Verdict
from .member import Member
from .membership import Agent
from .messages import Code, EngineHealth, EngineInfo, EngineMessage, Failed, Held, Topology, TransportKind
from .staleness import Window
from .states import EnginePhase

GENERATES: Final = frozenset({None, EnginePhase.PREPARING, EnginePhase.PREPARED, EnginePhase.SERVING, EnginePhase.LEFT})
_SERVING: Final = EnginePhase.SERVING
_LEFT: Final = EnginePhase.LEFT
_CLEAN: Final = EngineHealth.CLEAN
"""Names of their own: members of an enum are looked up through their class, which takes longer than what is done."""
_NOT_BEGUN: Final = frozenset({None, EnginePhase.PREPARING, EnginePhase.PREPARED})
_IN_ROUND: Final[Mapping[EnginePhase | None, Verdict]] = {
    phase: Verdict(Code.NOT_ALLOWED, f"in a round: {phase}") for phase in EnginePhase
}


class Engine(msgspec.Struct, kw_only=True):
    """One engine of a channel."""

    name: AgentId
    incarnation: Incarnation
    info: EngineInfo
    health: EngineHealth
    held: Held | None
    serving: bool = False
    """It said so, and nothing since speaks against it."""
    alive: bool = True
    lost_at: float = 0.0
    reason: str = ""
    last_epoch: Epoch = Epoch(0)
    """At which it answered last."""
    settled_at: Epoch = Epoch(0)
    """At which it was settled last."""
    seen: Epoch = Epoch(0)
    """The highest that it has seen, as it says. It is deaf to all that is below."""
    topology: Topology | None = None
    """What its agent said last of where it is, if it did."""
    took_by: TransportKind | None = None
    """How it got the version that it took last, in this life of agent and coordinator."""
    took_s: float = 0.0
    today: EngineInfo | None = None
    """`as_info`, as it was asked for last."""
    lent: bool = False
    """It has given its weights' memory back, and has not taken it again."""
    lent_at: Held | None = None
    """What was committed when it said so: it is not brought that, only what is committed later."""

    @classmethod
    def of(cls, agent: Agent) -> Engine:
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

    def as_info(self) -> EngineInfo:
        """The description with what is known today."""
        known = self.today
        if known is None or known.health is not self.health or known.held != self.held or known.lent is not self.lent:
            known = self.today = msgspec.structs.replace(self.info, health=self.health, held=self.held, lent=self.lent)
        return known

    def lends(self, committed: Held | None, *, lent: bool) -> None:
        """It said whether its memory is given back; `committed` is what the channel is at."""
        if lent and not self.lent:
            self.lent_at = committed
        self.lent = lent

    def waits(self, committed: Held | None) -> bool:
        """Its memory is somebody else's until another version than `committed` comes."""
        return self.lent and self.lent_at == committed

    def absorb(self, message: EngineMessage, member: Member, committed: Held | None) -> bool:
        """Take over what an answer to a round says of the engine. Returns whether it may have changed its readiness."""
        phase, health, serving = member.phase, self.health, self.serving
        if phase is _SERVING:
            self.health, self.serving, self.held, self.reason = _CLEAN, True, committed, ""
            self.took_by, self.took_s = member.transport, member.seconds.get("transfer", 0.0)
            return True
        self.reason = member.reason
        if phase is _LEFT:
            self.health, self.serving = _CLEAN, True
        else:
            if isinstance(message, Failed):
                self.health = message.health
            if phase not in GENERATES:
                self.serving = False
        return health is not self.health or serving is not self.serving


def readiness(engine: Engine, phase: EnginePhase | None, window: Window) -> Verdict:
    """Whether requests may be sent to the engine, and why not."""
    if not engine.alive:
        return Verdict(Code.NOT_ALLOWED, engine.reason or "not here")
    if engine.health is not _CLEAN:
        return Verdict(Code.NOT_ALLOWED, f"{engine.health.value}: {engine.reason or 'waits for a verified version'}")
    if phase not in GENERATES:
        return _IN_ROUND[phase]
    if not window.allows(engine.held):
        return Verdict(Code.NOT_ALLOWED, window.against(engine.held))
    if not engine.serving and phase in _NOT_BEGUN:
        return Verdict(Code.NOT_ALLOWED, engine.reason or "has not said yet that it serves")
    return YES
