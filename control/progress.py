"""How far one round has come, since when, and what it says of itself. Pure.

Nothing in here decides: round.py does.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping

from . import patience
from .codec import clip
from .cohort import HOPEFUL, SERVING_ON, Cohort
from .duties import Duties
from .effects import AnyObservation, StateEntered
from .ids import AgentId, Channel, Digest, Epoch, Version
from .limits import Limits
from .member import Member
from .messages import EngineInfo, Held, Outcome, Publish, RoundDone
from .routes import Route
from .states import CLOCK, ROUND_MOVES, SENDING, EnginePhase, RoundState, move


class Want(enum.Enum):
    """What a round needs of its channel before it can go on."""

    EPOCH = "a new epoch, durable, to drive broken engines again"
    COMMIT = "the version made durable"
    CLOSE = "to be closed and reported"


class Progress:
    """The facts of one round, from `Publish` to `RoundDone`."""

    def __init__(
        self,
        publish: Publish,
        holder: AgentId,
        routes: Mapping[AgentId, Route],
        engines: Mapping[AgentId, EngineInfo],
        *,
        limits: Limits,
        duties: Duties,
        story: deque[object],
        now: float,
    ) -> None:
        self.publish = publish
        self.holder = holder
        self.channel: Channel = publish.channel
        self.version: Version = publish.version
        self.epoch: Epoch = publish.epoch
        self.state = RoundState.IDLE
        self.wants: Want | None = None
        self.outcome: Outcome | None = Outcome.COMMITTED if publish.catch_up else None
        self.reason = ""
        self.notes: list[AnyObservation] = []
        self.replaced: Held | None = None
        """What was committed before the version was."""
        self._limits = limits
        self._duties = duties
        self._cohort = Cohort(publish, routes, engines, limits=limits, duties=duties, story=story, notes=self.notes)
        self.members: Mapping[AgentId, Member] = self._cohort.members
        self._story = story
        self._began_at = now
        self._since = now
        self._deadline = now
        self._commit_until = now
        self._seconds: dict[str, float] = {}
        self._hurried: RoundState | None = None
        self._last_attempt = False
        """Nothing can be driven again, whatever is left."""
        self._trainer_gone = False
        self.durable = publish.catch_up
        """The version is: the round can only go forward."""
        self._sent = False
        self._sent_once = False
        self._heard = False
        """Engines answered, and what that means for the round was not decided yet."""

    def needs(self, trainer: AgentId) -> bool:
        """Engines stand still, or would, until this trainer's half of the transfer is over."""
        sends = self.state is RoundState.OFFERING or (self.state in SENDING and not self._sent)
        return sends and trainer == self.holder

    def waits(self, engine: AgentId) -> bool:
        """It serves the version before until it is its turn, while others serve the new one."""
        member = self.members.get(engine)
        return self.durable and member is not None and member.phase is EnginePhase.PREPARED

    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        if self.wants is Want.CLOSE:
            return None
        given_up = self._cohort.next_deadline()
        return self._deadline if given_up is None else min(self._deadline, given_up)

    def take_notes(self) -> list[AnyObservation]:
        """What happened since this was asked last."""
        notes = self.notes[:]
        self.notes.clear()
        return notes

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
            outcome=self.outcome or Outcome.ABORTED,
            reason=clip(self.reason),
            engines=reports,
            seconds=seconds,
        )

    def check(self) -> tuple[str, ...]:
        """What is wrong with the round, if anything."""
        wrong = list(self._cohort.check())
        phases = {member.phase for member in self.members.values()}
        if phases & {EnginePhase.RESUMING, EnginePhase.SERVING} and not self.durable:
            wrong.append(f"an engine was told of version {self.version} in {self.state}, before it was durable")
        if self.state in (RoundState.PREPARING, RoundState.OFFERING) and EnginePhase.TRANSFERRING in phases:
            wrong.append(f"an engine takes weights in {self.state}")
        if self.state in SENDING and self._cohort.invited(*SERVING_ON):
            wrong.append("an engine of the round was told nothing of its transfer")
        if self.state is RoundState.TRANSFERRING and phases & {EnginePhase.PAUSING, EnginePhase.PAUSED}:
            wrong.append("weights travel, and an engine was neither told to take them nor left out")
        if self.durable and self.outcome is not Outcome.COMMITTED:
            wrong.append("resuming a version that was not committed")
        if self.state is RoundState.RESUMING and phases & set(HOPEFUL) - {EnginePhase.PREPARED}:
            wrong.append("an engine was forgotten at the commit")
        if not self.table and (self.durable or self.state is RoundState.COMMITTING):
            wrong.append("a version is committed, and its digest table is open")
        if any(member.epoch > self.epoch for member in self.members.values()):
            wrong.append("an engine is ahead of its round's epoch")
        return tuple(wrong)

    @property
    def table(self) -> Digest:
        """Of the version; empty while it is open."""
        return self._cohort.table

    # -- for who decides --------------------------------------------------------------------------------------------

    @property
    def _over(self) -> bool:
        """Nothing can be sent any more, to anybody."""
        return self._trainer_gone or self._last_attempt

    def _enter(self, state: RoundState, now: float, wait_s: float) -> None:
        left = self.state
        self.state = move(f"round {self.version}", ROUND_MOVES, left, state, self._story)
        spent = now - self._since
        if clock := CLOCK.get(left):
            self._seconds[clock] = self._seconds.get(clock, 0.0) + spent
        self._hurried = None
        self._since, self._deadline = now, now + patience.allowed_s(self.publish.policy, state, wait_s)
        note = StateEntered(
            channel=self.channel, version=self.version, epoch=self.epoch, left=left, state=state, seconds=spent
        )
        self.notes.append(note)
