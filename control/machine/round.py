"""One round: a version on its way into the engines of a channel, or back out of them. Pure.

The round decides when everybody may go on; what concerns one engine alone is decided in its `Participants`. It sends
nothing by itself: commands go to `PendingCommands`, which repeats them until they are answered.

What happens to it is noted when it happens; what follows from that is found in one place, `decide`, asked once for all
that came together. That goes on as long as nothing has to be waited for, and ends with a record when one has to be
durable before the round goes on. Nothing of the new version is told to an engine before `committed` was called, and
after that there is no way back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import assert_never

from ..protocol import (
    AgentId,
    Channel,
    Digest,
    Endpoint,
    EngineInfo,
    EngineMessage,
    Epoch,
    HeldVersion,
    Outcome,
    Publish,
    RoundDone,
    StragglerPolicy,
    Version,
    clip,
)
from .effects import AnyObservation, Committed, EpochTaken, RoundClosed, StateEntered, TransferRetried
from .limits import Limits
from .participant import Participant
from .participants import HOPEFUL, SERVING_ON, STANDING, Participants
from .pending_commands import PendingCommands
from .reply_cache import question
from .route import Route
from .states import BEFORE_COMMIT, CLOCK, ROUND_MOVES, SENDING, THROUGH, EnginePhase, RoundState, move
from .waves import Capacity


class Round:
    """The machine of one round, from `Publish` to `RoundDone`: takes what happens to it, and decides what follows."""

    def __init__(
        self,
        publish: Publish,
        holder: AgentId,
        routes: Mapping[AgentId, Route],
        engines: Mapping[AgentId, EngineInfo],
        capacity: Capacity,
        *,
        limits: Limits,
        duties: PendingCommands,
        story: deque[object],
        note: Callable[[AnyObservation], None],
        now: float,
    ) -> None:
        self.publish = publish
        self.holder = holder
        self.channel: Channel = publish.channel
        self.version: Version = publish.version
        self.epoch: Epoch = publish.epoch
        self.state = RoundState.IDLE
        self.reason = ""
        self.replaced: HeldVersion | None = None
        """What was committed before the version was."""
        self._limits = limits
        self._duties = duties
        self._cohort = Participants(
            publish, routes, engines, capacity, limits=limits, duties=duties, story=story, note=note
        )
        self.members: Mapping[AgentId, Participant] = self._cohort.members
        self._story = story
        self._note = note
        self._began_at = now
        self._since = now
        self._deadline = now
        self._seconds: dict[str, float] = {}
        self._over = False
        """Nothing can be sent any more, to anybody."""
        self.durable = publish.catch_up
        """The version is: the round can only go forward."""
        self._sent = False
        self._sent_once = False
        self._makes_room = False
        """Who was told to leave in this state is waited for."""

    # -- what happens to it -----------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Send `Prepare` to every engine that has a transport. Without any engine the version commits at once."""
        self._enter(RoundState.PREPARING, now, self._limits.prepare_s + self._limits.grace_s)
        self._cohort.prepare(now)

    def answered(self, member: Participant, message: EngineMessage, now: float) -> None:
        """An engine of the round answered at its current epoch. Answers that come too late change nothing."""
        self._cohort.answered(member, message, now)

    def offered(self, epoch: Epoch, offers: tuple[Endpoint, ...], failed: Mapping[str, str], now: float) -> None:
        """The trainer's half stands: the engines of the last `Send` may come. `failed` says why some may not."""
        if self.state is not RoundState.OFFERING or epoch != self.epoch:
            return
        self._duties.drop(self.holder)
        self._enter(RoundState.PAUSING, now, self._limits.pause_s + self._limits.grace_s)
        self._cohort.transfer(epoch, offers, failed, now)

    def sent(self, epoch: Epoch, table: Digest, failed: Mapping[str, str], spared: Sequence[str], now: float) -> None:
        """The trainer's half of the transfer is over. Engines in `failed` get a little time to speak for themselves.

        `table` is that of the version where it was open.
        """
        if self.state not in SENDING or epoch != self.epoch:
            return
        if not self.table:
            self._cohort.learn(table)
        self._transfer_over()
        self._cohort.doubt(failed, spared, now)

    def lost(self, name: AgentId, reason: str) -> None:
        """An engine is gone, or another incarnation has its name. It no longer holds up the round."""
        self._cohort.lost(name, reason)

    def unsent(self, member: Participant, epoch: Epoch, reason: str, now: float) -> None:
        """A member cannot be told a command of `epoch`."""
        if epoch == member.epoch:
            self._cohort.unsent(member, reason, now)

    def trainer_lost(self, reason: str, now: float) -> None:
        """The lease is gone. Before the bytes are across that ends the round; afterwards it can do without.

        They are across when the trainer has said so, or all engines have.
        """
        self._over = True
        self._duties.drop(self.holder)
        if self.state is RoundState.PREPARING:
            self._abort(reason, now)
        elif self.state is RoundState.OFFERING or self.state in SENDING:
            self._give_up_transfer(reason, now)

    def abandon(self, reason: str, now: float) -> None:
        """Somebody in charge wants the round to end. What is being made durable goes through nevertheless."""
        if self.state in BEFORE_COMMIT:
            self._abort(reason, now)
        elif self.state is RoundState.RESUMING and self._cohort.waiting:
            self._over = True
            self._leave_waiting(reason, now)

    def epoch_taken(self, epoch: Epoch, now: float) -> None:
        """`epoch` is durable: send everything again to the engines that broke, and to those whose turn it is."""
        self.epoch = epoch
        broken = tuple(member.name for member in self._cohort.within(EnginePhase.BROKEN))
        if broken:
            self._note(TransferRetried(channel=self.channel, version=self.version, epoch=epoch, engines=broken))
        self._offer(now)

    def epoch_refused(self, reason: str) -> None:
        """The journal took no new epoch: finish without the engines that broke."""
        self._over = True
        self.reason = reason

    def committed(self, now: float) -> None:
        """The version is durable: from here the round only rolls forward."""
        self.durable = True
        self._resume(now)

    def commit_refused(self, reason: str, now: float, *, again: bool) -> None:
        """The journal did not take the commit. It is asked `again` until `commit_s` is over; then the round aborts."""
        self.reason = reason
        until = self._since + self._limits.commit_s
        if now >= until or not again:
            self._abort(f"the version could not be made durable: {reason}", now)
        else:
            self._deadline = min(until, now + self._limits.probe_s)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._cohort.tick(now)
        if now >= self._deadline:
            self._timeout(now)

    # -- what is known of it ----------------------------------------------------------------------------------------

    def needs(self, trainer: AgentId) -> bool:
        """Engines stand still, or would, until this trainer's half of the transfer is over."""
        sends = self.state is RoundState.OFFERING or (self.state in SENDING and not self._sent)
        return sends and trainer == self.holder

    @property
    def across(self) -> bool:
        """By the trainer's word, and nothing is committed yet: without the trainer only re-drives are given up."""
        return self.state in BEFORE_COMMIT and self._sent_once and bool(self.table)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        given_up = self._cohort.next_deadline()
        return self._deadline if given_up is None else min(self._deadline, given_up)

    def take_moved(self) -> Iterable[AgentId]:
        """Engines that changed phase since this was asked last."""
        return self._cohort.take_moved()

    def age_s(self, now: float) -> float:
        """How long the round has been running."""
        return now - self._began_at

    def done(self, now: float) -> RoundDone:
        """The report for the trainer; also what the journal keeps, and has to be able to read again."""
        seconds = {**self._seconds, "total": now - self._began_at}
        if clock := CLOCK.get(self.state):
            seconds[clock] = seconds.get(clock, 0.0) + now - self._since
        told = sum(bool(member.reason) for member in self.members.values())
        reports = tuple(member.report(self.version, told) for member in self.members.values())
        return RoundDone(
            channel=self.channel,
            epoch=self.publish.epoch,
            version=self.version,
            outcome=Outcome.COMMITTED if self.durable else Outcome.ABORTED,
            reason=clip(self.reason),
            engines=reports,
            seconds=seconds,
        )

    def check(self) -> tuple[str, ...]:
        """What is wrong with the round, if anything."""
        return contradictions(self._cohort, self.state, self.epoch, self.version, durable=self.durable)

    @property
    def table(self) -> Digest:
        """Of the version; empty while it is open."""
        return self._cohort.table

    # -- decisions --------------------------------------------------------------------------------------------------

    def decide(self, next_epoch: Epoch, now: float) -> EpochTaken | Committed | RoundClosed | None:
        """Go on as long as nothing has to be waited for. Returns what has to be durable before it goes on further."""
        before = record = None
        while before is not self.state and record is None:
            before = self.state
            if self.publish.policy.slow is StragglerPolicy.QUORUM:
                self._hurry(now)
            record = self._go_on(next_epoch, now)
        return record

    def _go_on(self, next_epoch: Epoch, now: float) -> EpochTaken | Committed | RoundClosed | None:
        """Whether what this state waited for has come to its end."""
        match self.state:
            case RoundState.PREPARING:
                self._prepared(now)
            case RoundState.OFFERING:
                self._offered(now)
            case RoundState.PAUSING:
                self._paused(now)
            case RoundState.TRANSFERRING:
                self._transferred(now)
            case RoundState.VERIFYING:
                return self._verified(next_epoch, now)
            case RoundState.COMMITTING:
                return self._committing(now)
            case RoundState.RESUMING:
                return self._resumed(next_epoch, now)
            case RoundState.ABORTING:
                return self._closed(now) if self._cohort.settled else None
            case RoundState.IDLE:
                pass
            case _:
                assert_never(self.state)
        return None

    def _hurry(self, now: float) -> None:
        """Once a quorum is through this step, the rest has little time left."""
        phases = THROUGH.get(self.state)
        if phases and self._cohort.count(*phases) >= max(1, self.publish.policy.quorum):
            self._deadline = min(self._deadline, now + self.publish.policy.slow_s)

    def _prepared(self, now: float) -> None:
        if not self.members and not self.publish.policy.min_engines:
            self._enter(RoundState.COMMITTING, now, 0.0)
        elif self.durable and not self._cohort.count(*SERVING_ON):
            self._resume(now)
        elif not self._cohort.count(EnginePhase.PREPARING) and self._enough(now):
            (self._offer if self._cohort.room > 0 else self._stop)(now)

    def _offered(self, now: float) -> None:
        if not self._cohort.count(EnginePhase.PREPARED, EnginePhase.BROKEN):
            self._give_up_transfer("no engine is left to send to", now)
        else:
            self._enough(now)

    def _paused(self, now: float) -> None:
        if self._enough(now):
            self._withdraw(now)
            if not self._cohort.count(EnginePhase.PAUSING):
                self._cohort.release(now)
                self._enter(RoundState.TRANSFERRING, now, self.publish.policy.transfer_timeout_s + self._limits.grace_s)

    def _transferred(self, now: float) -> None:
        if self._enough(now):
            self._withdraw(now)
            if self._cohort.count(EnginePhase.TRANSFERRING):
                return
            if self._sent:
                self._enter(RoundState.VERIFYING, now, self._limits.verify_s + self._limits.grace_s)
            elif self._through and not self._cohort.count(EnginePhase.BROKEN):
                self._deadline = min(self._deadline, now + self._limits.reconnect_s)

    @property
    def _through(self) -> bool:
        """Nobody takes anything of the trainer's any more, and what they hold can be proven without it."""
        return bool(self.table) and not self._cohort.count(*STANDING)

    def _verified(self, next_epoch: Epoch, now: float) -> EpochTaken | None:
        """Commit, or drive what broke again, for which it takes an epoch. Who may not be driven again leaves."""
        if self._cohort.count(EnginePhase.TRANSFERRED, EnginePhase.TRANSFERRING):
            return None
        again = [] if self._over else self._cohort.drive_again()
        for member in self._cohort.within(EnginePhase.BROKEN):
            if member not in again:
                self._cohort.leave(member, member.reason, now)
        if not self._enough(now):
            return None
        lacking = 0 if self.durable else self._needed - self._cohort.count(EnginePhase.VERIFIED)
        more = self._cohort.waiting and not self._over and lacking > 0
        if again or (more and self._cohort.room >= lacking):
            return self._epoch(next_epoch)
        if more and self._cohort.makes_room:
            if not self._makes_room:  # who was told to leave serves again in a moment, or does not
                self._makes_room, self._deadline = True, now + self._limits.abort_s + self._limits.grace_s
        elif more:
            self._stop(now)
        elif self.durable:
            self._resume(now)
        else:
            self._enter(RoundState.COMMITTING, now, 0.0)
        return None

    def _committing(self, now: float) -> Committed | None:
        """Ask the journal, now or once more, unless too few are verified: those that were may be gone meanwhile."""
        if now < self._deadline:
            return None
        verified = self._cohort.within(EnginePhase.VERIFIED)
        if len(verified) < self._needed:
            found = f"{len(verified)} verified engines are left, {self._needed} are needed"
            self._abort(f"{found}{f' ({self.reason})' if self.reason else ''}", now)
            return None
        return Committed(
            channel=self.channel,
            epoch=self.epoch,
            version=self.version,
            manifest=self.publish.manifest,
            table=self.table,
            request=self.publish.request,
            announced=self.publish.epoch,
            question=question(self.publish),
            engines=tuple(member.name for member in verified),
            rollback=self.publish.rollback,
        )

    def _resumed(self, next_epoch: Epoch, now: float) -> EpochTaken | RoundClosed | None:
        """Those who stood still serve again, or are out: the next ones may, if there are any and they can be served."""
        if not self._cohort.settled:
            others = self._cohort.count(EnginePhase.SERVING) or not self._cohort.count(EnginePhase.RESUMING)
            if others and not self._cohort.waiting:
                self._deadline = min(self._deadline, now + self._limits.straggle_s)
            return None
        if not self._cohort.waiting:
            return self._closed(now)
        if self._over:
            self._leave_waiting(self.reason or "the trainer can send no more", now)
        elif self._cohort.room > 0:
            return self._epoch(next_epoch)
        else:
            self._stop(now)
        return None

    def _stop(self, now: float) -> None:
        """Too many of those who stood still do not serve: nobody else is risked for this version."""
        self.reason = self._cohort.stopped()
        if not self.durable:
            self._abort(self.reason, now)
            return
        self._over = True
        self._leave_waiting(self.reason, now)
        if self.state is RoundState.PREPARING:
            self._resume(now)

    def _epoch(self, epoch: Epoch) -> EpochTaken:
        """To send under, once it is durable."""
        return EpochTaken(channel=self.channel, epoch=epoch, holder=self.holder, version=self.version, redrive=True)

    def _closed(self, now: float) -> RoundClosed:
        return RoundClosed(request=self.publish.request, done=self.done(now), question=question(self.publish))

    @property
    def _needed(self) -> int:
        """How many verified engines the version is committed with at least."""
        return max(1 if self.members else 0, self.publish.policy.min_engines)

    def _enough(self, now: float) -> bool:
        """Whether the version can still reach as many engines as its policy asks for; aborts when not."""
        left = self._cohort.count(*HOPEFUL)
        if left >= self._needed or self.durable:
            return True
        why = "; ".join(f"{m.name}: {m.reason}" for m in self.members.values() if m.reason)
        self._abort(f"{left} engines can take the version, {self._needed} are needed ({why or 'none joined'})", now)
        return False

    def _offer(self, now: float) -> None:
        self._enter(RoundState.OFFERING, now, self._limits.offer_s + self._limits.grace_s)
        self._sent = False
        self._duties.assign(self.holder, self._cohort.wanted(self.epoch), now)

    def _withdraw(self, now: float) -> None:
        """Tell the trainer whom it waits for in vain, as soon as that is known, until its half is over."""
        if not self._sent and (command := self._cohort.take_withdrawn(self.epoch)):
            self._duties.assign(self.holder, command, now)

    def _wait_for_sent_no_longer(self, waited: str, now: float) -> None:
        """The time of its engines is over. Only the trainer can say a table that is open: it has the whole deadline."""
        until = self._since + self.publish.policy.transfer_timeout_s + self._limits.grace_s
        if self.table:
            self._transfer_over()
        elif now < until:
            self._deadline = until
        else:
            self._abort(f"the trainer has not said the version's digest table: {waited}", now)

    def _transfer_over(self) -> None:
        self._sent = self._sent_once = True
        self._duties.drop(self.holder)

    def _resume(self, now: float) -> None:
        """Whoever holds the durable version, verified, is to serve it."""
        self._enter(RoundState.RESUMING, now, self._limits.resume_s + self._limits.grace_s)
        self._cohort.commit(now)

    def _leave_waiting(self, reason: str, now: float) -> None:
        for member in self._cohort.within(EnginePhase.PREPARED):
            self._cohort.leave(member, reason, now)
        self._deadline = max(self._deadline, now + self._limits.abort_s + self._limits.grace_s)

    def _give_up_transfer(self, reason: str, now: float) -> None:
        """The trainer can send no more. What is verified already is worth committing; the rest is left out."""
        verified = self._cohort.within(EnginePhase.VERIFIED, EnginePhase.TRANSFERRED)
        enough = (self.across or self._through) and len(verified) >= self._needed
        if not enough and not self.durable:
            self._abort(reason, now)
            return
        self._over = True
        self.reason = reason
        self._duties.drop(self.holder)
        for member in self._cohort.within(*STANDING, EnginePhase.BROKEN):
            self._cohort.leave(member, reason, now)
        if self.state is not RoundState.OFFERING:
            self._enter(RoundState.VERIFYING, now, self._limits.verify_s + self._limits.grace_s)
        elif self.durable:
            self._resume(now)
        else:
            self._enter(RoundState.COMMITTING, now, 0.0)

    def _abort(self, reason: str, now: float) -> None:
        """Back to the old version, for all that can; what is durable already is only brought to no more engines."""
        self.reason = reason
        self._over = True
        self._duties.drop(self.holder)
        kept = self._cohort.within(EnginePhase.VERIFIED) if self.durable else []
        for member in self._cohort.within(*HOPEFUL):
            if member not in kept:
                self._cohort.leave(member, member.reason, now, told=reason)
        if self.durable:
            self._resume(now)
        else:
            self._enter(RoundState.ABORTING, now, self._limits.abort_s + self._limits.grace_s)

    def _timeout(self, now: float) -> None:  # one case per state
        waited = f"no answer within {now - self._since:.0f} s"
        match self.state:
            case RoundState.PREPARING | RoundState.PAUSING:
                for member in self._cohort.within(EnginePhase.PREPARING, EnginePhase.PAUSING):
                    self._cohort.leave(member, f"{member.phase.value}: {waited}", now)
            case RoundState.OFFERING:
                self._give_up_transfer(f"the trainer offered nothing: {waited}", now)
            case RoundState.TRANSFERRING:
                for member in self._cohort.within(EnginePhase.TRANSFERRING):
                    self._cohort.leave(member, f"transfer: {waited}", now)
                self._wait_for_sent_no_longer(waited, now)
            case RoundState.VERIFYING if not self._makes_room:
                for member in self._cohort.within(EnginePhase.TRANSFERRED, EnginePhase.TRANSFERRING):
                    self._cohort.leave(member, f"verify: {waited}", now)
            case RoundState.VERIFYING | RoundState.RESUMING | RoundState.ABORTING:
                self._cohort.overdue(waited)
            case RoundState.COMMITTING | RoundState.IDLE:
                pass
            case _:
                assert_never(self.state)

    def _enter(self, state: RoundState, now: float, wait_s: float) -> None:
        left = self.state
        self.state = move(f"round {self.version}", ROUND_MOVES, left, state, self._story)
        spent = now - self._since
        if clock := CLOCK.get(left):
            self._seconds[clock] = self._seconds.get(clock, 0.0) + spent
        policy = self.publish.policy
        evicts = policy.slow is StragglerPolicy.EVICT_AFTER and state in THROUGH
        self._makes_room = False
        self._since, self._deadline = now, now + (min(wait_s, policy.slow_s) if evicts else wait_s)
        entered = StateEntered(
            channel=self.channel, version=self.version, epoch=self.epoch, left=left, state=state, seconds=spent
        )
        self._note(entered)


def contradictions(
    cohort: Participants, state: RoundState, epoch: Epoch, version: Version, *, durable: bool
) -> tuple[str, ...]:
    """What is wrong with a round that is in `state`, if anything."""
    wrong = list(cohort.check())
    phases = {member.phase for member in cohort.members.values()}
    if phases & {EnginePhase.RESUMING, EnginePhase.SERVING} and not durable:
        wrong.append(f"an engine was told of version {version} in {state}, before it was durable")
    if state in (RoundState.PREPARING, RoundState.OFFERING) and EnginePhase.TRANSFERRING in phases:
        wrong.append(f"an engine takes weights in {state}")
    if state in SENDING and cohort.invited(*SERVING_ON):
        wrong.append("an engine of the round was told nothing of its transfer")
    if state is RoundState.TRANSFERRING and phases & {EnginePhase.PAUSING, EnginePhase.PAUSED}:
        wrong.append("weights travel, and an engine was neither told to take them nor left out")
    if state is RoundState.RESUMING and phases & set(HOPEFUL) - {EnginePhase.PREPARED}:
        wrong.append("an engine was forgotten at the commit")
    if not cohort.table and (durable or state is RoundState.COMMITTING):
        wrong.append("a version is committed, and its digest table is open")
    if any(member.epoch > epoch for member in cohort.members.values()):
        wrong.append("an engine is ahead of its round's epoch")
    return tuple(wrong)
