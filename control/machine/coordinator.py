"""The coordinator: `handle(event, now)` returns the effects of an event, in order. Pure.

The coordinator finds the agent of a message, checks its authorization, repeats earlier replies, and passes the message
to the agent's channel, which decides the rest. It has no clock, socket, disk or log: the driver is event_loop.py.

One record is written at a time. Until the driver reports the result, further events wait in line: a record is durable
before any answer or command that depends on it leaves. The path of a record, and back::

    Round.decide -> Channel.flush -> Coordinator._flush -> JournalWriter.write -> Persist       the driver writes it,
    Channel.persisted <- Coordinator._journal_answered <- JournalWriter.answered <- Persisted   and reports
    Channel.make_current    makes the version of a durable `Committed` the current one
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, NamedTuple, assert_never

from ..protocol import (
    MAX_ANSWER_BYTES,
    MAX_PAGE_BYTES,
    MAX_PAGES,
    Abandon,
    Ack,
    Acquire,
    AgentId,
    Alive,
    BlobPage,
    Bye,
    Channel as ChannelId,
    EngineMessage,
    Failed,
    GetBlob,
    GetStatus,
    Granted,
    Heartbeat,
    Hello,
    IllegalMove,
    InvariantBroken,
    Offered,
    Paused,
    Prepared,
    Publish,
    PutBlob,
    RefusalCode,
    Refused,
    Release,
    Request,
    RequestId,
    Role,
    Sent,
    Serving,
    Status,
    ToAgent,
    ToCoordinator,
    Topology,
    Transferred,
    Verified,
    Welcome,
)
from . import status
from .channel import CHANNEL_RECORDS, Channel, Restored, TracedMessage
from .effects import (
    Acknowledge,
    AgentJoined,
    AgentLeft,
    AnyEffect,
    AnyEvent,
    AnyObservation,
    AnyRecord,
    Burst,
    ChannelForgotten,
    ConnectionLost,
    Evict,
    JournalChanged,
    MessageReceived,
    Observe,
    Peer,
    Persist,
    Persisted,
    PersistFailed,
    Probe,
    ReadinessChanged,
    Refusal,
    RoundReadiness,
    SendTo,
    SendToAll,
    StateEntered,
    StopRequested,
    Tick,
    Token,
    TrustLost,
    Unsent,
)
from .membership import Agent, LateGrant, Membership, may_join, may_say
from .participants import SendToAgents
from .states import YES, Decision, KeyedRequest, Limits, RoundState, Routing, earlier, key_reused, question

_JOURNAL_ANSWERS: Final = (Persisted, PersistFailed)
_ENGINE_ANSWERS: Final = (Prepared, Paused, Transferred, Verified, Serving, Failed)
"""Tuples made once: a union inside of a function would be made anew for every message."""
_Work = AnyEvent | partial[Channel | None]
"""An event, or a call with the time, which returns the channel to flush."""


class Coordinator:
    """The machine. Drive it from one thread; carry out every effect in order before the next event."""

    def __init__(
        self,
        limits: Limits,
        boot: int,
        routing: Routing,
        restored: Mapping[ChannelId, Restored] | None = None,
        *,
        stride: int = 1,
        keyed: bool = False,
    ) -> None:
        """`stride`: the amount by which this start raised all epochs. `keyed`: every agent needs a trusted key."""
        self.boot = boot
        self.limits = limits
        self.membership = Membership(limits)
        self.blobs = BlobCache(limits.blob_bytes)
        self.channels = {
            name: Channel(name, limits, routing, known, stride=stride) for name, known in (restored or {}).items()
        }
        self.stopping = False
        self._queued_work: deque[_Work] = deque()
        self._to_flush: dict[ChannelId, Channel] = {}
        """Channels to flush when the event is over."""
        self._effects = EffectQueue(limits.answers)
        self.replies = self._effects.replies
        self._journal_writer = JournalWriter(self._effects, limits.probe_s)
        self._routing, self._stride, self._keyed = routing, stride, keyed

    # -- entry ------------------------------------------------------------------------------------------------------

    def handle(self, event: AnyEvent, now: float) -> tuple[AnyEffect, ...]:
        """Take `event`, which happened at `now` (monotonic seconds). Raises `IllegalMove` on an unknown token."""
        if isinstance(event, _JOURNAL_ANSWERS):
            self._journal_answered(event, now)
        elif isinstance(event, Burst):
            for message in event.messages:
                if self._queued_work or self._journal_writer.writing:
                    self._queued_work.append(message)
                else:
                    self._received(message, now)
        else:
            self._queued_work.append(partial(self._tick, now) if isinstance(event, Tick) else event)
        while self._journal_writer.writing is None and (self._queued_work or self._to_flush):
            if self._queued_work:
                self._perform(self._queued_work.popleft(), now)
            else:
                self._flush(self._to_flush.popitem()[1], now)
        return self._effects.take()

    def next_deadline(self) -> float | None:
        """The time at which a `Tick` is due; None if no deadline is set."""
        due = earlier(self.membership.next_deadline(), self._journal_writer.retry_at)
        for channel in self.channels.values():
            due = earlier(due, channel.next_deadline())
        return due

    @property
    def read_only(self) -> bool:
        """True if the journal refused the last record."""
        return self._journal_writer.read_only

    @property
    def idle(self) -> bool:
        """True while there is no lease, no round and no unacknowledged command or unfinished write."""
        return not self._journal_writer.writing and all(channel.idle for channel in self.channels.values())

    @property
    def stopped(self) -> bool:
        """True once a requested stop is complete: no round runs and no record is being written."""
        idle = all(channel.round is None for channel in self.channels.values())
        return self.stopping and idle and self._journal_writer.writing is None and not self._queued_work

    def forget_engine(self, name: AgentId) -> str:
        """Drop the record of a lost engine. Returns why not; empty if it was dropped."""
        known = [channel for channel in self.channels.values() if name in channel.engines]
        if not known:
            return f"no engine {name!r} is known: see `weightbus status`"
        if any(channel.engines[name].alive for channel in known):
            return f"engine {name!r} is here: stop its engine agent first"
        for channel in known:
            channel.forget_engine(name)
        return ""

    def status(self, now: float) -> status.StatusView:
        """The status document."""
        return status.StatusView(
            boot=self.boot,
            read_only=self.read_only,
            stopping=self.stopping,
            agents=len(self.membership),
            blob_bytes=self.blobs.held_bytes,
            channels=status.describe(self.channels.values(), self.membership, self.limits.lease_s, now),
        )

    def check(self) -> None:
        """Raise `InvariantBroken` unless all parts agree with each other."""
        self.membership.check()
        self.blobs.check()
        for channel in self.channels.values():
            channel.check()
        if self._effects:
            raise InvariantBroken("effects were left in the queue")

    # -- work -------------------------------------------------------------------------------------------------------

    def _perform(self, work: _Work, now: float) -> None:
        match work:
            case MessageReceived():
                self._received(work, now)
            case ConnectionLost():
                self._disconnected(work.peer, now)
            case Unsent():
                self._unsent(work, now)
            case TrustLost():
                self._flush(self._distrusted(work, now), now)
            case StopRequested():
                self.stopping = True
                self._queued_work.extend(partial(_after, channel, channel.stop) for channel in self.channels.values())
            case partial():
                self._flush(work(now), now)
            case Persisted() | PersistFailed() | Burst() | Tick():
                raise InvariantBroken(f"{type(work).__name__} does not wait in line")
            case _:
                assert_never(work)

    def _flush(self, channel: Channel | None, now: float) -> None:
        """Queue the effects of `channel` that are due, in its order."""
        if channel is None:
            return
        for out in channel.flush(now):
            if isinstance(out, SendToAgents):
                self._effects.tell(self.membership.peers(out.agents), out.message)
            elif isinstance(out, LateGrant):
                self._answer_deferred(out)
            elif isinstance(out, CHANNEL_RECORDS):
                self._journal_writer.write(out, channel.name)
            else:
                if isinstance(out, StateEntered) and out.state is RoundState.OFFERING:
                    self._missed(channel, now)
                if not isinstance(out, ReadinessChanged | RoundReadiness):
                    channel.event_trace.append(out)
                self._effects.observe(out)

    def _answer_deferred(self, late: LateGrant) -> None:
        if isinstance(late.answer, Granted):
            self.replies.remember(late.agent, late.request, late.answer)
            self._effects.tell(self.membership.peers((late.agent,)), late.answer)
        else:
            for peer in self.membership.peers((late.agent,)):
                self._effects.refuse(peer, late.agent, late.request, late.answer)

    def _unsent(self, event: Unsent, now: float) -> None:
        """A message cannot be encoded for the wire: its channel does not wait for an answer."""
        for agent in filter(None, map(self.membership.on, event.peers)):
            channel = self.channels[agent.channel]
            channel.unsent(agent.name, event.message, event.reason, now)
            self._to_flush[channel.name] = channel

    def _tick(self, at: float, _now: float) -> Channel | None:
        """Act on the deadlines that had passed at `at`, the time of the `Tick`, which may have waited for a write.

        Messages that came later wait behind it. By the present time it would take their senders for silent.
        """
        self._queued_work.extend(partial(self._give_up_on, agent.name, at) for agent in self.membership.lost(at))
        self._queued_work.extend(partial(_tick_channel, channel, at) for channel in self.channels.values())
        self._journal_writer.tick(at)
        return None

    def _journal_answered(self, event: Persisted | PersistFailed, now: float) -> None:
        record, name, failed, again = self._journal_writer.answered(event, now)
        channel = self.channels[name] if name is not None else None
        if channel and not isinstance(record, Probe | ChannelForgotten):
            if failed is None:
                channel.persisted(record, now)
            else:
                reason = f"the journal {'cannot be written' if again else 'does not take it'}: {failed}"
                channel.not_persisted(record, reason, now, again=again)
            self._flush(channel, now)

    # -- messages ---------------------------------------------------------------------------------------------------

    def _received(self, event: MessageReceived, now: float) -> None:
        message, peer = event.message, event.peer
        if isinstance(message, Hello):
            self._hello(message, event, now)
            return
        agent = self.membership.on(peer)
        if agent is None:
            if not isinstance(message, Bye):
                self._effects.refuse(peer, "?", message, Decision(RefusalCode.UNKNOWN_AGENT, "say Hello first"))
            return
        verdict = may_say(agent, message, event.principal)
        if verdict.code is not None:
            self._effects.refuse(peer, agent.name, message, verdict)
            return
        self.membership.heard(agent, now)
        if isinstance(message, _ENGINE_ANSWERS):
            self._from_engine(agent, message, peer, now)
        else:
            self._take_message(agent, message, event, now)

    def _hello(self, message: Hello, event: MessageReceived, now: float) -> None:
        before = self.membership.get(message.agent)
        verdict = self._may_enter(message, event, before, now)
        if not verdict.ok:
            self._effects.refuse(event.peer, message.agent, message, verdict)
            if verdict.code is RefusalCode.SERVER_TAKEN and before and before.incarnation == message.incarnation:
                # The address of its server leads to another agent's by now: it is not to be listed, or told anything.
                self._flush(self._leave(before, verdict.reason, now, evict=event.peer != before.peer), now)
        elif before and before.incarnation != message.incarnation:
            # Losing the earlier incarnation may move its round on: the welcome shows how things stand afterwards.
            self._queued_work.appendleft(event)
            reason = f"was replaced by {message.incarnation}"
            self._flush(self._leave(before, reason, now, evict=before.peer != event.peer), now)
        else:
            self._flush(self._welcome(message, event, before, now), now)

    def _take_message(  # noqa: C901  # one case per message
        self, agent: Agent, message: ToCoordinator, event: MessageReceived, now: float
    ) -> None:
        peer = event.peer
        if agent.role is Role.TRAINER:
            self.channels[agent.channel].trainer_heard(agent, now)
        match message:
            case Heartbeat():
                self._flush(self._heartbeat(agent, message, peer, now), now)
            case Bye():
                self._flush(self._leave(agent, f"said Bye: {message.reason}", now, for_good=True), now)
            case GetBlob():
                self._get_blob(agent, message, peer)
            case Topology():
                agent.topology = message
                self._effects.answer(peer, agent.name, message, YES)
                if agent.role is Role.ENGINE:
                    self._flush(self.channels[agent.channel].engine_located(agent, message, now), now)
            case GetStatus():
                self._get_status(agent, message, peer, now)
            case PutBlob():
                blob = event.blob if event.blob is not None else b""
                verdict = self.blobs.put(message.digest, message.page, message.pages, blob)
                self._effects.answer(peer, agent.name, message, verdict)
            case Acquire() | Release() | Publish() | Offered() | Sent() | Abandon():
                self._from_trainer(agent, message, peer, now)
            case Hello() | Prepared() | Paused() | Transferred() | Verified() | Serving() | Failed():
                raise InvariantBroken(f"{message.kind} is handled elsewhere")
            case _:
                assert_never(message)

    def _get_blob(self, agent: Agent, message: GetBlob, peer: Peer) -> None:
        found = self.blobs.page(message.digest, message.page)
        if found is None:
            reason = f"page {message.page} of blob {message.digest[:12]} is not here"
            self._effects.refuse(peer, agent.name, message, Decision(RefusalCode.UNKNOWN_BLOB, reason))
            return
        blob, pages = found
        answer = BlobPage(request=message.request, digest=message.digest, page=message.page, pages=pages)
        self._effects.send(peer, answer, blob)

    def _get_status(self, agent: Agent, message: GetStatus, peer: Peer, now: float) -> None:
        document = status.encode(self.status(now))
        if len(document) > MAX_ANSWER_BYTES:
            reason = f"the status takes {len(document)} bytes, a message {MAX_ANSWER_BYTES}: read it over HTTP"
            self._effects.refuse(peer, agent.name, message, Decision(RefusalCode.NOT_ALLOWED, reason))
            return
        self._effects.send(peer, Status(request=message.request), document)

    def _from_engine(self, agent: Agent, message: EngineMessage, peer: Peer, now: float) -> None:
        channel = self.channels[agent.channel]
        verdict = channel.engine_answered(agent.name, message, now)
        channel.event_trace.append(TracedMessage(now, agent.name, message))
        if verdict.code is None:
            self._effects.acknowledge(peer, message)
        else:
            self._effects.refuse(peer, agent.name, message, verdict)
        self._to_flush[channel.name] = channel

    def _from_trainer(self, agent: Agent, message: KeyedRequest, peer: Peer, now: float) -> None:
        channel = self.channels[agent.channel]
        known = self.replies.get(agent.name, message)
        if isinstance(known, Decision):
            self._effects.refuse(peer, agent.name, message, known)
        elif known:
            self._effects.send(peer, known)
            if isinstance(message, Publish):
                channel.repeat_done(agent, message)
        else:
            channel.event_trace.append(TracedMessage(now, agent.name, message))
            verdict = self._decide(channel, agent, message, now)
            if not verdict.ok or not isinstance(message, Acquire):
                self._effects.answer(peer, agent.name, message, verdict)
        self.blobs.pin(digest for channel in self.channels.values() for digest in channel.pinned())
        self._flush(channel, now)

    def _decide(self, channel: Channel, agent: Agent, message: KeyedRequest, now: float) -> Decision:
        match message:
            case Acquire():
                return self._refused_now() or channel.acquire(agent, message, now)
            case Publish():
                return self._refused_now() or channel.publish(
                    agent, message, self._missing(message.manifest, message.table), now
                )
            case Release():
                return channel.release(agent, message)
            case Offered() | Sent():
                table = message.table if isinstance(message, Sent) else ""
                return channel.transfer_reported(agent, message, self._missing(table), now)
            case Abandon():
                return channel.abandon(agent, message, now)
            case _:
                assert_never(message)

    def _missing(self, *digests: str) -> str:
        """The first of these digests without a blob; empty if there is none. Empty digests are skipped."""
        return next((digest for digest in digests if digest and digest not in self.blobs), "")

    def _refused_now(self) -> Decision | None:
        """Why no new lease or round may begin; None if it may."""
        if self.stopping:
            return Decision(RefusalCode.SHUTTING_DOWN, "the coordinator is stopping", 5.0)
        if self.read_only:
            return Decision(
                RefusalCode.READ_ONLY, "the journal cannot be written; is the disk full?", self.limits.probe_s
            )
        return None

    # -- joining ----------------------------------------------------------------------------------------------------

    def _may_enter(self, message: Hello, event: MessageReceived, before: Agent | None, now: float) -> Decision:
        """Whether an agent may join; `before` is the agent that has its name."""
        verdict = may_join(message, event.principal, self.membership.on(event.peer), before, keyed=self._keyed)
        if verdict.ok and message.channel not in self.channels and len(self.channels) >= self.limits.max_channels:
            found = f"{len(self.channels)} channels are known, max_channels = {self.limits.max_channels}"
            advice = "raise it, or have one forgotten that is not needed any more: `weightbus forget-channel NAME`"
            verdict = Decision(RefusalCode.NOT_ALLOWED, f"{found}: {advice}")
        return self.membership.verdict(message, event.peer, now) if verdict.ok else verdict

    def _welcome(self, message: Hello, event: MessageReceived, before: Agent | None, now: float) -> Channel:
        """Register an agent; `before` is its own earlier registration, if this incarnation is known."""
        peer = event.peer
        if before and before.peer and before.peer != peer:
            self._effects.add(Evict(peer=before.peer, reason="came back on another connection"))
        agent = self.membership.join(message, peer, now, event.principal)
        if message.channel not in self.channels:
            self.channels[message.channel] = Channel(
                message.channel, self.limits, self._routing, Restored(), stride=self._stride
            )
        channel = self.channels[message.channel]
        self._effects.send(
            peer,
            Welcome(
                request=message.request,
                boot=self.boot,
                epoch=channel.epoch,
                committed=channel.committed,
                heartbeat_s=self.limits.heartbeat_s,
                silence_s=self.limits.silence_s,
                doubted=self.membership.note_owner(message),
            ),
        )
        note = AgentJoined(
            agent=agent.name,
            role=agent.role,
            channel=agent.channel,
            incarnation=agent.incarnation,
            returning=before is not None,
        )
        self._effects.observe(note)
        if agent.role is Role.ENGINE:
            channel.engine_joined(agent, now)
        elif agent.role is Role.TRAINER:
            channel.trainer_heard(agent, now)
            channel.trainer_joined(agent, now)
        return channel

    # -- alive ------------------------------------------------------------------------------------------------------

    def _heartbeat(self, agent: Agent, message: Heartbeat, peer: Peer, now: float) -> Channel | None:
        """An agent is alive; the heartbeat of an engine may report a change of its server."""
        channel = self.channels[agent.channel]
        if message.seq:
            allowed = channel.allowed_versions
            committed = allowed.committed.version if allowed.committed else None
            self._effects.send(
                peer, Alive(seq=message.seq, boot=self.boot, committed=committed, max_lag=allowed.max_lag)
            )
        moved = agent.role is Role.ENGINE and channel.engine_heard(agent.name, message, now)
        return channel if moved else None

    # -- leaving ----------------------------------------------------------------------------------------------------

    def _disconnected(self, peer: Peer, now: float) -> None:
        """A connection is gone. Its agent may reconnect within `reconnect_s`."""
        agent = self.membership.disconnect(peer, now)
        channel = self.channels.get(agent.channel) if agent else None
        if agent and channel and channel.round and channel.round.waits_for(agent.name):
            self.membership.expect(agent.name, now)

    def _missed(self, channel: Channel, now: float) -> None:
        """Engines are about to pause for a trainer: if its connection is gone already, it has `reconnect_s` left."""
        agent = self.membership.get(channel.round.holder) if channel.round else None
        if agent and agent.peer is None:
            self.membership.expect(agent.name, now)

    def _distrusted(self, event: TrustLost, now: float) -> Channel | None:
        """The allow-list has dropped an agent's key: remove the agent."""
        agent = self.membership.get(event.agent)
        return self._leave(agent, f"is not trusted any more: {event.reason}", now, for_good=True) if agent else None

    def _give_up_on(self, name: AgentId, at: float, now: float) -> Channel | None:
        """Remove an agent if it had been silent for too long at `at`."""
        agent = self.membership.get(name)
        reason = self.membership.why_lost(agent, at) if agent else ""
        return self._leave(agent, reason, now) if agent and reason else None

    def _leave(self, agent: Agent, reason: str, now: float, *, evict: bool = True, for_good: bool = False) -> Channel:
        """Remove an agent, with its lease and its part in a round. `for_good`: it is not expected to come back."""
        self.membership.remove(agent.name)
        if evict and agent.peer:
            self._effects.add(Evict(peer=agent.peer, reason=reason))
        self._effects.observe(AgentLeft(agent=agent.name, role=agent.role, channel=agent.channel, reason=reason))
        channel = self.channels[agent.channel]
        if agent.role is Role.ENGINE:
            channel.engine_lost(agent.name, reason, now, for_good=for_good)
        elif agent.role is Role.TRAINER:
            channel.trainer_lost(agent, reason, now)
        return channel


def _tick_channel(channel: Channel, at: float, _now: float) -> Channel | None:
    channel.tick(at)
    return channel


def _after(channel: Channel, do: Callable[[float], None], now: float) -> Channel | None:
    do(now)
    return channel


MAX_GRANTS: Final = 64
"""Remembered grants. Each describes every engine: a megabyte for a large fleet."""


class _Reply(NamedTuple):
    kind: type[KeyedRequest]
    question: str
    """Digest of the request: an offer may be long, and thousands are remembered."""
    reply: Ack | Granted


class ReplyCache:
    """Replies by agent and request key: a repeated request gets the same reply."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_key: OrderedDict[tuple[AgentId, RequestId], _Reply] = OrderedDict()
        self._grants: deque[tuple[AgentId, RequestId]] = deque()

    def get(self, agent: AgentId, message: KeyedRequest) -> Ack | Granted | Decision | None:
        """The earlier reply to this request, if remembered; or a refusal if its key was used for another request."""
        known = self._by_key.get((agent, message.request))
        if known is None:
            return None
        if known.question == question(message):
            return known.reply
        return key_reused(message, known.kind)

    def remember(self, agent: AgentId, message: KeyedRequest, reply: Ack | Granted) -> None:
        """Keep the reply to `message` of `agent`; the oldest replies are dropped."""
        self._by_key[agent, message.request] = _Reply(type(message), question(message), reply)
        if isinstance(reply, Granted):
            self._grants.append((agent, message.request))
            if len(self._grants) > MAX_GRANTS:
                self._by_key.pop(self._grants.popleft(), None)
        while len(self._by_key) > self._limit:
            self._by_key.popitem(last=False)

    def __len__(self) -> int:
        return len(self._by_key)


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

    def add(self, effect: AnyEffect) -> None:
        """Add any effect but an acknowledgement."""
        self._open_acknowledge = None
        self._effects.append(effect)

    def send(self, peer: Peer, message: ToAgent, blob: bytes | None = None) -> None:
        """Send to one connection."""
        self.add(SendTo(peer, message, blob))

    def tell(self, peers: tuple[Peer, ...], message: ToAgent) -> None:
        """Send the same to any number of connections."""
        if len(peers) > 1:
            self.add(SendToAll(peers, message))
        elif peers:
            self.add(SendTo(peers[0], message))

    def observe(self, what: AnyObservation) -> None:
        """Report an observation to logs and metrics."""
        self.add(Observe(what))

    def answer(self, peer: Peer, agent: AgentId, message: ToCoordinator, verdict: Decision) -> None:
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

    def refuse(self, peer: Peer, agent: str, message: ToCoordinator, verdict: Decision) -> None:
        """Refuse `message`, which changed nothing. Refusals are not remembered."""
        code = verdict.code or RefusalCode.NOT_ALLOWED
        request = HEARTBEAT_KEY if isinstance(message, _KEYLESS) else message.request
        self.send(peer, Refused(request=request, code=code, reason=verdict.reason, retry_after_s=verdict.retry_after_s))
        self.observe(Refusal(agent=agent, message=message.kind, code=code, reason=verdict.reason))


class WriteResult(NamedTuple):
    """The result of a write."""

    record: AnyRecord
    channel: ChannelId | None
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
        self.writing: tuple[Persist, ChannelId | None] | None = None
        self.read_only = False
        self.retry_at: float | None = None
        """Time of the next try to write to a journal that refused the last record."""
        self._out = out
        self._probe_s = probe_s
        self._tokens = 0

    def write(self, record: AnyRecord, channel: ChannelId | None) -> None:
        """Make `record` durable; `channel` waits for it."""
        if self.writing:
            raise InvariantBroken(f"{record} was to be written during the write of {self.writing[0].record}")
        self._tokens += 1
        persist = Persist(token=Token(self._tokens), record=record)
        self.writing = (persist, channel)
        self._out.add(persist)

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


MAX_BLOBS: Final = 4096
MAX_UPLOADS: Final = 128
"""Most unfinished uploads; `MAX_BLOBS` are whole. Bytes alone bound neither, because pages may be empty."""


class BlobCache:
    """A content-addressed store of at most `limit_bytes`, unfinished uploads included."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._whole: dict[str, bytes] = {}
        self._partial: dict[str, dict[int, bytes]] = {}
        self._pages: dict[str, int] = {}
        self._pinned: frozenset[str] = frozenset()
        self._held_bytes = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._whole

    @property
    def held_bytes(self) -> int:
        """Bytes of blobs and unfinished uploads."""
        return self._held_bytes

    def put(self, digest: str, page: int, pages: int, data: bytes) -> Decision:
        """Take one page. The last one to arrive completes the blob, which must hash to `digest`."""
        if digest in self._whole:
            self._touch(digest)
            return YES
        if refused := self._refusal(digest, page, pages, data):
            return refused
        if digest not in self._partial and len(self._partial) >= MAX_UPLOADS:
            self._forget_partial(next(iter(self._partial)))
        parts = self._partial.setdefault(digest, {})
        self._pages[digest] = pages
        if page not in parts:
            parts[page] = data
            self._held_bytes += len(data)
        if len(parts) < pages:
            return YES
        blob = b"".join(parts[index] for index in range(pages))
        self._forget_partial(digest)
        found = hashlib.sha256(blob).hexdigest()
        if found != digest:
            return Decision(
                RefusalCode.BAD_BLOB, f"the {pages} pages hash to {found}, sent under {digest}; send all again"
            )
        if len(self._whole) >= MAX_BLOBS and (oldest := next(filter(self._is_free, self._whole), None)):
            self._held_bytes -= len(self._whole.pop(oldest))
        self._whole[digest] = blob
        self._held_bytes += len(blob)
        return YES

    def page(self, digest: str, page: int) -> tuple[bytes, int] | None:
        """Page `page` of a blob and its number of pages; None if blob or page is missing."""
        blob = self._whole.get(digest)
        if blob is None:
            return None
        pages = max(1, -(-len(blob) // MAX_PAGE_BYTES))
        if page >= pages:
            return None
        self._touch(digest)
        return blob[page * MAX_PAGE_BYTES : (page + 1) * MAX_PAGE_BYTES], pages

    def pin(self, digests: Iterable[str]) -> None:
        """Keep exactly these blobs; any other may be evicted."""
        self._pinned = frozenset(digests)

    def _refusal(self, digest: str, page: int, pages: int, data: bytes) -> Decision | None:
        if not 1 <= pages <= MAX_PAGES or page >= pages:
            return Decision(RefusalCode.BAD_BLOB, f"page {page} of {pages}: pages count from 0, at most {MAX_PAGES}")
        if len(data) > MAX_PAGE_BYTES:
            return Decision(
                RefusalCode.BAD_BLOB, f"page {page} has {len(data)} bytes, at most {MAX_PAGE_BYTES} are allowed"
            )
        if self._pages.get(digest, pages) != pages:
            self._forget_partial(digest)  # a publisher with another page size begins anew
        if not self._room_for(len(data), digest):
            reason = f"the store holds {self._held_bytes} of {self._limit_bytes} bytes, all of them in use"
            return Decision(RefusalCode.NOT_ALLOWED, f"{reason}; raise blob_bytes", 5.0)
        return None

    def _room_for(self, size: int, digest: str) -> bool:
        for other in list(filter(self._is_free, self._whole)):
            if self._held_bytes + size <= self._limit_bytes:
                return True
            self._held_bytes -= len(self._whole.pop(other))
        for other in [name for name in self._partial if name != digest]:
            if self._held_bytes + size <= self._limit_bytes:
                return True
            self._forget_partial(other)
        return self._held_bytes + size <= self._limit_bytes

    def _is_free(self, digest: str) -> bool:
        return digest not in self._pinned

    def _forget_partial(self, digest: str) -> None:
        self._held_bytes -= sum(len(part) for part in self._partial.pop(digest, {}).values())
        self._pages.pop(digest, None)

    def _touch(self, digest: str) -> None:
        self._whole[digest] = self._whole.pop(digest)  # moved to the end: the dict is ordered by last use

    def check(self) -> None:
        """Raise `InvariantBroken` unless the byte count is right and the bounds are kept."""
        whole = sum(len(blob) for blob in self._whole.values())
        partial = sum(len(part) for parts in self._partial.values() for part in parts.values())
        if whole + partial != self._held_bytes:
            raise InvariantBroken(f"blobs take {whole} + {partial} bytes, counted as {self._held_bytes}")
        if self._held_bytes > self._limit_bytes:
            raise InvariantBroken(f"blobs take {self._held_bytes} bytes, at most {self._limit_bytes} are allowed")
        if len(self._whole) > MAX_BLOBS + len(self._pinned) or len(self._partial) > MAX_UPLOADS:
            raise InvariantBroken(f"{len(self._whole)} blobs and {len(self._partial)} uploads are kept")
