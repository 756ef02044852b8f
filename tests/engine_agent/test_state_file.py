"""The record on disk: what survives a crash; records that may be written late come in order, a failure is told once."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from tests.engine_agent.world import CHANNEL, World
from tests.kit.disk_calls import DiskCalls
from weightbus.control.protocol.errors import ConfigurationError
from weightbus.control.protocol.messages import Abort, EngineHealth, Epoch, Failed, HeldVersion, Version
from weightbus.engine_agent import state_file
from weightbus.engine_agent.errors import StateInUse, StateUnreadable, StateUnwritable
from weightbus.engine_agent.machine.events import (
    Answer,
    Commanded,
    Effect,
    Event,
    ReleaseServer,
    RunOperation,
    StateRecord,
)
from weightbus.engine_agent.state_file import (
    EffectDispatcher,
    LockHeld,
    ProcessLock,
    StateFile,
    StateWriter,
    server_claim,
    write_durably,
)


def test_a_claim_leaves_the_record_as_it_is(tmp_path: Path) -> None:
    """That the folder can be written is tried out beside the record."""
    record = StateRecord(identity="first", health=EngineHealth.DIRTY, epoch=3)
    first = StateFile(tmp_path / "state", "e0")
    first.claim()
    assert first.read() is None
    first.write(record)
    first.release()
    second = StateFile(tmp_path / "state", "e0")
    second.claim()
    assert second.read() == record


def test_a_record_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are on the disk before it takes the old one's place, and the new name is before `write` returns."""
    disk = DiskCalls(monkeypatch)
    records = StateFile(tmp_path / "state", "e0")
    for epoch in (1, 2):
        disk.calls.clear()
        records.write(StateRecord(identity="first", health=EngineHealth.CLEAN, epoch=epoch))
        assert disk.calls == [("sync file", "e0.json.new"), ("rename to", "e0.json"), ("sync folder", "state")]
        assert disk.synced["e0.json.new"] == records.path.read_bytes()


def test_what_is_kept_beside_a_record_is_written_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, at the same time: neither is taken for the other, and both are kept."""
    record = StateRecord(identity="first", health=EngineHealth.CLEAN, epoch=1)
    records = StateFile(tmp_path, "e0")
    write_fresh = state_file.write_fresh

    def meanwhile(path: Path, content: bytes) -> Path:
        fresh = write_fresh(path, content)
        if path == records.path:
            write_durably(tmp_path / "e0.manifest", b"a manifest")
        return fresh

    monkeypatch.setattr(state_file, "write_fresh", meanwhile)
    records.write(record)

    assert records.read() == record
    assert (tmp_path / "e0.manifest").read_bytes() == b"a manifest"


def test_one_agent_of_a_name(tmp_path: Path) -> None:
    """A second agent with the same name and folder does not start; with another name, or after the first, it does."""
    first, second, other = StateFile(tmp_path, "e0"), StateFile(tmp_path, "e0"), StateFile(tmp_path, "e1")
    first.claim()
    with pytest.raises(StateInUse, match="another agent with the name 'e0'"):
        second.claim()
    other.claim()
    first.release()
    second.claim()


def test_a_folder_that_cannot_be_written_is_found_at_the_start(tmp_path: Path) -> None:
    """As a mistake of configuration that names the folder, not in mid-round."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StateUnwritable, match=str(tmp_path / "file" / "state")) as refused:
        StateFile(tmp_path / "file" / "state", "e0").claim()
    assert isinstance(refused.value, ConfigurationError)
    (tmp_path / "e1.json.new").mkdir()
    with pytest.raises(StateUnwritable, match="--state-dir"):
        StateFile(tmp_path, "e1").claim()


@pytest.mark.parametrize("change", [(b"first", b"f\xffrst"), (b"}", b""), (b"{", b"\xff")])
def test_a_record_that_was_damaged_is_told_from_none(tmp_path: Path, change: tuple[bytes, bytes]) -> None:
    """Whatever stands in it, text or not: the file is named, and what to do."""
    records = StateFile(tmp_path, "e0")
    records.write(StateRecord(identity="first", health=EngineHealth.CLEAN, epoch=3))
    records.path.write_bytes(records.path.read_bytes().replace(*change))
    with pytest.raises(StateUnreadable, match="restart the server, then delete the file"):
        records.read()


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
    """A late write returns at once; after a write now the newest record is on disk."""
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
    monkeypatch.setattr(state_file, "CLOSE_S", 0.1)
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


def test_a_disk_that_hangs_is_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller goes on after a moment, at once the next time; later the newest record is on disk (N33, F38)."""
    monkeypatch.setattr(state_file, "HUNG_S", 0.2)
    disk = Disk()
    writer = StateWriter(disk.write)
    with pytest.raises(OSError, match="its disk has not answered"):
        writer.now(record(1))
    began = time.monotonic()
    for epoch in (2, 3):
        with pytest.raises(OSError, match="its disk has not answered"):
            writer.now(record(epoch))
    assert time.monotonic() - began < 0.2, "a disk that is known to hang was waited for"
    disk.go_on.set()
    until = time.monotonic() + WAIT_S
    while disk.written != [1] and time.monotonic() < until:
        time.sleep(0.01)
    writer.now(record(4))
    assert disk.written == [1, 4]
    assert writer.failure() is None


def test_a_late_record_that_fails_at_last_is_not_told_over_a_newer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again is the newest record: the older one would be written over it (F38)."""
    monkeypatch.setattr(state_file, "HUNG_S", 0.2)
    disk = Disk()
    writer = StateWriter(disk.write)
    writer.later(record(1))
    assert disk.begun.wait(WAIT_S)
    with pytest.raises(OSError, match="its disk has not answered"):
        writer.now(record(2))
    disk.full = True
    disk.go_on.set()
    writer.close()
    assert writer.failure() is None
    disk.full = False
    writer.now(record(2))
    assert disk.written == [2]


def test_a_paused_server_goes_on_while_the_disk_of_its_record_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer does not begin, its reason goes to the trainer, and the abort resumes the server (N33, G4, F38)."""
    monkeypatch.setattr(state_file, "HUNG_S", 0.1)
    world, disk = World(), Disk()
    world.to_paused()
    writer = StateWriter(disk.write)
    carried: list[Effect] = []
    posted: list[Event] = []
    dispatcher = EffectDispatcher(world.machine, writer.now, carried.append, posted.append, writer.later)
    dispatcher.dispatch(Commanded(world.transfer_message()), world.now)
    assert not any(isinstance(each, RunOperation) for each in carried), "the transfer began"
    dispatcher.dispatch(posted.pop(), world.now)
    (failed,) = (each.message for each in carried if isinstance(each, Answer))
    assert isinstance(failed, Failed)
    assert (failed.health, "its disk has not answered" in failed.reason) == (EngineHealth.CLEAN, True)
    carried.clear()
    abort = Abort(channel=CHANNEL, epoch=Epoch(1), reason="the test says so", deadline_s=30.0)
    dispatcher.dispatch(Commanded(abort), world.now)
    assert any(isinstance(each, RunOperation) and isinstance(each.operation, ReleaseServer) for each in carried)
    disk.go_on.set()
    writer.close()


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


HOLD = """
import sys
from pathlib import Path
from weightbus.engine_agent.state_file import server_claim
claim = server_claim(Path(sys.argv[1]), sys.argv[2], "e0")
claim.take()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_claim_ends_with_its_process(tmp_path: Path) -> None:
    """Held by a live process, named in the refusal; free the moment it was killed, with nothing to clean up (S19)."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), "http://127.0.0.1:30000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    claim = server_claim(tmp_path, "http://localhost:30000/", "e1")
    with pytest.raises(LockHeld) as held:
        claim.take()
    assert held.value.holder == f"e0 (process {holder.pid})"
    holder.kill()
    holder.communicate()
    claim.take()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("http://127.0.0.1:30000", "http://localhost:30000/", True),
        ("http://127.0.0.1:30000", "http://[::1]:30000", True),
        ("http://Host:30000", "http://host:30000", True),
        ("http://127.0.0.1:30000", "http://127.0.0.1:30001", False),
        ("http://10.0.0.7:30000", "http://10.0.0.8:30000", False),
    ],
)
def test_what_is_one_server(tmp_path: Path, one: str, other: str, same: bool) -> None:
    """Spellings of one address are one server; other ports and hosts are others (S19)."""
    assert (server_claim(tmp_path, one, "e0").path == server_claim(tmp_path, other, "e1").path) is same


def test_a_released_claim_can_be_taken(tmp_path: Path) -> None:
    """By any process, any number of times."""
    first, second = ProcessLock(tmp_path / "lock", "one"), ProcessLock(tmp_path / "lock", "two")
    for _ in range(2):
        first.take()
        with pytest.raises(LockHeld, match="held by one"):
            second.take()
        first.release()
        second.take()
        second.release()
