"""The effects of an event, in order, until the driver takes them; and the journal writer. Pure.

The order is part of the contract (effects.py). `EffectQueue` also remembers replies by request key, so that a repeated
request gets the same reply. `JournalWriter` writes one record at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from ..protocol import (
    Abandon,
    Ack,
    AgentId,
    Bye,
    Channel,
    Heartbeat,
    IllegalMove,
    InvariantBroken,
    Offered,
    Publish,
    RefusalCode,
    Refused,
    Release,
    Request,
    RequestId,
    Sent,
    ToAgent,
    ToCoordinator as Message,
)
from .effects import (
    Acknowledge,
    AnyEffect,
    AnyObservation,
    AnyRecord,
    Committed,
    EpochRaised,
    EpochTaken,
    Evict,
    JournalChanged,
    Observe,
    Persist,
    Probe,
    Refusal,
    RoundClosed,
    SendTo,
    SendToAll,
)
from .events import Peer, Persisted, PersistFailed, Token
from .lease import LateGrant
from .pending_commands import AgentCommand
from .reply_cache import Decision, ReplyCache

HEARTBEAT_KEY: Final = RequestId("heartbeat")
"""`Refused.request` of a refused heartbeat, which has no key: an unknown agent is told to say `Hello`."""
_KEYLESS: Final = (Heartbeat, Bye)
_REMEMBERED: Final = (Publish, Release, Offered, Sent, Abandon)
"""Tuples made once: a union inside of a function would be made anew for every message."""


class EffectQueue:
    """The effects of one event after the other."""

    def __init__(self, answers: int) -> None:
        """`answers` is the number of remembered replies."""
        self.replies = ReplyCache(answers)
        self._effects: list[AnyEffect] = []
        self._open_acknowledge: list[tuple[Peer, Request]] | None = None
        """Requests of the last effect, if that is an `Acknowledge`."""

    def __len__(self) -> int:
        return len(self._effects)

    def take(self) -> tuple[AnyEffect, ...]:
        """The effects since the last call."""
        effects, self._effects, self._open_acknowledge = tuple(self._effects), [], None
        return effects

    def _add(self, effect: AnyEffect) -> None:
        self._open_acknowledge = None
        self._effects.append(effect)

    def send(self, peer: Peer, message: ToAgent, blob: bytes | None = None) -> None:
        """Send to one connection."""
        self._add(SendTo(peer, message, blob))

    def tell(self, peers: tuple[Peer, ...], message: ToAgent) -> None:
        """Send the same to any number of connections."""
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
        """Report an observation to logs and metrics."""
        self._add(Observe(what))

    def answer(self, peer: Peer, agent: AgentId, message: Message, verdict: Decision) -> None:
        """Reply with an `Ack`, or with a refusal and its reason."""
        if verdict.code is not None:
            self.refuse(peer, agent, message, verdict)
        elif not isinstance(message, _KEYLESS):
            if isinstance(message, _REMEMBERED):
                self.replies.remember(agent, message, Ack(request=message.request))
            self.acknowledge(peer, message)

    def acknowledge(self, peer: Peer, message: Request) -> None:
        """Acknowledge `message`. Consecutive acknowledgements are one effect."""
        if self._open_acknowledge is None:
            self._open_acknowledge = []
            self._effects.append(Acknowledge(self._open_acknowledge))
        self._open_acknowledge.append((peer, message))

    def refuse(self, peer: Peer, agent: str, message: Message, verdict: Decision) -> None:
        """Refuse `message`, which changed nothing. Refusals are not remembered."""
        code = verdict.code or RefusalCode.NOT_ALLOWED
        request = HEARTBEAT_KEY if isinstance(message, _KEYLESS) else message.request
        self.send(peer, Refused(request=request, code=code, reason=verdict.reason, retry_after_s=verdict.retry_after_s))
        self.observe(Refusal(agent=agent, message=message.kind, code=code, reason=verdict.reason))


class WriteResult(NamedTuple):
    """The result of a write."""

    record: AnyRecord
    channel: Channel | None
    failed: str | None
    """Why the record is not durable; None if it is."""
    again: bool
    """True if a later try may succeed."""


class JournalWriter:
    """Asks the driver to write one record at a time, and tracks whether the journal takes records.

    While `writing` is set, the coordinator handles no further event: a record is durable before any answer or command
    that depends on it leaves.
    """

    def __init__(self, out: EffectQueue, probe_s: float) -> None:
        self.writing: tuple[Persist, Channel | None] | None = None
        self.read_only = False
        self.retry_at: float | None = None
        """Time of the next try to write to a journal that refused the last record."""
        self._out = out
        self._probe_s = probe_s
        self._tokens = 0

    def write(self, record: AnyRecord, channel: Channel | None) -> None:
        """Make `record` durable; `channel` waits for it."""
        if self.writing:
            raise InvariantBroken(f"{record} was to be written during the write of {self.writing[0].record}")
        self._tokens += 1
        persist = Persist(token=Token(self._tokens), record=record)
        self.writing = (persist, channel)
        self._out.persist(persist)

    def answered(self, event: Persisted | PersistFailed, now: float) -> WriteResult:
        """Take the driver's answer. Raises `IllegalMove` on an unknown token."""
        if self.writing is None or self.writing[0].token != event.token:
            expected = self.writing[0].token if self.writing else "none"
            raise IllegalMove("coordinator", f"writing {expected}", f"{type(event).__name__}({event.token})")
        (persist, channel), self.writing = self.writing, None
        failed = event.reason if isinstance(event, PersistFailed) else None
        again = isinstance(event, PersistFailed) and event.again
        if again is not self.read_only:
            self.read_only = again
            self._out.observe(JournalChanged(writable=not again, reason=failed or ""))
        self.retry_at = now + self._probe_s if self.read_only else None
        return WriteResult(persist.record, channel, failed, again)

    def tick(self, now: float) -> None:
        """Probe a journal that refused the last record, if it is time."""
        if self.retry_at is not None and now >= self.retry_at:
            self.retry_at = now + self._probe_s
            self.write(Probe(), None)


class SendToAgents(msgspec.Struct, frozen=True):
    """Send `message` to the connections of `agents`."""

    agents: tuple[AgentId, ...]
    message: ToAgent


ChannelRecord = EpochTaken | EpochRaised | Committed | RoundClosed
ChannelEffect = SendToAgents | LateGrant | ChannelRecord | AnyObservation
CHANNEL_RECORDS: Final = (EpochTaken, EpochRaised, Committed, RoundClosed)


def group_by_command(due: Iterable[tuple[tuple[AgentId, ...], AgentCommand]]) -> list[SendToAgents]:
    """One effect for each command, in the order of the first agent told.

    Equal commands of a round are one object (round_commands.py), so they are grouped by identity.
    """
    alike: dict[int, tuple[list[AgentId], AgentCommand]] = {}
    for agents, command in due:
        alike.setdefault(id(command), ([], command))[0].extend(agents)
    return [SendToAgents(tuple(agents), command) for agents, command in alike.values()]
