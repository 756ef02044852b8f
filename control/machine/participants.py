"""The engines of one round: how far each has come, what it is told next, and what its answers change. Pure.

`Participants` decides what concerns one engine alone; round.py decides when all of them go on. `RoundCommands` builds
the commands, and `PendingCommands` repeats them until they are acknowledged. A failing engine either *breaks*, and may
be sent everything again (a retry), or *leaves*: it is told to abort, and resumes if it is clean.

In a rolling round (`Policy.max_paused`) engines are paused in *waves*. For some transports a wave is a collective
group, formed anew when its members change: `wave_order` keeps engines in their places from version to version.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, assert_never

import msgspec

from ..protocol import (
    Abort,
    AgentId,
    Commit,
    Digest,
    Endpoint,
    EngineHealth,
    EngineInfo,
    EngineMessage,
    EngineReport,
    Epoch,
    Failed,
    Outcome,
    Pause,
    Paused,
    Prepare,
    Prepared,
    Publish,
    ReceivingEngine,
    Send,
    Serving,
    Step,
    ToAgent,
    ToEngine,
    ToTrainer,
    Transfer,
    Transferred,
    TransportKind,
    Verified,
    Version,
    Withdraw,
    clip_each,
)
from .effects import AnyObservation, EngineFailed
from .states import ENGINE_MOVES, FINISHED, GENERATING, EnginePhase, Limits, Route, move

_DOWN: Final = frozenset({EnginePhase.RESUMING, EnginePhase.LEAVING, EnginePhase.QUARANTINED})


class Participant(msgspec.Struct, kw_only=True):
    """One engine of a round, and what the trainer is told of it."""

    name: AgentId
    info: EngineInfo
    phase: EnginePhase
    epoch: Epoch
    """Epoch of its commands: that of the latest attempt in which it took part."""
    transport: TransportKind | None
    """None if no transport reaches the engine."""
    retries_left: int = 0
    """Number of further attempts after failures in which the engine, or bytes on the way to it, had a part."""
    reason: str = ""
    """Why it failed or was excluded; empty otherwise."""
    seconds: dict[str, float] = {}
    """Seconds by step, as the engine measured them."""
    bytes: int = 0
    buckets: int = 0
    verified_by: str = ""
    verified_table: str = ""
    """Digest table that the engine says it holds, once it is verified."""
    shares_gpu: bool = False
    """True if a worker of the engine is on a GPU of the trainer."""
    gpus: tuple[str, ...] = ()
    """GPUs of its workers in a collective group, which takes no GPU twice; empty for other transports."""
    rank_offset: int = 0
    """Rank of its first worker in the collective group."""
    was_serving: bool = False
    """True if it served when the round began, or if an earlier round of the same version stopped it."""
    paused: bool = False
    """True once this round has told it to pause."""
    failed: bool = False
    """True if its last attempt failed once it had been told to pause: others may have waited for it."""
    spared: bool = False
    """True if the last attempt sent it nothing, only because another engine failed."""

    @property
    def is_down(self) -> bool:
        """True if it served, was paused by the round, and does not serve again yet."""
        return self.paused and self.was_serving and self.phase in _DOWN

    @property
    def outcome(self) -> Outcome:
        """The outcome of the round for this engine, if the round ended now."""
        if self.phase is EnginePhase.SERVING:
            return Outcome.COMMITTED
        if self.phase is EnginePhase.LEFT:
            return Outcome.ABORTED
        return Outcome.LOST if self.phase is EnginePhase.LOST else Outcome.QUARANTINED

    def report(self, version: Version, reasons: int) -> EngineReport:
        """The engine's part of `RoundDone`. `reasons` is the number of engines with one: each is cut accordingly."""
        held = self.info.held.version if self.info.held else None
        serves = {Outcome.COMMITTED: version, Outcome.ABORTED: held}
        return EngineReport(
            engine=self.name,
            outcome=self.outcome,
            transport=self.transport,
            version=serves.get(self.outcome),
            bytes=self.bytes,
            buckets=self.buckets,
            seconds=dict(self.seconds),
            verified_by=self.verified_by,
            reason=clip_each(self.reason, reasons),
        )


class FleetAtStart(NamedTuple):
    """The engines of the channel when a round begins."""

    was_serving: frozenset[AgentId] = frozenset()
    """Engines that serve, or would if an earlier round of the same version had not stopped them."""
    down: int = 0
    """Number of engines that stopped serving because of the version that a resync brings, and take no part in it."""
    unacknowledged: frozenset[AgentId] = frozenset()
    """Engines with an unacknowledged command of an earlier round: this round does not wait for them."""
    troubled: Mapping[AgentId, str] = {}
    """Engines that this round does not ask, with the reason: their servers are known to take no version now, or they
    have failed again and again."""


STILL_SERVING: Final = (EnginePhase.PREPARING, EnginePhase.PREPARED)
"""Phases in which the engine serves as before the round."""
CAN_STILL_COMMIT: Final = (
    *STILL_SERVING,
    EnginePhase.PAUSING,
    EnginePhase.PAUSED,
    EnginePhase.TRANSFERRING,
    EnginePhase.TRANSFERRED,
    EnginePhase.VERIFIED,
    EnginePhase.BROKEN,
)
"""Phases from which an engine can still get the version."""
_OUT_OF_WAVE: Final = frozenset({EnginePhase.BROKEN, EnginePhase.LEAVING, EnginePhase.LOST})
"""Phases of an engine that was excluded from a running attempt."""
TRANSFER_PENDING: Final = (EnginePhase.PAUSING, EnginePhase.PAUSED, EnginePhase.TRANSFERRING)
"""Phases of an engine that is told to pause and has neither taken the version nor left the round."""
_LOADING: Final = (*TRANSFER_PENDING, EnginePhase.TRANSFERRED)
"""Phases of an engine that is paused and not verified yet."""
_PREPARING: Final = EnginePhase.PREPARING
_PREPARED: Final = EnginePhase.PREPARED
_RESUMING: Final = EnginePhase.RESUMING
_LEFT: Final = EnginePhase.LEFT
_SERVING: Final = EnginePhase.SERVING
"""Names of their own: the lookup of an enum's member takes longer than the work of an answer."""
_NOT_GENERATING: Final = frozenset(EnginePhase) - GENERATING - FINISHED
"""Phases without generation: a move between two of them changes no readiness."""

_UNACKNOWLEDGED: Final = "has not answered what it was told when an earlier round ended: it takes no part before it has"


class Participants:
    """All participants of one round. Their commands go to `pending_commands`, observations to `observe`."""

    def __init__(
        self,
        publish: Publish,
        routes: Mapping[AgentId, Route],
        engines: Mapping[AgentId, EngineInfo],
        fleet: FleetAtStart,
        *,
        limits: Limits,
        pending_commands: PendingCommands,
        event_trace: deque[object],
        observe: Callable[[AnyObservation], None],
    ) -> None:
        self.by_name: dict[AgentId, Participant] = {}
        self.table: Digest = publish.table
        """Digest table of the version; empty while it is deferred."""
        self._publish = publish
        self._max_paused, self._down_outside = publish.policy.max_paused, fleet.down
        self._limits = limits
        self._pending_commands = pending_commands
        self._commands = RoundCommands(publish, limits)
        self._event_trace = event_trace
        self._observe = observe
        self._wave: frozenset[AgentId] = frozenset()
        """Engines named by the last `Send`."""
        self._excluded: dict[str, str] = {}
        """Engines of the wave that will not take all of the version, and why."""
        self._excluded_told = 0
        """Number of excluded engines that the last `Withdraw` named."""
        self._deferred_offers: Mapping[TransportKind | None, Endpoint] = {}
        """Offers for engines that wait until all of the wave are paused."""
        self._not_awaited: set[AgentId] = set()
        """Engines that were told to resume or leave and are not waited for any more."""
        self._suspects: dict[AgentId, float] = {}
        """Engines that the trainer could not serve -> time at which they break unless they report."""
        self._phase_changes: dict[AgentId, None] = {}
        """Engines whose readiness may have changed since `take_phase_changes`."""
        epoch, retries = publish.epoch, publish.policy.retries
        for name, info in engines.items():
            transport = routes[name].transport
            phase = _PREPARING if transport and name not in fleet.troubled else _LEFT
            self.by_name[name] = Participant(
                name=name,
                info=info,
                phase=EnginePhase.QUARANTINED if name in fleet.unacknowledged else phase,
                epoch=epoch,
                transport=transport,
                retries_left=retries,
                shares_gpu=routes[name].shares_gpu,
                gpus=routes[name].gpus,
                was_serving=name in fleet.was_serving,
            )
        for participant in self.within(*FINISHED):
            participant.reason = fleet.troubled.get(participant.name, "") or (
                _UNACKNOWLEDGED if participant.name in fleet.unacknowledged else routes[participant.name].reason
            )
            self._phase_changes[participant.name] = None
        self._counts = {**dict.fromkeys(EnginePhase, 0), **Counter(each.phase for each in self.by_name.values())}

    def count(self, *phases: EnginePhase) -> int:
        """Number of engines in `phases`. Called with every answer, so it reads counters instead of all engines."""
        counts, found = self._counts, 0
        for phase in phases:
            found += counts[phase]
        return found

    def take_phase_changes(self) -> Iterable[AgentId]:
        """Engines that changed phase since the last call, if their readiness may have changed with it."""
        moved, self._phase_changes = self._phase_changes, {}
        return moved

    def within(self, *phases: EnginePhase) -> list[Participant]:
        """Participants in one of `phases`."""
        return [participant for participant in self.by_name.values() if participant.phase in phases]

    def in_wave(self, *phases: EnginePhase) -> list[Participant]:
        """Participants of the last `Send` in one of `phases`."""
        return [participant for participant in self.within(*phases) if participant.name in self._wave]

    @property
    def finished(self) -> bool:
        """True if no answer is waited for any more; engines may still wait for their wave."""
        late = sum(self.by_name[name].phase not in FINISHED for name in self._not_awaited)
        return self.count(*FINISHED) + self.waiting + late == len(self.by_name)

    def stop_awaiting(self, waited: str) -> None:
        """Stop waiting for answers to `Commit` and `Abort`; the commands are still repeated until acknowledged."""
        for participant in self.within(EnginePhase.RESUMING, EnginePhase.LEAVING):
            participant.reason = (
                participant.reason or f"{participant.phase.value}: {waited}; it is told until it answers"
            )
            self._not_awaited.add(participant.name)

    def check(self) -> tuple[str, ...]:
        """Every invariant of the participants that does not hold, in words."""
        found = Counter(participant.phase for participant in self.by_name.values())
        wrong = () if found == Counter(self._counts) else (f"engines by phase are {found}, counted as {self._counts}",)
        paused = self.count(*TRANSFER_PENDING, EnginePhase.TRANSFERRED, EnginePhase.VERIFIED, EnginePhase.BROKEN)
        down = sum(participant.is_down for participant in self.by_name.values())
        if self._max_paused and paused + down > self._max_paused:
            wrong = (*wrong, f"{paused} engines are paused and {down} down, at most {self._max_paused} may be")
        gpus = Counter((each.transport, gpu) for each in self.in_wave(*TRANSFER_PENDING) for gpu in each.gpus)
        conflicts = tuple(
            f"two members of the group of {kind} are on GPU {gpu}" for (kind, gpu), n in gpus.items() if n > 1
        )
        return (*wrong, *conflicts)

    # -- commands ---------------------------------------------------------------------------------------------------

    def prepare(self, now: float) -> None:
        """Send `Prepare` to every engine that has a transport."""
        self._tell(self.within(EnginePhase.PREPARING), lambda participant: (self._commands.prepare(participant),), now)

    @property
    def waiting(self) -> int:
        """Number of prepared engines that wait for their wave."""
        return self.count(EnginePhase.PREPARED)

    @property
    def wave_room(self) -> int:
        """Number of engines that the next wave may pause.

        An engine that stopped serving in this round counts as paused. A lost engine does not, nor one that did not
        serve before the round.
        """
        if not self._max_paused:
            return self.waiting
        down = sum(participant.is_down for participant in self.by_name.values())
        return self._max_paused - self._down_outside - down - self.count(EnginePhase.BROKEN, EnginePhase.VERIFIED)

    @property
    def room_expected(self) -> bool:
        """True if a leaving engine that served before has yet to answer: it may make room for the next wave."""
        return any(each.is_down and each.name not in self._not_awaited for each in self.within(EnginePhase.LEAVING))

    def why_stopped(self) -> str:
        """Why there is no further wave."""
        down = [participant for participant in self.by_name.values() if participant.is_down]
        paused = sum(participant.paused for participant in self.by_name.values()) + self._down_outside
        version, count = self._publish.version, len(down) + self._down_outside
        found = f"{count} of {paused} engines that were paused for version {version}"
        why = "; ".join(f"{participant.name}: {participant.reason}" for participant in down)
        return (
            f"the rolling round stopped: {found} do not serve, max_paused is {self._max_paused} ({why or 'as before'})"
        )

    def next_wave(self, epoch: Epoch) -> Send:
        """Choose the engines of the attempt under `epoch` and build the trainer's `Send`.

        At most `Policy.max_paused` are paused at a time, and no two of a collective group are on one GPU.
        """
        participants = self.within(EnginePhase.BROKEN)
        waiting, room = self.within(EnginePhase.PREPARED), self.wave_room
        taken = {(participant.transport, gpu) for participant in participants for gpu in participant.gpus}
        for participant in waiting:
            mine = {(participant.transport, gpu) for gpu in participant.gpus}
            if room > 0 and taken.isdisjoint(mine):
                participants.append(participant)
                taken |= mine
                room -= 1
        self._wave = frozenset(participant.name for participant in participants)
        self._excluded, self._excluded_told = {}, 0
        return self._commands.send(epoch, participants)

    def take_withdraw(self, epoch: Epoch) -> Withdraw | None:
        """The `Withdraw` for engines excluded from the attempt of `epoch`; None if the last one named them all."""
        if self._excluded_told == len(self._excluded):
            return None
        self._excluded_told = len(self._excluded)
        return self._commands.withdraw(epoch, self._excluded)

    def transfer(self, epoch: Epoch, offers: tuple[Endpoint, ...], failed: Mapping[str, str], now: float) -> None:
        """Pause the engines of the wave and tell them where their tensors are; engines without an offer leave.

        `Pause` and `Transfer` go out together, which saves a round trip of a paused engine. With `Policy.min_engines`
        above 1 all engines pause before the first one takes the version: if one fails until then, the others can go on
        with the weights that they have. `failed` says why the trainer could not make an offer.
        """
        by_kind: Mapping[TransportKind | None, Endpoint] = {offer.transport: offer for offer in offers}
        commands, paused = self._commands, list[Participant]()
        for participant in self.in_wave(EnginePhase.PREPARED, EnginePhase.BROKEN):
            if participant.transport not in by_kind:
                why = failed.get(participant.name)
                self.leave(
                    participant, f"the trainer made no {participant.transport} offer{f': {why}' if why else ''}", now
                )
                continue
            self._move(participant, EnginePhase.PAUSING)
            participant.epoch, participant.spared, participant.paused, participant.failed = epoch, False, True, False
            paused.append(participant)
        if self._publish.policy.min_engines > 1:
            self._deferred_offers = by_kind
            self._tell(paused, lambda each: (commands.pause(each),), now)
        else:
            self._tell(
                paused, lambda each: (commands.pause(each), commands.transfer(each, by_kind[each.transport])), now
            )

    def transfer_paused(self, now: float) -> None:
        """No pause is waited for any more: tell the paused engines to take the version."""
        offers, self._deferred_offers = self._deferred_offers, {}
        paused = self.within(EnginePhase.PAUSED)
        for participant in paused:
            self._move(participant, EnginePhase.TRANSFERRING)
        self._tell(
            paused, lambda participant: (self._commands.transfer(participant, offers[participant.transport]),), now
        )

    def set_table(self, table: Digest) -> None:
        """The deferred digest table is known: engines that verified another one break."""
        self.table = table
        for participant in self.within(EnginePhase.VERIFIED):
            if participant.verified_table != table:
                self._note_other_version(participant, self._publish.version, participant.verified_table)

    def mark_suspect(self, failed: Mapping[str, str], spared: Sequence[str], now: float) -> None:
        """The trainer could not serve the engines in `failed`: each breaks unless it reports within `grace_s`.

        Engines in `spared` were well when another engine's failure ended the attempt before anything was sent to them.
        """
        for participant in self.within(*TRANSFER_PENDING, EnginePhase.BROKEN):
            participant.spared = participant.name in spared
            if participant.name in failed and participant.phase in TRANSFER_PENDING:
                participant.reason = f"the trainer could not serve it: {failed[participant.name]}"
                self._suspects[participant.name] = now + self._limits.grace_s

    def take_retries(self) -> list[Participant]:
        """The broken engines that get another attempt. Each has `Policy.retries` of them.

        An attempt costs a spared engine nothing. If every engine of the attempt was spared, it costs all of them one,
        because the next attempt would end like it.
        """
        broken = self.within(EnginePhase.BROKEN)
        spared = {participant.name for participant in broken if participant.spared}
        if len(spared) == len(self._wave):
            spared.clear()
        again = [participant for participant in broken if participant.name in spared or participant.retries_left]
        for participant in again:
            participant.retries_left -= participant.name not in spared
        return again

    def commit(self, now: float) -> None:
        """The version is durable: tell every verified engine to serve it."""
        participants = self.within(EnginePhase.VERIFIED)
        for participant in participants:
            self._move(participant, _RESUMING)
        self._tell(participants, lambda participant: (self._commands.commit(participant, self.table),), now)

    def leave(self, participant: Participant, reason: str, now: float, told: str = "") -> None:
        """Take an engine out of the round: it resumes if it is clean, and stays paused otherwise.

        `told` replaces `reason` in the command.
        """
        if reason and reason != participant.reason:
            self._note_failure(participant, reason)
        participant.failed |= participant.phase in _LOADING
        self._move(participant, EnginePhase.LEAVING)
        self._pending_commands.assign(participant.name, self._commands.abort(participant, told or reason), now)

    def _tell(
        self, participants: Sequence[Participant], commands: Callable[[Participant], tuple[ToEngine, ...]], now: float
    ) -> None:
        """Assign commands, one object for all engines with the same epoch, transport and rank."""
        alike: dict[tuple[Epoch, TransportKind | None, int], list[Participant]] = {}
        for participant in participants:
            alike.setdefault((participant.epoch, participant.transport, participant.rank_offset), []).append(
                participant
            )
        for each in alike.values():
            self._pending_commands.assign_all([participant.name for participant in each], commands(each[0]), now)

    # -- events -----------------------------------------------------------------------------------------------------

    def answered(self, participant: Participant, message: EngineMessage, now: float) -> None:
        """A participant answered a command of its current epoch. A late answer changes nothing."""
        match message:
            case Prepared():
                self._step(participant, _PREPARING, _PREPARED, "prepare", message.seconds)
            case Serving():
                self._serving(participant, message, now)
            case Paused():
                self._paused(participant, message)
            case Transferred():
                self._note_paused(participant)
                if self._step(
                    participant, EnginePhase.TRANSFERRING, EnginePhase.TRANSFERRED, "transfer", message.seconds
                ):
                    participant.bytes, participant.buckets = message.bytes, message.buckets
            case Verified():
                self._verified(participant, message)
            case Failed():
                self._failed(participant, message, now)
            case _:
                assert_never(message)

    def lost(self, name: AgentId, reason: str) -> None:
        """An engine is gone, or was replaced by another incarnation."""
        participant = self.by_name.get(name)
        if participant and participant.phase not in FINISHED:
            self._note_failure(participant, reason)
            self._move(participant, EnginePhase.LOST)
            self._pending_commands.drop(name)

    def unsent(self, participant: Participant, reason: str, now: float) -> None:
        """A command cannot be encoded for the wire: exclude the engine; quarantine it if that was its last command."""
        if participant.phase in (_RESUMING, EnginePhase.LEAVING):
            self._quarantine(participant, reason)
        else:
            self.leave(participant, reason, now)

    def tick(self, now: float) -> None:
        """Break suspects that have not reported in time."""
        for name in [name for name, give_up_at in self._suspects.items() if now >= give_up_at]:
            self._break(self.by_name[name], self.by_name[name].reason)

    def next_deadline(self) -> float | None:
        """The time at which `tick` is due."""
        return min(self._suspects.values(), default=None)

    # -- answers ----------------------------------------------------------------------------------------------------

    def _step(
        self, participant: Participant, found: EnginePhase, phase: EnginePhase, step: str, seconds: float
    ) -> bool:
        if participant.phase is not found:
            return False
        self._move(participant, phase)
        participant.seconds[step] = seconds
        self._pending_commands.drop(participant.name)
        return True

    def _paused(self, participant: Participant, message: Paused) -> None:
        if participant.phase is EnginePhase.PAUSING:
            participant.seconds["pause"] = message.seconds
            if self._deferred_offers:
                self._move(participant, EnginePhase.PAUSED)
                self._pending_commands.drop(participant.name)
            else:
                self._note_paused(participant)

    def _note_paused(self, participant: Participant) -> None:
        """The engine is paused, as it said or as a later answer implies: the answer to `Pause` may have been lost."""
        if participant.phase is EnginePhase.PAUSING:
            self._move(participant, EnginePhase.TRANSFERRING)
            self._pending_commands.acknowledge_first(participant.name)

    def _verified(self, participant: Participant, message: Verified) -> None:
        self._note_paused(participant)
        if participant.phase not in (EnginePhase.TRANSFERRING, EnginePhase.TRANSFERRED):
            return
        if message.version != self._publish.version or message.table != (self.table or message.table):
            self._note_other_version(participant, message.version, message.table)
            return
        self._move(participant, EnginePhase.VERIFIED)
        participant.verified_table = message.table
        participant.reason = ""  # an earlier failure is repaired by a verified version
        participant.seconds["verify"] = message.seconds
        participant.verified_by = message.verified_by
        self._pending_commands.drop(participant.name)

    def _note_other_version(self, participant: Participant, version: int, table: str) -> None:
        """The engine verified another version, or another table, than the trainer published: it breaks."""
        expected = f"{self._publish.version}, {self.table[:12] or 'with a deferred table'}"
        self._break(participant, f"verified version {version}, table {table[:12]}; expected {expected}")

    def _serving(self, participant: Participant, message: Serving, now: float) -> None:
        if participant.phase is _RESUMING:
            if message.version == self._publish.version:
                self._move(participant, _SERVING)
            else:
                self._move(participant, EnginePhase.QUARANTINED)
                why = f"serves version {message.version} after the commit of {self._publish.version}"
                self._note_failure(participant, why)
        elif participant.phase is EnginePhase.LEAVING:
            self._move(participant, EnginePhase.LEFT)
        else:
            if participant.phase in TRANSFER_PENDING:
                self.leave(participant, "it resumed by itself", now)
            return
        participant.seconds["resume"], participant.seconds["paused"] = message.seconds, message.paused_s
        self._pending_commands.drop(participant.name)

    def _failed(self, participant: Participant, message: Failed, now: float) -> None:
        reason = f"{message.step.value}: {message.reason}"
        if participant.phase in FINISHED:
            return
        if participant.phase is EnginePhase.RESUMING:
            self._quarantine(participant, reason)
        elif participant.phase is EnginePhase.LEAVING:
            if message.health is EngineHealth.CLEAN and message.step is not Step.RESUME:
                return  # crossed with the Abort, which the engine has yet to answer
            if message.health is EngineHealth.CLEAN or not participant.reason:
                self._quarantine(participant, f"{participant.reason}; {reason}" if participant.reason else reason)
                return
            self._move(participant, EnginePhase.QUARANTINED)  # noted when it failed
            self._pending_commands.drop(participant.name)
        elif participant.phase in (EnginePhase.TRANSFERRING, EnginePhase.TRANSFERRED) or (
            participant.phase is EnginePhase.PAUSING and message.step in (Step.TRANSFER, Step.VERIFY)
        ):
            self._break(participant, reason)
        elif participant.phase is not EnginePhase.BROKEN:
            self.leave(participant, reason, now)

    # -- steps ------------------------------------------------------------------------------------------------------

    def _break(self, participant: Participant, reason: str) -> None:
        self._note_failure(participant, reason)
        participant.failed = True
        self._move(participant, EnginePhase.BROKEN)
        self._pending_commands.drop(participant.name)

    def _quarantine(self, participant: Participant, reason: str) -> None:
        self._note_failure(participant, reason)
        self._move(participant, EnginePhase.QUARANTINED)
        self._pending_commands.drop(participant.name)

    def _move(self, participant: Participant, phase: EnginePhase) -> None:
        left = participant.phase
        if phase not in ENGINE_MOVES[left]:
            move(f"engine {participant.name}", ENGINE_MOVES, left, phase, self._event_trace)  # raises
        participant.phase = phase
        counts = self._counts
        counts[left] -= 1
        counts[phase] += 1
        # An engine prepared for a durable version waits for its wave, and may serve the previous one meanwhile.
        if (
            self._publish.catch_up
            if phase is _PREPARED
            else phase not in _NOT_GENERATING or left not in _NOT_GENERATING
        ):
            self._phase_changes[participant.name] = None
        if phase in _OUT_OF_WAVE and participant.name in self._wave:
            self._excluded.setdefault(participant.name, participant.reason)
        if self._suspects and phase is not EnginePhase.TRANSFERRING:
            self._suspects.pop(participant.name, None)  # it reported, or left

    def _note_failure(self, participant: Participant, reason: str) -> None:
        participant.reason = reason
        failed = EngineFailed(
            channel=self._publish.channel,
            engine=participant.name,
            version=self._publish.version,
            epoch=participant.epoch,
            step=participant.phase.value,
            reason=reason,
        )
        self._observe(failed)


def wave_order(before: Sequence[AgentId], present: Iterable[AgentId]) -> tuple[AgentId, ...]:
    """The engines `present`, in the order of their waves; `before` is the order for the previous version.

    An engine keeps its place. A place that became free goes to a new engine, or else to the last one: so a collective
    group changes no more members than it must.
    """
    here = dict.fromkeys(present)
    staying = deque(name for name in before if name in here)
    known = set(before)
    new = deque(name for name in here if name not in known)
    order: list[AgentId] = []
    for name in before:
        if len(order) == len(here):
            break
        if name in here:
            order.append(name)
        elif new:
            order.append(new.popleft())
        else:
            order.append(staying.pop())
    return (*order, *new)


AgentCommand = ToEngine | ToTrainer


class SendToAgents(NamedTuple):
    """Send `message` to the connections of `agents`."""

    agents: tuple[AgentId, ...]
    message: ToAgent


class PendingCommand(msgspec.Struct, eq=False):
    """One command, or two to be carried out in order, that several agents have not acknowledged.

    The agents were told together and are told again together, so thousands share one timer. An agent that has answered
    or got another command is dropped from `agents` when the timer fires.
    """

    commands: tuple[AgentCommand, ...]
    wait_s: float
    due_at: float
    agents: list[AgentId]
    """Agents that may still have to be told; empty once no timer waits for them."""
    rest: PendingCommand | None = None
    """Entry of agents that have acknowledged the first of two commands since the last send."""


class PendingCommands:
    """Commands that are sent again until acknowledged. A new command to an agent replaces the last one.

    Timers are in a heap of entries, so neither a command to thousands of agents nor the answer of one of them costs a
    look at the others.
    """

    def __init__(self, retry_s: float, retry_max_s: float) -> None:
        self._retry_s = retry_s
        self._retry_max_s = retry_max_s
        self._by_agent: dict[AgentId, PendingCommand] = {}
        self._timers: list[tuple[float, int, PendingCommand]] = []
        """Heap of due time, sequence number and entry."""
        self._new: list[PendingCommand] = []
        """Entries not sent yet. Most are sent at once and never enter the heap."""
        self._sequence = itertools.count()

    def assign(self, agent: AgentId, command: AgentCommand, now: float) -> None:
        """Send `command` to `agent` now, and again until `drop`."""
        self.assign_all((agent,), (command,), now)

    def assign_all(self, agents: Sequence[AgentId], commands: tuple[AgentCommand, ...], now: float) -> None:
        """Send one command, or two in order, to all of `agents`."""
        pending = PendingCommand(commands, self._retry_s, now, list(agents))
        self._by_agent.update(dict.fromkeys(agents, pending))
        self._new.append(pending)

    def get(self, agent: AgentId) -> AgentCommand | None:
        """The first command that `agent` has not acknowledged."""
        pending = self._by_agent.get(agent)
        return pending.commands[0] if pending else None

    def all(self) -> list[tuple[AgentId, AgentCommand]]:
        """Each agent with the first command that it has not acknowledged."""
        return [(agent, pending.commands[0]) for agent, pending in self._by_agent.items()]

    def acknowledge_first(self, agent: AgentId) -> None:
        """`agent` has acknowledged the first of two commands: only the second is sent again."""
        pending = self._by_agent.get(agent)
        if pending is None or len(pending.commands) < 2:
            return
        rest = pending.rest
        if rest is None or not rest.agents:
            rest = pending.rest = PendingCommand(pending.commands[1:], pending.wait_s, pending.due_at, [])
            self._schedule(rest)
        rest.agents.append(agent)
        self._by_agent[agent] = rest

    def drop(self, agent: AgentId) -> None:
        """The command was acknowledged, or its agent is gone."""
        self._by_agent.pop(agent, None)
        if not self._by_agent:
            self._timers.clear()
            self._new.clear()

    def resend_now(self, agent: AgentId, now: float) -> None:
        """Send again at once: `agent` is back on a new connection."""
        if pending := self._by_agent.get(agent):
            self.assign_all((agent,), pending.commands, now)

    def due(self, now: float) -> list[SendToAgents]:
        """Commands to send now, the longest due first. The wait before the next time doubles.

        One effect for each command. Equal commands of a round are one object, so they are grouped by identity.
        """
        ready: list[PendingCommand] = []
        while self._timers and self._timers[0][0] <= now:
            ready.append(heapq.heappop(self._timers)[2])
        new, self._new = self._new, []
        for pending in new:
            if pending.due_at <= now:
                ready.append(pending)
            else:
                self._schedule(pending)
        alike: dict[int, tuple[list[AgentId], AgentCommand]] = {}
        for pending in ready:
            for command in self._take_due(pending, now):
                alike.setdefault(id(command), ([], command))[0].extend(pending.agents)
        return [SendToAgents(tuple(agents), command) for agents, command in alike.values()]

    def next_deadline(self) -> float | None:
        """The time at which the next command is due."""
        for pending in self._new:
            self._schedule(pending)
        self._new.clear()
        of = self._by_agent
        while self._timers:
            due_at, _, pending = self._timers[0]
            agents = pending.agents
            while agents and of.get(agents[-1]) is not pending:
                agents.pop()
            if agents:
                return due_at
            heapq.heappop(self._timers)
        return None

    def __len__(self) -> int:
        return len(self._by_agent)

    def _take_due(self, pending: PendingCommand, now: float) -> tuple[AgentCommand, ...]:
        of = self._by_agent
        pending.agents = [agent for agent in pending.agents if of.get(agent) is pending]
        if not pending.agents:
            return ()
        pending.due_at, pending.rest = now + pending.wait_s, None
        pending.wait_s = min(pending.wait_s * 2, self._retry_max_s)
        self._schedule(pending)
        return pending.commands

    def _schedule(self, pending: PendingCommand) -> None:
        heapq.heappush(self._timers, (pending.due_at, next(self._sequence), pending))


class RoundCommands:
    """Builds the commands of one round. Equal commands are one object, which the bus encodes once."""

    def __init__(self, publish: Publish, limits: Limits) -> None:
        self._publish = publish
        self._limits = limits
        self._built: dict[ToEngine, ToEngine] = {}

    def prepare(self, participant: Participant) -> ToEngine:
        """Compare the manifest with the server."""
        return self._once(
            Prepare(
                channel=self._publish.channel,
                epoch=participant.epoch,
                version=self._publish.version,
                manifest=self._publish.manifest,
                table=self._publish.table,
                transport=participant.transport or TransportKind.DISK,
                policy=self._publish.policy,
                deadline_s=self._limits.prepare_s,
                publication_signature=self._publish.publication_signature,
                rollback=self._publish.rollback,
            )
        )

    def pause(self, participant: Participant) -> ToEngine:
        """Stop generating."""
        return self._once(
            Pause(
                channel=self._publish.channel,
                epoch=participant.epoch,
                mode=self._publish.policy.pause,
                lease_s=self._limits.lease_s,
                deadline_s=self._limits.pause_s,
            )
        )

    def send(self, epoch: Epoch, participants: Sequence[Participant]) -> Send:
        """Open the transports for `participants`. Assigns their ranks in a collective group; the trainer has rank 0."""
        receivers, rank = list[ReceivingEngine](), 1
        for participant in participants:
            if participant.transport is TransportKind.DISTRIBUTED:
                participant.rank_offset = rank
                rank += participant.info.tp
            transport = participant.transport or TransportKind.DISK
            told = not self._publish.table or transport is TransportKind.DISTRIBUTED
            info, shares = participant.info, participant.shares_gpu and told
            receivers.append(
                ReceivingEngine(engine=participant.name, transport=transport, tp=info.tp, url=info.url, shares=shares)
            )
        return Send(
            channel=self._publish.channel,
            epoch=epoch,
            version=self._publish.version,
            receivers=tuple(receivers),
            deadline_s=self._publish.policy.transfer_timeout_s,
        )

    def withdraw(self, epoch: Epoch, out: Mapping[str, str]) -> Withdraw:
        """Stop waiting for the engines in `out`, each with its reason."""
        engines = {name: clip_each(reason, len(out)) for name, reason in out.items()}
        return Withdraw(channel=self._publish.channel, epoch=epoch, engines=engines)

    def transfer(self, participant: Participant, offer: Endpoint) -> ToEngine:
        """Take the tensors."""
        return self._once(
            Transfer(
                channel=self._publish.channel,
                epoch=participant.epoch,
                version=self._publish.version,
                manifest=self._publish.manifest,
                table=self._publish.table,
                offer=offer,
                rank_offset=participant.rank_offset,
                deadline_s=self._publish.policy.transfer_timeout_s,
            )
        )

    def commit(self, participant: Participant, table: Digest) -> ToEngine:
        """The version is durable: serve it."""
        return self._once(
            Commit(
                channel=self._publish.channel,
                epoch=participant.epoch,
                version=self._publish.version,
                table=table,
                flush=self._publish.policy.flush,
                deadline_s=self._limits.resume_s,
            )
        )

    def abort(self, participant: Participant, reason: str) -> ToEngine:
        """Stop what the round began."""
        channel, deadline_s = self._publish.channel, self._limits.abort_s
        return self._once(Abort(channel=channel, epoch=participant.epoch, reason=reason, deadline_s=deadline_s))

    def _once(self, command: ToEngine) -> ToEngine:
        return self._built.setdefault(command, command)
