"""The simulated disks deserve to be believed: what is synced survives, and what is not may be lost or torn."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from weightbus.control.machine.effects import EpochTaken
from weightbus.control.protocol.messages import AgentId, Channel, Epoch, Version
from weightbus.engine_agent import state_file

from .filesystem import Files, SimOs, SimPath
from .sqlite_disk import SqliteDisk

CHANNEL = Channel("policy")
OLD, NEW = b'{"of": "the last round"}', b'{"of": "the round that was running"}'


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setattr(state_file, "os", SimOs)
    return Files()


def found_after(files: Files, seed: int) -> bytes | None:
    files.lose_power(random.Random(seed))
    try:
        return SimPath(files, "e0.json").read_bytes()
    except FileNotFoundError:
        return None


def write(files: Files, content: bytes) -> None:
    state_file.write_durably(SimPath(files, "e0.json"), content)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(20))
def test_what_was_written_durably_survives_a_power_cut(files: Files, seed: int) -> None:
    """The product's own way to write a small file loses nothing once it has returned."""
    write(files, OLD)
    write(files, NEW)
    assert found_after(files, seed) == NEW


def test_a_write_that_is_cut_short_anywhere_leaves_the_old_or_the_new(files: Files) -> None:
    """Whichever operation is the last, there is one whole file; and both ends are seen."""

    class Cut(Exception):
        pass

    def die_at(operation: int) -> None:
        left = operation

        def step(_: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Cut

        files.step = step

    found: set[bytes | None] = set()
    for operation in range(5):
        for seed in range(20):
            files.step = lambda _: None
            write(files, OLD)
            die_at(operation)
            with pytest.raises(Cut):
                write(files, NEW)
            found.add(found_after(files, seed))
    assert found == {OLD, NEW}


@pytest.mark.parametrize("without", ["file", "folder"])
def test_without_a_sync_it_is_lost_or_torn(files: Files, monkeypatch: pytest.MonkeyPatch, without: str) -> None:
    """The disk punishes a missing fsync: of the file by torn contents, of its folder by the old name."""

    class Forgetful(SimOs):
        @staticmethod
        def fsync(what: object) -> None:
            if isinstance(what, SimPath) is not (without == "folder"):
                SimOs.fsync(what)  # type: ignore[arg-type]

    found = set()
    for seed in range(40):
        monkeypatch.setattr(state_file, "os", SimOs)
        write(files, OLD)
        monkeypatch.setattr(state_file, "os", Forgetful)
        write(files, NEW)
        found.add(found_after(files, seed))
    assert OLD in found if without == "folder" else found - {OLD, NEW}


@pytest.fixture
def disk() -> Iterator[SqliteDisk]:
    disk = SqliteDisk(random.Random(1), lambda: 1e9)
    yield disk
    disk.discard()


def taken(epoch: int) -> EpochTaken:
    return EpochTaken(channel=CHANNEL, epoch=Epoch(epoch), holder=AgentId("t0"), version=Version(1), in_round=False)


def test_the_real_journal_loses_only_what_was_being_written(disk: SqliteDisk) -> None:
    """SQLite's own recovery: records that were written are there after a power cut, a half-written one is or is not."""
    boots, seen = 0, set()
    for _ in range(30):
        journal = disk.open(1)
        boots += 1
        assert journal.boot == boots
        known = journal.restore()
        epoch = known[CHANNEL].epoch if known else 0
        with disk.writing(taken(epoch + 10)):
            pass
        with pytest.raises(KeyboardInterrupt), disk.writing(taken(epoch + 20)):
            raise KeyboardInterrupt
        disk.lose_power()
        journal = disk.open(1)
        boots += 1
        seen.add(journal.restore()[CHANNEL].epoch - 1 - epoch)
        disk.crash()
    assert seen == {10, 20}


def test_a_journal_that_does_not_sync_loses_records(disk: SqliteDisk) -> None:
    """With SQLite's `synchronous` below FULL a power cut takes records that `write` has returned for."""
    lost = 0
    for _ in range(20):
        journal = disk.open(1)
        known = journal.restore()
        epoch = known[CHANNEL].epoch if known else 0
        disk._syncs = False  # what SqliteDisk makes of another setting
        with disk.writing(taken(epoch + 10)):
            pass
        disk.crash()
        disk.lose_power()
        found = disk.open(1).restore()
        lost += not found or found[CHANNEL].epoch != epoch + 11
        disk.crash()
    assert lost


def test_nothing_of_a_world_stays_in_memory(disk: SqliteDisk) -> None:
    """Its files go with it."""
    disk.open(1)
    folder = disk._folder.name
    disk.discard()
    assert not os.path.exists(folder)  # noqa: PTH110
