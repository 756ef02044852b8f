"""The journal's own thread: its caller waits for no disk, and a write that was given up leaves nothing behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weightbus.control.journal import writer_thread
from weightbus.control.journal.sqlite_journal import SqliteJournal
from weightbus.control.journal.writer_thread import WriterThread
from weightbus.control.machine.effects import AnyRecord
from weightbus.control.protocol.errors import JournalCorrupt, JournalError, JournalUnwritable

from ...kit.unreadable import loop_at
from ..journal_contract import POLICY, commit, taken


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class SlowJournal(SqliteJournal):
    """A real journal whose disk can hang before or after a record is on it, and refuse to have it disowned."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, by=1)
        self.thawed = threading.Event()
        self.thawed.set()
        self.lost, self.unwritable = False, 0

    def write(self, record: AnyRecord) -> None:
        self.thawed.wait(60)
        if self.lost:
            raise JournalUnwritable("j", "disk I/O error", "replace the disk")
        super().write(record)

    def disown(self, record: AnyRecord) -> None:
        if self.unwritable:
            self.unwritable -= 1
            raise JournalUnwritable("j", "full", "free room")
        super().disown(record)


class World:
    """A journal, its thread, and the number of times that the loop was woken."""

    def __init__(self, path: Path) -> None:
        self.journal = SlowJournal(path)
        self.woken = 0
        self.writer = WriterThread(self.journal, self._wake)

    def _wake(self) -> None:
        self.woken += 1

    def write(self, record: AnyRecord, wait_s: float = 30.0) -> Exception | None:
        self.writer.begin(record)
        result = self.writer.result(wait_s)
        assert result is not None
        return result.error

    @property
    def version(self) -> int | None:
        held = self.journal.restore()[POLICY].committed
        return held.version if held else None


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(writer_thread, "HUNG_S", 0.3)
    monkeypatch.setattr(writer_thread, "CHECK_S", 0.05)
    world = World(tmp_path / "j")
    yield world
    world.journal.thawed.set()
    world.writer.close()
    assert world.writer.closed
    world.journal.close()


def hang(world: World, record: AnyRecord) -> None:
    """Have `record` given up."""
    world.journal.thawed.clear()
    world.writer.begin(record)
    assert world.writer.result(0.0) is None, "not given up at once"
    time.sleep(0.35)
    result = world.writer.result(0.0)
    assert result is not None
    assert isinstance(result.error, JournalUnwritable)
    assert "has not taken a record for" in str(result.error)


def test_a_record_is_durable_when_its_result_says_so(world: World, tmp_path: Path) -> None:
    """The loop is woken, because it may be waiting for messages by then."""
    assert world.write(taken(1)) is None
    assert world.write(commit(1, 1)) is None
    until(lambda: world.woken == 2)
    assert world.version == 1
    assert world.writer.hung_s == 0.0
    assert (tmp_path / "j-wal").stat().st_size


def test_a_late_commit_is_disowned_before_anything_else_is_written(world: World) -> None:
    """It was reported as failed, so the version before is the committed one, and the next one may differ (A7)."""
    assert world.write(taken(1)) is None
    assert world.write(commit(1, 1)) is None
    hang(world, commit(2, 1, request="late"))
    assert world.writer.hung_s > 0
    for _ in range(3):
        assert isinstance(world.write(taken(2), 0.0), JournalUnwritable), "all fail while one hangs"
    world.journal.unwritable = 3  # nor can it be disowned at once
    world.journal.thawed.set()
    until(lambda: world.writer.hung_s == 0.0)
    assert world.journal.unwritable == 0
    assert world.version == 1
    assert world.write(taken(2)) is None
    assert world.write(commit(2, 2, request="other")) is None
    assert world.version == 2


def test_a_late_failure_changes_nothing(world: World) -> None:
    """The next write is an ordinary one."""
    assert world.write(taken(1)) is None
    hang(world, commit(2, 1))
    world.journal.lost = True
    world.journal.thawed.set()
    until(lambda: world.writer.hung_s == 0.0)
    world.journal.lost = False
    assert world.version is None
    assert world.write(commit(3, 1)) is None


def test_what_is_wrong_with_the_files_is_raised_on_the_loop(world: World, tmp_path: Path) -> None:
    """They are looked at while nothing is written, too (A2)."""
    world.writer.confirm()
    (tmp_path / "j").unlink()
    until(lambda: world.woken > 0)
    with pytest.raises(JournalError, match="was removed or replaced"):
        world.writer.confirm()


def test_an_error_of_the_journal_is_handed_to_the_loop(world: World) -> None:
    """The loop knows which of them ends the process."""
    assert isinstance(world.write(commit(2, 7)), JournalCorrupt)


def test_close_does_not_wait_for_a_hung_disk(world: World) -> None:
    """The process can end; what is written after that is not disowned, and the journal decides at the next start."""
    assert world.write(taken(1)) is None
    hang(world, taken(2))
    began = time.monotonic()
    world.writer.close()
    assert time.monotonic() - began < 10
    assert not world.writer.closed


def test_a_disk_that_gives_no_answer_while_nothing_is_written_ends_nothing(world: World, tmp_path: Path) -> None:
    """The next record finds out whether it lasts."""
    assert world.write(taken(1)) is None
    log, world.journal._log = world.journal._log, loop_at(tmp_path / "loop")
    time.sleep(0.2)
    world.writer.confirm()
    world.journal._log = log
    assert world.write(taken(2)) is None
