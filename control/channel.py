"""One channel: its committed version, its lease, its round and its engines. Pure.

Decides who may publish, what an engine that comes (back) is told, and who is ready to serve. What it wants sent,
written down or noted it leaves in `out`, in order; after a record nothing follows until the record is durable.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

import msgspec

from .answers import Answers, already_committed, never_begun
from .duties import Duties
from .effects import (
    AnyObservation,
    Committed,
    EpochTaken,
    LeaseEnded,
    LeaseGranted,
    ReadinessChanged,
    RoundClosed,
    RoundEnded,
)
from .engines import Engine, readiness
from .errors import InvariantBroken
from .ids import AgentId, Epoch, Incarnation, RequestId, Version
from .ids import Channel as ChannelId
from .lease import YES, Lease, Verdict, may_acquire, may_use
from .limits import Limits
from .membership import Agent
from .messages import (
    Abandon,
    Abort,
    Acquire,
    Code,
    Commit,
    EngineHealth,
    EngineMessage,
    Failed,
    Granted,
    Heartbeat,
    Held,
    Offered,
    PauseMode,
    Publish,
    Refused,
    Release,
    RoundDone,
    Sent,
    Serving,
    Step,
    ToAgent,
    TrainerInfo,
)
from .round import Round, Want
from .states import SETTLED, EnginePhase, RoundState

STORY: Final = 64
"""Recent events that an error carries."""


class Tell(msgspec.Struct, frozen=True):
    """Send `message` to whatever connection `agent` is on."""

    agent: AgentId
    message: ToAgent


class Answer(msgspec.Struct, frozen=True):
    """The late answer to a request that had to wait for the journal."""

    agent: AgentId
    message: Granted | Refused


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal knows of a channel."""

    epoch: Epoch = Epoch(0)
    committed: Held | None = None
    committed_epoch: Epoch = Epoch(0)
    answers: Mapping[RequestId, RoundDone] = {}


ChannelRecord = EpochTaken | Committed | RoundClosed
Out = Tell | Answer | ChannelRecord | AnyObservation


class Channel:
    """The machine of one channel."""

    def __init__(self, name: ChannelId, limits: Limits, restored: Restored) -> None:
        self.name = name
        self.epoch: Epoch = restored.epoch
        self.committed: Held | None = restored.committed
        self.committed_epoch: Epoch = restored.committed_epoch
        self.lease: Lease | None = None
        self.round: Round | None = None
        self.engines: dict[AgentId, Engine] = {}
        self.out: list[Out] = []
        self.story: deque[str] = deque(maxlen=STORY)
        self._limits = limits
        self._duties = Duties(limits.retry_s, limits.retry_max_s)
        self._answers = Answers(restored.answers)
        self._asked: tuple[Agent, Acquire] | None = None
        self._holder: tuple[AgentId, Incarnation] | None = None
        self._ready: dict[AgentId, bool] = {}

    # -- trainers ---------------------------------------------------------------------------------------------------

    def acquire(self, agent: Agent, message: Acquire, now: float) -> Verdict:
        """Ask for the lease. When nothing speaks against it, the answer follows once the epoch is durable."""
        verdict = may_acquire(
            self.lease,
            agent.name,
            agent.incarnation,
            in_round=self.round is not None,
            now=now,
            lease_s=self._limits.lease_s,
        )
        if not verdict.ok:
            return verdict
        if self.committed and message.version < self.committed.version:
            return self._not_newer(message.version)
        self._asked = (agent, message)
        self.out.append(
            EpochTaken(channel=self.name, epoch=Epoch(self.epoch + 1), holder=agent.name, version=message.version)
        )
        return YES

    def release(self, agent: Agent, message: Release) -> Verdict:
        """Give back a lease under which nothing was published."""
        verdict = may_use(self.lease, agent.name, agent.incarnation, message.epoch, self.epoch)
        if verdict.ok and self.round:
            return Verdict(Code.NOT_ALLOWED, "a round is running under this lease: send Abandon instead")
        if verdict.ok:
            self._end_lease("released")
        return verdict

    def publish(self, agent: Agent, message: Publish, missing: str, now: float) -> Verdict:
        """Begin the round. `missing` names a blob that has to be put first."""
        if self._answers.knows(message.request) or self._is_committed(message):
            self.repeat_done(agent, message)
            return YES
        verdict = may_use(self.lease, agent.name, agent.incarnation, message.epoch, self.epoch)
        if verdict.ok:
            verdict = self._may_begin(message, missing)
        if not verdict.ok:
            return verdict
        self._holder = (agent.name, agent.incarnation)
        self.round = Round(
            message,
            agent.name,
            agent.trainer or TrainerInfo(host="", device="", ranks=0, transports=()),
            {engine.name: engine.as_info() for engine in self.engines.values() if engine.alive},
            limits=self._limits,
            duties=self._duties,
            story=self.story,
            now=now,
        )
        self.round.start(now)
        return YES

    def _may_begin(self, message: Publish, missing: str) -> Verdict:
        if self.round:
            return Verdict(Code.NOT_ALLOWED, f"the round of version {self.round.version} is running under this lease")
        if self.committed and message.version <= self.committed.version:
            return self._not_newer(message.version)
        if missing:
            return Verdict(Code.UNKNOWN_BLOB, f"blob {missing} is not here: put it, then publish again")
        if message.policy.flush and message.policy.pause is PauseMode.IN_PLACE:
            return Verdict(Code.NOT_ALLOWED, "pause in_place keeps the KV cache: publish with flush off")
        return YES

    def repeat_done(self, agent: Agent, message: Publish) -> None:
        """Answer a `Publish` whose round is over."""
        done = self._answers.get(message.request)
        if done is None and self._is_committed(message) and self.round is None:
            holders = [engine.name for engine in self.engines.values() if engine.alive and self._holds(engine)]
            done = already_committed(message, self.committed_epoch, holders)
            if self.lease and self.lease.holder == agent.name and self.lease.incarnation == agent.incarnation:
                self._end_lease("the version was committed already")
        if done:
            self.out.append(Tell(agent.name, done))

    def transferring(self, agent: Agent, message: Offered | Sent, now: float) -> Verdict:
        """The trainer's half of the transports stands, or is over."""
        verdict = may_use(self.lease, agent.name, agent.incarnation, message.epoch, self.epoch)
        if not verdict.ok or self.round is None:
            return verdict
        if isinstance(message, Offered):
            self.round.offered(message.epoch, message.offers, now)
        elif self.round.state is RoundState.OFFERING:
            return Verdict(Code.NOT_ALLOWED, f"nothing was offered under epoch {message.epoch} yet")
        else:
            self.round.sent(message.epoch, message.failed, now)
        return verdict

    def abandon(self, agent: Agent, message: Abandon, now: float) -> Verdict:
        """The trainer cannot go on. It may not know of a re-drive yet, so any epoch of its lease will do."""
        lease = self.lease
        epoch = lease.epoch if lease and lease.first_epoch <= message.epoch <= lease.epoch else message.epoch
        verdict = may_use(lease, agent.name, agent.incarnation, epoch, self.epoch)
        if verdict.ok and lease:
            if self.round:
                self.round.abandon(f"abandoned by {agent.name}: {message.reason}", now)
            else:
                self._end_lease(f"abandoned: {message.reason}")
                self.out.append(Tell(agent.name, never_begun(lease, message)))
        return verdict

    def trainer_joined(self, agent: Agent, now: float) -> None:
        """A trainer said `Hello`: tell it at once what it may have missed."""
        if self._holder != (agent.name, agent.incarnation):
            return
        if self.round:
            self._duties.hurry(agent.name, now)
        elif self._answers.last:
            self.out.append(Tell(agent.name, self._answers.last))

    def trainer_heard(self, agent: Agent, now: float) -> None:
        """A trainer is alive; if it holds the lease, that goes on."""
        if self.lease and self.lease.holder == agent.name and self.lease.incarnation == agent.incarnation:
            self.lease = msgspec.structs.replace(self.lease, heard_at=now)

    def trainer_lost(self, agent: Agent, reason: str, now: float) -> None:
        """A trainer left for good."""
        if self.lease and self.lease.holder == agent.name and self.lease.incarnation == agent.incarnation:
            self._end_lease(reason)
            if self.round:
                self.round.trainer_lost(f"trainer {agent.name} {reason}", now)

    # -- engines ----------------------------------------------------------------------------------------------------

    def engine_joined(self, agent: Agent, now: float) -> None:
        """An engine said `Hello`: go on with its round where it stands, or settle what it is to do."""
        known = self.engines.get(agent.name)
        if known and known.incarnation != agent.incarnation and self.round:
            self.round.lost(agent.name, f"restarted as {agent.incarnation}", now)
        engine = Engine.of(agent)
        self.engines[agent.name] = engine
        member = self.round.members.get(agent.name) if self.round else None
        if member and member.phase not in SETTLED:
            self._duties.hurry(agent.name, now)
        else:
            self._settle(engine, now)

    def engine_heard(self, name: AgentId, message: Heartbeat, now: float) -> bool:
        """A heartbeat may say that the server changed under the agent. Returns whether it did."""
        engine = self.engines.get(name)
        if engine is None or message.health is None or (engine.health, engine.held) == (message.health, message.held):
            return False
        recovered = engine.health is not EngineHealth.CLEAN and message.health is EngineHealth.CLEAN
        engine.health, engine.held = message.health, message.held
        if engine.health is not EngineHealth.CLEAN:
            engine.serving = False
        elif recovered and not self._takes_part(name) and self._duties.get(name) is None:
            self._settle(engine, now)
        return True

    def engine_lost(self, name: AgentId, reason: str, now: float) -> None:
        """An engine fell silent or said `Bye`."""
        if engine := self.engines.get(name):
            engine.alive, engine.serving, engine.reason, engine.lost_at = False, False, reason, now
        if self.round:
            self.round.lost(name, reason, now)
        self._duties.drop(name)

    def engine_answered(self, name: AgentId, message: EngineMessage, now: float) -> Verdict:
        """Take an engine's answer at the epoch at which it was asked. A repetition finds its phase over: no effect."""
        engine = self.engines[name]
        verdict = self._take_answer(engine, message, now)
        if verdict.ok:
            engine.last_epoch = message.epoch
        return verdict

    # -- the journal's answers --------------------------------------------------------------------------------------

    def persisted(self, record: ChannelRecord, now: float) -> None:
        """`record` is durable: do what depended on it."""
        match record:
            case EpochTaken():
                self.epoch = record.epoch
                if record.redrive and self.round:
                    if self.lease:
                        self.lease = msgspec.structs.replace(self.lease, epoch=record.epoch)
                    self.round.epoch_taken(record.epoch, now)
                else:
                    self._grant(record, now)
            case Committed():
                if self.committed and record.version <= self.committed.version:
                    raise InvariantBroken(
                        f"{self.name} goes from {self.committed.version} to {record.version}", self.story
                    )
                self.committed = Held(version=record.version, manifest=record.manifest, table=record.table)
                self.committed_epoch = record.epoch
                if self.round:
                    self.round.committed(now)
            case RoundClosed():
                self._close(record, now)

    def not_persisted(self, record: ChannelRecord, reason: str, now: float) -> None:
        """`record` could not be written: nothing that depends on it happens."""
        match record:
            case EpochTaken():
                if record.redrive and self.round:
                    self.round.epoch_refused(reason, now)
                elif self._asked:
                    agent, message = self._asked
                    self._asked = None
                    refused = Refused(request=message.request, code=Code.READ_ONLY, reason=reason, retry_after_s=2.0)
                    self.out.append(Answer(agent.name, refused))
            case Committed():
                if self.round:
                    self.round.commit_refused(reason, now)
            case RoundClosed():
                self._close(record, now)  # only the memory of the answer is at stake, not the version

    # -- time -------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed."""
        if lease := self.lease:
            if now >= lease.expires_at(self._limits.lease_s):
                self._end_lease(f"silent for {now - lease.heard_at:.1f} s")
                if self.round:
                    self.round.trainer_lost(f"trainer {lease.holder} was silent for {now - lease.heard_at:.1f} s", now)
            elif self.round is None and now >= lease.granted_at + self._limits.publish_s:
                self._end_lease(f"nothing published within {self._limits.publish_s:.0f} s")
        if self.round:
            self.round.tick(now)
        for engine in [e for e in self.engines.values() if not e.alive and now - e.lost_at > self._limits.forget_s]:
            del self.engines[engine.name]
            self._ready.pop(engine.name, None)

    def next_deadline(self) -> float | None:
        """When `tick` or `flush` has something to do."""
        times: list[float] = []
        if self.lease:
            times.append(self.lease.expires_at(self._limits.lease_s))
            if self.round is None:
                times.append(self.lease.granted_at + self._limits.publish_s)
        if self.round and (at := self.round.next_deadline()) is not None:
            times.append(at)
        if (at := self._duties.next_deadline()) is not None:
            times.append(at)
        return min(times, default=None)

    def stop(self, now: float) -> None:
        """Bring the round to an end, forward if it is durable, back if not."""
        if self.round:
            self.round.abandon("the coordinator is stopping", now)
        elif self.lease:
            self._end_lease("the coordinator is stopping")

    def flush(self, now: float) -> list[Out]:
        """Everything to be sent, noted and written now, in this order; at most one record, and it comes last."""
        if self.round:
            self.out.extend(self.round.notes)
            self.round.notes.clear()
        self._note_readiness()
        tells = [Tell(agent, command) for agent, command in self._duties.due(now)]
        out: list[Out] = [o for o in self.out if not isinstance(o, ChannelRecord)]
        out.extend(tells)
        out.extend(o for o in self.out if isinstance(o, ChannelRecord))
        self.out.clear()
        if self.round and (record := self._wanted(self.round, now)):
            out.append(record)
        return out

    # -- small things -----------------------------------------------------------------------------------------------

    def pinned(self) -> set[str]:
        """Blobs that are needed."""
        needed: set[str] = set()
        if self.committed:
            needed.update((self.committed.manifest, self.committed.table))
        if self.round:
            needed.update((self.round.publish.manifest, self.round.publish.table))
        return needed

    def phase(self, name: AgentId) -> EnginePhase | None:
        """Where an engine stands in the running round."""
        member = self.round.members.get(name) if self.round else None
        return member.phase if member else None

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
            if readiness(engine, phase, self.committed).ok and self.committed and engine.held != self.committed:
                wrong.append(f"{engine.name} is ready, but holds {engine.held}")
            if phase is EnginePhase.SERVING and (self.committed is None or self.round is None):
                wrong.append(f"{engine.name} serves what was never committed")
        if wrong:
            raise InvariantBroken("; ".join(wrong), tuple(self.story))

    def _takes_part(self, name: AgentId) -> bool:
        return self.phase(name) not in (None, *SETTLED)

    def _grant(self, record: EpochTaken, now: float) -> None:
        if self._asked is None:
            raise InvariantBroken(f"epoch {record.epoch} is durable, but nobody asked for it", self.story)
        agent, message = self._asked
        self._asked = None
        if self.lease:
            self._end_lease("its holder acquired again")
        self.lease = Lease(
            holder=agent.name,
            incarnation=agent.incarnation,
            epoch=record.epoch,
            first_epoch=record.epoch,
            version=message.version,
            granted_at=now,
            heard_at=now,
        )
        granted = Granted(
            request=message.request,
            channel=self.name,
            epoch=record.epoch,
            lease_s=self._limits.lease_s,
            committed=self.committed,
            engines={engine.name: engine.as_info() for engine in self.engines.values() if engine.alive},
        )
        self.out.append(Answer(agent.name, granted))
        note = LeaseGranted(channel=self.name, holder=agent.name, epoch=record.epoch, version=message.version)
        self.out.append(note)

    def _end_lease(self, reason: str) -> None:
        if lease := self.lease:
            self.lease = None
            self.out.append(LeaseEnded(channel=self.name, holder=lease.holder, epoch=lease.epoch, reason=reason))

    def _wanted(self, round_: Round, now: float) -> ChannelRecord | None:
        """The record that the round waits for; asked for once."""
        want, round_.wants = round_.wants, None
        match want:
            case Want.EPOCH:
                return EpochTaken(
                    channel=self.name,
                    epoch=Epoch(self.epoch + 1),
                    holder=round_.holder,
                    version=round_.version,
                    redrive=True,
                )
            case Want.COMMIT:
                return Committed(
                    channel=self.name,
                    epoch=round_.epoch,
                    version=round_.version,
                    manifest=round_.publish.manifest,
                    table=round_.publish.table,
                    request=round_.publish.request,
                    engines=round_.verified(),
                )
            case Want.CLOSE:
                return RoundClosed(request=round_.publish.request, done=round_.done(now))
            case None:
                return None

    def _close(self, record: RoundClosed, now: float) -> None:
        round_ = self.round
        if round_ is None:
            raise InvariantBroken("a round was closed that is not there", self.story)
        for member in round_.members.values():
            if member.phase not in SETTLED and (engine := self.engines.get(member.name)):
                engine.serving, engine.reason = False, member.reason
        self.round = None
        self._answers.remember(record.request, record.done)
        self.out.append(RoundEnded(channel=self.name, outcome=record.done.outcome, done=record.done))
        self._end_lease("the round ended")
        self.out.append(Tell(round_.holder, record.done))
        for engine in self.engines.values():
            if engine.alive and not engine.serving and self._duties.get(engine.name) is None and self._holds(engine):
                self._settle(engine, now)

    def _holds(self, engine: Engine) -> bool:
        return self.committed is not None and engine.held == self.committed

    def _settle(self, engine: Engine, now: float) -> None:
        """Tell an engine outside a round what to do: serve the committed version if it holds it, else its old one."""
        engine.serving = False
        if self.epoch == 0 and engine.health is EngineHealth.CLEAN:
            engine.serving = True  # nobody was ever allowed to pause it
            self._duties.drop(engine.name)
        elif self.committed and self._holds(engine):
            commit = Commit(
                channel=self.name,
                epoch=self.epoch,
                version=self.committed.version,
                table=self.committed.table,
                flush=True,
                deadline_s=self._limits.resume_s,
            )
            self._duties.assign(engine.name, commit, now)
        else:
            reason = "no round concerns you"
            abort = Abort(channel=self.name, epoch=self.epoch, reason=reason, deadline_s=self._limits.abort_s)
            self._duties.assign(engine.name, abort, now)

    def _take_answer(self, engine: Engine, message: EngineMessage, now: float) -> Verdict:
        member = self.round.members.get(engine.name) if self.round else None
        if message.epoch > self.epoch:
            return Verdict(Code.NOT_ALLOWED, f"epoch {message.epoch} was never taken; the highest is {self.epoch}")
        if self.round and member and member.phase not in SETTLED:
            if message.epoch != member.epoch:
                return Verdict(Code.STALE_EPOCH, f"found epoch {message.epoch}, expected {member.epoch}")
            self.round.answered(engine.name, message, now)
            engine.absorb(message, member, self.committed)
            return YES
        duty = self._duties.get(engine.name)
        if duty and duty.epoch == message.epoch:
            self._settled(engine, message, duty)
            return YES
        if message.epoch == engine.last_epoch:
            return YES  # a repetition of what was answered in time
        return Verdict(Code.STALE_EPOCH, f"no round of epoch {message.epoch} is running; the highest was {self.epoch}")

    def _settled(self, engine: Engine, message: EngineMessage, duty: object) -> None:
        if isinstance(message, Serving):
            engine.serving, engine.health, engine.reason = True, EngineHealth.CLEAN, ""
            if isinstance(duty, Commit) and self.committed and message.version == self.committed.version:
                engine.held = self.committed
            self._duties.drop(engine.name)
        elif isinstance(message, Failed):
            engine.health, engine.serving, engine.reason = message.health, False, message.reason
            if message.health is not EngineHealth.CLEAN or message.step in (Step.RESUME, Step.COMMIT):
                self._duties.drop(engine.name)

    def _note_readiness(self) -> None:
        for engine in self.engines.values():
            verdict = readiness(engine, self.phase(engine.name), self.committed)
            if self._ready.get(engine.name, False) is not verdict.ok:
                note = ReadinessChanged(channel=self.name, engine=engine.name, ready=verdict.ok, reason=verdict.reason)
                self.out.append(note)
            self._ready[engine.name] = verdict.ok

    def _is_committed(self, message: Publish) -> bool:
        held = self.committed
        return held is not None and held.version == message.version and held.table == message.table

    def _not_newer(self, version: Version) -> Verdict:
        found = self.committed.version if self.committed else None
        return Verdict(Code.VERSION_NOT_NEWER, f"found version {version}, committed is {found}: publish a higher one")
