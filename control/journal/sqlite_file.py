"""Checks of a journal's file before SQLite writes to it: whether a journal can be kept there, and that it is one.

A wrong file is left untouched: a refused file keeps its mode, bytes and times.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Final

from ..protocol import JournalCorrupt, JournalError

RESTORE: Final = "restore it from a backup; beginning anew would forget which version is committed"
_ELSEWHERE: Final = "or name another file with --journal"
_MAGIC: Final = b"SQLite format 3\0"
_OURS: Final = frozenset({"only_row", "schema", "boot"})
"""Columns of the table `meta`, in every release."""


def check_location(path: Path) -> None:
    """Make the folder and check that a journal can be kept there: SQLite's own errors do not say why not.

    Raises `JournalError`, or `JournalCorrupt` for a file that is no database.
    """
    folder = path.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        problem = f"its folder cannot be made ({error.filename}: {error.strerror})"
        raise JournalError(path, problem, f"make {folder} for user {os.geteuid()}, {_ELSEWHERE}") from error
    if path.is_dir():
        raise JournalError(path, "is a folder, expected a file", f"name a file in it, {_ELSEWHERE}")
    if path.exists() and not path.is_file():
        raise JournalError(path, "is a device, a socket or a pipe, expected a regular file", "name one with --journal")
    # SQLite writes two more files beside the main one, so the folder must be writable too.
    for place in (folder, path) if path.exists() else (folder,):
        if os.statvfs(place).f_flag & os.ST_RDONLY:
            problem = f"{place} is on a file system that is mounted read-only"
            raise JournalError(path, problem, f"mount it for writing, {_ELSEWHERE}")
        if not os.access(place, os.R_OK | os.W_OK, effective_ids=True):
            found = place.stat()
            problem = (
                f"{place} cannot be read and written by user {os.geteuid()}: it belongs to user {found.st_uid}, mode"
                f" {stat.S_IMODE(found.st_mode):04o}"
            )
            raise JournalError(path, problem, f"give it to user {os.geteuid()}, {_ELSEWHERE}")
    _refuse_a_log_alone(path)
    if path.exists():
        _look_inside(path)


def log_of(path: Path) -> Path:
    """The write-ahead log, with the newest records. SQLite puts it beside the target of a symbolic link."""
    return Path(f"{path.resolve()}-wal")


def _refuse_a_log_alone(path: Path) -> None:
    """Refuse a log without its main file: SQLite would delete it, and with it every record that is in the log alone.

    An interrupted first start leaves no such log: SQLite writes and syncs the first page of the main file, and its name
    in the folder, before it makes the log.
    """
    log = log_of(path)
    size = _size(log)  # read before that of the main file, which another process may be making
    if size and not _size(path):
        found = "is empty" if path.exists() else "is not there"
        problem = (
            f"{found}, but {log} holds {size} bytes: records that may be nowhere else, and a start would delete them"
        )
        advice = (
            f"put the main file that was written together with it back at {path}, or restore both from a backup; to"
            f" begin anew, with nothing known to be committed, move {log} away"
        )
        raise JournalError(path, problem, advice)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _look_inside(path: Path) -> None:
    """Raise unless the file is empty, which becomes a journal, or is a journal."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_MAGIC))
    except OSError as error:
        raise JournalError(path, f"cannot be read ({error.strerror})", f"is the disk failing? {_ELSEWHERE}") from error
    if not start:
        return
    if start != _MAGIC:
        advice = f"if it was a journal, {RESTORE}; if it never was, name another file with --journal"
        raise JournalCorrupt(path, "file is not a database", advice)
    tables, ours = _tables(path)
    if tables and not ours:
        found = ", ".join(tables[:5])
        problem = f"is a database of another program: found the tables {found}, and not those of a journal"
        raise JournalError(path, problem, "name another file with --journal")


def _tables(path: Path) -> tuple[list[str], bool]:
    """The tables that are visible without a lock, and whether they are a journal's; none while they are being written.

    The file is read without SQLite's locks, and nothing is written. If all of the database is still in its log, a copy
    of both is read, because SQLite does not read a log without changing it.
    """
    found = _read_tables(f"{path.absolute().as_uri()}?immutable=1")
    log = log_of(path)
    if found[0] or not log.exists():
        return found
    try:
        with tempfile.TemporaryDirectory(prefix="weightbus-") as folder:
            copy = Path(folder, "copy")
            shutil.copyfile(path, copy)
            shutil.copyfile(log, copy.with_name("copy-wal"))
            return _read_tables(copy.as_uri())
    except OSError:  # no room for a copy, or the log is gone meanwhile: another process has it open
        return [], False


def _read_tables(uri: str) -> tuple[list[str], bool]:
    try:
        with closing(sqlite3.connect(uri, uri=True)) as database:
            tables = [
                row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
            ]
            columns = {row[0] for row in database.execute("SELECT name FROM pragma_table_info('meta')")}
    except sqlite3.Error:  # damaged, or being written: opening it under a lock will tell
        return [], False
    return sorted(tables), columns >= _OURS


def keep_private(path: Path) -> None:
    """Make the file private to its user (mode 0600), which SQLite applies to its other two files too."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(file).st_uid == os.geteuid():
                os.fchmod(file, 0o600)
        finally:
            os.close(file)
    except OSError as error:
        raise JournalError(path, f"cannot be opened ({error.strerror})", f"free room there, {_ELSEWHERE}") from error


def advice_on(error: sqlite3.Error) -> str:
    """Advice for an error of SQLite."""
    code: str = getattr(error, "sqlite_errorname", "")
    if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return "is another coordinator running on it? one file serves one coordinator"
    if code.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return f"let user {os.geteuid()} write the file and its folder, {_ELSEWHERE}"
    if code.startswith("SQLITE_FULL"):
        return "free room on the disk"
    return "is the disk full, failing or on another machine? a journal belongs on a local disk with room"
