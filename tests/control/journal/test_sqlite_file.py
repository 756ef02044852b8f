"""Which file becomes a journal. What is refused is left as it was: its mode, its bytes and its times."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sqlite3
import stat
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from weightbus.control.journal.sqlite_journal import SqliteJournal, check_location
from weightbus.control.protocol.errors import JournalCorrupt, JournalError
from weightbus.control.protocol.messages import Channel

from ..journal_contract import taken

Left = dict[str, tuple[int, int, int, bytes]]


def left(folder: Path) -> Left:
    """Of every file in `folder`: mode, size and time of its last change, and what it holds."""
    found: Left = {}
    for path in folder.iterdir():
        stats = path.stat()
        content = path.read_bytes() if path.is_file() else b""
        found[path.name] = (stats.st_mode, stats.st_size, stats.st_mtime_ns, content)
    return found


def refused(path: Path, reason: str, kind: type[JournalError] = JournalError) -> None:
    """It is, by the journal, and all that is beside it is as it was."""
    path.chmod(0o664)
    before = left(path.parent)
    with pytest.raises(kind, match=reason) as error:
        SqliteJournal(path)
    assert type(error.value) is kind
    assert re.search("name (another file|one) with --journal", str(error.value))
    assert left(path.parent) == before


def database(path: Path, statements: Sequence[str], *, in_log: bool = False) -> None:
    """A database of another program; `in_log`: as a crash leaves one of which all is in its log yet."""
    source = path.with_name("source") if in_log else path
    with closing(sqlite3.connect(source, isolation_level=None)) as made:
        if in_log:
            made.execute("PRAGMA journal_mode = WAL")
        for statement in statements:
            made.execute(statement)
        for end in ("", "-wal") if in_log else ():
            shutil.copyfile(f"{source}{end}", f"{path}{end}")
    if in_log:
        source.unlink()


def test_a_device_is_refused(tmp_path: Path) -> None:
    """`--journal /dev/null` once made it unusable for all users of the host."""
    device = Path("/dev/null")
    if os.geteuid() == 0:  # whose own it is, and who would change it if this were broken
        device = tmp_path / "null"
        try:
            os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("this root may make no devices")
    before = device.stat()
    with pytest.raises(
        JournalError, match="is a device, a socket or a pipe, expected a regular file; name one with --journal"
    ):
        SqliteJournal(device)
    assert (device.stat().st_mode, device.stat().st_ctime_ns) == (before.st_mode, before.st_ctime_ns)


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as bound:
        bound.bind(str(path))


@pytest.mark.parametrize("make", [_pipe, _socket])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """At once: a pipe would be waited at."""
    make(tmp_path / "j")
    refused(tmp_path / "j", "expected a regular file")


@pytest.mark.parametrize("content", [b"\n", b"notes\n" * 1000, bytes(8192)])
def test_a_file_that_is_no_database_is_refused(tmp_path: Path, content: bytes) -> None:
    """After a bad disk the advice is to restore the journal; for a mistaken file, to name another."""
    (tmp_path / "j").write_bytes(content)
    refused(tmp_path / "j", "file is not a database; .*restore it from a backup", JournalCorrupt)


@pytest.mark.parametrize("in_log", [False, True])
@pytest.mark.parametrize(
    "statement",
    ["CREATE TABLE users (name TEXT)", "CREATE TABLE meta (key TEXT, value TEXT)", "CREATE VIEW v AS SELECT 1"],
)
def test_a_database_of_another_program_is_refused(tmp_path: Path, statement: str, *, in_log: bool) -> None:
    """Nothing is written to it, nor does its owner find it with another mode."""
    database(tmp_path / "j", [statement], in_log=in_log)
    assert (tmp_path / "j-wal").exists() is in_log
    refused(
        tmp_path / "j", "is a database of another program: found the tables (users|meta|v), and not those of a journal"
    )


def test_a_database_that_is_empty_becomes_a_journal(tmp_path: Path) -> None:
    """As an empty file does: nothing is lost."""
    database(tmp_path / "j", ["PRAGMA journal_mode = WAL", "CREATE TABLE t (x)", "DROP TABLE t"])
    SqliteJournal(tmp_path / "j").close()
    assert (tmp_path / "j").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["j", "what is 100% ? #1", "ä"])
def test_a_journal_is_known_wherever_its_tables_are(tmp_path: Path, name: str) -> None:
    """In its file, or all in its log yet, as a coordinator that was killed leaves it. Looking changes neither."""
    source, copy = tmp_path / "folder" / name, tmp_path / "copies" / name
    copy.parent.mkdir()
    journal = SqliteJournal(source)
    journal.write(taken(7))
    for end in ("", "-wal"):
        shutil.copy(f"{source}{end}", f"{copy}{end}")
    journal.close()
    for path in (source, copy):
        before = left(path.parent)
        check_location(path)
        assert left(path.parent) == before
        again = SqliteJournal(path, by=1)
        assert again.restore()[Channel("policy")].epoch == 8
        again.close()
