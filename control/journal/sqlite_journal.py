"""The journal in one SQLite file, written by one thread. It survives restarts and power cuts.

WAL with synchronous=FULL: one fsync per record, and a record is durable when `write` returns. Heartbeats and other
repeatable messages are not journaled. The file belongs on a local disk: SQLite's locks do not work on NFS.

Tables: `meta` (schema, boot), `channel` (highest epoch, committed version), `reply` (replies of rounds that are over or
committed), `past` (committed versions), `event` (append-only audit trail of grants, commits and ended rounds). The last
three keep the newest rows of each channel.

A file is checked before SQLite writes to it. A wrong file is left untouched: it keeps its mode, bytes and times.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import tempfile
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Final, cast

import msgspec

from ..log import get_log
from ..machine import (
    MAX_HISTORY,
    MAX_ROUND_REPLIES,
    AnyRecord,
    ChannelForgotten,
    ChannelOwner,
    Committed,
    EpochRaised,
    EpochTaken,
    PastVersion,
    Probe,
    Restored,
    RoundClosed,
    RoundReply,
    history_with,
    round_reply_of,
)
from ..protocol import (
    AgentId,
    Channel,
    Digest,
    Epoch,
    HeldVersion,
    JournalCorrupt,
    JournalError,
    JournalUnwritable,
    RequestId,
    RoundDone,
    Version,
)
from .interface import stride

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


SCHEMA: Final = 3
"""Schema 2 added the digest of its request to each reply, and a reply from the commit on; schema 3 added `past`. Older
files are upgraded."""
EVENTS: Final = 1_000
"""Audit rows kept for each channel."""
_BUSY_S: Final = 2.0


_TABLES: Final = """
CREATE TABLE meta (
    only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    schema INTEGER NOT NULL,
    boot INTEGER NOT NULL,
    probed INTEGER NOT NULL
) STRICT;
CREATE TABLE channel (
    name TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL,
    committed_version INTEGER,
    committed_epoch INTEGER,
    manifest TEXT,
    digest_table TEXT,
    CHECK (committed_epoch IS NULL OR committed_epoch <= epoch)
) STRICT;
CREATE TABLE reply (
    request TEXT PRIMARY KEY,
    channel TEXT NOT NULL,
    answer BLOB NOT NULL,
    written_at REAL NOT NULL,
    question TEXT NOT NULL DEFAULT '',
    closed INTEGER NOT NULL DEFAULT 1
) STRICT;
CREATE TABLE event (
    id INTEGER PRIMARY KEY,
    written_at REAL NOT NULL,
    boot INTEGER NOT NULL,
    channel TEXT NOT NULL,
    record TEXT NOT NULL
) STRICT;
"""
_TABLES_3: Final = """
CREATE TABLE past (
    id INTEGER PRIMARY KEY,
    channel TEXT NOT NULL,
    version INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    rollback INTEGER NOT NULL
) STRICT;
CREATE INDEX past_of_channel ON past (channel, id);
CREATE INDEX event_of_channel ON event (channel, id);
UPDATE meta SET schema = 3;
"""

_OWNERS: Final = (
    "CREATE TABLE IF NOT EXISTS owner (channel TEXT PRIMARY KEY, run TEXT NOT NULL, trainer TEXT NOT NULL) STRICT"
)

_FROM_1: Final = """
ALTER TABLE reply ADD COLUMN question TEXT NOT NULL DEFAULT '';
ALTER TABLE reply ADD COLUMN closed INTEGER NOT NULL DEFAULT 1;
UPDATE meta SET schema = 2;
"""

_ENCODE_ANSWER: Final = msgspec.msgpack.Encoder()
_DECODE_ANSWER: Final = msgspec.msgpack.Decoder(RoundDone)
_ENCODE_EVENT: Final = msgspec.json.Encoder()


class _Commit(msgspec.Struct):
    """The needed fields of an audited `Committed`, without the names of two thousand engines."""

    channel: Channel
    version: Version
    epoch: Epoch
    rollback: bool = False


_DECODE_COMMIT: Final = msgspec.json.Decoder(_Commit)


class SqliteJournal:
    """The journal of one coordinator."""

    def __init__(self, path: Path, wall_clock: Callable[[], float] = time.time, *, by: int = 0) -> None:
        """Open or create the file, check it, and count this boot, durably; `by` is its stride, 0 for any.

        Raises `JournalCorrupt` for a file that cannot be trusted, `JournalError` for one that cannot be used.
        """
        self._path, self._log = path, log_of(path)
        self._wall_clock = wall_clock
        self.boot = 0
        self.stride = by or stride()
        self._undo: tuple[object, ...] | None = None
        """What the last commit replaced, for `disown`."""
        self._raised: set[Channel] = set()
        """Channels with a raised epoch in the audit trail of this boot: one row is enough."""
        check_location(path)
        found = "a file that holds no journal" if path.exists() else "no file"
        keep_private(path)
        try:
            # the driver uses it from one thread at a time
            self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise JournalError(path, f"cannot be opened ({error})", advice_on(error)) from error
        try:
            self._open()
        except BaseException:
            self._db.close()
            raise
        self._mine = self._files()
        self._bytes = {each: _size(each) for each in (self._path, self._log)}
        self._warn_of_new_journal(found)

    def _open(self) -> None:
        try:
            self._claim()
            self._check_pages()
            with self._transaction():
                self._adopt_schema()
                self._db.execute("UPDATE meta SET boot = boot + 1")
                # Messages from before the restart are stale by comparison.
                self._db.execute("UPDATE channel SET epoch = epoch + ?", (self.stride,))
            (self.boot,) = self._db.execute("SELECT boot FROM meta").fetchone()
        except JournalUnwritable as error:
            raise JournalError(self._path, error.problem, error.advice) from error
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise JournalError(self._path, f"cannot be used ({error})", advice_on(error)) from error
            raise JournalCorrupt(self._path, str(error), RESTORE) from error

    def _warn_of_new_journal(self, found: str) -> None:
        """Warn of a new journal: the first start, or a copy without its -wal file. Only an operator can tell."""
        if self.boot == 1:
            get_log(__name__).warning(
                "journal_begun_anew", path=str(self._path), found=found, advice=_ADVICE_ON_NEW_JOURNAL
            )

    def _claim(self) -> None:
        """Lock the file for this process: a second coordinator would grant the same epochs."""
        self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
        (mode,) = self._db.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise JournalError(self._path, f"journal mode is {mode!r}, expected 'wal'", "put it on a local disk")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA foreign_keys = ON")

    def _check_pages(self) -> None:
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise JournalCorrupt(self._path, f"quick_check found {found!r}", RESTORE)

    def _adopt_schema(self) -> None:
        if not self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
            self._run(_TABLES)
            self._db.execute("INSERT INTO meta VALUES (1, 2, 0, 0)")
        (found,) = self._db.execute("SELECT schema FROM meta").fetchone()
        if found == 1:
            self._run(_FROM_1)
            found = 2
        if found == 2:
            self._run(_TABLES_3)
            for channel, known in self._audited_commits().items():
                for past in known:
                    self._note_past(channel, past)
            found = SCHEMA
        self._db.execute(_OWNERS)  # of no schema's own: a release that does not know it does not miss it
        if found != SCHEMA:
            advice = "start the release that wrote it, or another journal"
            raise JournalError(self._path, f"schema {found}, this release reads {SCHEMA}", advice)

    def _run(self, script: str) -> None:
        for statement in filter(str.strip, script.split(";")):
            self._db.execute(statement)

    def confirm(self) -> None:
        """Nothing but its files can take the journal from this coordinator: see `check`."""

    def check(self) -> None:
        """Raise `JournalError` if a file was removed, replaced or cut: its lock, or its content, is lost."""
        if self._files() != self._mine:
            problem = "was removed or replaced while it was written to: what was written since is not to be found"
            raise JournalError(self._path, problem, _ADVICE_ON_REPLACED_JOURNAL)
        for file, before in self._bytes.items():
            try:
                size = _size(file)
            except OSError as error:
                raise self._not_seen(file, error) from error
            if size < before:
                problem = f"was cut while it was written to: {file} had {before} bytes, and has {size}"
                raise JournalError(self._path, problem, _ADVICE_ON_REPLACED_JOURNAL)
            self._bytes[file] = size  # SQLite writes the log from the front again, and shortens neither

    def _files(self) -> list[tuple[int, int] | None]:
        """Device and inode of the journal and of its log."""
        found: list[tuple[int, int] | None] = []
        for path in (self._path, self._log):
            try:
                file = path.stat()
            except FileNotFoundError:
                found.append(None)
            except OSError as error:
                raise self._not_seen(path, error) from error
            else:
                found.append((file.st_dev, file.st_ino))
        return found

    def _not_seen(self, file: Path, error: OSError) -> JournalUnwritable:
        problem = f"cannot be looked at ({file}: {error.strerror})"
        return JournalUnwritable(self._path, problem, f"is the disk failing? {_ELSEWHERE}")

    def write(self, record: AnyRecord) -> None:
        """Make `record` durable, or raise `JournalUnwritable` and leave everything as it was."""
        self.check()
        before = self._before(record.channel) if isinstance(record, Committed) else None
        with self._transaction():
            match record:
                case EpochTaken() | EpochRaised():
                    self._db.execute(
                        "INSERT INTO channel (name, epoch) VALUES (?, ?)"
                        " ON CONFLICT (name) DO UPDATE SET epoch = max(epoch, excluded.epoch)",
                        (record.channel, record.epoch),
                    )
                    if isinstance(record, EpochTaken) and record.run:
                        self._db.execute(
                            "INSERT OR REPLACE INTO owner VALUES (?, ?, ?)", (record.channel, record.run, record.holder)
                        )
                case Committed():
                    self._commit(record)
                    self._remember(record)
                case RoundClosed():
                    self._remember(record)
                case ChannelForgotten():
                    self._forget(record.channel)
                case Probe():
                    self._db.execute("UPDATE meta SET probed = probed + 1")
            if not (isinstance(record, Probe) or (isinstance(record, EpochRaised) and record.channel in self._raised)):
                self._audit(record)
        if isinstance(record, EpochRaised):
            self._raised.add(record.channel)
        self._undo = before
        self.check()

    def disown(self, record: AnyRecord) -> None:
        """Take the commit back that was written last; other records do no harm."""
        if not isinstance(record, Committed):
            return
        before, channel = self._undo, record.channel
        assert before is not None, "a commit was written last"
        with self._transaction():
            self._db.execute(
                "UPDATE channel SET committed_version = ?, committed_epoch = ?, manifest = ?, digest_table = ?"
                " WHERE name = ?",
                (*before, channel),
            )
            self._db.execute("DELETE FROM reply WHERE request = ?", (record.request,))
            for table in ("past", "event"):
                self._db.execute(
                    f"DELETE FROM {table} WHERE id = (SELECT max(id) FROM {table} WHERE channel = ?)",  # noqa: S608
                    (channel,),
                )
        self.check()

    def _before(self, channel: Channel) -> tuple[object, ...]:
        """The committed version of `channel`, as its row has it."""
        row = self._db.execute(
            "SELECT committed_version, committed_epoch, manifest, digest_table FROM channel WHERE name = ?", (channel,)
        ).fetchone()
        return cast("tuple[object, ...]", row or (None,) * 4)

    def forget(self, channels: Collection[Channel]) -> None:
        """Forget all of `channels`, or raise as `write` does and forget none."""
        with self._transaction():
            for channel in channels:
                self._forget(channel)
                self._audit(ChannelForgotten(channel=channel))
        self.check()

    def _forget(self, channel: Channel) -> None:
        self._db.execute("DELETE FROM channel WHERE name = ?", (channel,))
        self._db.execute("DELETE FROM reply WHERE channel = ?", (channel,))
        self._db.execute("DELETE FROM past WHERE channel = ?", (channel,))
        self._db.execute("DELETE FROM owner WHERE channel = ?", (channel,))

    def restore(self) -> Mapping[Channel, Restored]:
        """Every channel as it was last written. Raises `JournalCorrupt`."""
        answers: dict[str, dict[RequestId, RoundReply]] = {}
        rows = self._db.execute(
            "SELECT request, channel, answer, question, closed FROM (SELECT *, rowid AS number, row_number() OVER"
            " (PARTITION BY channel ORDER BY rowid DESC) AS place FROM reply) WHERE place <= ? ORDER BY number",
            (MAX_ROUND_REPLIES,),
        )
        for request, channel, answer, question, closed in rows:
            try:
                known = RoundReply(_DECODE_ANSWER.decode(answer), question, closed=bool(closed))
                answers.setdefault(channel, {})[RequestId(request)] = known
            except ValueError as error:
                raise JournalCorrupt(
                    self._path, f"the answer to {request!r} is unreadable ({error})", RESTORE
                ) from error
        rows = self._db.execute(
            "SELECT name, epoch, committed_version, committed_epoch, manifest, digest_table FROM channel"
        )
        past, owners = self._history(), self._owners()
        return {
            Channel(row[0]): msgspec.structs.replace(
                _restored(row, answers.get(row[0], {})),
                history=past.get(Channel(row[0]), ()),
                owner=owners.get(Channel(row[0])),
            )
            for row in rows
        }

    def _owners(self) -> dict[Channel, ChannelOwner]:
        rows = self._db.execute("SELECT channel, run, trainer FROM owner")
        return {Channel(channel): ChannelOwner(run, AgentId(trainer)) for channel, run, trainer in rows}

    def _history(self) -> dict[Channel, tuple[PastVersion, ...]]:
        found: dict[Channel, tuple[PastVersion, ...]] = {}
        for channel, version, epoch, rollback in self._db.execute(
            "SELECT channel, version, epoch, rollback FROM past ORDER BY id"
        ):
            past = PastVersion(Version(version), Epoch(epoch), bool(rollback))
            found[Channel(channel)] = history_with(found.get(Channel(channel), ()), past)
        return found

    def _audited_commits(self) -> dict[Channel, tuple[PastVersion, ...]]:
        """Versions that an older release committed, from its audit trail. An unreadable row is skipped."""
        found: dict[Channel, tuple[PastVersion, ...]] = {}
        newest = self._db.execute(
            'SELECT record, channel FROM event WHERE record LIKE \'{"record":"Committed"%\''
            ' OR record LIKE \'{"record":"ChannelForgotten"%\' ORDER BY id'
        )
        for line, channel in newest:
            if line.startswith('{"record":"ChannelForgotten"'):
                found.pop(Channel(channel), None)
                continue
            with contextlib.suppress(ValueError):
                commit = _DECODE_COMMIT.decode(line)
                past = PastVersion(commit.version, commit.epoch, commit.rollback)
                found[commit.channel] = history_with(found.get(commit.channel, ()), past)
        return found

    def audit(self) -> list[dict[str, object]]:
        """The audit trail, oldest first."""
        rows = self._db.execute("SELECT record FROM event ORDER BY id")
        return [cast("dict[str, object]", msgspec.json.decode(row[0])) for row in rows]

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _commit(self, record: Committed) -> None:
        changed = self._db.execute(
            "UPDATE channel SET committed_version = ?1, committed_epoch = ?2, manifest = ?3, digest_table = ?4"
            " WHERE name = ?5 AND epoch >= ?2 AND (committed_version IS NULL OR committed_version < ?1"
            " OR (committed_version = ?1 AND digest_table = ?4) OR ?6)",
            (record.version, record.epoch, record.manifest, record.table, record.channel, record.rollback),
        ).rowcount
        if changed != 1:
            problem = f"version {record.version} of {record.channel!r} at epoch {record.epoch} would go back"
            raise JournalCorrupt(self._path, problem, "this is a bug: keep the file and report it")
        self._note_past(record.channel, PastVersion(record.version, record.epoch, record.rollback))

    def _note_past(self, channel: Channel, past: PastVersion) -> None:
        row = (channel, past.version, past.epoch, past.rollback)
        self._db.execute("INSERT INTO past (channel, version, epoch, rollback) VALUES (?, ?, ?, ?)", row)
        self._keep_newest("past", channel, MAX_HISTORY)

    def _keep_newest(self, table: str, channel: Channel, count: int) -> None:
        self._db.execute(
            f"DELETE FROM {table} WHERE channel = ?1 AND id <= (SELECT id FROM {table} WHERE channel = ?1"  # noqa: S608
            " ORDER BY id DESC LIMIT 1 OFFSET ?2)",
            (channel, count),
        )

    def _remember(self, record: Committed | RoundClosed) -> None:
        known = round_reply_of(record)
        self._db.execute(
            "INSERT OR REPLACE INTO reply (request, channel, answer, written_at, question, closed)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (
                record.request,
                known.done.channel,
                _ENCODE_ANSWER.encode(known.done),
                self._wall_clock(),
                known.question,
                known.closed,
            ),
        )
        self._db.execute(  # by rowid: wall clocks may jump
            "DELETE FROM reply WHERE channel = ?1 AND rowid <= (SELECT rowid FROM reply WHERE channel = ?1"
            " ORDER BY rowid DESC LIMIT 1 OFFSET ?2)",
            (known.done.channel, MAX_ROUND_REPLIES),
        )

    def _audit(self, record: EpochTaken | EpochRaised | Committed | RoundClosed | ChannelForgotten) -> None:
        channel = record.done.channel if isinstance(record, RoundClosed) else record.channel
        if isinstance(record, RoundClosed):  # the reply has the engines; here they would take a megabyte a round
            record = msgspec.structs.replace(record, done=msgspec.structs.replace(record.done, engines=()))
        row = (self._wall_clock(), self.boot, channel, _ENCODE_EVENT.encode(record).decode())
        self._db.execute("INSERT INTO event (written_at, boot, channel, record) VALUES (?, ?, ?, ?)", row)
        self._keep_newest("event", channel, EVENTS)

    @contextlib.contextmanager
    def _transaction(self) -> Generator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                # after SQLITE_FULL or SQLITE_IOERR SQLite may have rolled back by itself
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        except sqlite3.OperationalError as error:
            code = getattr(error, "sqlite_errorname", "")
            raise JournalUnwritable(self._path, f"cannot be written ({code}: {error})", advice_on(error)) from error
        except sqlite3.DatabaseError as error:
            raise JournalCorrupt(self._path, str(error), RESTORE) from error


_ADVICE_ON_NEW_JOURNAL: Final = (
    "nothing is known to be committed; if this is not the first start, stop, and restore the file together with the one"
    " beside it that ends in -wal"
)
_ADVICE_ON_REPLACED_JOURNAL: Final = (
    "put both files back with the coordinator stopped, or restore them from a backup, and start it again"
)

_Row = tuple[str, int, int | None, int | None, str | None, str | None]


def _restored(row: _Row, answers: Mapping[RequestId, RoundReply]) -> Restored:
    _, epoch, version, committed_epoch, manifest, table = row
    held = None
    if version is not None and manifest is not None and table is not None:
        held = HeldVersion(version=Version(version), manifest=Digest(manifest), table=Digest(table))
    return Restored(epoch=Epoch(epoch), committed=held, committed_epoch=Epoch(committed_epoch or 0), answers=answers)
