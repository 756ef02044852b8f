"""Records that may be written late are written in order, and a failure of one is told once."""

from __future__ import annotations

import errno
import threading

import msgspec
import pytest

from tests.engine_agent.world import World
from weightbus.control.protocol.enums import EngineHealth
from weightbus.control.protocol.ids import Epoch, Version
from weightbus.control.protocol.message_fields import HeldVersion
from weightbus.engine_agent.machine.events import StateRecord
from weightbus.engine_agent.sidecar import state_writer as late_records
from weightbus.engine_agent.sidecar.effect_dispatcher import EffectDispatcher
from weightbus.engine_agent.sidecar.state_writer import StateWriter

WAIT_S = 20.0


def record(epoch: int) -> StateRecord:
    return StateRecord(identity="i", health=EngineHealth.PENDING, held=None, epoch=Epoch(epoch), checkpoint="")


class Disk:
    """Writes when it is let."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.full = False

    def write(self, each: StateRecord) -> None:
        self.begun.set()
        assert self.go_on.wait(WAIT_S)
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.written.append(each.epoch)


def test_late_is_beside_and_now_is_behind_what_was_begun() -> None:
    """Whoever writes late goes on at once; whoever writes now has the newest record on disk afterwards."""
    disk = Disk()
    late = StateWriter(disk.write)
    late.later(record(1))
    assert disk.begun.wait(WAIT_S)
    late.later(record(2))
    writer = threading.Thread(target=late.now, args=(record(3),))
    writer.start()
    disk.go_on.set()
    writer.join(WAIT_S)
    assert disk.written[-1] == 3
    assert disk.written[0] == 1
    late.later(record(4))
    late.close()
    assert disk.written[-1] == 4
    assert disk.written == sorted(disk.written)


def test_a_disk_that_hangs_does_not_hold_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record on it is of a worse state than the true one, as after any write that failed."""
    monkeypatch.setattr(late_records, "CLOSE_S", 0.1)
    disk = Disk()
    late = StateWriter(disk.write)
    late.later(record(1))
    assert disk.begun.wait(WAIT_S)
    closing = threading.Thread(target=late.close, daemon=True)
    closing.start()
    closing.join(WAIT_S / 4)
    ended = not closing.is_alive()
    disk.go_on.set()
    assert ended
    closing.join(WAIT_S)
    assert late._thread is not None
    late._thread.join(WAIT_S)


def test_what_could_not_be_written_late_is_told_once() -> None:
    """With its record, so that it can be tried again; not, when a newer one was written since."""
    disk = Disk()
    disk.full = True
    disk.go_on.set()
    late = StateWriter(disk.write)
    late.later(record(1))
    late.close()
    failure = late.failure()
    assert failure is not None
    assert failure[0].epoch == 1
    assert late.failure() is None
    with pytest.raises(OSError, match="No space left"):
        late.now(record(2))

    late = StateWriter(disk.write)
    late.later(record(1))
    late.close()
    disk.full = False
    late.now(record(2))
    assert late.failure() is None


def test_only_a_proven_version_that_waits_for_its_commit_or_got_it_is_written_late() -> None:
    """Dirty records are there before the first byte; clean ones at once, unless the record says all but the commit."""
    world = World()
    now: list[StateRecord] = []
    later: list[StateRecord] = []
    dispatcher = EffectDispatcher(world.machine, now.append, lambda _: None, lambda _: None, later.append)
    world.to_paused()
    kept = [each.late for effects in (world.transfer(), world.end()) for each in effects if hasattr(each, "late")]
    assert True not in kept
    recorded = world.machine._recorded
    held = HeldVersion(version=7, manifest="a" * 64, table="b" * 64)  # type: ignore[arg-type]
    other = msgspec.structs.replace(held, version=Version(8))
    for health, holds, epoch, late in (
        (EngineHealth.DIRTY, None, 1, False),
        (EngineHealth.CLEAN, held, 1, False),  # nothing of it was lost
        (EngineHealth.PENDING, None, 1, False),
        (EngineHealth.PENDING, held, 1, True),
        (EngineHealth.CLEAN, held, 2, False),  # of this epoch nothing is on disk yet
        (EngineHealth.PENDING, held, 2, True),
        (EngineHealth.CLEAN, other, 2, False),
        (EngineHealth.PENDING, held, 2, True),
        (EngineHealth.CLEAN, held, 2, True),
        (EngineHealth.CLEAN, held, 2, False),
    ):
        assert recorded.remember("i", health, holds, Epoch(epoch), "").late is late
    dispatcher.lost(record(5), OSError(errno.ENOSPC, "No space left on device"))
    assert dispatcher.unsaved == record(5)
    dispatcher.retry()
    assert now == [record(5)]
    assert dispatcher.unsaved is None
