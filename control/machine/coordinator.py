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

from collections import deque
from collections.abc import Mapping
from typing import Final, assert_never

import msgspec

from ..protocol import (
    MAX_ANSWER_BYTES,
    Abandon,
    Acquire,
    AgentId,
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
    InvariantBroken,
    Offered,
    Paused,
    Prepared,
    Publish,
    PutBlob,
    RefusalCode,
    Release,
    Role,
    Sent,
    Serving,
    Status,
    ToCoordinator,
    Topology,
    Transferred,
    Verified,
)
from . import status
from .authorization import may_say
from .blob_cache import BlobCache
from .channel import Channel, TracedMessage
from .effect_queue import CHANNEL_RECORDS, EffectQueue, JournalWriter, SendToAgents
from .effects import AnyEffect, ChannelForgotten, Probe, ReadinessChanged, RoundReadiness, StateEntered
from .events import (
    AnyEvent,
    Burst,
    ConnectionLost,
    MessageReceived,
    Peer,
    Persisted,
    PersistFailed,
    StopRequested,
    Tick,
    TrustLost,
    Unsent,
)
from .lease import LateGrant
from .limits import Limits, earlier
from .membership import Agent, Membership
from .registration import Registration
from .reply_cache import YES, Decision, KeyedRequest, Restored
from .route import Routing
from .states import RoundState


class _Silent(msgspec.Struct, frozen=True):
    agent: AgentId


class _ChannelTick(msgspec.Struct, frozen=True):
    channel: ChannelId


class _ChannelStop(msgspec.Struct, frozen=True):
    channel: ChannelId


_JOURNAL_ANSWERS: Final = (Persisted, PersistFailed)
_ENGINE_ANSWERS: Final = (Prepared, Paused, Transferred, Verified, Serving, Failed)
"""Tuples made once: a union inside of a function would be made anew for every message."""
_Work = AnyEvent | _Silent | _ChannelTick | _ChannelStop


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
        self._registration = Registration(
            boot, limits, routing, self.channels, self.membership, out=self._effects, stride=stride, keyed=keyed
        )

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
            self._queued_work.append(event)
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
                self._registration.disconnected(work.peer, now)
            case Unsent():
                self._unsent(work, now)
            case TrustLost():
                self._flush(self._registration.distrusted(work, now), now)
            case Tick():
                self._tick(now)
            case StopRequested():
                self.stopping = True
                self._queued_work.extend(_ChannelStop(name) for name in self.channels)
            case _Silent():
                self._flush(self._registration.give_up_on(work.agent, now), now)
            case _ChannelTick() | _ChannelStop():
                channel = self.channels[work.channel]
                channel.tick(now) if isinstance(work, _ChannelTick) else channel.stop(now)
                self._flush(channel, now)
            case Persisted() | PersistFailed() | Burst():
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
                    self._registration.missed(channel, now)
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

    def _tick(self, now: float) -> None:
        self._queued_work.extend(_Silent(agent.name) for agent in self.membership.lost(now))
        self._queued_work.extend(_ChannelTick(name) for name in self.channels)
        self._journal_writer.tick(now)

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
        agent = self.membership.heard(peer, now)
        if agent is None:
            if not isinstance(message, Bye):
                self._effects.refuse(peer, "?", message, Decision(RefusalCode.UNKNOWN_AGENT, "say Hello first"))
            return
        verdict = may_say(agent, message, event.principal)
        if verdict.code is not None:
            self._effects.refuse(peer, agent.name, message, verdict)
        elif isinstance(message, _ENGINE_ANSWERS):
            self._from_engine(agent, message, peer, now)
        else:
            self._take_message(agent, message, event, now)

    def _hello(self, message: Hello, event: MessageReceived, now: float) -> None:
        before = self.membership.get(message.agent)
        verdict = self._registration.may_enter(message, event, before, now)
        if not verdict.ok:
            self._effects.refuse(event.peer, message.agent, message, verdict)
        elif before and before.incarnation != message.incarnation:
            # Losing the earlier incarnation may move its round on: the welcome shows how things stand afterwards.
            self._queued_work.appendleft(event)
            reason = f"was replaced by {message.incarnation}"
            self._flush(self._registration.leave(before, reason, now, evict=before.peer != event.peer), now)
        else:
            self._flush(self._registration.welcome(message, event, before, now), now)

    def _take_message(self, agent: Agent, message: ToCoordinator, event: MessageReceived, now: float) -> None:
        peer = event.peer
        if agent.role is Role.TRAINER:
            self.channels[agent.channel].trainer_heard(agent, now)
        match message:
            case Heartbeat():
                self._flush(self._registration.heartbeat(agent, message, peer, now), now)
            case Bye():
                self._flush(self._registration.leave(agent, f"said Bye: {message.reason}", now), now)
            case GetBlob():
                self._get_blob(agent, message, peer)
            case Topology():
                self._registration.located(agent, message)
                self._effects.answer(peer, agent.name, message, YES)
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
