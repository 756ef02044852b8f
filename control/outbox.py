"""What the coordinator wants done, in the order in which it came about, until its driver takes it. Pure.

That order is part of the contract (effects.py). Here stands also what was answered under which key, so that the same
request gets the same answer.
"""

from __future__ import annotations

from typing import Final

from .answers import Replies
from .effects import (
    Acknowledge,
    AnyEffect,
    AnyObservation,
    Evict,
    Observe,
    Persist,
    Refusal,
    SendTo,
    SendToAll,
)
from .events import Peer
from .ids import AgentId, RequestId
from .lease import Verdict
from .messages import (
    Abandon,
    Ack,
    Bye,
    Code,
    Heartbeat,
    Offered,
    Publish,
    Refused,
    Release,
    Request,
    Sent,
    ToAgent,
)
from .messages import ToCoordinator as Message

HEARTBEAT_KEY: Final = RequestId("heartbeat")
"""Heartbeats carry no key; this one stands in the `Refused` that tells a stranger to say `Hello`."""
_KEYLESS: Final = (Heartbeat, Bye)
_REMEMBERED: Final = (Publish, Release, Offered, Sent, Abandon)
"""As tuples, made once: a union in the middle of a function is made anew with every message."""


class Outbox:
    """The effects of one event after the other."""

    def __init__(self, answers: int) -> None:
        """`answers` are remembered by request key."""
        self.replies = Replies(answers)
        self._effects: list[AnyEffect] = []
        self._owed: list[tuple[Peer, Request]] | None = None
        """Of the last effect, if it is an `Acknowledge`."""

    def __len__(self) -> int:
        return len(self._effects)

    def take(self) -> tuple[AnyEffect, ...]:
        """Everything since this was asked last."""
        effects, self._effects, self._owed = tuple(self._effects), [], None
        return effects

    def _add(self, effect: AnyEffect) -> None:
        self._owed = None
        self._effects.append(effect)

    def send(self, peer: Peer, message: ToAgent, blob: bytes | None = None) -> None:
        """To one connection."""
        self._add(SendTo(peer, message, blob))

    def tell(self, peers: tuple[Peer, ...], message: ToAgent) -> None:
        """To many connections, or one, or none."""
        if len(peers) > 1:
            self._add(SendToAll(peers, message))
        elif peers:
            self._add(SendTo(peers[0], message))

    def evict(self, peer: Peer, reason: str) -> None:
        """Forget the connection."""
        self._add(Evict(peer=peer, reason=reason))

    def persist(self, persist: Persist) -> None:
        """Make a record durable."""
        self._add(persist)

    def observe(self, what: AnyObservation) -> None:
        """For logs and metrics."""
        self._add(Observe(what))

    def answer(self, peer: Peer, agent: AgentId, message: Message, verdict: Verdict) -> None:
        """An `Ack`, or a refusal with its reason."""
        if verdict.code is not None:
            self.refuse(peer, agent, message, verdict)
        elif not isinstance(message, _KEYLESS):
            if isinstance(message, _REMEMBERED):
                self.replies.remember(agent, message, Ack(request=message.request))
            self.acknowledge(peer, message)

    def acknowledge(self, peer: Peer, message: Request) -> None:
        """`message` was taken. Those that come together are one effect."""
        if self._owed is None:
            self._owed = []
            self._effects.append(Acknowledge(self._owed))
        self._owed.append((peer, message))

    def refuse(self, peer: Peer, agent: str, message: Message, verdict: Verdict) -> None:
        """A refusal changed nothing and is not remembered."""
        code = verdict.code or Code.NOT_ALLOWED
        request = HEARTBEAT_KEY if isinstance(message, _KEYLESS) else message.request
        self.send(peer, Refused(request=request, code=code, reason=verdict.reason, retry_after_s=verdict.retry_after_s))
        self.observe(Refusal(agent=agent, message=type(message).__name__, code=code, reason=verdict.reason))
