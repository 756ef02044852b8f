"""How far one round has come, since when, and what it says of itself. Pure.

Nothing in here decides: round.py does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from .codec import clip
from .cohort import HOPEFUL, SERVING_ON, Cohort
from .duties import Duties
from .effects import AnyObservation, StateEntered
from .ids import AgentId, Channel, Digest, Epoch, Version
from .limits import Limits
from .member import Member
from .messages import EngineInfo, Held, Outcome, Publish, RoundDone, SlowEngines
from .routes import Route
from .states import CLOCK, ROUND_MOVES, SENDING, EnginePhase, RoundState, move

THROUGH: Final[Mapping[RoundState, tuple[EnginePhase, ...]]] = {
    RoundState.PREPARING: (EnginePhase.PREPARED,),
    RoundState.PAUSING: (EnginePhase.PAUSED, EnginePhase.TRANSFERRING, EnginePhase.TRANSFERRED, EnginePhase.VERIFIED),
    RoundState.TRANSFERRING: (EnginePhase.VERIFIED,),
    RoundState.VERIFYING: (EnginePhase.VERIFIED,),
    RoundState.RESUMING: (EnginePhase.SERVING,),
}
"""The states in which engines are waited for, and the phases of those that have come through.

How long they are, `SlowEngines` says. Who is late is left out of the round like one that ran into the step's deadline.
"""


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
        self.replaced: Held | None = None
        """What was committed before the version was."""
        self._limits = limits
        self._duties = duties
        self._cohort = Cohort(publish, routes, engines, limits=limits, duties=duties, story=story, note=note)
        self.members: Mapping[AgentId, Member] = self._cohort.members
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

    def needs(self, trainer: AgentId) -> bool:
        """Engines stand still, or would, until this trainer's half of the transfer is over."""
        sends = self.state is RoundState.OFFERING or (self.state in SENDING and not self._sent)
        return sends and trainer == self.holder

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

    def _enter(self, state: RoundState, now: float, wait_s: float) -> None:
        left = self.state
        self.state = move(f"round {self.version}", ROUND_MOVES, left, state, self._story)
        spent = now - self._since
        if clock := CLOCK.get(left):
            self._seconds[clock] = self._seconds.get(clock, 0.0) + spent
        policy = self.publish.policy
        evicts = policy.slow is SlowEngines.EVICT_AFTER and state in THROUGH
        self._since, self._deadline = now, now + (min(wait_s, policy.slow_s) if evicts else wait_s)
        entered = StateEntered(
            channel=self.channel, version=self.version, epoch=self.epoch, left=left, state=state, seconds=spent
        )
        self._note(entered)
