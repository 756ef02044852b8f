"""One round: brings a version into the engines of a channel, or takes it back. Pure.

The round decides when all engines may go on to its next state; `Participants` decides what concerns one engine alone.
Commands go to `PendingCommands`, which repeats them until they are acknowledged.

Events only change what is known. `decide`, called once after all events that came together, does what follows from
them: it enters further states until the round has to wait, or until a journal record must be durable before the round
goes on. No engine is told to serve the new version before `committed` is called, and afterwards the round only goes
forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

from ..protocol import (
    AgentId,
    Channel,
    Digest,
    Endpoint,
    EngineInfo,
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
from .participants import (
    CAN_STILL_COMMIT,
    STILL_SERVING,
    TRANSFER_PENDING,
    FleetAtStart,
    Participants,
    PendingCommands,
)
from .states import (
    BARRIER_PHASES,
    BEFORE_COMMIT,
    ROUND_MOVES,
    SENDING,
    TIMED_AS,
    EnginePhase,
    Limits,
    RoundState,
    Route,
    move,
    question,
)


class Round:
    """The machine of one round, from `Publish` to `RoundDone`."""

    def __init__(
        self,
        publish: Publish,
        holder: AgentId,
        routes: Mapping[AgentId, Route],
        engines: Mapping[AgentId, EngineInfo],
        fleet: FleetAtStart,
        *,
        limits: Limits,
        pending_commands: PendingCommands,
        event_trace: deque[object],
        observe: Callable[[AnyObservation], None],
        now: float,
    ) -> None:
        """`holder` is the trainer with the lease; `engines` are those of the round, each with its route."""
        self.publish = publish
        self.holder = holder
        self.channel: Channel = publish.channel
        self.version: Version = publish.version
        self.epoch: Epoch = publish.epoch
        """Epoch of the latest attempt; higher than that of `publish` after a retry or in a later wave."""
        self.state = RoundState.IDLE
        self.reason = ""
        """Why the round failed, or brought its version to fewer engines."""
        self.nonfinite = self.differing = 0
        """What the trainer found in the weights, by its last `Sent`."""
        self.previous_version: HeldVersion | None = None
        """The version that was current before this round's was."""
        self.participants = Participants(
            publish,
            routes,
            engines,
            fleet,
            limits=limits,
            pending_commands=pending_commands,
            event_trace=event_trace,
            observe=observe,
        )
        self._limits = limits
        self._pending_commands = pending_commands
        self._event_trace = event_trace
        self._observe = observe
        self._began_at = now
        self._since = now
        """When `state` was entered."""
        self._deadline = now
        """When `state` times out."""
        self._state_seconds: dict[str, float] = {}
        """Seconds spent in the states that are over, by their names in `RoundDone`."""
        self._trainer_done = False
        """True once the trainer's half has ended; no transfer command may be issued."""
        self.durable = publish.catch_up
        """True once the version is durable: the round can only go forward. From the start in a resync."""
        self._transfer_sent = False
        """True once the trainer's half of the latest attempt is over."""
        self._ever_sent = False
        """True once the trainer's half of any attempt was over."""
        self._awaiting_room = False
        """True while VERIFYING waits for leaving engines to serve again, so that the next wave has room."""

    # -- events -----------------------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Send `Prepare` to every engine that has a route. Without any engine the version commits at once."""
        self._enter(RoundState.PREPARING, now, self._limits.prepare_s + self._limits.grace_s)
        self.participants.prepare(now)

    def offered(self, epoch: Epoch, offers: tuple[Endpoint, ...], failed: Mapping[str, str], now: float) -> None:
        """The trainer has opened its half of the transports; `failed` has the engines without an offer, and why."""
        if self.state is not RoundState.OFFERING or epoch != self.epoch:
            return
        self._pending_commands.drop(self.holder)
        self._enter(RoundState.PAUSING, now, self._limits.pause_s + self._limits.grace_s)
        self.participants.transfer(epoch, offers, failed, now)

    def sent(self, epoch: Epoch, table: Digest, failed: Mapping[str, str], spared: Sequence[str], now: float) -> None:
        """The trainer's half of the transfer is over. Engines in `failed` have `grace_s` to report for themselves.

        `table` is the version's digest table if it was deferred. For `spared`, see `Participants.mark_suspect`.
        """
        if self.state not in SENDING or epoch != self.epoch:
            return
        if not self.table:
            self.participants.set_table(table)
        self._transfer_over()
        self.participants.mark_suspect(failed, spared, now)

    def trainer_lost(self, reason: str, now: float) -> None:
        """The lease has ended. The round aborts unless the trainer, or every engine, reported a complete transfer."""
        self._trainer_done = True
        self._pending_commands.drop(self.holder)
        if self.state is RoundState.PREPARING:
            self._abort(reason, now)
        elif self.state is RoundState.OFFERING or self.state in SENDING:
            self._give_up_transfer(reason, now)

    def abandon(self, reason: str, now: float) -> None:
        """End the round by request of the trainer or an operator. A commit that is being written goes through."""
        if self.state in BEFORE_COMMIT:
            self._abort(reason, now)
        elif self.state is RoundState.RESUMING and self.participants.waiting:
            self._trainer_done = True
            self._exclude_waiting(reason, now)

    def epoch_taken(self, epoch: Epoch, now: float) -> None:
        """`epoch` is durable: begin the attempt under it, with the broken engines and those of the next wave."""
        self.epoch = epoch
        broken = tuple(participant.name for participant in self.participants.within(EnginePhase.BROKEN))
        if broken:
            self._observe(TransferRetried(channel=self.channel, version=self.version, epoch=epoch, engines=broken))
        self._begin_wave(now)

    def epoch_refused(self, reason: str) -> None:
        """The journal did not take a new epoch: finish without a retry."""
        self._trainer_done = True
        self.reason = reason

    def committed(self, now: float) -> None:
        """The version is durable: from here the round only goes forward."""
        self.durable = True
        self._resume(now)

    def commit_refused(self, reason: str, now: float, *, again: bool) -> None:
        """The journal did not take the commit. If `again`, retry until `commit_s` is over; then abort."""
        self.reason = reason
        until = self._since + self._limits.commit_s
        if now >= until or not again:
            self._abort(f"the version could not be made durable: {reason}", now)
        else:
            self._deadline = min(until, now + self._limits.probe_s)

    def tick(self, now: float) -> None:
        """Apply the deadlines that have passed."""
        self.participants.tick(now)
        if now >= self._deadline:
            self._timeout(now)

    # -- views ------------------------------------------------------------------------------------------------------

    def waits_for(self, trainer: AgentId) -> bool:
        """Whether engines are, or soon will be, paused until this trainer's half of the transfer is over."""
        sends = self.state is RoundState.OFFERING or (self.state in SENDING and not self._transfer_sent)
        return sends and trainer == self.holder

    @property
    def transfer_complete(self) -> bool:
        """True before the commit if a whole transfer was reported: without the trainer only retries are lost."""
        return self.state in BEFORE_COMMIT and self._ever_sent and bool(self.table)

    def next_deadline(self) -> float | None:
        """The time at which `tick` is due."""
        of_suspects = self.participants.next_deadline()
        return self._deadline if of_suspects is None else min(self._deadline, of_suspects)

    def age_s(self, now: float) -> float:
        """Seconds since the round began."""
        return now - self._began_at

    def seconds(self, now: float) -> dict[str, float]:
        """Seconds by phase until now, as in `RoundDone`."""
        seconds = {**self._state_seconds, "total": now - self._began_at}
        if timed_as := TIMED_AS.get(self.state):
            seconds[timed_as] = seconds.get(timed_as, 0.0) + now - self._since
        return seconds

    def done(self, now: float) -> RoundDone:
        """The report for the trainer, which the journal keeps too."""
        reasons = sum(bool(participant.reason) for participant in self.participants.by_name.values())
        reports = tuple(participant.report(self.version, reasons) for participant in self.participants.by_name.values())
        return RoundDone(
            channel=self.channel,
            epoch=self.publish.epoch,
            version=self.version,
            outcome=Outcome.COMMITTED if self.durable else Outcome.ABORTED,
            reason=clip(self.reason),
            engines=reports,
            seconds=self.seconds(now),
        )

    def check(self) -> tuple[str, ...]:
        """Every invariant of the round that does not hold, in words."""
        wrong = list(self.participants.check())
        phases = {participant.phase for participant in self.participants.by_name.values()}
        if phases & {EnginePhase.RESUMING, EnginePhase.SERVING} and not self.durable:
            wrong.append(f"an engine was told of version {self.version} in {self.state}, before it was durable")
        if self.state in (RoundState.PREPARING, RoundState.OFFERING) and EnginePhase.TRANSFERRING in phases:
            wrong.append(f"an engine takes weights in {self.state}")
        if self.state in SENDING and self.participants.in_wave(*STILL_SERVING):
            wrong.append("an engine of the wave has no transfer command")
        if self.state is RoundState.TRANSFERRING and phases & {EnginePhase.PAUSING, EnginePhase.PAUSED}:
            wrong.append("weights travel, and an engine was neither told to take them nor left out")
        if self.state is RoundState.RESUMING and phases & set(CAN_STILL_COMMIT) - {EnginePhase.PREPARED}:
            wrong.append("an engine was forgotten at the commit")
        if not self.table and (self.durable or self.state is RoundState.COMMITTING):
            wrong.append("a version is committed, and its digest table is not known")
        if any(participant.epoch > self.epoch for participant in self.participants.by_name.values()):
            wrong.append("an engine is ahead of its round's epoch")
        return tuple(wrong)

    @property
    def table(self) -> Digest:
        """Digest table of the version; empty while it is deferred."""
        return self.participants.table

    # -- decisions --------------------------------------------------------------------------------------------------

    def decide(self, next_epoch: Epoch, now: float) -> EpochTaken | Committed | RoundClosed | None:
        """Enter further states until one has to wait. Returns the record that must be durable before going on."""
        before = record = None
        while before is not self.state and record is None:
            before = self.state
            if self.publish.policy.slow is StragglerPolicy.QUORUM:
                self._shorten_for_quorum(now)
            record = self._go_on(next_epoch, now)
        return record

    def _go_on(self, next_epoch: Epoch, now: float) -> EpochTaken | Committed | RoundClosed | None:
        """Leave the current state if what it waits for has happened."""
        match self.state:
            case RoundState.PREPARING:
                self._leave_preparing(now)
            case RoundState.OFFERING:
                self._leave_offering(now)
            case RoundState.PAUSING:
                self._leave_pausing(now)
            case RoundState.TRANSFERRING:
                self._leave_transferring(now)
            case RoundState.VERIFYING:
                return self._leave_verifying(next_epoch, now)
            case RoundState.COMMITTING:
                return self._leave_committing(now)
            case RoundState.RESUMING:
                return self._leave_resuming(next_epoch, now)
            case RoundState.ABORTING:
                return self._closed(now) if self.participants.finished else None
            case RoundState.IDLE:
                pass
            case _:
                assert_never(self.state)
        return None

    def _shorten_for_quorum(self, now: float) -> None:
        """Give stragglers `slow_s` more once a quorum has reached the barrier of this state."""
        phases = BARRIER_PHASES.get(self.state)
        if phases and self.participants.count(*phases) >= max(1, self.publish.policy.quorum):
            self._deadline = min(self._deadline, now + self.publish.policy.slow_s)

    def _leave_preparing(self, now: float) -> None:
        if not self.participants.by_name and not self.publish.policy.min_engines:
            self._enter(RoundState.COMMITTING, now, 0.0)
        elif self.durable and not self.participants.count(*STILL_SERVING):
            self._resume(now)
        elif not self.participants.count(EnginePhase.PREPARING) and self._can_commit(now):
            (self._begin_wave if self.participants.wave_room > 0 else self._stop_waves)(now)

    def _leave_offering(self, now: float) -> None:
        if not self.participants.count(EnginePhase.PREPARED, EnginePhase.BROKEN):
            self._give_up_transfer("no engine is left to send to", now)
        else:
            self._can_commit(now)

    def _leave_pausing(self, now: float) -> None:
        if self._can_commit(now):
            self._withdraw_excluded(now)
            if not self.participants.count(EnginePhase.PAUSING):
                self.participants.transfer_paused(now)
                self._enter(RoundState.TRANSFERRING, now, self.publish.policy.transfer_timeout_s + self._limits.grace_s)

    def _leave_transferring(self, now: float) -> None:
        if self._can_commit(now):
            self._withdraw_excluded(now)
            if self.participants.count(EnginePhase.TRANSFERRING):
                return
            if self._transfer_sent:
                self._enter(RoundState.VERIFYING, now, self._limits.verify_s + self._limits.grace_s)
            elif self._all_transferred and not self.participants.count(EnginePhase.BROKEN):
                self._deadline = min(self._deadline, now + self._limits.reconnect_s)

    @property
    def _all_transferred(self) -> bool:
        """True if no engine still receives from the trainer, and the table is known: they can verify without it."""
        return bool(self.table) and not self.participants.count(*TRANSFER_PENDING)

    def _leave_verifying(self, next_epoch: Epoch, now: float) -> EpochTaken | None:
        """Commit; or retry the broken engines, which takes a new epoch. Engines without a retry left are excluded."""
        if self.participants.count(EnginePhase.TRANSFERRED, EnginePhase.TRANSFERRING):
            return None
        again = [] if self._trainer_done else self.participants.take_retries()
        for participant in self.participants.within(EnginePhase.BROKEN):
            if participant not in again:
                self.participants.leave(participant, participant.reason, now)
        if not self._can_commit(now):
            return None
        lacking = 0 if self.durable else self._needed - self.participants.count(EnginePhase.VERIFIED)
        more = self.participants.waiting and not self._trainer_done and lacking > 0
        if again or (more and self.participants.wave_room >= lacking):
            return self._next_epoch(next_epoch)
        if more and self.participants.room_expected:
            if not self._awaiting_room:  # leaving engines serve again in a moment, or are quarantined
                self._awaiting_room, self._deadline = True, now + self._limits.abort_s + self._limits.grace_s
        elif more:
            self._stop_waves(now)
        elif self.durable:
            self._resume(now)
        else:
            self._enter(RoundState.COMMITTING, now, 0.0)
        return None

    def _leave_committing(self, now: float) -> Committed | None:
        """Ask the journal for the commit, or abort if too few verified engines are left."""
        if now < self._deadline:
            return None
        verified = self.participants.within(EnginePhase.VERIFIED)
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
            engines=tuple(participant.name for participant in verified),
            rollback=self.publish.rollback,
        )

    def _leave_resuming(self, next_epoch: Epoch, now: float) -> EpochTaken | RoundClosed | None:
        """Once every engine of the wave serves or is excluded, begin the next wave or close the round."""
        if not self.participants.finished:
            others = self.participants.count(EnginePhase.SERVING) or not self.participants.count(EnginePhase.RESUMING)
            if others and not self.participants.waiting:
                self._deadline = min(self._deadline, now + self._limits.straggle_s)
            return None
        if not self.participants.waiting:
            return self._closed(now)
        if self._trainer_done:
            self._exclude_waiting(self.reason or "the trainer can send no more", now)
        elif self.participants.wave_room > 0:
            return self._next_epoch(next_epoch)
        else:
            self._stop_waves(now)
        return None

    def _stop_waves(self, now: float) -> None:
        """End a rolling round because too many engines of earlier waves do not serve: no other engine is risked."""
        self.reason = self.participants.why_stopped()
        if not self.durable:
            self._abort(self.reason, now)
            return
        self._trainer_done = True
        self._exclude_waiting(self.reason, now)
        if self.state is RoundState.PREPARING:
            self._resume(now)

    def _next_epoch(self, epoch: Epoch) -> EpochTaken:
        """The record of the epoch for the next attempt."""
        return EpochTaken(channel=self.channel, epoch=epoch, holder=self.holder, version=self.version, in_round=True)

    def _closed(self, now: float) -> RoundClosed:
        return RoundClosed(request=self.publish.request, done=self.done(now), question=question(self.publish))

    @property
    def _needed(self) -> int:
        """The smallest number of verified engines with which the version may be committed."""
        return max(1 if self.participants.by_name else 0, self.publish.policy.min_engines)

    def _can_commit(self, now: float) -> bool:
        """Whether the version can still reach as many engines as its policy requires; aborts if not."""
        left = self.participants.count(*CAN_STILL_COMMIT)
        if left >= self._needed or self.durable:
            return True
        why = "; ".join(f"{m.name}: {m.reason}" for m in self.participants.by_name.values() if m.reason)
        missing = f"none joined: start `weightbus engine-agent --channel {self.channel}` beside each server"
        self._abort(f"{left} engines can take the version, {self._needed} are needed ({why or missing})", now)
        return False

    def _begin_wave(self, now: float) -> None:
        self._enter(RoundState.OFFERING, now, self._limits.offer_s + self._limits.grace_s)
        self._transfer_sent = False
        self._pending_commands.assign(self.holder, self.participants.next_wave(self.epoch), now)

    def _withdraw_excluded(self, now: float) -> None:
        """While the trainer sends, tell it of engines that were excluded from the attempt."""
        if not self._transfer_sent and (command := self.participants.take_withdraw(self.epoch)):
            self._pending_commands.assign(self.holder, command, now)

    def _transfer_timed_out(self, waited: str, now: float) -> None:
        """The engines' time is over. A trainer that owes a deferred table has the whole deadline of the transfer."""
        until = self._since + self.publish.policy.transfer_timeout_s + self._limits.grace_s
        if self.table:
            self._transfer_over()
        elif now < until:
            self._deadline = until
        else:
            self._abort(f"the trainer has not said the version's digest table: {waited}", now)

    def _transfer_over(self) -> None:
        self._transfer_sent = self._ever_sent = True
        self._pending_commands.drop(self.holder)

    def _resume(self, now: float) -> None:
        """Tell every verified engine to serve the durable version."""
        self._enter(RoundState.RESUMING, now, self._limits.resume_s + self._limits.grace_s)
        self.participants.commit(now)

    def _exclude_waiting(self, reason: str, now: float) -> None:
        for participant in self.participants.within(EnginePhase.PREPARED):
            self.participants.leave(participant, reason, now)
        self._deadline = max(self._deadline, now + self._limits.abort_s + self._limits.grace_s)

    def _give_up_transfer(self, reason: str, now: float) -> None:
        """The trainer can send no more: commit with the engines that are verified, and exclude the others."""
        verified = self.participants.within(EnginePhase.VERIFIED, EnginePhase.TRANSFERRED)
        enough = (self.transfer_complete or self._all_transferred) and len(verified) >= self._needed
        if not enough and not self.durable:
            self._abort(reason, now)
            return
        self._trainer_done = True
        self.reason = reason
        self._pending_commands.drop(self.holder)
        for participant in self.participants.within(*TRANSFER_PENDING, EnginePhase.BROKEN):
            self.participants.leave(participant, reason, now)
        if self.state is not RoundState.OFFERING:
            self._enter(RoundState.VERIFYING, now, self._limits.verify_s + self._limits.grace_s)
        elif self.durable:
            self._resume(now)
        else:
            self._enter(RoundState.COMMITTING, now, 0.0)

    def _abort(self, reason: str, now: float) -> None:
        """Return the engines to the previous version. If the version is durable, only bring it to no more engines."""
        self.reason = reason
        self._trainer_done = True
        self._pending_commands.drop(self.holder)
        kept = self.participants.within(EnginePhase.VERIFIED) if self.durable else []
        for participant in self.participants.within(*CAN_STILL_COMMIT):
            if participant not in kept:
                self.participants.leave(participant, participant.reason, now, told=reason)
        if self.durable:
            self._resume(now)
        else:
            self._enter(RoundState.ABORTING, now, self._limits.abort_s + self._limits.grace_s)

    def _timeout(self, now: float) -> None:
        waited = f"no answer within {now - self._since:.0f} s"
        match self.state:
            case RoundState.PREPARING | RoundState.PAUSING:
                for participant in self.participants.within(EnginePhase.PREPARING, EnginePhase.PAUSING):
                    self.participants.leave(participant, f"{participant.phase.value}: {waited}", now)
            case RoundState.OFFERING:
                self._give_up_transfer(f"the trainer offered nothing: {waited}", now)
            case RoundState.TRANSFERRING:
                for participant in self.participants.within(EnginePhase.TRANSFERRING):
                    self.participants.leave(participant, f"transfer: {waited}", now)
                self._transfer_timed_out(waited, now)
            case RoundState.VERIFYING if not self._awaiting_room:
                for participant in self.participants.within(EnginePhase.TRANSFERRED, EnginePhase.TRANSFERRING):
                    self.participants.leave(participant, f"verify: {waited}", now)
            case RoundState.VERIFYING | RoundState.RESUMING | RoundState.ABORTING:
                self.participants.stop_awaiting(waited)
            case RoundState.COMMITTING | RoundState.IDLE:
                pass
            case _:
                assert_never(self.state)

    def _enter(self, state: RoundState, now: float, wait_s: float) -> None:
        left = self.state
        self.state = move(f"round {self.version}", ROUND_MOVES, left, state, self._event_trace)
        spent = now - self._since
        if timed_as := TIMED_AS.get(left):
            self._state_seconds[timed_as] = self._state_seconds.get(timed_as, 0.0) + spent
        policy = self.publish.policy
        evicts = policy.slow is StragglerPolicy.EVICT_AFTER and state in BARRIER_PHASES
        self._awaiting_room = False
        self._since, self._deadline = now, now + (min(wait_s, policy.slow_s) if evicts else wait_s)
        entered = StateEntered(
            channel=self.channel, version=self.version, epoch=self.epoch, left=left, state=state, seconds=spent
        )
        self._observe(entered)
