"""One round: a version on its way into the engines of a channel, or back out of them. Pure.

The round decides when everybody may go on; what concerns one engine alone is decided in its `Cohort`. It sends nothing
by itself: commands go to `Duties`, which repeats them until they are answered. What is known of it stands in its
`Progress`. What it needs of its channel stands in `wants`, and `record` writes it out: a new epoch or the commit made
durable, or to be closed. Nothing of the new version is told to an engine before `committed` was called, and after that
there is no way back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

from . import patience
from .answers import question
from .cohort import HOPEFUL, SERVING_ON, STANDING
from .effects import Committed, EpochTaken, Redriven, RoundClosed
from .ids import AgentId, Digest, Epoch
from .member import Member
from .messages import EngineMessage, Offer, Outcome, SlowEngines
from .progress import Progress, Want
from .states import BEFORE_COMMIT, SENDING, EnginePhase, RoundState


class Round(Progress):
    """The machine of one round: takes what happens to it, and decides what follows."""

    # -- what happens to it -----------------------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Send `Prepare` to every engine that has a transport. Without any engine the version commits at once."""
        self._enter(RoundState.PREPARING, now, self._limits.prepare_s + self._limits.grace_s)
        self._cohort.prepare(now)
        self._advance(now)

    def answered(self, member: Member, message: EngineMessage, now: float) -> None:
        """An engine of the round answered at its current epoch. Answers that come too late change nothing."""
        self._cohort.answered(member, message, now)
        self._heard = True

    def decide(self, now: float) -> None:
        """Go on if what was `answered` allows it: asked once for all answers that came together."""
        if self._heard:
            self._heard = False
            self._advance(now)

    def offered(self, epoch: Epoch, offers: tuple[Offer, ...], failed: Mapping[str, str], now: float) -> None:
        """The trainer's half stands: the engines of the last `Send` may come. `failed` says why some may not."""
        if self.state is not RoundState.OFFERING or epoch != self.epoch:
            return
        self._duties.drop(self.holder)
        self._enter(RoundState.PAUSING, now, self._limits.pause_s + self._limits.grace_s)
        self._cohort.transfer(epoch, offers, failed, now)
        self._advance(now)

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
        self._advance(now)

    def lost(self, name: AgentId, reason: str, now: float) -> None:
        """An engine is gone, or another incarnation has its name. It no longer holds up the round."""
        if self._cohort.lost(name, reason):
            self._advance(now)

    def trainer_lost(self, reason: str, now: float) -> None:
        """The lease is gone. Before the bytes are across that ends the round; afterwards it can do without.

        They are across when the trainer has said so, or all engines have.
        """
        if self._trainer_gone:
            return
        self._trainer_gone = True
        self._duties.drop(self.holder)
        if self.state is RoundState.PREPARING:
            self._abort(reason, now)
        elif self.state is RoundState.OFFERING or self.state in SENDING:
            self._give_up_transfer(reason, now)
        self._advance(now)

    def abandon(self, reason: str, now: float) -> None:
        """Somebody in charge wants the round to end. What is being made durable goes through nevertheless."""
        if self.state in BEFORE_COMMIT:
            self._abort(reason, now)
            self._advance(now)
        elif self.state is RoundState.RESUMING and self._cohort.waiting:
            self._last_attempt, self.wants = True, None
            self._leave_waiting(reason, now)

    def epoch_taken(self, epoch: Epoch, now: float) -> None:
        """`epoch` is durable: send everything again to the engines that broke, and to those whose turn it is."""
        self.wants = None
        self.epoch = epoch
        broken = tuple(member.name for member in self._cohort.within(EnginePhase.BROKEN))
        if broken:
            self.notes.append(Redriven(channel=self.channel, version=self.version, epoch=epoch, engines=broken))
        self._offer(now)
        self._advance(now)

    def epoch_refused(self, reason: str, now: float) -> None:
        """The journal took no new epoch: finish without the engines that broke."""
        self.wants = None
        self._last_attempt = True
        self.reason = reason
        self._advance(now)

    def committed(self, now: float) -> None:
        """The version is durable: from here the round only rolls forward."""
        self.wants = None
        self.outcome = Outcome.COMMITTED
        self.durable = True
        self._resume(now)
        self._advance(now)

    def commit_refused(self, reason: str, now: float) -> None:
        """The journal did not take the commit. It is asked again until `commit_s` is over; then the round aborts."""
        self.wants = None
        self.reason = reason
        if now >= self._commit_until:
            self._abort(f"the version could not be made durable: {reason}", now)
            self._advance(now)
        else:
            self._deadline = min(self._commit_until, now + self._limits.probe_s)

    def tick(self, now: float) -> None:
        """Time has passed."""
        self._cohort.tick(now)
        if now >= self._deadline and self.wants is None:
            self._timeout(now)
        self._advance(now)

    # -- what it asks for -------------------------------------------------------------------------------------------

    def record(self, next_epoch: Epoch, now: float) -> EpochTaken | Committed | RoundClosed | None:
        """What has to be durable before the round goes on; asked for once."""
        want, self.wants = self.wants, None
        if want is None:
            return None
        match want:
            case Want.EPOCH:
                return EpochTaken(
                    channel=self.channel, epoch=next_epoch, holder=self.holder, version=self.version, redrive=True
                )
            case Want.COMMIT:
                return Committed(
                    channel=self.channel,
                    epoch=self.epoch,
                    version=self.version,
                    manifest=self.publish.manifest,
                    table=self.table,
                    request=self.publish.request,
                    announced=self.publish.epoch,
                    question=question(self.publish),
                    engines=tuple(member.name for member in self._cohort.within(EnginePhase.VERIFIED)),
                    rollback=self.publish.rollback,
                )
            case Want.CLOSE:
                return RoundClosed(request=self.publish.request, done=self.done(now), question=question(self.publish))

    # -- decisions --------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Go on as long as nothing has to be waited for."""
        before = None
        while before is not self.state and self.wants is None:
            before = self.state
            if self.publish.policy.slow is SlowEngines.QUORUM:
                self._hurry(now)
            self._go_on(now)

    def _go_on(self, now: float) -> None:
        """Whether what this state waited for has come to its end. COMMITTING waits for the disk."""
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
                self._verified(now)
            case RoundState.RESUMING:
                if self._cohort.settled:
                    self._next_wave(now)
            case RoundState.ABORTING:
                if self._cohort.settled:
                    self.wants = Want.CLOSE
            case _:
                pass

    def _hurry(self, now: float) -> None:
        """Once a quorum is through this step, the rest has little time left."""
        phases = patience.THROUGH.get(self.state)
        if (
            phases
            and self._hurried is not self.state
            and patience.enough(self.publish.policy, self._cohort.count(*phases))
        ):
            self._hurried = self.state
            self._deadline = min(self._deadline, now + self.publish.policy.slow_s)

    def _prepared(self, now: float) -> None:
        if not self.members and not self.publish.policy.min_engines:
            self._commit(now)
        elif self.durable and not self._cohort.count(*SERVING_ON):
            self._resume(now)
        elif not self._cohort.count(EnginePhase.PREPARING) and self._enough(now):
            self._offer(now)

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

    def _verified(self, now: float) -> None:
        if not self._cohort.count(EnginePhase.TRANSFERRED, EnginePhase.TRANSFERRING):
            self._conclude(now)

    def _enough(self, now: float) -> bool:
        """Whether the version can still reach as many engines as its policy asks for; aborts when not."""
        needed = max(1, self.publish.policy.min_engines)
        left = self._cohort.count(*HOPEFUL)
        if left >= needed or self.durable:
            return True
        why = "; ".join(f"{m.name}: {m.reason}" for m in self.members.values() if m.reason)
        self._abort(f"{left} engines can take the version, {needed} are needed ({why or 'none joined'})", now)
        return False

    def _offer(self, now: float) -> None:
        self._enter(RoundState.OFFERING, now, self._limits.offer_s + self._limits.grace_s)
        self._sent = False
        self._duties.assign(self.holder, self._cohort.wanted(self.epoch), now)

    def _withdraw(self, now: float) -> None:
        """Tell the trainer whom it waits for in vain, as soon as that is known, until its half is over."""
        if self._sent or self._trainer_gone:
            return
        if command := self._cohort.take_withdrawn(self.epoch):
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

    def _conclude(self, now: float) -> None:
        """Commit, or drive what broke again. Who may not be driven again leaves."""
        again = [] if self._over else self._cohort.drive_again()
        for member in self._cohort.within(EnginePhase.BROKEN):
            if member not in again:
                self._cohort.leave(member, member.reason, now)
        if not self._enough(now):
            return
        verified = self._cohort.count(EnginePhase.VERIFIED)
        more = self._cohort.waiting and not self._over and verified < max(1, self.publish.policy.min_engines)
        if again or (more and not self.durable):
            self.wants = Want.EPOCH
        elif self.durable:
            self._resume(now)
        elif not verified and self._cohort.waiting:
            self._abort("nobody can send to the engines that are left", now)
        else:
            self._commit(now)

    def _resume(self, now: float) -> None:
        """Whoever holds the durable version, verified, is to serve it."""
        self._enter(RoundState.RESUMING, now, self._limits.resume_s + self._limits.grace_s)
        self._cohort.commit(now)

    def _next_wave(self, now: float) -> None:
        """Those who stood still serve again, or are out: the next ones may, if there are any and they can be served."""
        if not self._cohort.waiting:
            self.wants = Want.CLOSE
        elif not self._over:
            self.wants = Want.EPOCH
        else:
            self._leave_waiting(self.reason or "the trainer can send no more", now)

    def _leave_waiting(self, reason: str, now: float) -> None:
        for member in self._cohort.within(EnginePhase.PREPARED):
            self._cohort.leave(member, reason, now)

    def _commit(self, now: float) -> None:
        self._enter(RoundState.COMMITTING, now, self._limits.commit_s)
        self._commit_until = self._deadline
        self.wants = Want.COMMIT

    def _commit_again(self, now: float) -> None:
        """The journal is asked once more, unless too many of those that were verified are gone meanwhile."""
        needed = max(1, self.publish.policy.min_engines) if self.members else 0
        left = self._cohort.count(EnginePhase.VERIFIED)
        if left >= needed:
            self.wants = Want.COMMIT
        else:
            self._abort(f"{left} verified engines are left, {needed} are needed ({self.reason})", now)

    def _give_up_transfer(self, reason: str, now: float) -> None:
        """The trainer can send no more. What is verified already is worth committing; the rest is left out."""
        verified = self._cohort.within(EnginePhase.VERIFIED, EnginePhase.TRANSFERRED)
        across = self._sent_once and bool(self.table)
        enough = (across or self._through) and len(verified) >= max(1, self.publish.policy.min_engines)
        if not enough and not self.durable:
            self._abort(reason, now)
            return
        self._last_attempt = True
        self.reason = reason
        self._duties.drop(self.holder)
        for member in self._cohort.within(*STANDING, EnginePhase.BROKEN):
            self._cohort.leave(member, reason, now)
        if self.state is not RoundState.OFFERING:
            self._enter(RoundState.VERIFYING, now, self._limits.verify_s + self._limits.grace_s)
        elif self.durable:
            self._resume(now)
        else:
            self._commit(now)

    def _abort(self, reason: str, now: float) -> None:
        """Back to the old version, for all that can; what is durable already is only brought to no more engines."""
        self.reason = reason
        self.wants = None
        self._duties.drop(self.holder)
        if self.durable:
            self._last_attempt = True
            kept = self._cohort.within(EnginePhase.VERIFIED)
        else:
            self.outcome = Outcome.ABORTED
            kept = []
        for member in self._cohort.within(*HOPEFUL):
            if member not in kept:
                self._cohort.leave(member, member.reason, now, told=reason)
        if self.durable:
            self._resume(now)
        else:
            self._enter(RoundState.ABORTING, now, self._limits.abort_s + self._limits.grace_s)

    def _timeout(self, now: float) -> None:  # noqa: C901  # one case per state
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
            case RoundState.VERIFYING:
                for member in self._cohort.within(EnginePhase.TRANSFERRED, EnginePhase.TRANSFERRING):
                    self._cohort.leave(member, f"verify: {waited}", now)
            case RoundState.COMMITTING:
                self._commit_again(now)
            case RoundState.RESUMING | RoundState.ABORTING:
                for member in self._cohort.within(EnginePhase.RESUMING, EnginePhase.LEAVING):
                    member.reason = member.reason or f"{member.phase.value}: {waited}; it is told until it answers"
                self._cohort.overdue()
                self.wants = Want.CLOSE if self.state is RoundState.ABORTING else None
            case RoundState.IDLE:
                pass
            case _:
                assert_never(self.state)
