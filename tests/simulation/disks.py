"""Disks: what is written, what survives, and what a crash in the middle leaves behind.

The journal behaves as `control/journal.py` with SQLite does: a record is there as a whole or not at all (a torn one is
found by its checksum and dropped), `write` returns after the fsync, and a write that was refused may have reached the
disk all the same, to be found after a restart if nothing was written since.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from weightbus.control.answers import ANSWERS
from weightbus.control.effects import AnyRecord, Committed, EpochTaken, Probe, RoundClosed
from weightbus.control.errors import JournalCorrupt, JournalUnwritable
from weightbus.control.ids import Channel, Digest, Epoch, RequestId
from weightbus.control.journal import REPLY_TTL_S
from weightbus.control.messages import Held, RoundDone
from weightbus.control.past import Restored, remembered
from weightbus.engine_agent.events import Record

if TYPE_CHECKING:
    from .process import Process
    from .world import World


class JournalDisk:
    """The file of the coordinator. Outlives it."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self._rng = world, rng
        self.full = False
        self.boots = 0
        self.wall_offset = 0.0
        """The wall clock of this machine; it may jump, and nothing but the age of replies depends on it."""
        self.channels: dict[Channel, Restored] = {}
        self.replies: dict[RequestId, tuple[float, RoundDone]] = {}
        self.ghost: AnyRecord | None = None
        """Refused, and yet it may be on the disk."""

    def wall(self) -> float:
        """`time.time()`."""
        return 1e9 + self.world.loop.now + self.wall_offset

    def keep(self, record: AnyRecord) -> None:
        """`record` is durable."""
        self.ghost = None
        match record:
            case EpochTaken():
                known = self.channels.get(record.channel, Restored())
                epoch = max(known.epoch, record.epoch)
                self.channels[record.channel] = msgspec.structs.replace(known, epoch=epoch)
            case Committed():
                self._commit(record)
            case RoundClosed():
                self.replies[record.request] = (self.wall(), record.done)
                for key in [k for k, (at, _) in self.replies.items() if at < self.wall() - REPLY_TTL_S]:
                    del self.replies[key]
            case Probe():
                return
        self.world.judge.durable(record)

    def _commit(self, record: Committed) -> None:
        known = self.channels.get(record.channel, Restored())
        held = known.committed
        newer = held is None or held.version < record.version or record.rollback
        if record.epoch > known.epoch or not (newer or (held and held.table == record.table)):
            raise JournalCorrupt("journal", f"version {record.version} would go back", "this is a bug")
        now = Held(version=record.version, manifest=Digest(record.manifest), table=Digest(record.table))
        self.channels[record.channel] = msgspec.structs.replace(
            known, committed=now, committed_epoch=record.epoch, history=remembered(known.history, record)
        )

    def refuse(self, record: AnyRecord) -> None:
        """The disk took nothing, it said."""
        if self._rng.random() < 0.2:
            self.ghost = record

    def settle_after_crash(self) -> None:
        """What a new life finds: a record that was refused last may be there."""
        ghost, self.ghost = self.ghost, None
        if ghost is not None and self._rng.random() < 0.5:
            self.world.loop.note("journal", f"{type(ghost).__name__} had reached the disk, though it was refused")
            self.world.judge.resurrected(ghost)
            self.keep(ghost)

    def restore(self) -> Mapping[Channel, Restored]:
        """Every channel as it was last written."""
        oldest = self.wall() - REPLY_TTL_S
        answers: dict[Channel, dict[RequestId, RoundDone]] = {}
        for request, (at, done) in list(self.replies.items())[-ANSWERS:]:
            if at >= oldest:
                answers.setdefault(Channel(done.channel), {})[request] = done
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
        disk.boots += 1
        disk.channels = {
            name: msgspec.structs.replace(known, epoch=Epoch(known.epoch + 1)) for name, known in disk.channels.items()
        }
        self.boot = disk.boots
        process.passes("persist", "after")

    def confirm(self) -> None:
        """Nobody else can have it."""

    def write(self, record: AnyRecord) -> None:
        """Make `record` durable."""
        disk, process = self._disk, self._process
        process.passes("persist", "before")
        if disk.full:
            disk.refuse(record)
            raise JournalUnwritable("journal", "cannot be written (SQLITE_FULL)", "free room")
        disk.world.loop.note("journal", f"{type(record).__name__} {_about(record)}")
        process.lag += disk.world.journal_s()
        if process.doomed("persist") and disk.world.coin():
            disk.keep(record)
        process.passes("persist", "during")
        disk.keep(record)
        process.passes("persist", "after")

    def restore(self) -> Mapping[Channel, Restored]:
        """Every channel as it was last written."""
        return self._disk.restore()

    def close(self) -> None:
        """Let go of the file."""


class RecordDisk:
    """An engine agent's record file, as `engine_agent/record_file.py` writes it: new file, fsync, rename, fsync."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.full = False
        self._now: Record | None = None

    def read(self) -> Record | None:
        """What was written last."""
        return self._now

    def write(self, record: Record, process: Process) -> None:
        """Replace the record, or raise `OSError` and keep the old one."""
        process.passes("persist", "before")
        if self.full:
            raise OSError(28, "No space left on device")
        if process.doomed("persist") and self._world.coin():  # the rename had reached the disk
            self._now = record
        process.passes("persist", "during")
        self._now = record
        process.passes("persist", "after")


def _about(record: AnyRecord) -> str:
    if isinstance(record, RoundClosed):
        return f"version={record.done.version} {record.done.outcome}"
    return f"epoch={getattr(record, 'epoch', '')} version={getattr(record, 'version', '')}"
