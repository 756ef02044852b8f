"""Disks: what is written, what survives, and what a crash in the middle leaves behind.

The journal behaves as `control/journal/sqlite_journal.py` with SQLite does: a record is there as a whole or not at all
(a torn one is found by its checksum and dropped), `write` returns after the fsync, and a write that was refused may
have reached the disk all the same, to be found after a restart if nothing was written since. That it does is not taken
on trust: in some worlds the real one is written beside it (sqlite_disk.py), and every life compares what it finds.

A sidecar's record is written by the product's own code (filesystem.py). A trainer keeps nothing on disk that the
protocol stands on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from weightbus.control.journal.writer_thread import HUNG_S, InlineWriter, WriteResult
from weightbus.control.machine.channel import (
    MAX_ROUND_REPLIES,
    ChannelOwner,
    Restored,
    RoundReply,
    history_with,
    round_reply_of,
)
from weightbus.control.machine.effects import AnyRecord, Committed, EpochRaised, EpochTaken, Probe, RoundClosed
from weightbus.control.protocol.errors import JournalCorrupt, JournalError, JournalUnwritable
from weightbus.control.protocol.messages import Channel, Digest, Epoch, HeldVersion, RequestId
from weightbus.engine_agent import state_file
from weightbus.engine_agent.errors import StateUnreadable
from weightbus.engine_agent.machine.events import StateRecord
from weightbus.engine_agent.state_file import StateFile

from .filesystem import Files, SimOs, SimPath
from .invariants import Memory
from .process import Hung, Killed
from .sqlite_disk import SqliteDisk

if TYPE_CHECKING:
    from .process import Process
    from .world import World


class JournalDisk:
    """The file of the coordinator. Outlives it."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self._rng = world, rng
        self.full = False
        self.hangs_until = 0.0
        """Time until which no write ends."""
        self.boots = 0
        self.wall_offset = 0.0
        """The wall clock of this machine; it may jump, and nothing depends on it."""
        self.channels: dict[Channel, Restored] = {}
        self.replies: dict[RequestId, RoundReply] = {}
        self.ghost: AnyRecord | None = None
        """Refused, and yet it may be on the disk."""
        self.stride = 1
        """By how much the newest start raised the epochs."""
        self._strides = world.rng("strides")
        self._copies: list[tuple[dict[Channel, Restored], dict[RequestId, RoundReply], int, Memory]] = []
        """The file after every record, where it may be set back; and what the judge knew then of the disk."""
        self._in_flight: AnyRecord | None = None
        """Its writing was cut short in the middle."""
        self.sqlite = SqliteDisk(world.rng("sqlite"), self.wall) if world.scenario.sqlite else None
        """The real journal's files. What is in here is what they should hold."""

    def wall(self) -> float:
        """`time.time()`."""
        return 1e9 + self.world.loop.now + self.wall_offset

    def keep(self, record: AnyRecord) -> None:
        """`record` is durable."""
        self.ghost = None
        match record:
            case EpochTaken() | EpochRaised():
                known = self.channels.get(record.channel, Restored())
                epoch = max(known.epoch, record.epoch)
                taken = isinstance(record, EpochTaken) and record.run
                owner = ChannelOwner(record.run, record.holder) if taken else known.owner
                self.channels[record.channel] = msgspec.structs.replace(known, epoch=epoch, owner=owner)
            case Committed():
                self._commit(record)
                self._remember(record)
            case RoundClosed():
                self._remember(record)
            case Probe():
                return
        self.world.judge.durable(record)
        if self.world.scenario.may_be_set_back:
            self._copies.append((dict(self.channels), dict(self.replies), self.boots, self.world.judge.memory()))

    def set_back(self, count: int) -> None:
        """An operator restores a copy that is `count` records old, or an empty journal (0), while it is not in use."""
        kept = len(self._copies) - count if count else 0
        del self._copies[max(0, kept) :]
        fresh: dict[Channel, Restored] = {}
        channels, replies, boots, memory = self._copies[-1] if self._copies else (fresh, {}, 0, Memory())
        self.channels, self.replies, self.boots, self.ghost = dict(channels), dict(replies), boots, None
        self.world.judge.set_back(memory)
        found = ", ".join(f"epoch={each.epoch} committed={each.committed}" for each in channels.values())
        self.world.loop.note("journal", f"** is set back to an older copy: {found or 'nothing'}")

    def _remember(self, record: Committed | RoundClosed) -> None:
        self.replies.pop(record.request, None)
        self.replies[record.request] = round_reply_of(record)

    def _commit(self, record: Committed) -> None:
        known = self.channels.get(record.channel, Restored())
        held = known.committed
        newer = held is None or held.version < record.version or record.rollback
        if record.epoch > known.epoch or not (newer or (held and held.table == record.table)):
            raise JournalCorrupt("journal", f"version {record.version} would go back", "this is a bug")
        now = HeldVersion(version=record.version, manifest=Digest(record.manifest), table=Digest(record.table))
        self.channels[record.channel] = msgspec.structs.replace(
            known, committed=now, committed_epoch=record.epoch, history=history_with(known.history, record)
        )

    def refuse(self, record: AnyRecord) -> None:
        """The disk took nothing, it said."""
        if self._rng.random() < 0.2 and self.sqlite is None:
            self.ghost = record

    def settle_after_crash(self) -> None:
        """What a new life finds: a record that was refused last may be there."""
        ghost, self.ghost = self.ghost, None
        if ghost is not None and self._rng.random() < 0.5:
            self.world.loop.note("journal", f"{type(ghost).__name__} had reached the disk, though it was refused")
            self.world.judge.resurrected(ghost)
            self.keep(ghost)

    def begin_life(self, process: Process) -> None:
        """Count a boot, and raise every epoch. What the real journal finds must be what was written to it."""
        cut, self._in_flight = self._in_flight, None
        if self.sqlite is None:
            self._next_stride()
            self._count_boot()
            return
        try:
            real = self.sqlite.open(self._next_stride())
            found = real.restore()
        except JournalError as error:
            self.world.judge.broken("journal-survives", str(error))
            raise Killed("its journal cannot be used") from error
        known, replies = self.channels, dict(self.replies)
        self._count_boot()
        if cut is not None and found != self.restore():
            self.world.loop.note("journal", f"{type(cut).__name__} had reached the disk, though it was cut short")
            self.boots, self.channels, self.replies = self.boots - 1, known, replies
            self.keep(cut)
            self._count_boot()
        if (found, real.boot) != (self.restore(), self.boots):
            what = f"{process.name} finds boot {real.boot}, {found}; written was boot {self.boots}, {self.restore()}"
            self.world.judge.broken("journal-survives", what)

    @contextmanager
    def writing(self, record: AnyRecord) -> Generator[None]:
        """The write of one record; the body is its middle."""
        if self.sqlite is None:
            yield
        else:
            self._in_flight = record
            with self.sqlite.writing(record):
                yield
            self._in_flight = None

    def _next_stride(self) -> int:
        self.stride = self._strides.randrange(*self.world.scenario.strides)
        return self.stride

    def _count_boot(self) -> None:
        self.boots += 1
        self.channels = {
            name: msgspec.structs.replace(known, epoch=Epoch(known.epoch + self.stride))
            for name, known in self.channels.items()
        }

    def restore(self) -> Mapping[Channel, Restored]:
        """Every channel as it was last written."""
        answers: dict[Channel, dict[RequestId, RoundReply]] = {}
        for request, known in list(self.replies.items())[-MAX_ROUND_REPLIES:]:
            answers.setdefault(Channel(known.done.channel), {})[request] = known
        return {
            name: msgspec.structs.replace(known, answers=answers.get(name, {})) for name, known in self.channels.items()
        }


class SimJournal:
    """`journal.Journal` on a `JournalDisk`, for one life of the coordinator."""

    def __init__(self, disk: JournalDisk, process: Process) -> None:
        """Count this boot, durably, as `SqliteJournal` does."""
        self._disk, self._process = disk, process
        disk.settle_after_crash()
        process.passes("persist", "before")
        disk.begin_life(process)
        self.boot, self.stride = disk.boots, disk.stride
        process.passes("persist", "after")

    def check(self) -> None:
        """Its file is what it was."""

    def disown(self, record: AnyRecord) -> None:
        """Nothing is written late."""

    def confirm(self) -> None:
        """No other process can take it."""

    def write(self, record: AnyRecord) -> None:
        """Make `record` durable."""
        disk, process = self._disk, self._process
        process.passes("persist", "before")
        if disk.full:
            disk.refuse(record)
            raise JournalUnwritable("journal", "cannot be written (SQLITE_FULL)", "free room")
        disk.world.loop.note("journal", f"{type(record).__name__} {_about(record)}")
        process.lag += disk.world.journal_s()
        if disk.sqlite is None and process.doomed("persist") and disk.world.coin():
            disk.keep(record)
        with disk.writing(record):
            process.passes("persist", "during")
        disk.keep(record)
        process.passes("persist", "after")

    def restore(self) -> Mapping[Channel, Restored]:
        """Every channel as it was last written."""
        return self._disk.restore()

    def close(self) -> None:
        """Let go of the file."""


class SimWriter(InlineWriter):
    """`journal.WriterThread` on a `JournalDisk`: a write that hangs is given up, and disowned if it ends well.

    Until it ends, a coordinator that begins anew may find the record.
    """

    def __init__(self, journal: SimJournal, disk: JournalDisk) -> None:
        super().__init__(journal)
        self._disk = disk
        self._hung: AnyRecord | None = None
        self._since = 0.0
        self._given_up = False

    @property
    def _hangs(self) -> bool:
        return self._disk.world.loop.now < self._disk.hangs_until

    def begin(self, record: AnyRecord) -> None:
        """Write `record`; while the disk hangs, only the first is in its queue."""
        self._disown()
        if not self._hangs:
            super().begin(record)
        elif self._hung is None:
            self._hung, self._since, self._given_up, self._result = record, self._disk.world.loop.now, False, None
        else:
            self._result = _hung()

    def result(self, wait_s: float) -> WriteResult | None:
        """The result of the last write."""
        self._disown()
        if self._hung is not None and self._result is None:
            if not self._hangs:
                record, self._hung = self._hung, None
                super().begin(record)
            elif self._disk.world.loop.now >= self._since + HUNG_S:
                self._given_up, self._result, self._disk.ghost = True, _hung(), self._hung
        return super().result(wait_s)

    def _disown(self) -> None:
        """The disk goes on, and the record that was given up is taken back before anything else is written."""
        if self._given_up and not self._hangs:
            self._hung, self._given_up, self._disk.ghost = None, False, None


def _hung() -> WriteResult:
    return WriteResult(JournalUnwritable("journal", "has not taken a record", "does its disk hang?"))


class RecordDisk:
    """Where an engine agent keeps its record: the product's own `StateFile`, on files that lose what is not synced.

    It may be another machine than that of the server.
    """

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self._rng = world.rng(f"disk-{name}")
        self.files = Files()
        self._file = StateFile(SimPath(self.files), name)  # type: ignore[arg-type]
        self._written: list[StateRecord | None] = [None]
        """What a new life may find: the last record that was written, and one whose writing was cut short."""
        self._hangs_until = 0.0
        self._hung: StateRecord | None = None
        """The record that hangs: it reaches the disk when that goes on, though its writer was told that it failed."""

    @property
    def hangs(self) -> bool:
        """True while no write ends."""
        return self._world.loop.now < self._hangs_until

    def hang(self, seconds: float) -> None:
        """Take no record for a while."""
        self._hangs_until = self._world.loop.now + seconds

    def goes_on(self) -> None:
        """The hang is over."""
        self._hangs_until = 0.0
        record, self._hung = self._hung, None
        if record is not None:
            self._written = [self._written[0], record]
            with contextlib.suppress(OSError):  # it is full, too
                self._replace(record)

    def read(self, process: Process) -> StateRecord | None:
        """What a new life finds. It has no lock before the last one is gone, which waits for its call to the disk."""
        if self._hung is not None and self._rng.random() < 0.5:  # that was not the last call of the write
            self._hung = None
        self.goes_on()
        try:
            found = self._file.read()
        except StateUnreadable as error:
            self._world.judge.broken("record-survives", f"{process.name} finds {error}")
            return None
        if found not in self._written:
            what = f"{process.name} finds {found}, written was {self._written[0]}"
            self._world.judge.broken("record-survives", what)
        self._written = [found]
        return found

    def write(self, record: StateRecord, process: Process) -> None:
        """Replace the record, or raise `OSError` and keep the old one."""
        process.passes("persist", "before")
        if self.hangs:
            self._hung = self._hung or record
            raise OSError(errno.ETIMEDOUT, "its disk has not answered")
        self.goes_on()
        self._written = [self._written[0], record]
        if process.doomed("persist"):
            self._cut_short(process)
        self._replace(record)
        process.passes("persist", "during")
        process.passes("persist", "after")

    def _replace(self, record: StateRecord) -> None:
        state_file.os = SimOs  # type: ignore[assignment]
        try:
            self._file.write(record)
        finally:
            state_file.os = os
            self.files.step = _on
        self._written = [record]

    def _cut_short(self, process: Process) -> None:
        """Death comes with one of the next operations, at once or while that one hangs: other threads go on then."""
        left = self._rng.randrange(6)
        seconds = self._rng.choice((0.0, 0.0, 0.3, 2.0))

        def step(what: str) -> None:
            nonlocal left
            left -= 1
            if left < 0 and process.trap is not None:
                process.power_fails, process.trap = process.trap.power, None
                raise Hung(f"in {what} of its record", seconds) if seconds else Killed(f"in {what} of its record")

        self.files.step = step

    def lose_power(self) -> None:
        """What is not synced is lost, or torn; what hangs is lost."""
        self._hung = None
        self.files.lose_power(self._rng)

    def vanish(self) -> None:
        """The folder of a container without a volume: the next life finds nothing."""
        full, self.files = self.files.full, Files()
        self.files.full = full
        self._file = StateFile(SimPath(self.files), self._name)  # type: ignore[arg-type]
        self._written = [None]


def _on(_: str) -> None:
    """No death happens here."""


def _about(record: AnyRecord) -> str:
    if isinstance(record, RoundClosed):
        return f"version={record.done.version} {record.done.outcome}"
    return f"epoch={getattr(record, 'epoch', '')} version={getattr(record, 'version', '')}"
