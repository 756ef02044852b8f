"""The engines of one channel outside its rounds: which are here, what each is told, and which are ready. Pure.

An engine that joins, reconnects or was left behind by a round is *settled*: told to serve the committed version if it
holds that, and otherwise to go on with the version that it has.

By default only the committed version is served. With `Policy.max_lag` a stale engine goes on serving until its version
is further behind than the trainer allowed; then it gets no requests before it takes a newer version. Versions are
compared by their digest tables, not by their numbers: after a rollback a number may stand for other weights.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from typing import Final

import msgspec

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
    Incarnation,
    Policy,
    RefusalCode,
    Serving,
    Step,
    Topology,
    TrainerInfo,
    TransportKind,
    Version,
    lasting,
)
from .effects import ReadinessChanged, RoundReadiness
from .membership import Agent
from .participants import FleetAtStart, Participant, PendingCommands
from .states import FINISHED, GENERATING, YES, Decision, EnginePhase, Limits, Route, Routing, TransferEnds, earlier

_PREPARED: Final = EnginePhase.PREPARED
_SERVING: Final = EnginePhase.SERVING
_LEFT: Final = EnginePhase.LEFT
_CLEAN: Final = EngineHealth.CLEAN
"""Names of their own: the lookup of an enum's member takes longer than the work of an answer."""
_IN_DOUBT: Final = "serves another version than it was known to hold"
_IN_ROUND: Final[Mapping[EnginePhase | None, Decision]] = {
    phase: Decision(RefusalCode.NOT_ALLOWED, f"in a round: {phase}") for phase in EnginePhase
}


_NONE: Final = Route(None, "")
MAX_FAILURES: Final = 2
"""Rounds in a row that an engine may fail in before one leaves it out: a first recovery is never put off."""
BACK_OFF_S: Final = 2.0
"""Seconds for which rounds leave it out then; twice as long after each further failure."""
MAX_BACK_OFF_S: Final = 60.0
LEFT_S: Final = 60.0
"""Seconds for which an engine that left on purpose, or whose trust was removed, stays in the status: `forget_s` is for
engines that were lost, which an operator has to look for."""


class AllowedVersions(msgspec.Struct, frozen=True):
    """Versions that engines of a channel may serve. `Channel.make_current` replaces it."""

    committed: HeldVersion | None = None
    """The current version; None before the first commit."""
    max_lag: int = 0
    """`Policy.max_lag` of the round that committed it; 0 after a restart of the coordinator."""
    older: tuple[HeldVersion | None, ...] = ()
    """Earlier versions within `max_lag`, newest first; None stands for the weights with which a server started."""

    def advanced_to(self, held: HeldVersion, max_lag: int, *, rollback: bool) -> AllowedVersions:
        """The allowed versions once `held` is current. A rollback allows no earlier version."""
        before = () if rollback or self.committed is None else (self.committed, *self.older)
        past = tuple(each for each in before if each and 0 < held.version - each.version <= max_lag)
        return AllowedVersions(held, max_lag, past)

    def including(self, held: HeldVersion | None) -> AllowedVersions:
        """These versions and `held`, for an engine that waits for its wave."""
        return msgspec.structs.replace(self, older=(*self.older, held))

    def allows(self, held: HeldVersion | None) -> bool:
        """Whether an engine may serve `held`; None stands for the weights with which its server started.

        Those are allowed until a version is committed. A version unknown to the channel is never allowed.
        """
        return held == self.committed or held in self.older

    def why_not(self, held: HeldVersion | None) -> str:
        """Why `held` is not allowed."""
        found = f"version {held.version}" if held else "the weights of its launch"
        if self.committed is None:
            return f"holds {found}, which this channel has not committed"
        allowed = f", and max_lag is {self.max_lag}" if self.max_lag else ""
        return f"holds {found}, committed is {self.committed.version}{allowed}"


class EngineRecord(msgspec.Struct, kw_only=True):
    """One engine of a channel."""

    name: AgentId
    incarnation: Incarnation
    info: EngineInfo
    health: EngineHealth
    held: HeldVersion | None
    serving: bool = False
    """True while it says that it serves."""
    version_in_doubt: bool = False
    """True if it serves another version than it was known to hold; its next heartbeat says which."""
    alive: bool = True
    forget_at: float = 0.0
    """Time at which the record of a lost engine is dropped."""
    reason: str = ""
    """Why it does not serve; empty otherwise."""
    last_epoch: Epoch = Epoch(0)
    """Epoch of its last answer."""
    settled_epoch: Epoch = Epoch(0)
    """Epoch of the last command that settled it."""
    seen_epoch: Epoch = Epoch(0)
    """Highest epoch that it has seen, by its heartbeats. It ignores messages of lower ones."""
    epoch_reported: bool = False
    """True once a heartbeat since its `Hello` has reported `seen_epoch`."""
    topology: Topology | None = None
    """Its last topology report, without trouble and without why it is not clean."""
    trouble: str = ""
    """Why its server can take no version now, by that report; empty if it can."""
    trouble_since: float = 0.0
    starting: bool = False
    """True if that server has held no version since its launch: a publication with too few engines waits for it."""
    unclean: str = ""
    """Why it is not clean, by that report; empty once it serves."""
    last_transport: TransportKind | None = None
    """Transport of the last version that it took, since its agent and the coordinator started."""
    last_transfer_s: float = 0.0
    """Seconds of that transfer."""
    downed_by: HeldVersion | None = None
    """Version whose round paused it and left it not serving."""
    unacknowledged: bool = False
    """True if a round ended without its answer to the last command."""
    failures: int = 0
    """Rounds in a row in which its transfer failed while another engine took the version by the same transport."""
    failure: str = ""
    """Reason of the last of them."""
    asked_at: float = 0.0
    """Time until which rounds leave it out for its failures, if the other engines are enough."""
    _info: EngineInfo | None = None
    """Last result of `as_info`."""
    memory_released: bool = False
    """True while its weights' memory is released to another user."""
    released_at: HeldVersion | None = None
    """Version that was current when it released its memory: the engine is brought only later ones."""

    @classmethod
    def of(cls, agent: Agent) -> EngineRecord:
        """The record of an engine that said `Hello`."""
        if agent.engine is None:
            raise ValueError(f"{agent.name} is no engine")
        info = agent.engine
        return cls(
            name=agent.name,
            incarnation=agent.incarnation,
            info=info,
            health=info.health,
            held=info.held,
            topology=agent.topology,
        )

    @property
    def never_commanded(self) -> bool:
        """True if the engine reports that it has seen no epoch, so no coordinator has ever paused it.

        Nor will a late message: only an engine that has seen the epoch of a `Prepare` is sent a `Pause`.
        """
        return self.epoch_reported and not self.seen_epoch

    def as_info(self) -> EngineInfo:
        """The engine's description for trainers, with its present health and version.

        Its generation and socket concern the coordinator alone, and trainers of earlier releases do not know them.
        """
        known = self._info
        if (
            known is None
            or known.health is not self.health
            or known.held != self.held
            or known.memory_released is not self.memory_released
        ):
            known = self._info = msgspec.structs.replace(
                self.info,
                health=self.health,
                held=self.held,
                memory_released=self.memory_released,
                generation="",
                follows="",
                socket="",
            )
        return known

    def note_topology(self, report: Topology, now: float) -> bool:
        """Take a topology report. Returns True if the engine's trouble, or why it is not clean, changed.

        Both are kept apart: a route does not depend on them, and is not chosen anew for them.
        """
        before = self.trouble, self.starting, self.unclean
        self.trouble, self.trouble_since, self.starting = report.trouble, now - report.trouble_s, report.starting
        self.unclean = report.unclean
        self.topology = msgspec.structs.replace(report, trouble="", trouble_s=0.0, starting=False, unclean="")
        return before != (self.trouble, self.starting, self.unclean)

    @property
    def why_unclean(self) -> str:
        """Why it is not clean: what its agent says, and what came of its last command if that is something else."""
        own, told = self.unclean, self.reason
        if own in told or told in own:
            return max(own, told, key=len) or "waits for a verified version"
        return f"{own}; {told}"

    def trouble_for(self, now: float) -> str:
        """The trouble with its duration; empty without any."""
        return lasting(self.trouble, now - self.trouble_since)

    def note_round(self, participant: Participant, of: HeldVersion, *, others: bool, now: float) -> None:
        """A round of version `of` closed. `others`: another engine took the version by this one's transport.

        Only that shows that the cause is this engine's: else the trainer's half, or a group, may have failed for all.
        """
        if participant.phase not in FINISHED:
            self.serving, self.unacknowledged, self.reason = False, True, participant.reason
        if participant.is_down:
            self.downed_by = of
        if participant.phase is _SERVING:
            self.failures = 0
        elif participant.failed and others:
            self.failures, self.failure = self.failures + 1, participant.reason
            if self.failures >= MAX_FAILURES:
                wait_s = BACK_OFF_S * 2.0 ** min(self.failures - MAX_FAILURES, 10)
                self.asked_at = now + min(wait_s, MAX_BACK_OFF_S)

    def keep_failures(self, before: EngineRecord) -> None:
        """Go on counting where `before` ended. Another process, or another launch of the server, is asked at once."""
        self.failures, self.failure = before.failures, before.failure
        if (before.incarnation, before.info.generation) == (self.incarnation, self.info.generation):
            self.asked_at = before.asked_at

    def left_out(self, now: float) -> str:
        """Why rounds leave the engine out now, if the other engines are enough; empty if they do not."""
        if now >= self.asked_at:
            return ""
        found = f"its transfer failed in {self.failures} rounds in a row, the last time with {self.failure!r}"
        return f"{found}: mend that, and launch its server or its agent again, or wait {self.asked_at - now:.0f} s"

    def note_memory(self, committed: HeldVersion | None, *, released: bool) -> None:
        """Record whether its memory is released; `committed` is the current version."""
        if released and not self.memory_released:
            self.released_at = committed
        self.memory_released = released

    def awaits_newer(self, committed: HeldVersion | None) -> bool:
        """True if its memory stays released until a later version than `committed`."""
        return self.memory_released and self.released_at == committed

    def absorb(self, message: EngineMessage, participant: Participant, committed: HeldVersion | None) -> bool:
        """Apply an answer to a round's command. Returns True if readiness may have changed."""
        phase, health, serving = participant.phase, self.health, self.serving
        if phase is _SERVING:
            self.health, self.serving, self.held, self.reason, self.unclean = _CLEAN, True, committed, "", ""
            self.last_transport, self.last_transfer_s = participant.transport, participant.seconds.get("transfer", 0.0)
            return True
        self.reason = participant.reason
        if phase is _LEFT:
            self.health, self.serving = _CLEAN, True
            if isinstance(message, Serving):
                self.note_served(message.version)
        else:
            if isinstance(message, Failed):
                self.health = message.health
            if phase not in GENERATING:
                self.serving = False
        return health is not self.health or serving is not self.serving or self.version_in_doubt

    def note_served(self, version: Version | None) -> None:
        """The engine says that it serves `version`; None stands for the weights with which its server started."""
        self.version_in_doubt = version != (self.held.version if self.held else None)


def readiness(engine: EngineRecord, phase: EnginePhase | None, window: AllowedVersions) -> Decision:
    """Whether requests may be sent to the engine, and why not."""
    if not engine.alive:
        return Decision(RefusalCode.NOT_ALLOWED, engine.reason or "not here")
    if engine.trouble or engine.health is not _CLEAN:
        unclean = f"{engine.health.value}: {engine.why_unclean}"
        return Decision(RefusalCode.NOT_ALLOWED, engine.trouble or unclean)
    if phase not in GENERATING:
        return _IN_ROUND[phase]
    if not window.allows(engine.held):
        why_not = window.why_not(engine.held)
        reason = f"{engine.reason}; {why_not}" if engine.reason else why_not
        return Decision(RefusalCode.NOT_ALLOWED, reason)
    if not engine.serving or engine.version_in_doubt:
        reason = _IN_DOUBT if engine.version_in_doubt else engine.reason or "has not said yet that it serves"
        return Decision(RefusalCode.NOT_ALLOWED, reason)
    return YES


class EngineRegistry:
    """The engines of a channel. Their commands go to `pending_commands`."""

    def __init__(self, channel: Channel, limits: Limits, routing: Routing, pending_commands: PendingCommands) -> None:
        self.engines: dict[AgentId, EngineRecord] = {}
        self._channel = channel
        self._limits = limits
        self._routing = routing
        self._pending_commands = pending_commands
        self._routed: tuple[tuple[AgentId, TransferEnds], ...] = ()
        """The fleet for which `_routes` were chosen; the order of its engines counts."""
        self._routes: Mapping[AgentId, Route] = {}
        self.forget_at: float | None = None
        """Time at which the next lost engine is forgotten; None without one."""
        self._ready: dict[AgentId, bool] = {}
        self._to_recheck: dict[AgentId, None] = {}
        """Engines whose readiness may differ from the announced one, in the order of the causes."""

    def infos(self) -> dict[AgentId, EngineInfo]:
        """The engines that are alive, as they are now."""
        return {engine.name: engine.as_info() for engine in self.engines.values() if engine.alive}

    def stale(self, committed: HeldVersion | None) -> dict[AgentId, EngineInfo]:
        """The engines that are alive, do not hold the committed version, and have memory for it.

        Engines that stopped serving because of that version come first, before any serving engine is risked.
        """
        known = self.engines
        lacking = {
            name: info
            for name, info in self.infos().items()
            if not _holds(known[name], committed) and not known[name].awaits_newer(committed)
        }
        return dict(sorted(lacking.items(), key=lambda each: known[each[0]].downed_by != committed))

    def fleet_at_start(
        self, committed: HeldVersion | None, among: Container[AgentId], routes: Mapping[AgentId, Route], policy: Policy,
        now: float, *, catch_up: bool,
    ) -> FleetAtStart:  # fmt: skip
        """The engines as a round with those in `among` begins; `catch_up` marks the round of a resync.

        Engines with an unacknowledged command, with trouble, or that failed again and again, are listed only if the
        others in `routes` are enough for `policy`; those with trouble also if no transport reaches them.
        """
        here = [engine for engine in self.engines.values() if engine.alive]
        pending = self._pending_commands
        down = frozenset(each.name for each in here if catch_up and each.downed_by == committed and not each.serving)
        serving = (each.name for each in here if _serves(each, committed))
        late = frozenset(each.name for each in here if each.unacknowledged and pending.get(each.name) is not None)
        troubled = {each.name: why for each in here if (why := each.trouble or each.left_out(now))}
        others = sum(
            route.transport is not None and name not in late and name not in troubled for name, route in routes.items()
        )
        enough = others >= max(1, policy.min_engines)
        return FleetAtStart(
            down.union(serving),
            sum(name not in among for name in down),
            late if enough else frozenset(),
            {name: why for name, why in troubled.items() if enough or routes.get(name, _NONE).transport is None},
        )

    def routes(
        self,
        trainer: TrainerInfo,
        topology: Topology | None,
        *,
        snapshot: bool = False,
        among: Container[AgentId] | None = None,
    ) -> Mapping[AgentId, Route]:
        """The route from `trainer`, at `topology`, to each engine that is alive and, if given, in `among`."""
        fleet = {
            engine.name: TransferEnds(trainer, engine.info, topology, engine.topology, snapshot)
            for engine in self.engines.values()
            if engine.alive and (among is None or engine.name in among)
        }
        if (asked := tuple(fleet.items())) != self._routed:  # the same fleet takes one version after the other
            self._routed, self._routes = asked, self._routing(fleet)
        return self._routes

    def holders(self, committed: HeldVersion | None) -> tuple[AgentId, ...]:
        """The engines that are alive and hold the committed version."""
        return tuple(each.name for each in self.engines.values() if each.alive and _holds(each, committed))

    def joined(self, agent: Agent) -> EngineRecord:
        """An engine said `Hello`: its record begins anew."""
        before, engine = self.engines.get(agent.name), EngineRecord.of(agent)
        if before is not None:
            engine.keep_failures(before)
        self.engines[agent.name] = engine
        self.recheck(agent.name)
        return engine

    def lost(self, name: AgentId, reason: str, now: float, *, for_good: bool = False) -> None:
        """An engine fell silent, said `Bye`, or was replaced. `for_good`: it is not expected to come back."""
        if engine := self.engines.get(name):
            engine.alive, engine.serving, engine.reason = False, False, reason
            engine.forget_at = now + min(self._limits.forget_s, LEFT_S if for_good else self._limits.forget_s)
            self.forget_at = earlier(self.forget_at, engine.forget_at)
            self.recheck(name)

    def forget(self, now: float) -> None:
        """Drop the records of lost engines whose time is over."""
        if self.forget_at is None or now < self.forget_at:
            return
        for engine in [each for each in self.engines.values() if not each.alive and each.forget_at <= now]:
            self.drop(engine.name)
        self.forget_at = min((each.forget_at for each in self.engines.values() if not each.alive), default=None)

    def drop(self, name: AgentId) -> None:
        """Drop the record of a lost engine."""
        del self.engines[name]
        self._ready.pop(name, None)

    def settle(self, engine: EngineRecord, epoch: Epoch, committed: HeldVersion | None, now: float) -> None:
        """Tell an engine outside a round to serve: the committed version if it holds it, otherwise the one it has.

        In a channel without any epoch yet, a clean engine is told nothing: it serves if it was never commanded. If it
        was, by a coordinator whose journal is lost, it is settled once the epoch is above the one it has seen.
        """
        engine.serving, engine.settled_epoch = False, epoch
        self.recheck(engine.name)
        if epoch == 0 and engine.health is EngineHealth.CLEAN:
            engine.serving = engine.never_commanded
            self._pending_commands.drop(engine.name)
        elif committed and _holds(engine, committed):
            commit = Commit(
                channel=self._channel,
                epoch=epoch,
                version=committed.version,
                table=committed.table,
                flush=True,
                deadline_s=self._limits.resume_s,
            )
            self._pending_commands.assign(engine.name, commit, now)
        else:
            reason = "no round concerns you"
            abort = Abort(channel=self._channel, epoch=epoch, reason=reason, deadline_s=self._limits.abort_s)
            self._pending_commands.assign(engine.name, abort, now)

    def round_closed(self, participants: Collection[Participant], of: HeldVersion, now: float) -> None:
        """A round of version `of` closed. Its unfinished engines do not serve."""
        taken_by = {each.transport for each in participants if each.phase is _SERVING}
        for participant in participants:
            if (engine := self.engines.get(participant.name)) is None:
                continue
            engine.note_round(participant, of, others=participant.transport in taken_by, now=now)
            if participant.phase not in FINISHED:
                self.recheck(engine.name)

    def settle_idle(self, epoch: Epoch, committed: HeldVersion | None, now: float) -> None:
        """Settle engines that hold the committed version, do not serve and have no pending command."""
        for engine in self.engines.values():
            idle = engine.alive and not engine.serving and self._pending_commands.get(engine.name) is None
            if idle and _holds(engine, committed):
                self.settle(engine, epoch, committed, now)

    def superseded(self, epoch: Epoch, committed: HeldVersion, now: float) -> None:
        """Another version became current: settle engines that are still being told to serve the previous one."""
        current = (committed.version, committed.table)
        for name, pending in self._pending_commands.all():
            other = isinstance(pending, Commit) and (pending.version, pending.table) != current
            if other and (engine := self.engines.get(name)):
                self.settle(engine, epoch, committed, now)

    def answered(self, engine: EngineRecord, message: EngineMessage, committed: HeldVersion | None) -> bool:
        """Take an answer to a command of `settle` or of a closed round. Returns False if it answers none."""
        pending = self._pending_commands.get(engine.name)
        if pending is None or pending.epoch != message.epoch:
            return False
        if isinstance(message, Serving):
            engine.serving, engine.health, engine.reason, engine.unclean = True, EngineHealth.CLEAN, "", ""
            named = (pending.version, pending.table) if isinstance(pending, Commit) else None
            if committed and named == (message.version, committed.table):  # a number may stand for other weights by now
                engine.held = committed
            engine.note_served(message.version)
            engine.unacknowledged = False
            self._pending_commands.drop(engine.name)
        elif isinstance(message, Failed):
            engine.health, engine.serving, engine.reason = message.health, False, message.reason
            if message.health is not EngineHealth.CLEAN or message.step in (Step.RESUME, Step.COMMIT):
                engine.unacknowledged = False
                self._pending_commands.drop(engine.name)
        return True

    def unsent(self, name: AgentId, reason: str) -> None:
        """The command of `settle` cannot be encoded for the wire."""
        self._pending_commands.drop(name)
        if engine := self.engines.get(name):
            engine.reason = reason
            self.recheck(name)

    def recheck(self, *names: AgentId) -> None:
        """Compute the readiness of these engines again at the next `readiness_changes`."""
        self._to_recheck.update(dict.fromkeys(names))

    def readiness_changes(
        self, participants: Mapping[AgentId, Participant], allowed: AllowedVersions, waiting: AllowedVersions
    ) -> list[ReadinessChanged | RoundReadiness]:
        """The engines that became ready, or ceased to be, since the last call.

        `participants` are those of the running round. `waiting` has the versions allowed to prepared engines, `allowed`
        those of all others.
        """
        if not self._to_recheck:
            return []
        to_recheck, self._to_recheck = self._to_recheck, {}
        engines, known_ready = self.engines, self._ready
        notes: list[ReadinessChanged | RoundReadiness] = []
        of_round: dict[bool, list[AgentId]] = {True: [], False: []}
        for name in to_recheck:
            participant, before = participants.get(name), known_ready.get(name, False)
            phase = participant.phase if participant is not None else None
            if not before and phase not in GENERATING:
                continue  # no engine is ready in such a phase
            engine = engines.get(name)
            if engine is None:
                continue
            verdict = readiness(engine, phase, waiting if phase is _PREPARED else allowed)
            ready = known_ready[name] = verdict.code is None
            if ready is before:
                continue
            if participant is not None:
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
    """Whether the engine serves, or would if its version were not stale. Not with the weights of its start alone."""
    return engine.health is EngineHealth.CLEAN and (engine.held is not None or committed is None)


def _holds(engine: EngineRecord, committed: HeldVersion | None) -> bool:
    return committed is not None and engine.held == committed
