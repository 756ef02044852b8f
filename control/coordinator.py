"""The coordinator: `handle(event, now)` returns what is to be done about it, in order. Pure.

It knows who speaks, whether their role allows it, which channel is meant and which answers were given before; channels
decide the rest. No clock, no socket, no disk, no log in here: the driver is server.py.

One record is written at a time. Until the driver says how that went, further events wait in line: whatever an answer
or a command depends on is durable before it leaves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final, assert_never

import msgspec

from . import plan_document, status
from .admission import may_join, may_say
from .blobs import Blobs
from .channel import Channel, Out, Tell, TrainerRequest
from .deadlines import earlier
from .effects import (
    AgentJoined,
    AgentLeft,
    AnyEffect,
    AnyRecord,
    Committed,
    EpochTaken,
    JournalChanged,
    Persist,
    Probe,
    ReadinessChanged,
    RoundClosed,
    announced_as,
)
from .errors import IllegalMove, InvariantBroken
from .events import (
    AnyEvent,
    Burst,
    MessageReceived,
    Peer,
    PeerLost,
    Persisted,
    PersistFailed,
    StopRequested,
    Tick,
    Token,
    TrustLost,
)
from .ids import AgentId
from .ids import Channel as ChannelId
from .lease import YES, Verdict
from .limits import Limits
from .membership import Agent, Membership
from .messages import (
    Abandon,
    Acquire,
    Alive,
    BlobPage,
    Bye,
    Code,
    EngineMessage,
    Failed,
    GetBlob,
    GetStatus,
    Heartbeat,
    Hello,
    Offered,
    Paused,
    Prepared,
    Publish,
    PutBlob,
    Release,
    Role,
    Sent,
    Serving,
    Status,
    ToCoordinator,
    Topology,
    Transferred,
    Verified,
    Welcome,
)
from .outbox import Outbox
from .past import Restored
from .story import Said
from .tenure import Answer, Denial


class _Silent(msgspec.Struct, frozen=True):
    agent: AgentId


class _ChannelTick(msgspec.Struct, frozen=True):
    channel: ChannelId


class _ChannelStop(msgspec.Struct, frozen=True):
    channel: ChannelId


_WRITTEN: Final = (Persisted, PersistFailed)
_ENGINES_SAY: Final = (Prepared, Paused, Transferred, Verified, Serving, Failed)
"""As tuples, made once: a union in the middle of a function is made anew with every message."""
_Work = AnyEvent | _Silent | _ChannelTick | _ChannelStop


class Coordinator:
    """The machine. Drive it from one thread; carry out every effect in order before the next event."""

    def __init__(self, limits: Limits, boot: int, restored: Mapping[ChannelId, Restored] | None = None) -> None:
        self.boot = boot
        self.limits = limits
        self.members = Membership(limits)
        self.blobs = Blobs(limits.blob_bytes)
        self.channels = {name: Channel(name, limits, known) for name, known in (restored or {}).items()}
        self.read_only = False
        self.stopping = False
        self._waiting: deque[_Work] = deque()
        self._writing: tuple[Persist, ChannelId | None] | None = None
        self._stirred: dict[ChannelId, Channel] = {}
        """Of which something is to be noted when the event is over."""
        self._out = Outbox(boot, limits.answers)
        self.replies = self._out.replies
        self._tokens = 0
        self._probe_at: float | None = None

    # -- the door ---------------------------------------------------------------------------------------------------

    def handle(self, event: AnyEvent, now: float) -> tuple[AnyEffect, ...]:
        """Take `event`, which happened at `now` (monotonic seconds). Raises `IllegalMove` on a token not given out."""
        if isinstance(event, _WRITTEN):
            self._written(event, now)
        elif isinstance(event, Burst):
            for message in event.messages:
                if self._waiting or self._writing:
                    self._waiting.append(message)
                else:
                    self._received(message, now)
        else:
            self._waiting.append(event)
        while self._waiting and self._writing is None:
            self._work(self._waiting.popleft(), now)
        while self._stirred:
            self._flush(self._stirred.popitem()[1], now)
        return self._out.take()

    def next_deadline(self) -> float | None:
        """When a `Tick` is due; None when nothing is waited for."""
        due = earlier(self.members.next_deadline(), self._probe_at)
        for channel in self.channels.values():
            due = earlier(due, channel.next_deadline())
        return due

    @property
    def calm(self) -> bool:
        """Whether nobody's next step waits for a message: no lease, no round, nothing asked and not answered."""
        return not self._writing and all(channel.calm for channel in self.channels.values())

    @property
    def stopped(self) -> bool:
        """Whether a requested stop is complete: no round, nothing being written."""
        idle = all(channel.round is None for channel in self.channels.values())
        return self.stopping and idle and self._writing is None and not self._waiting

    def status(self, now: float) -> status.StatusView:
        """What may be known of the whole."""
        return status.StatusView(
            boot=self.boot,
            read_only=self.read_only,
            stopping=self.stopping,
            agents=len(self.members),
            blob_bytes=self.blobs.held_bytes,
            channels=status.describe(self.channels.values(), self.members, self.limits.lease_s, now),
        )

    def plan(self, now: float) -> plan_document.PlanView:
        """By which transport each engine would take the next version, and why."""
        del now
        return plan_document.describe(self.channels.values(), self.members)

    def check(self) -> None:
        """Raise `InvariantBroken` unless everything agrees with everything else."""
        self.members.check()
        self.blobs.check()
        for channel in self.channels.values():
            channel.check()
        if self._out:
            raise InvariantBroken("effects were left behind")

    # -- work -------------------------------------------------------------------------------------------------------

    def _disconnected(self, peer: Peer, now: float) -> None:
        agent = self.members.disconnect(peer, now)
        channel = self.channels.get(agent.channel) if agent else None
        if agent and channel and channel.round and channel.round.needs(agent.name):
            self.members.expect(agent.name, now)

    def _work(self, work: _Work, now: float) -> None:
        match work:
            case MessageReceived():
                self._received(work, now)
            case PeerLost():
                self._disconnected(work.peer, now)
            case TrustLost():
                self._distrust(work, now)
            case Tick():
                self._tick(now)
            case StopRequested():
                self.stopping = True
                self._waiting.extend(_ChannelStop(name) for name in self.channels)
            case _Silent():
                self._give_up_on(work.agent, now)
            case _ChannelTick():
                self.channels[work.channel].tick(now)
                self._flush(self.channels[work.channel], now)
            case _ChannelStop():
                self.channels[work.channel].stop(now)
                self._flush(self.channels[work.channel], now)
            case Persisted() | PersistFailed() | Burst():
                raise InvariantBroken(f"{type(work).__name__} does not wait in line")
            case _:
                assert_never(work)

    def _distrust(self, event: TrustLost, now: float) -> None:
        if agent := self.members.get(event.agent):
            self._leave(agent, f"is not trusted any more: {event.reason}", now)

    def _give_up_on(self, name: AgentId, now: float) -> None:
        agent = self.members.get(name)
        if agent and (reason := self.members.why_lost(agent, now)):
            self._leave(agent, reason, now)

    def _tick(self, now: float) -> None:
        self._waiting.extend(_Silent(agent.name) for agent in self.members.lost(now))
        self._waiting.extend(_ChannelTick(name) for name in self.channels)
        if self._probe_at is not None and now >= self._probe_at:
            self._probe_at = now + self.limits.probe_s
            self._persist(Probe(), None)

    def _written(self, event: Persisted | PersistFailed, now: float) -> None:
        if self._writing is None or self._writing[0].token != event.token:
            expected = self._writing[0].token if self._writing else "none"
            raise IllegalMove("coordinator", f"writing {expected}", f"{type(event).__name__}({event.token})")
        (persist, name), self._writing = self._writing, None
        channel = self.channels[name] if name is not None else None
        failed = event.reason if isinstance(event, PersistFailed) else None
        self._note_journal(failed, now)
        record = persist.record
        if channel and not isinstance(record, Probe):
            if failed is None:
                channel.persisted(record, now)
            else:
                channel.not_persisted(record, f"the journal cannot be written: {failed}", now)
            self._flush(channel, now)

    def _note_journal(self, failed: str | None, now: float) -> None:
        if (failed is not None) is not self.read_only:
            self.read_only = failed is not None
            self._out.observe(JournalChanged(writable=not self.read_only, reason=failed or ""))
        self._probe_at = now + self.limits.probe_s if self.read_only else None

    def _persist(self, record: AnyRecord, channel: ChannelId | None) -> None:
        if self._writing:
            raise InvariantBroken(f"{record} was to be written while {self._writing[0].record} still is")
        self._tokens += 1
        persist = Persist(token=Token(self._tokens), record=record)
        self._writing = (persist, channel)
        self._out.persist(persist)

    # -- messages ---------------------------------------------------------------------------------------------------

    def _received(self, event: MessageReceived, now: float) -> None:
        message, peer = event.message, event.peer
        if isinstance(message, Hello):
            self._hello(message, event, now)
            return
        agent = self.members.heard(peer, now)
        if agent is None:
            if not isinstance(message, Bye):
                self._out.refuse(peer, "?", message, Verdict(Code.UNKNOWN_AGENT, "say Hello first"))
            return
        verdict = may_say(agent, message, event.principal)
        if verdict.code is not None:
            self._out.refuse(peer, agent.name, message, verdict)
        elif isinstance(message, _ENGINES_SAY):
            self._from_engine(agent, message, peer, now)
        else:
            self._take(agent, message, event, now)

    def _take(self, agent: Agent, message: ToCoordinator, event: MessageReceived, now: float) -> None:
        peer = event.peer
        if agent.role is Role.TRAINER:
            self._channel(agent.channel).trainer_heard(agent, now)
        match message:
            case Heartbeat():
                self._heartbeat(agent, message, peer, now)
            case Bye():
                self._leave(agent, f"said Bye: {message.reason}", now)
            case GetBlob():
                self._get_blob(agent, message, peer)
            case Topology():
                self._located(agent, message)
                self._out.answer(peer, agent.name, message, YES)
            case GetStatus():
                self._out.send(peer, Status(request=message.request), status.encode(self.status(now)))
            case PutBlob():
                blob = event.blob if event.blob is not None else b""
                verdict = self.blobs.put(message.digest, message.page, message.pages, blob)
                self._out.answer(peer, agent.name, message, verdict)
            case Acquire() | Release() | Publish() | Offered() | Sent() | Abandon():
                self._from_trainer(agent, message, peer, now)
            case Hello() | Prepared() | Paused() | Transferred() | Verified() | Serving() | Failed():
                raise InvariantBroken(f"{type(message).__name__} is taken elsewhere")
            case _:
                assert_never(message)

    def _hello(self, message: Hello, event: MessageReceived, now: float) -> None:
        peer = event.peer
        before = self.members.get(message.agent)
        verdict = may_join(message, event.principal, self.members.on(peer), before)
        if verdict.ok and message.channel not in self.channels and len(self.channels) >= self.limits.max_channels:
            verdict = Verdict(Code.NOT_ALLOWED, f"{len(self.channels)} channels are here, no more are taken")
        if verdict.ok:
            verdict = self.members.verdict(message, peer, now)
        if not verdict.ok:
            self._out.refuse(peer, message.agent, message, verdict)
            return
        returning = before is not None and before.incarnation == message.incarnation
        if before and not returning:
            self._leave(before, f"was replaced by {message.incarnation}", now, evict=before.peer != peer)
            if self._writing:  # losing it moved its round on: who comes is told how things stand after that
                self._waiting.appendleft(event)
                return
        elif before and before.peer and before.peer != peer:
            self._out.evict(before.peer, "came back on another connection")
        agent = self.members.join(message, peer, now)
        channel = self._channel(message.channel)
        self._out.send(
            peer,
            Welcome(
                request=message.request,
                boot=self.boot,
                epoch=channel.epoch,
                committed=channel.committed,
                heartbeat_s=self.limits.heartbeat_s,
                silence_s=self.limits.silence_s,
            ),
        )
        note = AgentJoined(
            agent=agent.name,
            role=agent.role,
            channel=agent.channel,
            incarnation=agent.incarnation,
            returning=returning,
        )
        self._out.observe(note)
        if agent.role is Role.ENGINE:
            channel.engine_joined(agent, now)
        elif agent.role is Role.TRAINER:
            channel.trainer_heard(agent, now)
            channel.trainer_joined(agent, now)
        self._flush(channel, now)

    def _heartbeat(self, agent: Agent, message: Heartbeat, peer: Peer, now: float) -> None:
        channel = self._channel(agent.channel)
        if message.seq:
            window = channel.window
            committed = window.committed.version if window.committed else None
            self._out.send(peer, Alive(seq=message.seq, boot=self.boot, committed=committed, max_lag=window.max_lag))
        if agent.role is Role.ENGINE and channel.engine_heard(agent.name, message, now):
            self._flush(channel, now)

    def _located(self, agent: Agent, message: Topology) -> None:
        agent.topology = message
        if agent.role is Role.ENGINE:
            self._channel(agent.channel).engine_located(agent.name, message)

    def _get_blob(self, agent: Agent, message: GetBlob, peer: Peer) -> None:
        found = self.blobs.page(message.digest, message.page)
        if found is None:
            reason = f"page {message.page} of blob {message.digest[:12]} is not here"
            self._out.refuse(peer, agent.name, message, Verdict(Code.UNKNOWN_BLOB, reason))
            return
        blob, pages = found
        answer = BlobPage(request=message.request, digest=message.digest, page=message.page, pages=pages)
        self._out.send(peer, answer, blob)

    def _from_engine(self, agent: Agent, message: EngineMessage, peer: Peer, now: float) -> None:
        channel = self._channel(agent.channel)
        verdict = channel.engine_answered(agent.name, message, now)
        channel.story.append(Said(now, agent.name, message))
        self._out.answer(peer, agent.name, message, verdict)
        if channel.pressing:
            self._flush(channel, now)
        else:
            self._stirred[channel.name] = channel

    def _from_trainer(self, agent: Agent, message: TrainerRequest, peer: Peer, now: float) -> None:
        channel = self._channel(agent.channel)
        known = self.replies.get(agent.name, message.request)
        if known:
            self._out.send(peer, known)
            if isinstance(message, Publish):
                channel.repeat_done(agent, message)
        else:
            channel.story.append(Said(now, agent.name, message))
            verdict = self._ask(channel, agent, message, now)
            if not verdict.ok or not isinstance(message, Acquire):
                self._out.answer(peer, agent.name, message, verdict)
        self.blobs.pin(digest for channel in self.channels.values() for digest in channel.pinned())
        self._flush(channel, now)

    def _ask(self, channel: Channel, agent: Agent, message: TrainerRequest, now: float) -> Verdict:
        match message:
            case Acquire():
                return self._closed() or channel.acquire(agent, message, now)
            case Publish():
                missing = next((d for d in (message.manifest, message.table) if d not in self.blobs), "")
                return self._closed() or channel.publish(agent, message, missing, now)
            case Release():
                return channel.release(agent, message)
            case Offered() | Sent():
                return channel.transferring(agent, message, now)
            case Abandon():
                return channel.abandon(agent, message, now)
            case _:
                assert_never(message)

    def _closed(self) -> Verdict | None:
        """Why nothing new may begin; None when it may."""
        if self.stopping:
            return Verdict(Code.SHUTTING_DOWN, "the coordinator is stopping", 5.0)
        if self.read_only:
            return Verdict(Code.READ_ONLY, "the journal cannot be written; is the disk full?", self.limits.probe_s)
        return None

    # -- small things -----------------------------------------------------------------------------------------------

    def _channel(self, name: ChannelId) -> Channel:
        if name not in self.channels:
            self.channels[name] = Channel(name, self.limits, Restored())
        return self.channels[name]

    def _leave(self, agent: Agent, reason: str, now: float, *, evict: bool = True) -> None:
        self.members.remove(agent.name)
        if evict and agent.peer:
            self._out.evict(agent.peer, reason)
        self._out.observe(AgentLeft(agent=agent.name, role=agent.role, channel=agent.channel, reason=reason))
        channel = self._channel(agent.channel)
        if agent.role is Role.ENGINE:
            channel.engine_lost(agent.name, reason, now)
        elif agent.role is Role.TRAINER:
            channel.trainer_lost(agent, reason, now)
        self._flush(channel, now)

    def _flush(self, channel: Channel, now: float) -> None:
        outs = channel.flush(now)
        if not outs:
            return
        hinted: set[str] = set()
        for out in outs:
            if isinstance(out, Tell):
                self._out.tell(self.members.peers(out.agents), out.message)
                continue
            self._put(channel, out)
            event = announced_as(out)
            if event and event not in hinted:  # hints name no engine: one says as much as a thousand
                hinted.add(event)
                version = channel.committed.version if channel.committed else None
                self._out.hint(channel.name, event, version, channel.epoch)

    def _put(self, channel: Channel, out: Out) -> None:
        match out:
            case ReadinessChanged():
                self._out.observe(out)
            case Answer():
                self.replies.remember(out.agent, out.message)
                self._out.tell(self.members.peers((out.agent,)), out.message)
            case Denial():
                for peer in self.members.peers((out.agent.name,)):
                    self._out.refuse(peer, out.agent.name, out.message, out.verdict)
            case Tell():
                raise InvariantBroken("what agents are told was sent already")
            case EpochTaken() | Committed() | RoundClosed():
                self._persist(out, channel.name)
            case _:
                channel.story.append(out)
                self._out.observe(out)
