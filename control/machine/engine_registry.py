"""The engines of one channel outside its rounds: who is here, what each is to do, and who is ready to serve. Pure.

An engine that comes, comes back or is left behind by a round is *settled*: it is told to serve the committed version if
it holds it, and else to go on with what it has.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Final

from ..protocol import (
    Abort,
    AgentId,
    Channel,
    Commit,
    EngineHealth,
    EngineInfo,
    EngineMessage,
    Epoch,
    Failed,
    HeldVersion,
    Policy,
    Serving,
    Step,
    Topology,
    TrainerInfo,
)
from .effects import ReadinessChanged, RoundReadiness
from .engine_record import GENERATES, EngineRecord, VersionWindow, readiness
from .limits import Limits
from .membership import Agent
from .participant import Participant
from .pending_commands import PendingCommands
from .route import Route, Routing, TransferEnds
from .states import SETTLED, EnginePhase
from .waves import Capacity

_PREPARED: Final = EnginePhase.PREPARED


class EngineRegistry:
    """The engines of a channel. What it tells them goes to `duties`."""

    def __init__(self, channel: Channel, limits: Limits, routing: Routing, duties: PendingCommands) -> None:
        self.engines: dict[AgentId, EngineRecord] = {}
        self._channel = channel
        self._limits = limits
        self._routing = routing
        self._duties = duties
        self._ready: dict[AgentId, bool] = {}
        self._touched: dict[AgentId, None] = {}
        """Engines whose readiness may be another than was last announced, in the order in which that came about."""

    def infos(self) -> dict[AgentId, EngineInfo]:
        """The engines that are here, as they are today."""
        return {engine.name: engine.as_info() for engine in self.engines.values() if engine.alive}

    def behind(self, committed: HeldVersion | None) -> dict[AgentId, EngineInfo]:
        """The engines that are here, do not hold the committed version, and have memory for it.

        Those that fell with it come first: whoever serves is not risked before them.
        """
        known = self.engines
        lacking = {
            name: info
            for name, info in self.infos().items()
            if not _holds(known[name], committed) and not known[name].waits(committed)
        }
        return dict(sorted(lacking.items(), key=lambda each: known[each[0]].fell != committed))

    def capacity(
        self, committed: HeldVersion | None, among: Container[AgentId], routes: Mapping[AgentId, Route], policy: Policy,
        *, catch_up: bool,
    ) -> Capacity:  # fmt: skip
        """Who of `among` is missed where a round makes it stop; in a catch-up also who fell with what it brings.

        And who owes an answer, if the others of `routes` are enough for `policy`.
        """
        here = [engine for engine in self.engines.values() if engine.alive]
        fell = frozenset(each.name for each in here if catch_up and each.fell == committed and not each.serving)
        serve = (each.name for each in here if _serves(each, committed))
        owing = frozenset(each.name for each in here if each.owes and self._duties.get(each.name) is not None)
        others = sum(route.transport is not None and name not in owing for name, route in routes.items())
        enough = others >= max(1, policy.min_engines)
        return Capacity(fell.union(serve), sum(name not in among for name in fell), owing if enough else frozenset())

    def routes(
        self,
        trainer: TrainerInfo,
        topology: Topology | None,
        *,
        snapshot: bool = False,
        among: Container[AgentId] | None = None,
    ) -> Mapping[AgentId, Route]:
        """How each engine that is here, or is `among` these, gets a version of `trainer`, which told `topology`."""
        return self._routing(
            {
                engine.name: TransferEnds(trainer, engine.info, topology, engine.topology, snapshot)
                for engine in self.engines.values()
                if engine.alive and (among is None or engine.name in among)
            }
        )

    def located(self, name: AgentId, topology: Topology) -> None:
        """An engine's agent said where it is."""
        if engine := self.engines.get(name):
            engine.topology = topology

    def holders(self, committed: HeldVersion | None) -> tuple[AgentId, ...]:
        """The engines that are here and hold the committed version."""
        return tuple(each.name for each in self.engines.values() if each.alive and _holds(each, committed))

    def joined(self, agent: Agent) -> EngineRecord:
        """An engine said `Hello`: what was known under its name is forgotten."""
        engine = self.engines[agent.name] = EngineRecord.of(agent)
        self.touch(agent.name)
        return engine

    def lost(self, name: AgentId, reason: str, now: float) -> None:
        """An engine fell silent or said `Bye`."""
        if engine := self.engines.get(name):
            engine.alive, engine.serving, engine.reason, engine.lost_at = False, False, reason, now
            self.touch(name)

    def forget(self, now: float) -> None:
        """Engines that have been gone for long are not shown any more."""
        for engine in [e for e in self.engines.values() if not e.alive and now - e.lost_at > self._limits.forget_s]:
            del self.engines[engine.name]
            self._ready.pop(engine.name, None)

    def settle(self, engine: EngineRecord, epoch: Epoch, committed: HeldVersion | None, now: float) -> None:
        """Tell an engine outside a round what to do: serve the committed version if it holds it, else its old one.

        Where no epoch was ever taken, nothing can be told to one that is clean: it serves if nobody ever told it
        anything. Else an earlier life has, of which nobody knows, and it is settled above that.
        """
        engine.serving, engine.settled_at = False, epoch
        self.touch(engine.name)
        if epoch == 0 and engine.health is EngineHealth.CLEAN:
            engine.serving = engine.untold
            self._duties.drop(engine.name)
        elif committed and _holds(engine, committed):
            commit = Commit(
                channel=self._channel,
                epoch=epoch,
                version=committed.version,
                table=committed.table,
                flush=True,
                deadline_s=self._limits.resume_s,
            )
            self._duties.assign(engine.name, commit, now)
        else:
            reason = "no round concerns you"
            abort = Abort(channel=self._channel, epoch=epoch, reason=reason, deadline_s=self._limits.abort_s)
            self._duties.assign(engine.name, abort, now)

    def left_by(self, members: Iterable[Participant], of: HeldVersion) -> None:
        """A round of `of` closed. Those of its engines that had not come to an end do not serve."""
        for member in members:
            if (engine := self.engines.get(member.name)) is None:
                continue
            if member.phase not in SETTLED:
                engine.serving, engine.owes, engine.reason = False, True, member.reason
                self.touch(engine.name)
            if member.fallen:
                engine.fell = of

    def settle_idle(self, epoch: Epoch, committed: HeldVersion | None, now: float) -> None:
        """Engines that hold the committed version and do not serve it, though nothing was asked of them, are to."""
        for engine in self.engines.values():
            idle = engine.alive and not engine.serving and self._duties.get(engine.name) is None
            if idle and _holds(engine, committed):
                self.settle(engine, epoch, committed, now)

    def overtaken(self, epoch: Epoch, committed: HeldVersion, now: float) -> None:
        """Another version was committed: nobody outside of its round is told any more to serve the one before it."""
        for name, duty in self._duties.all():
            other = isinstance(duty, Commit) and (duty.version, duty.table) != (committed.version, committed.table)
            if other and (engine := self.engines.get(name)):
                self.settle(engine, epoch, committed, now)

    def answered(self, engine: EngineRecord, message: EngineMessage, committed: HeldVersion | None) -> bool:
        """Take an answer to what `settle` or a closed round asked. Returns whether it was one."""
        duty = self._duties.get(engine.name)
        if duty is None or duty.epoch != message.epoch:
            return False
        if isinstance(message, Serving):
            engine.serving, engine.health, engine.reason = True, EngineHealth.CLEAN, ""
            named = (duty.version, duty.table) if isinstance(duty, Commit) else None
            if committed and named == (message.version, committed.table):  # a number may stand for other weights by now
                engine.held = committed
            engine.serves(message.version)
            engine.owes = False
            self._duties.drop(engine.name)
        elif isinstance(message, Failed):
            engine.health, engine.serving, engine.reason = message.health, False, message.reason
            if message.health is not EngineHealth.CLEAN or message.step in (Step.RESUME, Step.COMMIT):
                engine.owes = False
                self._duties.drop(engine.name)
        return True

    def unsent(self, name: AgentId, reason: str) -> None:
        """An engine cannot be told what `settle` wants of it."""
        self._duties.drop(name)
        if engine := self.engines.get(name):
            engine.reason = reason
            self.touch(name)

    def touch(self, name: AgentId) -> None:
        """Something was said by or about this engine: judge anew whether it is ready."""
        self._touched[name] = None

    def touch_many(self, names: Iterable[AgentId]) -> None:
        """The same of many."""
        self._touched.update(dict.fromkeys(names))

    def touch_all(self) -> None:
        """Something changed that every engine is judged by."""
        self._touched.update(dict.fromkeys(self.engines))

    def readiness_changes(
        self, members: Mapping[AgentId, Participant], window: VersionWindow, waiting: VersionWindow
    ) -> list[ReadinessChanged | RoundReadiness]:
        """Who became ready, or ceased to be, among those that were touched since the last call.

        `members` are those of the running round. What engines may serve is in `window`; in `waiting` while they are
        prepared.
        """
        if not self._touched:
            return []
        touched, self._touched = self._touched, {}
        engines, known_ready = self.engines, self._ready
        notes: list[ReadinessChanged | RoundReadiness] = []
        of_round: dict[bool, list[AgentId]] = {True: [], False: []}
        for name in touched:
            member, before = members.get(name), known_ready.get(name, False)
            stands = member.phase if member is not None else None
            if not before and stands not in GENERATES:
                continue  # nobody is ready in such a phase
            engine = engines.get(name)
            if engine is None:
                continue
            verdict = readiness(engine, stands, waiting if stands is _PREPARED else window)
            ready = known_ready[name] = verdict.code is None
            if ready is before:
                continue
            if member is not None:
                of_round[ready].append(name)
            else:
                notes.append(ReadinessChanged(channel=self._channel, engine=name, ready=ready, reason=verdict.reason))
        for ready, names in of_round.items():
            if names:
                notes.append(RoundReadiness(channel=self._channel, engines=tuple(names), ready=ready))
        return notes

    def announced(self, name: AgentId) -> bool:
        """Whether the engine was last announced as ready."""
        return self._ready.get(name, False)


def _serves(engine: EngineRecord, committed: HeldVersion | None) -> bool:
    """Requests may be sent to it, or might if it were not behind: not where it has the weights of its launch only."""
    return engine.health is EngineHealth.CLEAN and (engine.held is not None or committed is None)


def _holds(engine: EngineRecord, committed: HeldVersion | None) -> bool:
    return committed is not None and engine.held == committed
