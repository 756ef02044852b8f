"""The engines of one round: how far each has come, what it is told next, and what its answers change. Pure.

Here is decided what concerns one engine alone; round.py decides when all of them may go on. An engine that gets into
difficulties either *breaks*, and may be driven again, or *leaves*: it is told to abort and resumes if it is clean.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, assert_never

from ..protocol import (
    AgentId,
    Digest,
    Endpoint,
    EngineHealth,
    EngineInfo,
    EngineMessage,
    Epoch,
    Failed,
    Paused,
    Prepared,
    Publish,
    Send,
    Serving,
    Step,
    ToEngine,
    Transferred,
    TransportKind,
    Verified,
    Withdraw,
)
from .effects import AnyObservation, EngineFailed
from .engine_record import GENERATES
from .limits import Limits
from .participant import Participant
from .pending_commands import PendingCommands
from .round_commands import RoundCommands
from .route import Route
from .states import ENGINE_MOVES, SETTLED, EnginePhase, move
from .waves import Capacity

SERVING_ON: Final = (EnginePhase.PREPARING, EnginePhase.PREPARED)
"""Nothing of the round has changed what it does for its clients."""
HOPEFUL: Final = (
    *SERVING_ON,
    EnginePhase.PAUSING,
    EnginePhase.PAUSED,
    EnginePhase.TRANSFERRING,
    EnginePhase.TRANSFERRED,
    EnginePhase.VERIFIED,
    EnginePhase.BROKEN,
)
"""The new version may still reach it."""
_OUT: Final = frozenset({EnginePhase.BROKEN, EnginePhase.LEAVING, EnginePhase.LOST})
"""Where an engine goes that takes no more of a running attempt."""
STANDING: Final = (EnginePhase.PAUSING, EnginePhase.PAUSED, EnginePhase.TRANSFERRING)
"""Told to stand still for the version, and neither through nor out of it."""
_PREPARING: Final = EnginePhase.PREPARING
_PREPARED: Final = EnginePhase.PREPARED
_RESUMING: Final = EnginePhase.RESUMING
_LEFT: Final = EnginePhase.LEFT
_SERVING: Final = EnginePhase.SERVING
"""Names of their own: members of an enum are looked up through their class, which takes longer than what is done."""
_STILL: Final = frozenset(EnginePhase) - GENERATES - SETTLED
"""It generates nothing: whoever goes on from one of these to another is not ready, and was not."""

_OWES: Final = "has not answered what it was told when an earlier round ended: it takes no part before it has"


class Participants:
    """The members of one round. What it tells them goes to `duties`, what it observes to `note`."""

    def __init__(
        self,
        publish: Publish,
        routes: Mapping[AgentId, Route],
        engines: Mapping[AgentId, EngineInfo],
        capacity: Capacity,
        *,
        limits: Limits,
        duties: PendingCommands,
        story: deque[object],
        note: Callable[[AnyObservation], None],
    ) -> None:
        self.members: dict[AgentId, Participant] = {}
        self.table: Digest = publish.table
        """Of the version; empty while it is open."""
        self._publish = publish
        self._most, self._down = publish.policy.max_paused, capacity.down
        self._limits = limits
        self._duties = duties
        self._orders = RoundCommands(publish, limits)
        self._story = story
        self._note = note
        self._invited: frozenset[AgentId] = frozenset()
        """Whom the last `Send` named."""
        self._out: dict[str, str] = {}
        """Those of them that will take nothing, or not all, and why."""
        self._out_told = 0
        self._held_back: Mapping[TransportKind | None, Endpoint] = {}
        """What those are told of next that wait for all to stand still."""
        self._overdue: set[AgentId] = set()
        """Told to resume or leave, and not waited for any more."""
        self._doubted: dict[AgentId, float] = {}
        self._moved: dict[AgentId, None] = {}
        """Changed phase, or began in one, and may be judged otherwise than before."""
        epoch, redrives = publish.epoch, publish.policy.redrives
        for name, info in engines.items():
            transport = routes[name].transport
            phase = _PREPARING if transport else _LEFT
            self.members[name] = Participant(
                name=name,
                info=info,
                phase=EnginePhase.QUARANTINED if name in capacity.owing else phase,
                epoch=epoch,
                transport=transport,
                redrives_left=redrives,
                shares=routes[name].shares,
                gpus=routes[name].gpus,
                missed=name in capacity.missed,
            )
        for member in self.within(*SETTLED):
            member.reason = _OWES if member.name in capacity.owing else routes[member.name].reason
            self._moved[member.name] = None
        self._counts = {**dict.fromkeys(EnginePhase, 0), **Counter(each.phase for each in self.members.values())}

    def count(self, *phases: EnginePhase) -> int:
        """How many members stand in one of `phases`; asked with every answer, so nobody is looked at for it."""
        counts, found = self._counts, 0
        for phase in phases:
            found += counts[phase]
        return found

    def take_moved(self) -> Iterable[AgentId]:
        """Who changed phase since this was asked last, and may be ready now, or not any more."""
        moved, self._moved = self._moved, {}
        return moved

    def within(self, *phases: EnginePhase) -> list[Participant]:
        """The members that stand in one of `phases`."""
        return [member for member in self.members.values() if member.phase in phases]

    def invited(self, *phases: EnginePhase) -> list[Participant]:
        """Those of the last `Send` that stand in one of `phases`."""
        return [member for member in self.within(*phases) if member.name in self._invited]

    @property
    def settled(self) -> bool:
        """Nobody's answer is waited for any more; some may wait for their turn."""
        late = sum(self.members[name].phase not in SETTLED for name in self._overdue)
        return self.count(*SETTLED) + self.waiting + late == len(self.members)

    def overdue(self, waited: str) -> None:
        """Who has not answered its `Commit` or `Abort` by now is told until it does, and holds up nothing."""
        for member in self.within(EnginePhase.RESUMING, EnginePhase.LEAVING):
            member.reason = member.reason or f"{member.phase.value}: {waited}; it is told until it answers"
            self._overdue.add(member.name)

    def check(self) -> tuple[str, ...]:
        """What is wrong with the count, if anything."""
        found = Counter(member.phase for member in self.members.values())
        wrong = () if found == Counter(self._counts) else (f"engines by phase are {found}, counted as {self._counts}",)
        still = self.count(*STANDING, EnginePhase.TRANSFERRED, EnginePhase.VERIFIED, EnginePhase.BROKEN)
        fallen = sum(member.fallen for member in self.members.values())
        if self._most and still + fallen > self._most:
            wrong = (
                *wrong,
                f"{still} engines stand still for the round, {fallen} fell, at most {self._most} may",
            )
        seats = Counter((each.transport, gpu) for each in self.invited(*STANDING) for gpu in each.gpus)
        crowded = tuple(
            f"two members of the group of {kind} are on GPU {gpu}" for (kind, gpu), n in seats.items() if n > 1
        )
        return (*wrong, *crowded)

    # -- what they are told -----------------------------------------------------------------------------------------

    def prepare(self, now: float) -> None:
        """Send `Prepare` to every engine that has a transport."""
        self._tell(self.within(EnginePhase.PREPARING), lambda member: (self._orders.prepare(member),), now)

    @property
    def waiting(self) -> int:
        """How many are prepared, and have not been told to stand still."""
        return self.count(EnginePhase.PREPARED)

    @property
    def room(self) -> int:
        """How many more may be told to stand still: who fell in the round counts like who stands still for it.

        Who is gone does not, nor who served nobody before.
        """
        if not self._most:
            return self.waiting
        fallen = sum(member.fallen for member in self.members.values())
        return self._most - self._down - fallen - self.count(EnginePhase.BROKEN, EnginePhase.VERIFIED)

    @property
    def makes_room(self) -> bool:
        """Whether somebody who was told to leave is about to serve again, or to say that it does not."""
        return any(each.fallen and each.name not in self._overdue for each in self.within(EnginePhase.LEAVING))

    def stopped(self) -> str:
        """Why nobody else has a turn."""
        fallen = [member for member in self.members.values() if member.fallen]
        told = sum(member.paused for member in self.members.values()) + self._down
        found = f"{len(fallen) + self._down} of {told} engines that were paused for version {self._publish.version}"
        why = "; ".join(f"{member.name}: {member.reason}" for member in fallen)
        return f"the rolling round stopped: {found} do not serve, max_paused is {self._most} ({why or 'as before'})"

    def wanted(self, epoch: Epoch) -> Send:
        """What the trainer is to send under `epoch`, and to whom.

        At most `Policy.max_paused` stand still at a time, and nobody is in a group with another on the same GPU.
        """
        members = self.within(EnginePhase.BROKEN)
        fresh, room = self.within(EnginePhase.PREPARED), self.room
        taken = {(member.transport, gpu) for member in members for gpu in member.gpus}
        for member in fresh:
            mine = {(member.transport, gpu) for gpu in member.gpus}
            if room > 0 and taken.isdisjoint(mine):
                members.append(member)
                taken |= mine
                room -= 1
        self._invited, self._out, self._out_told = frozenset(member.name for member in members), {}, 0
        return self._orders.send(epoch, members)

    def take_withdrawn(self, epoch: Epoch) -> Withdraw | None:
        """Whom the trainer, which sends under `epoch`, waits for in vain; None while that is nobody new."""
        if self._out_told == len(self._out):
            return None
        self._out_told = len(self._out)
        return self._orders.withdraw(epoch, self._out)

    def transfer(self, epoch: Epoch, offers: tuple[Endpoint, ...], failed: Mapping[str, str], now: float) -> None:
        """Stop the engines of the last `Send` and tell them where their tensors are; those without an offer leave.

        Both at once: whoever stands still need not ask what for. Only where the round comes to nothing without several
        of them (`Policy.min_engines`), all have to stand still before the first one changes: should one fail until
        then, the others go on with what they served. `failed` is the trainer's account of the offers that it could not
        make.
        """
        by_kind: Mapping[TransportKind | None, Endpoint] = {offer.transport: offer for offer in offers}
        orders, paused = self._orders, list[Participant]()
        for member in self.invited(EnginePhase.PREPARED, EnginePhase.BROKEN):
            if member.transport not in by_kind:
                why = failed.get(member.name)
                self.leave(member, f"the trainer made no {member.transport} offer{f': {why}' if why else ''}", now)
                continue
            self._move(member, EnginePhase.PAUSING)
            member.epoch, member.spared, member.paused = epoch, False, True
            paused.append(member)
        if self._publish.policy.min_engines > 1:
            self._held_back = by_kind
            self._tell(paused, lambda each: (orders.pause(each),), now)
        else:
            self._tell(paused, lambda each: (orders.pause(each), orders.transfer(each, by_kind[each.transport])), now)

    def release(self, now: float) -> None:
        """Nobody's pause is waited for any more: who stands still for it takes the version."""
        offers, self._held_back = self._held_back, {}
        paused = self.within(EnginePhase.PAUSED)
        for member in paused:
            self._move(member, EnginePhase.TRANSFERRING)
        self._tell(paused, lambda member: (self._orders.transfer(member, offers[member.transport]),), now)

    def learn(self, table: Digest) -> None:
        """The table that was open is this one: whoever has proven another one is broken."""
        self.table = table
        for member in self.within(EnginePhase.VERIFIED):
            if member.proven != table:
                self._holds_another(member, self._publish.version, member.proven)

    def doubt(self, failed: Mapping[str, str], spared: Sequence[str], now: float) -> None:
        """The trainer could not serve these: each gets a little time to speak for itself, then it breaks.

        Those in `spared` were well when another engine's failure ended the attempt, before anything was sent to them.
        """
        for member in self.within(*STANDING, EnginePhase.BROKEN):
            member.spared = member.name in spared
            if member.name in failed and member.phase in STANDING:
                member.reason = f"the trainer could not serve it: {failed[member.name]}"
                self._doubted[member.name] = now + self._limits.grace_s

    def drive_again(self) -> list[Participant]:
        """The broken engines that are to be sent everything again. Each has its own `Policy.redrives`.

        Who was spared pays nothing for it: whoever was at fault does, and is out of it when it cannot. When nobody of
        an attempt was at fault, all of them pay, because the next attempt would end like it.
        """
        broken = self.within(EnginePhase.BROKEN)
        spared = {member.name for member in broken if member.spared}
        if len(spared) == len(self._invited):
            spared.clear()
        again = [member for member in broken if member.name in spared or member.redrives_left]
        for member in again:
            member.redrives_left -= member.name not in spared
        return again

    def commit(self, now: float) -> None:
        """The version is durable: whoever holds it, verified, is to serve it."""
        members = self.within(EnginePhase.VERIFIED)
        for member in members:
            self._move(member, _RESUMING)
        self._tell(members, lambda member: (self._orders.commit(member, self.table),), now)

    def leave(self, member: Participant, reason: str, now: float, told: str = "") -> None:
        """Take an engine out of the round: it resumes if it is clean, and stays paused otherwise."""
        if reason and reason != member.reason:
            self._note_failure(member, reason)
        self._move(member, EnginePhase.LEAVING)
        self._duties.assign(member.name, self._orders.abort(member, told or reason), now)

    def _tell(
        self, members: Sequence[Participant], orders: Callable[[Participant], tuple[ToEngine, ...]], now: float
    ) -> None:
        """To all of the same epoch, transport and place in its group the same, at once."""
        alike: dict[tuple[Epoch, TransportKind | None, int], list[Participant]] = {}
        for member in members:
            alike.setdefault((member.epoch, member.transport, member.rank_offset), []).append(member)
        for each in alike.values():
            self._duties.assign_all([member.name for member in each], orders(each[0]), now)

    # -- what happens to them ---------------------------------------------------------------------------------------

    def answered(self, member: Participant, message: EngineMessage, now: float) -> None:
        """A member answered at its current epoch. Answers that come too late change nothing."""
        match message:
            case Prepared():
                self._step(member, _PREPARING, _PREPARED, "prepare", message.seconds)
            case Serving():
                self._serving(member, message, now)
            case Paused():
                self._paused(member, message)
            case Transferred():
                self._stands(member)
                if self._step(member, EnginePhase.TRANSFERRING, EnginePhase.TRANSFERRED, "transfer", message.seconds):
                    member.bytes, member.buckets = message.bytes, message.buckets
            case Verified():
                self._verified(member, message)
            case Failed():
                self._failed(member, message, now)
            case _:
                assert_never(message)

    def lost(self, name: AgentId, reason: str) -> None:
        """An engine is gone, or another incarnation has its name."""
        member = self.members.get(name)
        if member and member.phase not in SETTLED:
            self._note_failure(member, reason)
            self._move(member, EnginePhase.LOST)
            self._duties.drop(name)

    def unsent(self, member: Participant, reason: str, now: float) -> None:
        """It cannot be told what comes next. Who cannot be told to end it either is left as it is."""
        if member.phase in (_RESUMING, EnginePhase.LEAVING):
            self._note_failure(member, reason)
            self._move(member, EnginePhase.QUARANTINED)
            self._duties.drop(member.name)
        else:
            self.leave(member, reason, now)

    def tick(self, now: float) -> None:
        """Time has passed: engines that the trainer gave up on, and that said nothing themselves, break."""
        for name in [name for name, give_up_at in self._doubted.items() if now >= give_up_at]:
            self._break(self.members[name], self.members[name].reason)

    def next_deadline(self) -> float | None:
        """When `tick` has something to do."""
        return min(self._doubted.values(), default=None)

    # -- answers ----------------------------------------------------------------------------------------------------

    def _step(self, member: Participant, found: EnginePhase, wanted: EnginePhase, clock: str, seconds: float) -> bool:
        if member.phase is not found:
            return False
        self._move(member, wanted)
        member.seconds[clock] = seconds
        self._duties.drop(member.name)
        return True

    def _paused(self, member: Participant, message: Paused) -> None:
        if member.phase is EnginePhase.PAUSING:
            member.seconds["pause"] = message.seconds
            if self._held_back:
                self._move(member, EnginePhase.PAUSED)
                self._duties.drop(member.name)
            else:
                self._stands(member)

    def _stands(self, member: Participant) -> None:
        """It generates nothing, as it says, or as what it says implies: its `Pause` may have got lost."""
        if member.phase is EnginePhase.PAUSING:
            self._move(member, EnginePhase.TRANSFERRING)
            self._duties.go_on(member.name)

    def _verified(self, member: Participant, message: Verified) -> None:
        self._stands(member)
        if member.phase not in (EnginePhase.TRANSFERRING, EnginePhase.TRANSFERRED):
            return
        if message.version != self._publish.version or message.table != (self.table or message.table):
            self._holds_another(member, message.version, message.table)
            return
        self._move(member, EnginePhase.VERIFIED)
        member.proven = message.table
        member.reason = ""  # what went wrong before, in this attempt or an earlier one, is mended
        member.seconds["verify"] = message.seconds
        member.verified_by = message.verified_by
        self._duties.drop(member.name)

    def _holds_another(self, member: Participant, version: int, table: str) -> None:
        """Than the one that the trainer published."""
        expected = f"{self._publish.version}, {self.table[:12] or 'whose table follows'}"
        self._break(member, f"verified version {version}, table {table[:12]}; expected {expected}")

    def _serving(self, member: Participant, message: Serving, now: float) -> None:
        if member.phase is _RESUMING:
            if message.version == self._publish.version:
                self._move(member, _SERVING)
            else:
                self._move(member, EnginePhase.QUARANTINED)
                why = f"serves version {message.version} after the commit of {self._publish.version}"
                self._note_failure(member, why)
        elif member.phase is EnginePhase.LEAVING:
            self._move(member, EnginePhase.LEFT)
        else:
            if member.phase in STANDING:
                self.leave(member, "it resumed by itself", now)
            return
        member.seconds["resume"], member.seconds["paused"] = message.seconds, message.paused_s
        self._duties.drop(member.name)

    def _failed(self, member: Participant, message: Failed, now: float) -> None:
        reason = f"{message.step.value}: {message.reason}"
        if member.phase in SETTLED:
            return
        if member.phase is EnginePhase.RESUMING:
            self._note_failure(member, reason)
            self._move(member, EnginePhase.QUARANTINED)
            self._duties.drop(member.name)
        elif member.phase is EnginePhase.LEAVING:
            if message.health is EngineHealth.CLEAN and message.step is not Step.RESUME:
                return  # crossed with our Abort, which it has yet to answer
            member.reason = member.reason or reason
            self._move(member, EnginePhase.QUARANTINED)
            self._duties.drop(member.name)
        elif member.phase in (EnginePhase.TRANSFERRING, EnginePhase.TRANSFERRED) or (
            member.phase is EnginePhase.PAUSING and message.step in (Step.TRANSFER, Step.VERIFY)
        ):
            self._break(member, reason)
        elif member.phase is not EnginePhase.BROKEN:
            self.leave(member, reason, now)

    # -- small things -----------------------------------------------------------------------------------------------

    def _break(self, member: Participant, reason: str) -> None:
        self._note_failure(member, reason)
        self._move(member, EnginePhase.BROKEN)
        self._duties.drop(member.name)

    def _move(self, member: Participant, phase: EnginePhase) -> None:
        left = member.phase
        if phase not in ENGINE_MOVES[left]:
            move(f"engine {member.name}", ENGINE_MOVES, left, phase, self._story)  # raises
        member.phase = phase
        counts = self._counts
        counts[left] -= 1
        counts[phase] += 1
        # Who is prepared for a version that is durable waits for its turn, and may serve the one before meanwhile.
        if self._publish.catch_up if phase is _PREPARED else phase not in _STILL or left not in _STILL:
            self._moved[member.name] = None
        if phase in _OUT and member.name in self._invited:
            self._out.setdefault(member.name, member.reason)
        if self._doubted and phase is not EnginePhase.TRANSFERRING:
            self._doubted.pop(member.name, None)  # it spoke for itself, or left

    def _note_failure(self, member: Participant, reason: str) -> None:
        member.reason = reason
        failed = EngineFailed(
            channel=self._publish.channel,
            engine=member.name,
            version=self._publish.version,
            epoch=member.epoch,
            step=member.phase.value,
            reason=reason,
        )
        self._note(failed)
