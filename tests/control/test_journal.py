"""The journal: what was written is there after any end of the process; what could not be written changed nothing."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from weightbus.control.effects import AnyRecord, Committed, EpochTaken, Probe, RoundClosed
from weightbus.control.errors import JournalCorrupt, JournalError, JournalUnwritable
from weightbus.control.ids import AgentId, Channel, Digest, Epoch, RequestId, Version
from weightbus.control.journal import REPLY_TTL_S, SqliteJournal
from weightbus.control.messages import Outcome, RoundDone

from .world import replay

A = Digest("a" * 64)


def taken(epoch: int, channel: str = "policy") -> EpochTaken:
    return EpochTaken(channel=Channel(channel), epoch=Epoch(epoch), holder=AgentId("t"), version=Version(1))


def commit(version: int, epoch: int, table: Digest = A) -> Committed:
    return Committed(
        channel=Channel("policy"),
        epoch=Epoch(epoch),
        version=Version(version),
        manifest=A,
        table=table,
        request=RequestId("p"),
        engines=(AgentId("e0"),),
    )


def closed(request: str) -> RoundClosed:
    done = RoundDone(
        channel=Channel("policy"),
        epoch=Epoch(1),
        version=Version(1),
        outcome=Outcome.COMMITTED,
        reason="",
        engines=(),
        seconds={"total": 1.0},
    )
    return RoundClosed(request=RequestId(request), done=done)


RECORDS: list[AnyRecord] = [taken(1), commit(1, 1), closed("p"), taken(1, "other"), taken(2), commit(3, 2), Probe()]


def test_restores_what_was_written(tmp_path: Path) -> None:
    """A restart knows committed versions and answers, the same as a naive replay of the records; epochs are raised."""
    journal = SqliteJournal(tmp_path / "j")
    for record in RECORDS:
        journal.write(record)
        journal.write(record)  # writing twice is the same as writing once
    journal.close()
    again = SqliteJournal(tmp_path / "j")
    expected = {name: msgspec.structs.replace(each, epoch=each.epoch + 1) for name, each in replay(RECORDS).items()}
    assert again.restore() == expected
    assert again.boot == 2
    again.close()


def test_every_prefix_restores(tmp_path: Path) -> None:
    """Wherever the records end, what comes back is what was written so far."""
    journal = SqliteJournal(tmp_path / "j")
    for count, record in enumerate(RECORDS, 1):
        journal.write(record)
        assert journal.restore() == replay(RECORDS[:count])
    journal.close()


def test_survives_sigkill_after_write(tmp_path: Path) -> None:
    """What `write` returned for is there after SIGKILL; the boot is counted."""
    script = (
        "import os, signal, sys; from pathlib import Path; sys.path[:0] = [];"
        "from weightbus.control.journal import SqliteJournal; from weightbus.control.effects import EpochTaken;"
        "j = SqliteJournal(Path(sys.argv[1]));"
        "[j.write(EpochTaken(channel='policy', epoch=n, holder='t', version=1)) for n in range(1, 8)];"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path / "j")], env=environ, check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    journal = SqliteJournal(tmp_path / "j")
    assert (journal.boot, journal.restore()[Channel("policy")].epoch) == (2, 8)
    journal.close()


def test_versions_and_epochs_never_go_back(tmp_path: Path) -> None:
    """Even a machine with a bug cannot write an older version over a newer one, or lower an epoch."""
    journal = SqliteJournal(tmp_path / "j")
    for record in (taken(5), commit(7, 5), taken(3)):
        journal.write(record)
    for record in (commit(6, 5), commit(7, 5, Digest("b" * 64)), commit(8, 6)):
        with pytest.raises(JournalCorrupt, match="would go back"):
            journal.write(record)
    restored = journal.restore()[Channel("policy")]
    assert restored.committed
    assert (restored.epoch, restored.committed.version, restored.committed.table) == (5, 7, A)
    journal.close()


def test_full_disk_is_told_and_recovered_from(tmp_path: Path) -> None:
    """A write that does not fit raises `JournalUnwritable` and changes nothing; with room again writes go on."""
    journal = SqliteJournal(tmp_path / "j")
    journal.write(taken(1))
    database = journal._db
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(JournalUnwritable, match=r"SQLITE_FULL.*free room"):
        for number in range(1000):
            journal.write(closed(f"request {number}"))
    assert journal.restore()[Channel("policy")].epoch == 1
    database.execute("PRAGMA max_page_count = 100000")
    journal.write(taken(2))
    assert journal.restore()[Channel("policy")].epoch == 2
    journal.close()


def test_one_file_serves_one_coordinator(tmp_path: Path) -> None:
    """A second coordinator on the same journal would grant the same epochs: it does not start."""
    first = SqliteJournal(tmp_path / "j")
    with pytest.raises(JournalError, match="another coordinator"):
        SqliteJournal(tmp_path / "j")
    first.close()
    SqliteJournal(tmp_path / "j").close()


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    """A file that is no database, or a damaged one, is refused with what to do; it is not begun anew."""
    path = tmp_path / "j"
    path.write_bytes(b"this is not a database" * 100)
    with pytest.raises(JournalCorrupt, match="restore it from a backup"):
        SqliteJournal(path)
    assert path.read_bytes().startswith(b"this is not")


def test_other_schema_is_refused(tmp_path: Path) -> None:
    """A file of another release is left as it is."""
    SqliteJournal(tmp_path / "j").close()
    with sqlite3.connect(tmp_path / "j") as database:
        database.execute("UPDATE meta SET schema = 99")
    database.close()
    with pytest.raises(JournalError, match="schema 99"):
        SqliteJournal(tmp_path / "j")


def test_folder_that_cannot_be_used(tmp_path: Path) -> None:
    """A path under a file is refused with its name."""
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=r"cannot be opened.*--journal"):
        SqliteJournal(tmp_path / "file" / "j")


def test_answers_are_forgotten_after_a_day(tmp_path: Path) -> None:
    """Old answers do not come back, and do not stay in the file."""
    clock = [0.0]
    journal = SqliteJournal(tmp_path / "j", wall_clock=lambda: clock[0])
    journal.write(taken(1))
    journal.write(closed("old"))
    clock[0] = REPLY_TTL_S + 1
    assert not journal.restore()[Channel("policy")].answers
    journal.write(closed("new"))
    assert list(journal.restore()[Channel("policy")].answers) == ["new"]
    assert journal._db.execute("SELECT count(*) FROM reply").fetchone() == (1,)
    journal.close()


def test_audit_tells_the_story(tmp_path: Path) -> None:
    """Grants, commits and ended rounds can be read in order; probes cannot."""
    journal = SqliteJournal(tmp_path / "j")
    for record in RECORDS:
        journal.write(record)
    assert [row["record"] for row in journal.audit()] == [
        "EpochTaken",
        "Committed",
        "RoundClosed",
        "EpochTaken",
        "EpochTaken",
        "Committed",
    ]
    journal.close()


def test_a_version_goes_back_only_by_a_rollback(tmp_path: Path) -> None:
    """An explicit rollback is written over a newer version; it needs the flag, and survives a restart."""
    journal = SqliteJournal(tmp_path / "j")
    journal.write(taken(1))
    journal.write(commit(7, 1))
    journal.write(taken(2))
    with pytest.raises(JournalCorrupt):
        journal.write(commit(3, 2))
    journal.write(msgspec.structs.replace(commit(3, 2), rollback=True))
    journal.close()
    again = SqliteJournal(tmp_path / "j")
    restored = again.restore()[Channel("policy")]
    assert restored.committed is not None
    assert (restored.committed.version, restored.epoch) == (3, 3)
    again.close()
