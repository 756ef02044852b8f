"""One channel: its committed version, its lease, its round and its engines. Pure.

Takes what agents say, the journal's answers and the time to whom they concern: its `LeaseHolder`, its `Round` or its
`EngineRegistry`. What it wants sent, written down or noted it leaves in `out`, in order; after a record nothing follows
until the record is durable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from ..protocol import (
    Abandon,
    Acquire,
    AgentId,
    Channel as ChannelId,
    EngineHealth,
    EngineMessage,
    Epoch,
    Heartbeat,
    HeldVersion,
    Incarnation,
    InvariantBroken,
    Offered,
    PauseMode,
    Publish,
    RefusalCode,
    Release,
    RoundDone,
    Send,
    Sent,
    ToAgent,
    ToEngine,
    Topology,
    TrainerInfo,
    Version,
)
from .effect_queue import RECORDS, ChannelRecord, Out, Tell, together
from .effects import AnyObservation, Committed, EngineAhead, EpochRaised, EpochTaken, RoundClosed, RoundEnded
from .engine_record import EngineRecord, VersionWindow, readiness
from .engine_registry import EngineRegistry
from .event_trace import STORY
from .lease import Lease, LeaseHolder, may_acquire, may_use
from .limits import Limits, earlier
from .membership import Agent
from .participant import Participant
from .pending_commands import PendingCommands
from .reply_cache import (
    YES,
    Decision,
    PastVersion,
    Restored,
    RoundReplies,
    already_committed,
    ending,
    never_begun,
    remembered,
)
from .round import Round
from .route import Route, Routing, open_routes
from .states import SETTLED, EnginePhase, RoundState
from .waves import in_turn


class Publisher(msgspec.Struct, frozen=True):
    """Who published last, in this life of the coordinator, and how much."""

    name: AgentId
    incarnation: Incarnation
    info: TrainerInfo
    topology: Topology | None
    version: Version
    bytes: int


NOBODY: Final = TrainerInfo(host="", device="", ranks=0, transports=())
"""Of a trainer that described nothing."""
SNAPSHOT: Final = "snapshot"
"""`Publish.mode` of a version whose trainer goes on meanwhile."""


class Standing:
    """How one channel stands."""

    def __init__(
        self, name: ChannelId, limits: Limits, routing: Routing, restored: Restored, *, stride: int = 1
    ) -> None:
        """`stride`: by so much an epoch is taken above what another life of the coordinator may have given out."""
        self.name = name
        self.epoch: Epoch = restored.epoch
        self.window = VersionWindow(restored.committed)
        self.committed_epoch: Epoch = restored.committed_epoch
        self.history: tuple[PastVersion, ...] = restored.history
        self.round: Round | None = None
        self.publisher: Publisher | None = None
        self.out: list[Out] = []
        self.story: deque[object] = deque(maxlen=STORY)
        self._stride = stride
        self._limits = limits
        self._duties = PendingCommands(limits.retry_s, limits.retry_max_s)
        self._answers = RoundReplies(restored.answers)
        self._tenure = LeaseHolder(name, limits, self.story)
        self._fleet = EngineRegistry(name, limits, routing, self._duties)
        self.engines: Mapping[AgentId, EngineRecord] = self._fleet.engines
        self._raise_at = 0.0
        """From when on what an engine says may raise the epoch once more."""
        self._turns: tuple[AgentId, ...] = ()
        """The order in which engines had their turns last."""
        self._outlook: tuple[Round | None, VersionWindow] = (None, VersionWindow())
        """By what all engines were last judged together."""

    @property
    def committed(self) -> HeldVersion | None:
        """The version that is durable."""
        return self.window.committed

    @property
    def lease(self) -> Lease | None:
        """Who may publish."""
        return self._tenure.lease

    @property
    def calm(self) -> bool:
        """Whether nobody's next step waits for a message."""
        return self.round is None and self.lease is None and not self._duties

    def next_deadline(self) -> float | None:
        """When `tick` or `flush` has something to do."""
        of_round = self.round.next_deadline() if self.round else None
        of_lease = self._tenure.next_deadline(in_round=self.round is not None)
        return earlier(self._duties.next_deadline(), earlier(of_round, of_lease))

    def pinned(self) -> set[str]:
        """Blobs that are needed."""
        needed: set[str] = set()
        if self.committed:
            needed.update((self.committed.manifest, self.committed.table))
        if self.round:
            needed.update(filter(None, (self.round.publish.manifest, self.round.table)))
        return needed

    def phase(self, name: AgentId) -> EnginePhase | None:
        """Where an engine stands in the running round."""
        member = self.round.members.get(name) if self.round else None
        return member.phase if member else None

    def window_of(self, name: AgentId) -> VersionWindow:
        """What an engine may serve."""
        return self.window_of_waiting if self.phase(name) is EnginePhase.PREPARED else self.window

    @property
    def window_of_waiting(self) -> VersionWindow:
        """What who is prepared may serve: also the version before, while it waits for its turn in a round."""
        round_ = self.round
        takes_turns = round_ is not None and round_.durable and not round_.publish.catch_up
        return self.window.also(round_.replaced) if round_ and takes_turns else self.window

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
            phase = self.phase(engine.name)
            ready = readiness(engine, phase, self.window_of(engine.name)).ok
            if ready is not self._fleet.announced(engine.name):
                wrong.append(f"{engine.name} is {'ready' if ready else 'not ready'}, and nobody was told")
            if ready and not self.window_of(engine.name).allows(engine.held):
                wrong.append(f"{engine.name} is ready, but holds {engine.held}")
            if phase is EnginePhase.SERVING and (self.committed is None or self.round is None):
                wrong.append(f"{engine.name} serves what was never committed")
        if wrong:
            raise InvariantBroken("; ".join(wrong), tuple(self.story))

    # -- for who decides --------------------------------------------------------------------------------------------

    def _settling_epoch(self, engine: EngineRecord) -> Epoch:
        """Under which an engine outside a round is told what to do: the highest that any engine can have seen.

        Not that of a lease under which nothing was published yet: what is answered to it late would be taken for an
        answer in the round that this lease begins. Nor a higher one then, which would make the engine deaf to that
        round; unless it is so already.
        """
        if self.lease is None or self.round is not None:
            return self.epoch
        return self.epoch if engine.seen >= self.lease.epoch else Epoch(self.lease.epoch - 1)

    def _takes_part(self, name: AgentId) -> bool:
        return self.phase(name) not in (None, *SETTLED)

    def _is_committed(self, message: Publish) -> bool:
        held = self.committed
        return held is not None and held.version == message.version and held.table == message.table

    def _is_newest(self, done: RoundDone) -> bool:
        """Whether what the round of `done` has committed is what is committed. Its table may have followed."""
        since = [past for past in self.history if past.epoch >= done.epoch]
        return len(since) == 1 and since[0].version == done.version

    def _not_newer(self, version: Version) -> Decision:
        found = self.committed.version if self.committed else None
        return Decision(
            RefusalCode.VERSION_NOT_NEWER,
            f"found version {version}, committed is {found}: publish a higher one, or say rollback",
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
            return self._not_newer(message.version)
        if missing:
            return _unknown(missing)
        if reason := self._all_deaf_to(message.epoch):
            return Decision(RefusalCode.STALE_EPOCH, reason)
        if not (message.table or any(each.transport for each in routes.values())):
            return Decision(RefusalCode.NOT_ALLOWED, "no engine is here to which an open table could be given: name it")
        reason = _contradicts(message, is_committed=self._is_committed(message))
        return Decision(RefusalCode.NOT_ALLOWED, reason) if reason else YES

    def _all_deaf_to(self, epoch: Epoch) -> str:
        """Why no engine would hear a round of `epoch`; empty where one may."""
        seen = [engine.seen for engine in self.engines.values() if engine.alive]
        return f"{ahead(min(seen), epoch)}: acquire again" if seen and min(seen) > epoch else ""

    def _may_be_sent(self, message: Sent, missing: str) -> Decision:
        """Whether what `message` says of the table agrees with what was said before."""
        known = self.round.table if self.round else ""
        if not (message.table or known):
            return Decision(RefusalCode.NOT_ALLOWED, "the table was left open and is not known yet: name it")
        if known and message.table not in ("", known):
            return Decision(
                RefusalCode.NOT_ALLOWED, f"found table {message.table[:12]}, expected {known[:12]} as said before"
            )
        return _unknown(missing) if missing else YES

    def _routes(
        self, trainer: Agent, *, snapshot: bool = False, among: Container[AgentId] | None = None
    ) -> Mapping[AgentId, Route]:
        return self._fleet.routes(trainer.trainer or NOBODY, trainer.topology, snapshot=snapshot, among=among)

    def _routes_of(
        self, message: Publish, trainer: Agent, *, among: Container[AgentId] | None = None
    ) -> Mapping[AgentId, Route]:
        """By which each engine, or each `among` them, would take what `message` begins."""
        routes = self._routes(trainer, snapshot=message.mode == SNAPSHOT, among=among)
        return routes if message.table else open_routes(routes)


def _contradicts(publish: Publish, *, is_committed: bool) -> str:
    """Why a round cannot be carried out as it is asked for; empty when it can."""
    policy = publish.policy
    if publish.catch_up and not is_committed:
        return "a catch-up brings what is committed: the version is another one, or the weights have changed since"
    if policy.flush and policy.pause is PauseMode.IN_PLACE:
        return "pause in_place keeps the KV cache: publish with flush off"
    if 0 < policy.max_paused < policy.min_engines:
        found = f"{policy.min_engines} engines are to be verified and at most {policy.max_paused} stand still at a time"
        return f"{found}: raise max_paused, or lower min_engines"
    return ""


def ahead(seen: Epoch, epoch: Epoch) -> str:
    """Why an engine that has seen `seen` does not hear what is said at `epoch`."""
    return f"has seen epoch {seen}, this is {epoch}: an older journal was restored, or one begun anew"


def _unknown(blob: str) -> Decision:
    return Decision(RefusalCode.UNKNOWN_BLOB, f"blob {blob} is not here: put it, then ask again")


LEAP: Final = 2**24
"""By so much an engine's word raises the epoch at most, once in a heartbeat: whoever lies is years from the highest."""


class Channel(Standing):
    """The machine of one channel."""

    # -- trainers ---------------------------------------------------------------------------------------------------

    def acquire(self, agent: Agent, message: Acquire, now: float) -> Decision:
        """Ask for the lease. When nothing speaks against it, the answer follows once the epoch is durable."""
        verdict = may_acquire(
            self.lease,
            agent.name,
            agent.incarnation,
            round_=self.round.state if self.round else None,
            now=now,
            lease_s=self._limits.lease_s,
        )
        if not verdict.ok:
            return verdict
        if self.committed and message.version < self.committed.version and not message.rollback:
            return self._not_newer(message.version)
        self.out.append(self._tenure.ask(agent, message, Epoch(self.epoch + (1 if self.epoch else self._stride))))
        return YES

    def release(self, agent: Agent, message: Release) -> Decision:
        """Give back a lease under which nothing was published."""
        verdict = may_use(self.lease, agent.name, agent.incarnation, message.epoch, self.epoch)
        if verdict.ok and self.round:
            return Decision(RefusalCode.NOT_ALLOWED, "a round is running under this lease: send Abandon instead")
        if verdict.ok:
            self._end_lease("released")
        return verdict

    def publish(self, agent: Agent, message: Publish, missing: str, now: float) -> Decision:
        """Begin the round. `missing` names a blob that has to be put first."""
        engines = self._fleet.behind(self.committed) if message.catch_up else self._fleet.infos()
        lacked = message.catch_up and engines and not (self.round and self.round.publish.request == message.request)
        if other := self._answers.contradicts(message):
            return other
        if self._answers.get(message.request) or (self._is_committed(message) and not lacked):
            self.repeat_done(agent, message)
            return YES
        verdict = may_use(self.lease, agent.name, agent.incarnation, message.epoch, self.epoch)
        routes = self._routes_of(message, agent, among=engines if message.catch_up else None)
        if verdict.ok:
            verdict = self._may_begin(message, missing, routes)
        if not verdict.ok:
            return verdict
        if message.policy.max_paused and not message.catch_up:
            self._turns = in_turn(self._turns, [name for name in engines if routes[name].transport])
            engines = {**{name: engines[name] for name in self._turns}, **engines}
        info = agent.trainer or NOBODY
        self.publisher = Publisher(agent.name, agent.incarnation, info, agent.topology, message.version, message.bytes)
        self.round = Round(
            message,
            agent.name,
            routes,
            engines,
            self._fleet.capacity(self.committed, engines, routes, message.policy, catch_up=message.catch_up),
            limits=self._limits,
            duties=self._duties,
            story=self.story,
            note=self._note,
            now=now,
        )
        self.round.start(now)
        for engine in self.engines.values():
            if engine.seen > message.epoch:
                self._heed(engine, now)
        return YES

    def repeat_done(self, agent: Agent, message: Publish) -> None:
        """Answer a `Publish` whose round is over."""
        known = self._answers.get(message.request)
        done = known.done if known else None
        newest = self._is_committed(message) or (done is not None and self._is_newest(done))
        if not (known and known.closed) and newest and self.round is None:
            done = already_committed(message, self.committed_epoch, self._fleet.holders(self.committed))
            if self._tenure.held_by(agent):
                self._end_lease("the version was committed already")
        if done:
            self.out.append(Tell((agent.name,), done))

    def transferring(self, agent: Agent, message: Offered | Sent, missing: str, now: float) -> Decision:
        """The trainer's half of the transports stands, or is over. `missing` names a blob that has to be put first."""
        verdict = may_use(self.lease, agent.name, agent.incarnation, message.epoch, self.epoch)
        if not verdict.ok or self.round is None:
            return verdict
        if isinstance(message, Offered):
            self.round.offered(message.epoch, message.offers, message.failed, now)
        elif self.round.state in (RoundState.PREPARING, RoundState.OFFERING):
            return Decision(RefusalCode.NOT_ALLOWED, f"nothing was offered under epoch {message.epoch} yet")
        else:
            verdict = self._may_be_sent(message, missing)
            if verdict.ok:
                self.round.sent(message.epoch, message.table, message.failed, message.spared, now)
        return verdict

    def abandon(self, agent: Agent, message: Abandon, now: float) -> Decision:
        """The trainer cannot go on. It may not know of a re-drive yet, so any epoch of its lease will do."""
        lease = self.lease
        epoch = lease.epoch if lease and lease.first_epoch <= message.epoch <= lease.epoch else message.epoch
        verdict = may_use(lease, agent.name, agent.incarnation, epoch, self.epoch)
        if verdict.ok and lease:
            if self.round:
                end = self.round.trainer_lost if self.round.across else self.round.abandon
                end(f"abandoned by {agent.name}: {message.reason}", now)
            else:
                self._end_lease(f"abandoned: {message.reason}")
                self.out.append(Tell((agent.name,), never_begun(lease.version, message)))
        return verdict

    def trainer_joined(self, agent: Agent, now: float) -> None:
        """A trainer said `Hello`: tell it at once what it may have missed."""
        last = self.publisher
        if last is None or (last.name, last.incarnation) != (agent.name, agent.incarnation):
            return
        if self.round:
            self._duties.hurry(agent.name, now)
        elif self._answers.last:
            self.out.append(Tell((agent.name,), self._answers.last))

    def trainer_heard(self, agent: Agent, now: float) -> None:
        """A trainer is alive; if it holds the lease, that goes on."""
        self._tenure.heard(agent, now)

    def trainer_lost(self, agent: Agent, reason: str, now: float) -> None:
        """A trainer left for good."""
        if self._tenure.held_by(agent):
            self._end_lease(reason)
            if self.round:
                self.round.trainer_lost(f"trainer {agent.name} {reason}", now)

    # -- engines ----------------------------------------------------------------------------------------------------

    def engine_joined(self, agent: Agent, now: float) -> None:
        """An engine said `Hello`: go on with its round where it stands, or settle what it is to do."""
        known = self.engines.get(agent.name)
        if known and known.incarnation != agent.incarnation and self.round:
            self.round.lost(agent.name, f"restarted as {agent.incarnation}")
        engine = self._fleet.joined(agent)
        engine.lends(self.committed, lent=engine.info.lent)
        member = self.round.members.get(agent.name) if self.round else None
        if member and member.phase not in SETTLED:
            self._duties.hurry(agent.name, now)
        else:
            self._fleet.settle(engine, self._settling_epoch(engine), self.committed, now)

    def engine_located(self, name: AgentId, topology: Topology) -> None:
        """An engine's agent said where it is: that counts from the next round on."""
        self._fleet.located(name, topology)

    def engine_heard(self, name: AgentId, message: Heartbeat, now: float) -> bool:
        """A heartbeat may say that the server changed under the agent. Returns whether it did."""
        engine = self.engines.get(name)
        if engine is None:
            return False
        first, engine.heard = not engine.heard, True
        moved = message.epoch > min(engine.seen, self.epoch) and self._saw(engine, message.epoch, now)
        idle = not engine.serving and self._duties.get(name) is None and not self._takes_part(name)
        if first and engine.untold and idle:
            self._fleet.settle(engine, self._settling_epoch(engine), self.committed, now)
            moved = True
        if message.health is None:
            return moved
        engine.lends(self.committed, lent=message.lent)
        if (engine.health, engine.held) == (message.health, message.held) and not engine.strange:
            return moved
        engine.strange = False
        recovered = engine.health is not EngineHealth.CLEAN and message.health is EngineHealth.CLEAN
        engine.health, engine.held = message.health, message.held
        self._fleet.touch(name)
        if engine.health is not EngineHealth.CLEAN:
            engine.serving = False
        # Whoever loaded the committed version by itself is told to serve it.
        arrived = engine.health is EngineHealth.PENDING and engine.held is not None and engine.held == self.committed
        if (recovered or arrived) and not self._takes_part(name) and self._duties.get(name) is None:
            self._fleet.settle(engine, self._settling_epoch(engine), self.committed, now)
        return True

    def _saw(self, engine: EngineRecord, epoch: Epoch, now: float) -> bool:
        """It says which epoch it has seen. The channel's is to be far above that, durably, step by step."""
        engine.seen = epoch
        moved = self._heed(engine, now)
        if epoch <= self.epoch or now < self._raise_at:
            return moved
        self._raise_at = now + self._limits.heartbeat_s
        above = Epoch(min(epoch + self._stride, self.epoch + LEAP))
        self.out.append(EpochRaised(channel=self.name, epoch=above, engine=engine.name))
        return True

    def _heed(self, engine: EngineRecord, now: float) -> bool:
        """An engine is deaf to all below the epoch that it has seen: no round waits for it, and it is settled above.

        Returns whether anything came of it.
        """
        member = self.round.members.get(engine.name) if self.round else None
        deaf = member is not None and member.epoch < engine.seen and self._takes_part(engine.name)
        if deaf and member is not None and self.round:
            self.round.lost(engine.name, f"it {ahead(engine.seen, member.epoch)}")
        unheard = self.epoch >= engine.seen > max(engine.last_epoch, engine.settled_at)
        if engine.alive and unheard and not self._takes_part(engine.name):
            self._fleet.settle(engine, self._settling_epoch(engine), self.committed, now)
            return True
        return deaf

    def engine_lost(self, name: AgentId, reason: str, now: float) -> None:
        """An engine fell silent or said `Bye`."""
        self._fleet.lost(name, reason, now)
        if self.round:
            self.round.lost(name, reason)
        self._duties.drop(name)

    def engine_answered(self, name: AgentId, message: EngineMessage, now: float) -> Decision:
        """Take an engine's answer at the epoch at which it was asked. A repetition finds its phase over: no effect."""
        engine, round_, epoch = self.engines[name], self.round, message.epoch
        if epoch > self.epoch:
            return Decision(RefusalCode.NOT_ALLOWED, f"epoch {epoch} was never taken; the highest is {self.epoch}")
        member = round_.members.get(name) if round_ is not None else None
        if round_ is None or member is None or member.phase in SETTLED:
            return self._take_late(engine, message)
        if epoch != member.epoch:
            return Decision(RefusalCode.STALE_EPOCH, f"found epoch {epoch}, expected {member.epoch}")
        round_.answered(member, message, now)
        if engine.absorb(message, member, self.window.committed):
            self._fleet.touch(name)
        engine.last_epoch, engine.owes = epoch, False
        return YES

    def unsent(self, name: AgentId, message: ToAgent, reason: str, now: float) -> None:
        """An agent cannot be told `message`: what it would have answered is not waited for."""
        round_, told = self.round, f"{message.kind} {reason}"
        if isinstance(message, Send) and round_ is not None and message.epoch == round_.epoch:
            round_.abandon(told, now)
        elif isinstance(message, ToEngine) and self._takes_part(name) and round_ is not None:
            round_.unsent(round_.members[name], message.epoch, told, now)
        elif self._duties.get(name) is message:
            self._fleet.unsent(name, told)

    # -- the journal's answers --------------------------------------------------------------------------------------

    def persisted(self, record: ChannelRecord, now: float) -> None:
        """`record` is durable: do what depended on it."""
        match record:
            case EpochTaken():
                self.epoch = record.epoch
                if record.redrive and self.round:
                    self._tenure.redriven(record.epoch)
                    self.round.epoch_taken(record.epoch, now)
                else:
                    again = self.committed is not None and record.version == self.committed.version
                    lacking = self._fleet.behind(self.committed) if again and not record.rollback else None
                    routes = partial(self._routes, among=lacking)
                    self.out.extend(self._tenure.grant(record, self.committed, self._fleet.infos(), routes, now))
            case EpochRaised():
                note = EngineAhead(channel=self.name, engine=record.engine, known=self.epoch, epoch=record.epoch)
                self.out.append(note)
                self.epoch = record.epoch
                for engine in self.engines.values():
                    self._heed(engine, now)
            case Committed():
                if self.committed and record.version <= self.committed.version and not record.rollback:
                    raise InvariantBroken(
                        f"{self.name} goes from {self.committed.version} to {record.version}", self.story
                    )
                if self.round:
                    self.round.replaced = self.committed
                committed = HeldVersion(version=record.version, manifest=record.manifest, table=record.table)
                max_lag = self.round.publish.policy.max_lag if self.round else 0
                self.window = self.window.after(committed, max_lag, rollback=record.rollback)
                self.committed_epoch = record.epoch
                self.history = remembered(self.history, record)
                self._fleet.overtaken(self.epoch, committed, now)
                if self.round:
                    self.round.committed(now)
            case RoundClosed():
                self._close(record, now)

    def not_persisted(self, record: ChannelRecord, reason: str, now: float, *, again: bool = True) -> None:
        """`record` could not be written: nothing that depends on it happens. `again`: it may be tried later."""
        match record:
            case EpochTaken():
                if record.redrive and self.round:
                    self.round.epoch_refused(reason)
                else:
                    self.out.extend(self._tenure.refuse(reason))
            case EpochRaised():
                pass  # the engine says it again
            case Committed():
                if self.round:
                    self.round.commit_refused(reason, now, again=again)
            case RoundClosed():
                self._close(record, now)  # only the memory of the answer is at stake, not the version

    # -- time -------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed."""
        lease = self.lease
        if lease and (reason := self._tenure.overdue(now, in_round=self.round is not None)):
            self._end_lease(reason)
            if self.round:
                self.round.trainer_lost(f"trainer {lease.holder} was {reason}", now)
        if self.round:
            self.round.tick(now)
        self._fleet.forget(now)

    def stop(self, now: float) -> None:
        """Bring the round to an end, forward if it is durable, back if not."""
        if self.round:
            self.round.abandon("the coordinator is stopping", now)
        elif self.lease:
            self._end_lease("the coordinator is stopping")

    def flush(self, now: float) -> Sequence[Out]:
        """Everything to be sent, noted and written now, in this order; at most one record, and it comes last."""
        round_, window = self.round, self.window
        busy = any(isinstance(each, RECORDS) for each in self.out)  # then the round's turn is when that is written
        wanted = round_.decide(Epoch(self.epoch + 1), now) if round_ and not busy else None
        if round_:
            self._fleet.touch_many(round_.take_moved())
        before, self._outlook = self._outlook, (round_, window)
        if (before[0] is not None and before[0] is not round_) or before[1] is not window:
            self._fleet.touch_all()  # a round that begins changes nothing for those who take part
        members: Mapping[AgentId, Participant] = round_.members if round_ else {}
        self.out += self._fleet.readiness_changes(members, window, self.window_of_waiting)
        due = self._duties.due(now)
        if not (self.out or due or wanted):
            return ()
        waiting, self.out = self.out, []
        out: list[Out] = [each for each in waiting if not isinstance(each, RECORDS)]
        out += together(due)
        out += [each for each in waiting if isinstance(each, RECORDS)]
        if wanted:
            out.append(wanted)
        return out

    # -- small things -----------------------------------------------------------------------------------------------

    def _note(self, what: AnyObservation) -> None:
        self.out.append(what)

    def _end_lease(self, reason: str) -> None:
        self.out.extend(self._tenure.end(reason))

    def _close(self, record: RoundClosed, now: float) -> None:
        round_ = self.round
        if round_ is None:
            raise InvariantBroken("a round was closed that is not there", self.story)
        of = HeldVersion(version=round_.version, manifest=round_.publish.manifest, table=round_.table)
        self._fleet.left_by(round_.members.values(), of)
        self.round = None
        self._answers.remember(record.request, ending(record))
        stood_s = round_.publish.stood_s
        self.out.append(RoundEnded(channel=self.name, outcome=record.done.outcome, done=record.done, stood_s=stood_s))
        self._end_lease("the round ended")
        self.out.append(Tell((round_.holder,), record.done))
        self._fleet.settle_idle(self.epoch, self.committed, now)

    def _take_late(self, engine: EngineRecord, message: EngineMessage) -> Decision:
        """The answer of an engine that no round waits for."""
        if self._fleet.answered(engine, message, self.committed):
            self._fleet.touch(engine.name)
            engine.last_epoch = message.epoch
            return YES
        if message.epoch == engine.last_epoch:
            return YES  # a repetition of what was answered in time
        return Decision(
            RefusalCode.STALE_EPOCH, f"no round of epoch {message.epoch} is running; the highest was {self.epoch}"
        )
