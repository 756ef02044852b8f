"""Agents that say anything their message types allow, at any time, to the coordinator's machine.

Unlike the decoder's inputs these are well formed. Their values come from small pools, so that they meet: epochs that
are granted, blobs that are known, names that are taken. The machine may refuse; it must not break.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from random import Random
from typing import Final

import msgspec

from weightbus.control import protocol as m
from weightbus.control.machine.coordinator import Coordinator
from weightbus.control.machine.effects import (
    Acknowledge,
    AnyEvent,
    ConnectionLost,
    MessageReceived,
    Peer,
    Persist,
    Persisted,
    PersistFailed,
    Principal,
    SendTo,
    SendToAll,
    StopRequested,
    Tick,
    TrustLost,
)
from weightbus.control.machine.routing import Router
from weightbus.control.machine.states import Limits
from weightbus.control.protocol.messages import AgentId, Channel

from ..control.protocol.test_codec import TO_COORDINATOR

CHANNELS: Final = (Channel("a"), Channel("b"))
NAMES: Final = tuple(AgentId(name) for name in ("t0", "t1", "e0", "e1", "e2", "o0"))
DIGESTS: Final = ("a" * 64, "b" * 64, "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afe48bb" + "b")
"""The last is that of the blob ``a``, which is the only one that can be put."""
ROLES: Final = {"t": m.Role.TRAINER, "e": m.Role.ENGINE, "o": m.Role.OBSERVER}


class HostileAgents:
    """A coordinator, and whoever may speak to it. `step` is one thing that happens."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._machine = Coordinator(Limits(), 1, Router())
        self._now = 0.0
        self._keys = itertools.count()
        self._peers = [Peer(bytes([number])) for number in range(10)]
        self._pools: dict[str, Callable[[], object]] = {
            "request": lambda: f"k{self._pick(range(40)) if self._random.random() < 0.3 else next(self._keys)}",
            "channel": lambda: self._pick(CHANNELS),
            "epoch": lambda: self._pick((0, 1, 2, 3, self._highest(), self._highest(), self._highest() + 1, 2**53)),
            "version": lambda: self._pick((0, 1, 2, 3, 5, 2**53)),
            "manifest": lambda: self._pick(DIGESTS[1:]),
            "table": lambda: self._pick(DIGESTS[1:]),
            "digest": lambda: self._pick(DIGESTS),
            "page": lambda: self._pick((0, 0, 0, 1, 4095)),
            "pages": lambda: self._pick((1, 1, 1, 2, 4096)),
            "incarnation": lambda: self._pick(("i1", "i2")),
            "health": lambda: self._pick(tuple(m.EngineHealth)),
            "step": lambda: self._pick(tuple(m.Step)),
            "failed": lambda: {self._pick(NAMES): "why"} if self._random.random() < 0.3 else {},
            "reason": lambda: self._pick(("", "x", "y" * 2048)),
            "seq": lambda: self._pick((0, 1, 2**53)),
        }
        self.answers = 0

    def step(self) -> None:
        """Something happens; raises what the machine raises, or finds broken in itself."""
        self._now += self._random.random() * self._pick((0.01, 0.01, 0.1, 20.0))
        self._handle(self._event())
        self._machine.check()

    def _handle(self, event: AnyEvent) -> None:
        for effect in self._machine.handle(event, self._now):
            if isinstance(effect, Persist):
                full = self._random.random() < 0.02
                said = PersistFailed(token=effect.token, reason="full") if full else Persisted(token=effect.token)
                self._handle(said)
            self.answers += isinstance(effect, SendTo | SendToAll)
            self.answers += len(effect.requests) if isinstance(effect, Acknowledge) else 0

    def _event(self) -> AnyEvent:
        chance = self._random.random()
        if chance < 0.06:
            return Tick()
        if chance < 0.08:
            return ConnectionLost(peer=self._pick(self._peers))
        if chance < 0.09:
            return TrustLost(agent=self._pick(NAMES), reason="r")
        if chance < 0.0901:
            return StopRequested()
        message, blob = self._pick(TO_COORDINATOR)
        who = self._pick(NAMES)
        fields = {
            field.name: self._pools[field.name]()
            for field in msgspec.structs.fields(message)
            if field.name in self._pools
        }
        message = msgspec.structs.replace(message, **fields)
        if isinstance(message, m.Hello):
            message = self._hello(message, who)
        principal = (
            Principal(who, ROLES[who[0]], CHANNELS[: self._pick((1, 2))]) if self._random.random() < 0.2 else None
        )
        peer = self._peers[NAMES.index(who)] if self._random.random() < 0.9 else self._pick(self._peers)
        return MessageReceived(peer=peer, message=message, blob=blob and b"a", principal=principal)

    def _hello(self, hello: m.Hello, who: AgentId) -> m.Hello:
        role = ROLES[who[0]] if self._random.random() < 0.9 else self._pick(tuple(m.Role))
        return msgspec.structs.replace(
            hello,
            agent=who,
            role=role,
            channel=CHANNELS[0] if self._random.random() < 0.9 else CHANNELS[1],
            engine=hello.engine if role is m.Role.ENGINE else None,
            trainer=hello.trainer if role is m.Role.TRAINER else None,
        )

    def _highest(self) -> int:
        return max((channel.epoch for channel in self._machine.channels.values()), default=0)

    def _pick(self, several):  # type: ignore[no-untyped-def]  # one of them, whatever they are
        return several[int(self._random.random() * len(several))]
