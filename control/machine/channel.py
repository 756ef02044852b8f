"""One channel: its committed version, its lease, its round and its engines. Pure.

`Channel.make_current` is the one place where a version becomes current: it runs once the journal has said that the
commit is durable.

The channel takes agents' messages, the journal's answers and the time, and passes them to its `LeaseHolder`, its
`Round` and its `EngineRegistry`. `flush` returns the resulting effects in order. A journal record comes last: no effect
follows it before it is durable.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final

import msgspec

from ..protocol import (
    Abandon,
    Acquire,
    AgentId,
    Channel as ChannelId,
    EngineHealth,
    EngineMessage,
    EngineReport,
    Epoch,
    Heartbeat,
    HeldVersion,
    Incarnation,
    InvariantBroken,
    Offered,
    Outcome,
    PauseMode,
    Publish,
    RefusalCode,
    Release,
    RequestId,
    RoundDone,
    Send,
    Sent,
    ToAgent,
    ToEngine,
    Topology,
    TrainerInfo,
    TransportKind,
    Version,
)
from .effects import (
    AnyObservation,
    Committed,
    EngineAhead,
    EpochRaised,
    EpochTaken,
    RoundClosed,
    RoundEnded,
)
from .engine_registry import AllowedVersions, EngineRecord, EngineRegistry, readiness
from .membership import Agent, LateGrant, Lease, LeaseHolder
from .participants import Participant, PendingCommands, SendToAgents, wave_order
from .round import Round
from .states import (
    FINISHED,
    YES,
    Decision,
    EnginePhase,
    Limits,
    RoundState,
    Route,
    Routing,
    earlier,
    key_reused,
    open_routes,
    question,
)

ChannelRecord = EpochTaken | EpochRaised | Committed | RoundClosed
ChannelEffect = SendToAgents | LateGrant | ChannelRecord | AnyObservation
CHANNEL_RECORDS: Final = (EpochTaken, EpochRaised, Committed, RoundClosed)

MAX_ROUND_REPLIES: Final = 32
"""Replies kept for finished rounds, per channel, in memory and in the journal: a trainer asks about its last round.
Each may take a megabyte, because it names every engine of the channel."""

MAX_PAST_ROUNDS: Final = 20
"""Finished rounds in the status document."""

MAX_HISTORY: Final = 64
"""Committed versions that are remembered, so that an operator can see what a channel may go back to."""
_NOT_CLOSED: Final = "was committed; the coordinator ended before the round did, and how its engines fared was not kept"


class RoundReply(msgspec.Struct, frozen=True):
    """How the round of a `Publish` ended."""

    done: RoundDone
    question: str = ""
    """Digest of the `Publish`, see `question()`; empty in records of older releases."""
    closed: bool = True
    """False if only the commit is known, because the coordinator ended before the round: `done` names no engines."""


class PastRound(msgspec.Struct, frozen=True):
    """A finished round in few words: the report of each engine is counted, not repeated."""

    version: Version
    epoch: Epoch
    outcome: Outcome
    reason: str
    seconds: dict[str, float]
    """Seconds by phase, as in `RoundDone`."""
    engines: dict[str, int]
    """Number of engines by their outcome."""
    transports: tuple[TransportKind, ...]
    """Transports by which its engines took the version."""
    bytes: int
    """Bytes that the engines took, all together."""
    ended_s: float | None = None
    """Seconds since its end; None if that was before the coordinator started."""

    @classmethod
    def of(cls, done: RoundDone) -> PastRound:
        """The summary of a report, without its time."""
        outcomes = Counter(report.outcome.value for report in done.engines)
        transports = {report.transport for report in done.engines if report.transport is not None and report.bytes}
        size = sum(report.bytes for report in done.engines)
        return cls(
            version=done.version,
            epoch=done.epoch,
            outcome=done.outcome,
            reason=done.reason,
            seconds=done.seconds,
            engines=dict(outcomes),
            transports=tuple(sorted(transports)),
            bytes=size,
        )


class RoundReplies:
    """How rounds ended, by the key of their `Publish`; the oldest are dropped."""

    def __init__(self, restored: Mapping[RequestId, RoundReply]) -> None:
        self.last: RoundDone | None = None
        """Report of the last finished round since the coordinator started."""
        self._by_request = dict(restored)
        self._ended_at: dict[RequestId, float] = {}
        self._past: dict[RequestId, PastRound] = {}
        """Summaries made so far: a report may name thousands of engines, and is summarized when one is looked at."""

    def past(self, now: float) -> tuple[PastRound, ...]:
        """The last `MAX_PAST_ROUNDS` finished rounds, oldest first."""
        newest = [*islice(reversed(self._by_request), MAX_PAST_ROUNDS)]
        past = {request: self._past.get(request) or PastRound.of(self._by_request[request].done) for request in newest}
        self._past = past
        ended = [(past[request], self._ended_at.get(request)) for request in reversed(newest)]
        return tuple(
            each if at is None else msgspec.structs.replace(each, ended_s=max(0.0, now - at)) for each, at in ended
        )

    def get(self, request: RequestId) -> RoundReply | None:
        """How the round of `request` ended; None if unknown."""
        return self._by_request.get(request)

    def contradicts(self, message: Publish) -> Decision | None:
        """A refusal if the finished round with this key was another one; None otherwise."""
        known = self._by_request.get(message.request)
        if known is None:
            return None
        same = (known.done.epoch, known.done.version) == (message.epoch, message.version)
        if same and known.question in ("", question(message)):
            return None
        return key_reused(message, Publish)

    def remember(self, request: RequestId, round_reply_of: RoundReply, now: float) -> None:
        """Keep how the round of `request` ended, which was now."""
        self.last = round_reply_of.done
        self._by_request[request] = round_reply_of
        self._ended_at[request] = now
        self._past.pop(request, None)
        while len(self._by_request) > MAX_ROUND_REPLIES:
            oldest = next(iter(self._by_request))
            self._by_request.pop(oldest)
            self._ended_at.pop(oldest, None)


def _report(
    channel: ChannelId,
    epoch: Epoch,
    version: Version,
    outcome: Outcome,
    reason: str,
    *,
    engines: tuple[EngineReport, ...] = (),
) -> RoundDone:
    seconds = {"total": 0.0}
    return RoundDone(
        channel=channel, epoch=epoch, version=version, outcome=outcome, reason=reason, engines=engines, seconds=seconds
    )


def already_committed(message: Publish, epoch: Epoch, holders: Sequence[AgentId]) -> RoundDone:
    """The report for a version that was committed earlier, at `epoch`, and that `holders` hold now."""
    reason, outcome = f"was committed already, at epoch {epoch}", Outcome.COMMITTED
    engines = tuple(EngineReport(engine=name, outcome=outcome, version=message.version) for name in holders)
    return _report(message.channel, message.epoch, message.version, outcome, reason, engines=engines)


def never_begun(version: Version, message: Abandon) -> RoundDone:
    """The report for a lease that was abandoned before `Publish`."""
    return _report(message.channel, message.epoch, version, Outcome.ABORTED, message.reason)


class PastVersion(msgspec.Struct, frozen=True):
    """An entry of a channel's history: a version that is or was current."""

    version: Version
    epoch: Epoch
    rollback: bool = False
    """True if the channel went back to it, or took it again."""


class ChannelOwner(msgspec.Struct, frozen=True):
    """The run to which a channel belongs."""

    run: str
    trainer: AgentId
    """The trainer that published for it last."""


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """A channel as the journal restores it."""

    epoch: Epoch = Epoch(0)
    committed: HeldVersion | None = None
    committed_epoch: Epoch = Epoch(0)
    answers: Mapping[RequestId, RoundReply] = {}
    history: tuple[PastVersion, ...] = ()
    """The last `MAX_HISTORY` committed versions, oldest first."""
    owner: ChannelOwner | None = None


def history_with(history: tuple[PastVersion, ...], commit: Committed | PastVersion) -> tuple[PastVersion, ...]:
    """`history` with `commit` added, unless it is the last entry already: a record may be written twice."""
    past = PastVersion(commit.version, commit.epoch, commit.rollback)
    return history if history[-1:] == (past,) else (*history, past)[-MAX_HISTORY:]


def round_reply_of(record: Committed | RoundClosed) -> RoundReply:
    """The reply to the `Publish` of `record` once that is durable, until a later record replaces it."""
    if isinstance(record, RoundClosed):
        return RoundReply(record.done, record.question)
    done = _report(record.channel, record.announced, record.version, Outcome.COMMITTED, _NOT_CLOSED)
    return RoundReply(done, record.question, closed=False)


TRACE_LENGTH: Final = 64
"""Events in `Channel.event_trace`, which errors of the machine carry."""
UNDESCRIBED_TRAINER: Final = TrainerInfo(host="", device="", ranks=0, transports=())
"""Stands for a trainer whose `Hello` had no description."""
SNAPSHOT: Final = "snapshot"
"""`Publish.mode` of a version whose trainer goes on training during the round."""
MAX_EPOCH_LEAP: Final = 2**24
"""The most by which one heartbeat raises the epoch: a lying engine needs years to reach the highest one."""


class TracedMessage(msgspec.Struct, frozen=True):
    """A message in an event trace. Formatted only when an error is shown: thousands are kept for each that is read."""

    at: float
    agent: AgentId
    message: EngineMessage | Acquire | Release | Publish | Offered | Sent | Abandon

    def __str__(self) -> str:
        """Time, agent, message and epoch."""
        epoch = getattr(self.message, "epoch", None)
        return f"{self.at:.3f} {self.agent} {self.message.kind}{f' epoch {epoch}' if epoch else ''}"


class Publisher(msgspec.Struct, frozen=True):
    """The trainer that published last, since the coordinator started, and the size of its version."""

    name: AgentId
    incarnation: Incarnation
    info: TrainerInfo
    topology: Topology | None
    version: Version
    bytes: int


class Channel:
    """The machine of one channel."""

    def __init__(
        self, name: ChannelId, limits: Limits, routing: Routing, restored: Restored, *, stride: int = 1
    ) -> None:
        """`restored` is the journal's account of the channel.

        `stride` is the distance of a new epoch from one that an earlier process of the coordinator may have granted.
        """
        self.name = name
        self.epoch: Epoch = restored.epoch
        """Highest epoch ever taken."""
        self.allowed_versions = AllowedVersions(restored.committed)
        """Versions that engines may serve; its `committed` is the current one. Changed by `make_current` alone."""
        self.committed_epoch: Epoch = restored.committed_epoch
        """Epoch under which the current version was committed."""
        self.history: tuple[PastVersion, ...] = restored.history
        """Committed versions, oldest first."""
        self.owner: ChannelOwner | None = restored.owner
        """The run that was granted the lease last, of those that name one; durable with the grant."""
        self.round: Round | None = None
        self.publisher: Publisher | None = None
        self.event_trace: deque[object] = deque(maxlen=TRACE_LENGTH)
        """Recent messages and observations, for errors."""
        self._stride = stride
        self._limits = limits
        self._effects: list[ChannelEffect] = []
        """Effects since the last `flush`, in order."""
        self._pending_commands = PendingCommands(limits.retry_s, limits.retry_max_s)
        self._round_replies = RoundReplies(restored.answers)
        self._lease_holder = LeaseHolder(name, limits, self.event_trace)
        self._registry = EngineRegistry(name, limits, routing, self._pending_commands)
        self.engines: Mapping[AgentId, EngineRecord] = self._registry.engines
        self._epoch_raise_at = 0.0
        """Earliest time at which an engine's heartbeat may raise the epoch again."""
        self._last_wave_order: tuple[AgentId, ...] = ()
        """Order of the engines in the waves of the last rolling round."""
        self._judged_against: tuple[Round | None, AllowedVersions] = (None, AllowedVersions())
        """Round and versions against which the readiness of all engines was last computed."""

    @property
    def committed(self) -> HeldVersion | None:
        """The current version; None before the first commit."""
        return self.allowed_versions.committed

    @property
    def lease(self) -> Lease | None:
        """The lease to publish, if a trainer has it."""
        return self._lease_holder.lease

    @property
    def idle(self) -> bool:
        """True while there is no round, no lease and no unacknowledged command."""
        return self.round is None and self.lease is None and not self._pending_commands

    def next_deadline(self) -> float | None:
        """The time at which `tick` or `flush` is due."""
        of_round = self.round.next_deadline() if self.round else None
        of_lease = self._lease_holder.next_deadline(in_round=self.round is not None)
        of_engines = earlier(self._pending_commands.next_deadline(), self._registry.forget_at)
        return earlier(of_engines, earlier(of_round, of_lease))

    def past_rounds(self, now: float) -> tuple[PastRound, ...]:
        """The last finished rounds, oldest first."""
        return self._round_replies.past(now)

    def pinned(self) -> set[str]:
        """Digests of the blobs that the current version and the running round need."""
        needed: set[str] = set()
        if self.committed:
            needed.update((self.committed.manifest, self.committed.table))
        if self.round:
            needed.update(filter(None, (self.round.publish.manifest, self.round.table)))
        return needed

    def phase(self, name: AgentId) -> EnginePhase | None:
        """The phase of an engine in the running round; None outside of it."""
        participant = self.round.participants.by_name.get(name) if self.round else None
        return participant.phase if participant else None

    def versions_allowed_to(self, name: AgentId) -> AllowedVersions:
        """The versions that one engine may serve."""
        waiting = self.phase(name) is EnginePhase.PREPARED
        return self.versions_allowed_while_waiting if waiting else self.allowed_versions

    @property
    def versions_allowed_while_waiting(self) -> AllowedVersions:
        """The versions that a prepared engine may serve: in a rolling round also the previous one, until its wave."""
        round_ = self.round
        in_waves = round_ is not None and round_.durable and not round_.publish.catch_up
        allowed = self.allowed_versions
        return allowed.including(round_.previous_version) if round_ and in_waves else allowed

    def check(self) -> None:
        """Raise `InvariantBroken` unless the channel's parts agree with each other."""
        wrong = list(self.round.check()) if self.round else []
        if self.lease and self.lease.epoch > self.epoch:
            wrong.append(f"the lease is of epoch {self.lease.epoch}, the highest ever taken is {self.epoch}")
        if self.round and self.round.epoch > self.epoch:
            wrong.append(f"the round is of epoch {self.round.epoch}, the highest ever taken is {self.epoch}")
        if self.committed_epoch > self.epoch:
            wrong.append(f"committed at epoch {self.committed_epoch}, the highest ever taken is {self.epoch}")
        for engine in self.engines.values():
            phase, allowed = self.phase(engine.name), self.versions_allowed_to(engine.name)
            ready = readiness(engine, phase, allowed).ok
            if ready is not self._registry.announced(engine.name):
                wrong.append(f"{engine.name} is {'ready' if ready else 'not ready'}, and this was not announced")
            if ready and not allowed.allows(engine.held):
                wrong.append(f"{engine.name} is ready, but holds {engine.held}")
            if phase is EnginePhase.SERVING and (self.committed is None or self.round is None):
                wrong.append(f"{engine.name} serves a version that was never committed")
        if wrong:
            raise InvariantBroken("; ".join(wrong), tuple(self.event_trace))

    # -- trainers ---------------------------------------------------------------------------------------------------

    def acquire(self, agent: Agent, message: Acquire, now: float) -> Decision:
        """Request the lease. If it is free, the answer follows once the new epoch is durable."""
        owner = self.owner
        if message.run and owner is not None and owner.run != message.run and not message.takeover:
            return self._taken(owner, message.run)
        verdict = self._lease_holder.may_acquire(agent, self.round.state if self.round else None, now)
        if not verdict.ok:
            return verdict
        if self.committed and message.version < self.committed.version and not message.rollback:
            return self._version_not_newer(message.version)
        next_epoch = Epoch(self.epoch + (1 if self.epoch else self._stride))
        self._effects.append(self._lease_holder.request(agent, message, next_epoch))
        return YES

    def release(self, agent: Agent, message: Release) -> Decision:
        """End a lease under which nothing was published."""
        verdict = self._lease_holder.may_use(agent, message.epoch, self.epoch)
        if verdict.ok and self.round:
            return Decision(RefusalCode.NOT_ALLOWED, "a round is running under this lease: send Abandon instead")
        if verdict.ok:
            self._end_lease("released")
        return verdict

    def publish(self, agent: Agent, message: Publish, missing: str, now: float) -> Decision:
        """Begin the round of a version. `missing` is the digest of a blob that must be put first; empty for none."""
        engines = self._registry.stale(self.committed) if message.catch_up else self._registry.infos()
        lacked = message.catch_up and engines and not (self.round and self.round.publish.request == message.request)
        if other := self._round_replies.contradicts(message):
            return other
        if self._round_replies.get(message.request) or (self._is_committed(message) and not lacked):
            self.repeat_done(agent, message)
            return YES
        verdict = self._lease_holder.may_use(agent, message.epoch, self.epoch)
        routes = self._routes_of(message, agent, among=engines if message.catch_up else None)
        if verdict.ok:
            verdict = self._may_begin(message, missing, routes)
        if not verdict.ok:
            return verdict
        if message.policy.max_paused and not message.catch_up:
            order = wave_order(self._last_wave_order, [name for name in engines if routes[name].transport])
            engines = {**{name: engines[name] for name in order}, **engines}
            self._last_wave_order = order
        info = agent.trainer or UNDESCRIBED_TRAINER
        self.publisher = Publisher(agent.name, agent.incarnation, info, agent.topology, message.version, message.bytes)
        self.round = Round(
            message,
            agent.name,
            routes,
            engines,
            self._registry.fleet_at_start(
                self.committed, engines, routes, message.policy, now, catch_up=message.catch_up
            ),
            limits=self._limits,
            pending_commands=self._pending_commands,
            event_trace=self.event_trace,
            observe=self._observe,
            now=now,
        )
        self.round.start(now)
        for engine in self.engines.values():
            if engine.seen_epoch > message.epoch:
                self._exclude_if_ahead(engine, now)
        return YES

    def repeat_done(self, agent: Agent, message: Publish) -> None:
        """Send the `RoundDone` of a finished round again, to a trainer that repeats its `Publish`."""
        known = self._round_replies.get(message.request)
        done = known.done if known else None
        newest = self._is_committed(message) or (done is not None and self._is_newest(done))
        if not (known and known.closed) and newest and self.round is None:
            done = already_committed(message, self.committed_epoch, self._registry.holders(self.committed))
            if self._lease_holder.held_by(agent):
                self._end_lease("the version was committed already")
        if done:
            self._effects.append(SendToAgents((agent.name,), done))

    def transfer_reported(self, agent: Agent, message: Offered | Sent, missing: str, now: float) -> Decision:
        """The trainer opened its half of the transports, or finished sending. `missing`: as for `publish`."""
        verdict = self._lease_holder.may_use(agent, message.epoch, self.epoch)
        if not verdict.ok or self.round is None:
            return verdict
        if isinstance(message, Offered):
            self.round.offered(message.epoch, message.offers, message.failed, now)
        elif self.round.state in (RoundState.PREPARING, RoundState.OFFERING):
            return Decision(RefusalCode.NOT_ALLOWED, f"nothing was offered under epoch {message.epoch} yet")
        else:
            verdict = self._may_take_sent(message, missing)
            if verdict.ok:
                self.round.sent(message.epoch, message.table, message.failed, message.spared, now)
                self.round.nonfinite, self.round.differing = message.nonfinite, message.differing
        return verdict

    def abandon(self, agent: Agent, message: Abandon, now: float) -> Decision:
        """The trainer cannot go on. Any epoch of its lease is accepted: it may not know of a retry yet."""
        lease = self.lease
        epoch = lease.epoch if lease and lease.first_epoch <= message.epoch <= lease.epoch else message.epoch
        verdict = self._lease_holder.may_use(agent, epoch, self.epoch)
        if verdict.ok and lease:
            if self.round:
                end = self.round.trainer_lost if self.round.transfer_complete else self.round.abandon
                end(f"abandoned by {agent.name}: {message.reason}", now)
            else:
                self._end_lease(f"abandoned: {message.reason}")
                self._effects.append(SendToAgents((agent.name,), never_begun(lease.version, message)))
        return verdict

    def trainer_joined(self, agent: Agent, now: float) -> None:
        """A trainer said `Hello`: send at once what it may have missed."""
        last = self.publisher
        if last is None or (last.name, last.incarnation) != (agent.name, agent.incarnation):
            return
        if self.round:
            self._pending_commands.resend_now(agent.name, now)
        elif self._round_replies.last:
            self._effects.append(SendToAgents((agent.name,), self._round_replies.last))

    def trainer_heard(self, agent: Agent, now: float) -> None:
        """A trainer is alive: if it holds the lease, the lease is extended."""
        self._lease_holder.heard(agent, now)

    def trainer_lost(self, agent: Agent, reason: str, now: float) -> None:
        """A trainer is gone for good: its lease ends, and its round if that needs it."""
        if self._lease_holder.held_by(agent):
            self._end_lease(reason)
            if self.round:
                self.round.trainer_lost(f"trainer {agent.name} {reason}", now)

    # -- engines ----------------------------------------------------------------------------------------------------

    def engine_joined(self, agent: Agent, now: float) -> None:
        """An engine said `Hello`: repeat the command of its round, or settle what it does outside of one."""
        known = self.engines.get(agent.name)
        if known and known.incarnation != agent.incarnation and self.round:
            self.round.participants.lost(agent.name, f"restarted as {agent.incarnation}")
        engine = self._registry.joined(agent)
        engine.note_memory(self.committed, released=engine.info.memory_released)
        participant = self.round.participants.by_name.get(agent.name) if self.round else None
        if participant and participant.phase not in FINISHED:
            self._pending_commands.resend_now(agent.name, now)
        else:
            self._registry.settle(engine, self._settling_epoch(engine), self.committed, now)

    def engine_heard(self, name: AgentId, message: Heartbeat, now: float) -> bool:
        """Take a heartbeat. Returns True if it changed what is known of the engine: its server may have restarted."""
        engine = self.engines.get(name)
        if engine is None:
            return False
        first, engine.epoch_reported = not engine.epoch_reported, True
        moved = message.epoch > min(engine.seen_epoch, self.epoch) and self._note_seen_epoch(engine, message.epoch, now)
        idle = not engine.serving and self._pending_commands.get(name) is None and not self._takes_part(name)
        if first and engine.never_commanded and idle:
            self._registry.settle(engine, self._settling_epoch(engine), self.committed, now)
            moved = True
        if message.health is None:
            return moved
        engine.note_memory(self.committed, released=message.memory_released)
        if (engine.health, engine.held) == (message.health, message.held) and not engine.version_in_doubt:
            return moved
        engine.version_in_doubt = False
        recovered = engine.health is not EngineHealth.CLEAN and message.health is EngineHealth.CLEAN
        engine.health, engine.held = message.health, message.held
        self._registry.recheck(name)
        if engine.health is not EngineHealth.CLEAN:
            engine.serving = False
        # An engine that loaded the committed version by itself (a resync) is told to serve it.
        arrived = engine.health is EngineHealth.PENDING and engine.held is not None and engine.held == self.committed
        if (recovered or arrived) and not self._takes_part(name) and self._pending_commands.get(name) is None:
            self._registry.settle(engine, self._settling_epoch(engine), self.committed, now)
        return True

    def engine_located(self, agent: Agent, report: Topology, now: float) -> Channel | None:
        """Take an engine's topology report. Returns this channel if other reasons keep the engine from serving."""
        engine = self.engines.get(agent.name)
        if engine is None:
            return None
        changed = engine.note_topology(report, now)
        agent.topology = engine.topology
        if not changed:
            return None
        self._registry.recheck(agent.name)
        return self

    def _note_seen_epoch(self, engine: EngineRecord, epoch: Epoch, now: float) -> bool:
        """Record the highest epoch that the engine has seen. If it is above the channel's, raise that one, durably."""
        engine.seen_epoch = epoch
        moved = self._exclude_if_ahead(engine, now)
        if epoch <= self.epoch or now < self._epoch_raise_at:
            return moved
        self._epoch_raise_at = now + self._limits.heartbeat_s
        above = Epoch(min(epoch + self._stride, self.epoch + MAX_EPOCH_LEAP))
        self._effects.append(EpochRaised(channel=self.name, epoch=above, engine=engine.name))
        return True

    def _exclude_if_ahead(self, engine: EngineRecord, now: float) -> bool:
        """Take an engine out of a round whose epoch it ignores because it has seen a higher one; settle it above that.

        Returns True if either happened.
        """
        participant = self.round.participants.by_name.get(engine.name) if self.round else None
        ignoring = participant is not None and participant.epoch < engine.seen_epoch and self._takes_part(engine.name)
        if ignoring and participant is not None and self.round:
            self.round.participants.lost(engine.name, f"it {ahead(engine.seen_epoch, participant.epoch)}")
        unheard = self.epoch >= engine.seen_epoch > max(engine.last_epoch, engine.settled_epoch)
        if engine.alive and unheard and not self._takes_part(engine.name):
            self._registry.settle(engine, self._settling_epoch(engine), self.committed, now)
            return True
        return ignoring

    def forget_engine(self, name: AgentId) -> None:
        """Drop the record of a lost engine."""
        self._registry.drop(name)

    def engine_lost(self, name: AgentId, reason: str, now: float, *, for_good: bool = False) -> None:
        """An engine fell silent, said `Bye`, or was replaced by another incarnation.

        `for_good`: it left on purpose, or is not trusted any more.
        """
        self._registry.lost(name, reason, now, for_good=for_good)
        if self.round:
            self.round.participants.lost(name, reason)
        self._pending_commands.drop(name)

    def engine_answered(self, name: AgentId, message: EngineMessage, now: float) -> Decision:
        """Take an engine's answer to a command of the same epoch. A repeated answer has no effect."""
        engine, round_, epoch = self.engines[name], self.round, message.epoch
        if epoch > self.epoch:
            return Decision(RefusalCode.NOT_ALLOWED, f"epoch {epoch} was never taken; the highest is {self.epoch}")
        participant = round_.participants.by_name.get(name) if round_ is not None else None
        if round_ is None or participant is None or participant.phase in FINISHED:
            return self._take_late_answer(engine, message)
        if epoch != participant.epoch:
            return Decision(RefusalCode.STALE_EPOCH, f"found epoch {epoch}, expected {participant.epoch}")
        round_.participants.answered(participant, message, now)
        if engine.absorb(message, participant, self.allowed_versions.committed):
            self._registry.recheck(name)
        engine.last_epoch, engine.unacknowledged = epoch, False
        return YES

    def unsent(self, name: AgentId, message: ToAgent, reason: str, now: float) -> None:
        """`message` cannot be encoded for the wire: its answer is not awaited."""
        round_, told = self.round, f"{message.kind} {reason}"
        if isinstance(message, Send) and round_ is not None and message.epoch == round_.epoch:
            round_.abandon(told, now)
        elif isinstance(message, ToEngine) and self._takes_part(name) and round_ is not None:
            participant = round_.participants.by_name[name]
            if message.epoch == participant.epoch:
                round_.participants.unsent(participant, told, now)
        elif self._pending_commands.get(name) is message:
            self._registry.unsent(name, told)

    # -- the journal's answers --------------------------------------------------------------------------------------

    def persisted(self, record: ChannelRecord, now: float) -> None:
        """The journal has made `record` durable: do what depended on it."""
        match record:
            case EpochTaken():
                self.epoch = record.epoch
                if record.run:
                    self.owner = ChannelOwner(record.run, record.holder)
                if record.in_round and self.round:
                    self._lease_holder.epoch_raised(record.epoch)
                    self.round.epoch_taken(record.epoch, now)
                else:
                    again = self.committed is not None and record.version == self.committed.version
                    lacking = self._registry.stale(self.committed) if again and not record.rollback else None
                    routes = partial(self._routes, among=lacking)
                    self._effects.extend(
                        self._lease_holder.grant(record, self.committed, self._registry.infos(), routes, now)
                    )
            case EpochRaised():
                observation = EngineAhead(channel=self.name, engine=record.engine, known=self.epoch, epoch=record.epoch)
                self._effects.append(observation)
                self.epoch = record.epoch
                for engine in self.engines.values():
                    self._exclude_if_ahead(engine, now)
            case Committed():
                self.make_current(record, now)
                if self.round:
                    self.round.committed(now)
            case RoundClosed():
                self._close_round(record, now)

    def make_current(self, record: Committed, now: float) -> None:
        """Make `record.version` the version that this channel serves: this is where a version becomes current.

        Called by `persisted` alone, once the journal has answered `Persisted` for `record`. Before, no agent hears of
        the version as committed; from here on, only this version, and earlier ones within `Policy.max_lag`, make an
        engine ready. Raises `InvariantBroken` if the channel would go back without a rollback.
        """
        if self.committed and record.version <= self.committed.version and not record.rollback:
            found = f"{self.name} goes from {self.committed.version} to {record.version}"
            raise InvariantBroken(found, self.event_trace)
        if self.round:
            self.round.previous_version = self.committed
        current = HeldVersion(version=record.version, manifest=record.manifest, table=record.table)
        max_lag = self.round.publish.policy.max_lag if self.round else 0
        self.allowed_versions = self.allowed_versions.advanced_to(current, max_lag, rollback=record.rollback)
        self.committed_epoch = record.epoch
        self.history = history_with(self.history, record)
        self._registry.superseded(self.epoch, current, now)

    def not_persisted(self, record: ChannelRecord, reason: str, now: float, *, again: bool = True) -> None:
        """The journal could not write `record`: what depends on it does not happen. `again`: a later try may work."""
        match record:
            case EpochTaken():
                if record.in_round and self.round:
                    self.round.epoch_refused(reason)
                else:
                    self._effects.extend(self._lease_holder.refuse(reason))
            case EpochRaised():
                pass  # the next heartbeat reports it again
            case Committed():
                if self.round:
                    self.round.commit_refused(reason, now, again=again)
            case RoundClosed():
                self._close_round(record, now)  # the version is safe: only a restart would not know how its round ended

    # -- time -------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Apply the deadlines that have passed: of the lease, the round and engines that were lost long ago."""
        lease = self.lease
        if lease and (reason := self._lease_holder.overdue(now, in_round=self.round is not None)):
            self._end_lease(reason)
            if self.round:
                self.round.trainer_lost(f"trainer {lease.holder} was {reason}", now)
        if self.round:
            self.round.tick(now)
        self._registry.forget(now)

    def stop(self, now: float) -> None:
        """End the round because the coordinator stops: forward if its version is durable, back otherwise."""
        if self.round:
            self.round.abandon("the coordinator is stopping", now)
        elif self.lease:
            self._end_lease("the coordinator is stopping")

    def flush(self, now: float) -> Sequence[ChannelEffect]:
        """Take the effects that are due: observations and messages, then commands, then at most one journal record."""
        round_, allowed = self.round, self.allowed_versions
        writing = any(isinstance(each, CHANNEL_RECORDS) for each in self._effects)  # the round decides after that write
        record = round_.decide(Epoch(self.epoch + 1), now) if round_ and not writing else None
        if round_:
            self._registry.recheck(*round_.participants.take_phase_changes())
        before, self._judged_against = self._judged_against, (round_, allowed)
        if (before[0] is not None and before[0] is not round_) or before[1] is not allowed:
            self._registry.recheck(*self.engines)  # not when a round begins: that alone changes no engine's readiness
        participants: Mapping[AgentId, Participant] = round_.participants.by_name if round_ else {}
        self._effects += self._registry.readiness_changes(participants, allowed, self.versions_allowed_while_waiting)
        due = self._pending_commands.due(now)
        if not (self._effects or due or record):
            return ()
        waiting, self._effects = self._effects, []
        effects: list[ChannelEffect] = [each for each in waiting if not isinstance(each, CHANNEL_RECORDS)]
        effects += due
        effects += [each for each in waiting if isinstance(each, CHANNEL_RECORDS)]
        if record:
            effects.append(record)
        return effects

    # -- steps ------------------------------------------------------------------------------------------------------

    def _observe(self, what: AnyObservation) -> None:
        self._effects.append(what)

    def _end_lease(self, reason: str) -> None:
        self._effects.extend(self._lease_holder.end(reason))

    def _close_round(self, record: RoundClosed, now: float) -> None:
        round_ = self.round
        if round_ is None:
            raise InvariantBroken("a round was closed while none is running", self.event_trace)
        of = HeldVersion(version=round_.version, manifest=round_.publish.manifest, table=round_.table)
        self._registry.round_closed(round_.participants.by_name.values(), of, now)
        self.round = None
        self._round_replies.remember(record.request, round_reply_of(record), now)
        stood_s = round_.publish.stood_s
        self._effects.append(
            RoundEnded(
                channel=self.name,
                outcome=record.done.outcome,
                done=record.done,
                stood_s=stood_s,
                nonfinite=round_.nonfinite,
                differing=round_.differing,
            )
        )
        self._end_lease("the round ended")
        self._effects.append(SendToAgents((round_.holder,), record.done))
        self._registry.settle_idle(self.epoch, self.committed, now)

    def _take_late_answer(self, engine: EngineRecord, message: EngineMessage) -> Decision:
        """Take an answer that no round waits for."""
        if self._registry.answered(engine, message, self.committed):
            self._registry.recheck(engine.name)
            engine.last_epoch = message.epoch
            return YES
        if message.epoch == engine.last_epoch:
            return YES  # a repetition of an answer that came in time
        return Decision(
            RefusalCode.STALE_EPOCH, f"no round of epoch {message.epoch} is running; the highest was {self.epoch}"
        )

    # -- decisions ----------------------------------------------------------------------------------------------------

    def _settling_epoch(self, engine: EngineRecord) -> Epoch:
        """The epoch of commands to an engine outside a round: the highest that any engine can have seen.

        While a lease has no round yet, this is the epoch before that of the lease: a late answer under the lease's own
        epoch would count as one in the coming round, and a higher epoch would make the engine ignore that round. The
        exception is an engine that has seen the lease's epoch already.
        """
        if self.lease is None or self.round is not None:
            return self.epoch
        return self.epoch if engine.seen_epoch >= self.lease.epoch else Epoch(self.lease.epoch - 1)

    def _takes_part(self, name: AgentId) -> bool:
        return self.phase(name) not in (None, *FINISHED)

    def _is_committed(self, message: Publish) -> bool:
        held = self.committed
        return held is not None and held.version == message.version and held.table == message.table

    def _is_newest(self, done: RoundDone) -> bool:
        """Whether the version that the round of `done` committed is the current one, whatever its digest table."""
        since = [past for past in self.history if past.epoch >= done.epoch]
        return len(since) == 1 and since[0].version == done.version

    def _taken(self, owner: ChannelOwner, run: str) -> Decision:
        last = f", which committed version {self.committed.version} last" if self.committed else ""
        found = f"channel {self.name!r} belongs to run {owner.run!r} of trainer {owner.trainer!r}{last}"
        advice = "if that run is over, or this one is to replace it, connect once with takeover=True (--takeover)"
        return Decision(RefusalCode.CHANNEL_TAKEN, f"{found}, and this is run {run!r}: {advice}")

    def _version_not_newer(self, version: Version) -> Decision:
        found = self.committed.version if self.committed else None
        return Decision(
            RefusalCode.VERSION_NOT_NEWER,
            f"found version {version}, committed is {found}: publish a higher one, or go back with rollback=True",
        )

    def _may_begin(self, message: Publish, missing: str, routes: Mapping[AgentId, Route]) -> Decision:  # noqa: PLR0911  # a list of reasons
        if self.round:
            return Decision(
                RefusalCode.NOT_ALLOWED, f"the round of version {self.round.version} is running under this lease"
            )
        if message.rollback and not (self.lease and self.lease.rollback):
            return Decision(RefusalCode.NOT_ALLOWED, "this lease was acquired without rollback: acquire again, with it")
        older = self.committed and message.version <= self.committed.version
        if older and not (message.rollback or message.catch_up):
            return self._version_not_newer(message.version)
        if missing:
            return _unknown(missing)
        if reason := self._ignored_by_all(message.epoch):
            return Decision(RefusalCode.STALE_EPOCH, reason)
        if not (message.table or any(each.transport for each in routes.values())):
            return Decision(
                RefusalCode.NOT_ALLOWED, "no engine is here that takes a deferred digest table: name the table"
            )
        reason = _impossible(message, is_committed=self._is_committed(message))
        return Decision(RefusalCode.NOT_ALLOWED, reason) if reason else YES

    def _ignored_by_all(self, epoch: Epoch) -> str:
        """Why every engine would ignore a round of `epoch`; empty if at least one would not."""
        seen = [engine.seen_epoch for engine in self.engines.values() if engine.alive]
        return f"{ahead(min(seen), epoch)}: acquire again" if seen and min(seen) > epoch else ""

    def _may_take_sent(self, message: Sent, missing: str) -> Decision:
        """Whether the digest table that `message` names agrees with the one named before."""
        known = self.round.table if self.round else ""
        if not (message.table or known):
            return Decision(RefusalCode.NOT_ALLOWED, "the digest table was deferred and is not known yet: name it")
        if known and message.table not in ("", known):
            return Decision(
                RefusalCode.NOT_ALLOWED, f"found table {message.table[:12]}, expected {known[:12]} as said before"
            )
        return _unknown(missing) if missing else YES

    def _routes(
        self, trainer: Agent, *, snapshot: bool = False, among: Container[AgentId] | None = None
    ) -> Mapping[AgentId, Route]:
        return self._registry.routes(
            trainer.trainer or UNDESCRIBED_TRAINER, trainer.topology, snapshot=snapshot, among=among
        )

    def _routes_of(
        self, message: Publish, trainer: Agent, *, among: Container[AgentId] | None = None
    ) -> Mapping[AgentId, Route]:
        """The routes by which engines, all or those in `among`, would take the version of `message`."""
        routes = self._routes(trainer, snapshot=message.mode == SNAPSHOT, among=among)
        return routes if message.table else open_routes(routes)


def _impossible(publish: Publish, *, is_committed: bool) -> str:
    """Why a round cannot be carried out as requested; empty if it can."""
    policy = publish.policy
    if publish.catch_up and not is_committed:
        return "a resync brings what is committed: the version is another one, or the weights have changed since"
    if policy.flush and policy.pause is PauseMode.IN_PLACE:
        return "pause in_place keeps the KV cache: publish with flush off"
    if 0 < policy.max_paused < policy.min_engines:
        found = f"{policy.min_engines} engines are to be verified and at most {policy.max_paused} are paused at a time"
        return f"{found}: raise max_paused, or lower min_engines"
    return ""


def ahead(seen: Epoch, epoch: Epoch) -> str:
    """Why an engine that has seen epoch `seen` ignores messages of `epoch`."""
    return f"has seen epoch {seen}, this is {epoch}: an older journal was restored, or one begun anew"


def _unknown(blob: str) -> Decision:
    return Decision(RefusalCode.UNKNOWN_BLOB, f"blob {blob} is not here: put it, then ask again")
