"""The journal: what was written is there after any end of the process; what could not be written changed nothing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import structlog

from weightbus.control.journal.interface import Journal
from weightbus.control.journal.sqlite_journal import EVENTS, SCHEMA, SqliteJournal, check_location
from weightbus.control.machine.channel import MAX_HISTORY, MAX_ROUND_REPLIES, ChannelOwner
from weightbus.control.machine.effects import EpochRaised, Probe
from weightbus.control.protocol.errors import JournalCorrupt, JournalError, JournalUnwritable
from weightbus.control.protocol.messages import (
    AgentId,
    Channel,
    Digest,
    EngineReport,
    Epoch,
    HeldVersion,
    Outcome,
    RequestId,
    Version,
)

from ...kit.unreadable import loop_at
from ..journal_contract import POLICY, RECORDS, JournalContract, closed, commit, taken

GOLDEN = Path(__file__).parents[1] / "golden"


class TestSqliteJournal(JournalContract):
    """The contract, kept by a file."""

    @pytest.fixture
    def opens(self, tmp_path: Path) -> Callable[..., Journal]:
        return lambda **options: SqliteJournal(tmp_path / "j", **{"by": 1, **options})


@pytest.mark.parametrize("found", [None, 0o644])
def test_only_its_owner_reads_it(tmp_path: Path, found: int | None) -> None:
    """File and folder are private from the first moment, whatever the umask; a file of an older release becomes so."""
    path = tmp_path / "state" / "journal.sqlite"
    before = os.umask(0)
    try:
        if found is not None:
            path.parent.mkdir(mode=0o700)
            path.touch()
            path.chmod(found)
        journal = SqliteJournal(path)
        journal.write(taken(1))
        assert {each.stat().st_mode & 0o777 for each in path.parent.iterdir()} == {0o600}
        assert len(list(path.parent.iterdir())) > 1
        assert path.parent.stat().st_mode & 0o777 == 0o700
        journal.close()
    finally:
        os.umask(before)


def test_survives_sigkill_after_write(tmp_path: Path) -> None:
    """What `write` returned for is there after SIGKILL; the boot is counted."""
    script = (
        "import os, signal, sys; from pathlib import Path; sys.path[:0] = [];"
        "from weightbus.control.journal.sqlite_journal import SqliteJournal;"
        "from weightbus.control.machine.effects import EpochTaken;"
        "j = SqliteJournal(Path(sys.argv[1]));"
        "[j.write(EpochTaken(channel='policy', epoch=n, holder='t', version=1)) for n in range(1, 8)];"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path / "j")], env=environ, check=False, timeout=300)
    assert ended.returncode == -signal.SIGKILL
    journal = SqliteJournal(tmp_path / "j", by=1)
    assert (journal.boot, journal.restore()[Channel("policy")].epoch) == (2, 8)
    journal.close()


def test_every_commit_is_synced(tmp_path: Path) -> None:
    """The open connection runs as the module promises, first and later: in WAL mode, with an fsync of each commit (G2).

    With NORMAL SQLite would sync at checkpoints only, with OFF never; SIGKILL shows neither (F1f).
    """
    full = 2
    for records in (RECORDS, [closed("later")]):
        journal = SqliteJournal(tmp_path / "j")
        for record in records:
            journal.write(record)
            assert not journal._db.in_transaction, "`write` returns when the commit is done"
            assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            assert journal._db.execute("PRAGMA synchronous").fetchone() == (full,)
        journal.close()


def test_a_journal_that_is_begun_anew_says_so(tmp_path: Path) -> None:
    """A copy without its -wal, or an empty file, cannot be told from a first start, so all of them are said aloud."""
    source = tmp_path / "j"

    def opened(path: Path) -> list[tuple[str, str]]:
        with structlog.testing.capture_logs() as lines:
            SqliteJournal(path).close()
        assert all((line["log_level"], line["path"]) == ("warning", str(path)) for line in lines)
        assert all("-wal" in line["advice"] for line in lines)
        return [(line["event"], line["found"]) for line in lines]

    with structlog.testing.capture_logs():
        journal = SqliteJournal(source)
    for record in RECORDS:
        journal.write(record)
    for name, files in {"bare": [""], "whole": ["", "-wal"]}.items():
        for file in files:
            shutil.copy(f"{source}{file}", tmp_path / f"{name}{file}")
    journal.close()
    (tmp_path / "empty").touch()
    assert opened(tmp_path / "none") == [("journal_begun_anew", "no file")]
    for name in ("bare", "empty"):
        assert opened(tmp_path / name) == [("journal_begun_anew", "a file that holds no journal")], name
    for name in ("whole", "j", "none", "bare", "empty"):
        assert opened(tmp_path / name) == [], name


def test_full_disk_is_told_and_recovered_from(tmp_path: Path) -> None:
    """A write that does not fit raises `JournalUnwritable` and changes nothing; with room again writes go on (F18)."""
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


def test_damaged_file_is_refused(tmp_path: Path) -> None:
    """A file that is no database, or a damaged one, is refused with what to do; it is not begun anew."""
    path = tmp_path / "j"
    path.write_bytes(b"this is not a database" * 100)
    with pytest.raises(JournalCorrupt, match="restore it from a backup"):
        SqliteJournal(path)
    assert path.read_bytes().startswith(b"this is not")


def test_the_last_answer_of_every_channel_is_restored(tmp_path: Path) -> None:
    """A channel that is quiet is not forgotten because another one is busy."""
    quiet = closed("quiet")
    quiet = msgspec.structs.replace(quiet, done=msgspec.structs.replace(quiet.done, channel=Channel("quiet")))
    with contextlib.closing(SqliteJournal(tmp_path / "journal", lambda: 0.0)) as journal:
        for record in (taken(1), taken(1, "quiet"), quiet, *(closed(f"r{n}") for n in range(2 * MAX_ROUND_REPLIES))):
            journal.write(record)
        found = journal.restore()
    assert list(found[Channel("quiet")].answers) == ["quiet"]
    assert list(found[Channel("policy")].answers) == [f"r{n}" for n in range(MAX_ROUND_REPLIES, 2 * MAX_ROUND_REPLIES)]


def test_a_journal_of_the_first_release_is_read(tmp_path: Path) -> None:
    """As it was written on the day on which the schema was made; what it held is held, one epoch further on."""
    with contextlib.closing(sqlite3.connect(tmp_path / "journal")) as database:
        database.executescript(GOLDEN.joinpath("journal.sql").read_text("utf-8"))
    with contextlib.closing(SqliteJournal(tmp_path / "journal", lambda: 1.0, by=1)) as journal:
        known = journal.restore()[Channel("policy")]
        for record in RECORDS[3:]:
            journal.write(record)
    with contextlib.closing(SqliteJournal(tmp_path / "journal", lambda: 1.0)) as again:
        assert again.restore()[Channel("policy")].answers[RequestId("r1")] == known.answers[RequestId("r1")]
        assert again._db.execute("SELECT schema FROM meta").fetchone() == (SCHEMA,)
    assert (journal.boot, known.epoch, known.committed_epoch) == (2, 2, 1)
    assert known.committed == HeldVersion(version=Version(1), manifest=Digest("a" * 64), table=Digest("b" * 64))
    assert [(past.version, past.epoch) for past in known.history] == [(1, 1)]
    answer = known.answers[RequestId("r1")]
    assert (answer.question, answer.closed) == ("", True)
    (report,) = answer.done.engines
    assert (report.engine, report.bytes, report.verified_by) == ("e0", 5, "live-digest")


def test_a_journal_of_the_code_before_the_rooms_opens(tmp_path: Path) -> None:
    """Written by 69e00d5, all records in it, forgotten channels too: it restores to what that code restored it to."""
    with contextlib.closing(sqlite3.connect(tmp_path / "journal")) as database:
        database.executescript(GOLDEN.joinpath("journal_before_rooms.sql").read_text("utf-8"))
    with contextlib.closing(SqliteJournal(tmp_path / "journal", lambda: 1.0, by=1)) as journal:
        found = msgspec.json.decode(msgspec.json.encode(journal.restore()))
    for channel in found.values():
        channel["epoch"] -= 1  # a start raises every epoch
        assert channel.pop("owner") is None  # that code knew no runs
    assert found == msgspec.json.decode(GOLDEN.joinpath("journal_before_rooms.json").read_bytes())


def test_other_schema_is_refused(tmp_path: Path) -> None:
    """A file of another release is left as it is."""
    SqliteJournal(tmp_path / "j").close()
    with sqlite3.connect(tmp_path / "j") as database:
        database.execute("UPDATE meta SET schema = 99")
    database.close()
    with pytest.raises(JournalError, match="schema 99"):
        SqliteJournal(tmp_path / "j")


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """A path under a file is refused with its name."""
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=r"its folder cannot be made \(.*/file: File exists\).*--journal"):
        SqliteJournal(tmp_path / "file" / "j")
    with pytest.raises(JournalError, match=r"is a folder, expected a file.*--journal"):
        SqliteJournal(tmp_path)


@contextlib.contextmanager
def journal_with(folder_mode: int, file_mode: int) -> Iterator[Path]:
    """A journal with these modes, and meanwhile a user for whom they hold: for root they do not."""
    with tempfile.TemporaryDirectory(prefix="wb-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        path = Path(name, "folder", "j")
        SqliteJournal(path).close()
        path.chmod(file_mode)
        path.parent.chmod(folder_mode)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)
        try:
            yield path
        finally:
            os.seteuid(user)
            path.parent.chmod(0o700)


@pytest.mark.parametrize(
    ("folder", "file", "said"),
    [
        (0o555, 0o666, r"folder cannot be read and written by user \d+: it belongs to user \d+, mode 0555; give it to"),
        (
            0o777,
            0o444,
            r"folder/j cannot be read and written by user \d+: it belongs to user \d+, mode 0444; give it to",
        ),
    ],
)
def test_what_may_not_be_written_is_found_before_anything_is_promised(folder: int, file: int, said: str) -> None:
    """Refused at the start: what was found, whose it is, what to do; and not taken for a second coordinator's."""
    with journal_with(folder, file) as path, pytest.raises(JournalError, match=said) as refused:
        SqliteJournal(path)
    assert "or name another file with --journal" in str(refused.value)
    assert "another coordinator" not in str(refused.value)


def test_file_system_that_is_mounted_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose volume was forgotten: said in these words."""
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(JournalError, match="is on a file system that is mounted read-only; mount it for writing"):
        SqliteJournal(tmp_path / "j")


@pytest.mark.parametrize("path", ["/proc/j", "/sys/kernel/j"])
def test_place_that_takes_no_files(path: str) -> None:
    """Where permissions promise what the file system does not keep, the refusal still says what to do."""
    with pytest.raises(JournalError, match="or name another file with --journal"):
        SqliteJournal(Path(path))


def test_old_answers_do_not_stay_in_the_file(tmp_path: Path) -> None:
    """Replies that no trainer will ask for any more are removed with a later write; the file does not grow for ever."""
    journal = SqliteJournal(tmp_path / "j")
    journal.write(taken(1))
    for number in range(MAX_ROUND_REPLIES + 5):
        journal.write(closed(f"p{number}"))
        journal.write(closed(f"p{number}"))
    assert journal._db.execute("SELECT count(*) FROM reply").fetchone() == (MAX_ROUND_REPLIES,)
    journal.close()


@pytest.mark.parametrize("name", ["j", "j-wal"])
@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_is_taken_away_is_noticed(tmp_path: Path, name: str, *, replaced: bool) -> None:
    """What is written to a file without a name is not durable: the coordinator ends, and says why (A2, F28)."""
    path = tmp_path / "j"
    journal = SqliteJournal(path)
    journal.write(taken(1))
    journal.check()
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    if replaced:
        (tmp_path / "copy").write_bytes(content)
        (tmp_path / "copy").rename(tmp_path / name)

    with pytest.raises(JournalError, match="was removed or replaced"):
        journal.write(taken(2))
    with pytest.raises(JournalError, match="was removed or replaced"):
        journal.check()
    journal.close()


@pytest.mark.parametrize(("name", "left"), [("j-wal", 4096), ("j-wal", 0), ("j", 4096), ("j", 0)])
def test_a_file_that_is_cut_in_place_is_noticed(tmp_path: Path, name: str, left: int) -> None:
    """Nothing more is acknowledged once records of the `-wal`, or of the main file, are gone (A2, F28)."""
    SqliteJournal(tmp_path / "j").close()  # so that the main file holds something
    journal = SqliteJournal(tmp_path / "j")
    journal.write(taken(1))
    os.truncate(tmp_path / name, left)
    for act in (journal.check, lambda: journal.write(taken(2))):
        with pytest.raises(JournalError, match="was cut while it was written to"):
            act()


def test_a_commit_that_is_disowned_leaves_nothing(tmp_path: Path) -> None:
    """The version before is committed again, durably, with its reply and its history; another may be committed (A7)."""
    path = tmp_path / "j"
    journal = SqliteJournal(path, by=1)
    journal.write(taken(1))
    journal.write(commit(1, 1))
    before, trail = journal.restore(), journal.audit()
    late = commit(9, 1, request="late")
    journal.write(late)
    assert journal.restore() != before
    journal.disown(late)
    assert journal.restore() == before
    assert journal.audit() == trail
    for harmless in (taken(2), Probe()):
        journal.write(harmless)
        journal.disown(harmless)
    journal.write(commit(5, 2, request="next"))
    journal.close()
    again = SqliteJournal(path, by=1).restore()[POLICY].committed
    assert again is not None
    assert again.version == 5


@pytest.mark.parametrize("main", ["moved away", "emptied", "behind a link"])
def test_a_start_deletes_no_decisions_of_a_file_that_was_taken_away(tmp_path: Path, main: str) -> None:
    """They are all in the `-wal` yet. A coordinator started anew refuses, and the file put back has them all.

    SQLite deletes a `-wal` whose main file is absent or empty (F28).
    """
    path, moved = tmp_path / "j", tmp_path / "moved"
    if main == "behind a link":
        (tmp_path / "disk").mkdir()
        path.symlink_to(tmp_path / "disk" / "j")
    there = path.resolve()
    journal = SqliteJournal(path, by=1)
    for record in RECORDS:
        journal.write(record)
    committed = journal.restore()
    there.rename(moved)
    if main == "emptied":
        there.touch(mode=0o640)
    with pytest.raises(JournalError, match="was removed or replaced"):
        journal.check()
    journal.close()

    def left() -> dict[Path, tuple[int, int, bytes]]:
        files = [each for each in tmp_path.rglob("*") if each.is_file()]
        return {each: ((found := each.stat()).st_mode, found.st_mtime_ns, each.read_bytes()) for each in files}

    before = left()
    found = "is empty" if main == "emptied" else "is not there"
    for _ in range(2):
        with pytest.raises(JournalError, match=f"{found}, but .*j-wal holds .* a start would delete them") as refused:
            SqliteJournal(path, by=1)
        assert f"move {there}-wal away" in refused.value.advice
        assert left() == before

    moved.replace(there)
    again = SqliteJournal(path, by=1)
    found_again = again.restore()
    again.close()
    assert {name: (each.committed, each.answers) for name, each in found_again.items()} == {
        name: (each.committed, each.answers) for name, each in committed.items()
    }
    assert found_again[Channel("policy")].committed is not None


def test_a_log_that_is_moved_away_lets_a_journal_begin_anew(tmp_path: Path) -> None:
    """As the refusal says. An empty `-wal`, which holds nothing, is not in the way."""
    for empty in (tmp_path / "j", tmp_path / "j-wal"):
        empty.touch()
    with contextlib.closing(SqliteJournal(tmp_path / "j")) as journal:
        journal.write(taken(1))
        (tmp_path / "j").unlink()
    with pytest.raises(JournalError, match="is not there, but"):
        SqliteJournal(tmp_path / "j")
    (tmp_path / "j-wal").rename(tmp_path / "away")
    with contextlib.closing(SqliteJournal(tmp_path / "j")) as journal:
        assert journal.restore() == {}


def test_a_first_start_that_is_cut_off_leaves_no_log_without_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it ends, the next one begins: the main file has its first page before there is a log."""
    seen: list[list[int]] = []
    files = tmp_path / "j", tmp_path / "j-wal"

    def look_at(_statement: str) -> None:
        seen.append([each.stat().st_size if each.exists() else 0 for each in files])

    connect = sqlite3.connect

    def traced(*given: Any, **how: Any) -> sqlite3.Connection:
        opened: sqlite3.Connection = connect(*given, **how)
        opened.set_trace_callback(look_at)
        return opened

    monkeypatch.setattr(sqlite3, "connect", traced)
    SqliteJournal(files[0]).close()
    assert [0, 0] in seen
    assert any(log for _, log in seen)
    assert all(main for main, log in seen if log)


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
        "EpochRaised",
    ]
    journal.close()


def test_no_channel_and_no_key_makes_another_one_s_past_go(tmp_path: Path) -> None:
    """Neither thousands of commits nor of grants, nor an engine that says higher and higher epochs."""
    with contextlib.closing(SqliteJournal(tmp_path / "j", by=1)) as journal:
        journal._db.execute("PRAGMA synchronous = OFF")  # the power is not cut here
        for version in (1, 2, 3):
            journal.write(taken(version))
            journal.write(commit(version, version, request=f"p{version}"))
        loud = Channel("loud")
        for number in range(1, 2 * EVENTS):
            journal.write(msgspec.structs.replace(taken(number), channel=loud))
            journal.write(msgspec.structs.replace(commit(number, number), channel=loud, request=RequestId("l")))
        for number in range(EVENTS):
            journal.write(EpochRaised(channel=POLICY, epoch=Epoch(10 + number), engine=AgentId("liar")))
        rows = [row["record"] for row in journal.audit() if row["channel"] == POLICY]
        assert rows == ["EpochTaken", "Committed"] * 3 + ["EpochRaised"], "the first of a boot tells"
        assert len(journal.audit()) == EVENTS + len(rows)
        for number in range(2 * EVENTS):  # and its own trainer, which acquires and releases
            journal.write(taken(9_000 + number))
    with contextlib.closing(SqliteJournal(tmp_path / "j", by=1)) as journal:
        found = journal.restore()
        assert [past.version for past in found[POLICY].history] == [1, 2, 3]
        assert len(found[loud].history) == MAX_HISTORY


def test_the_audit_of_a_round_does_not_grow_with_its_engines(tmp_path: Path) -> None:
    """How each of thousands fared is in the answer, of which a few are kept."""
    report = EngineReport(engine=AgentId("e0"), outcome=Outcome.COMMITTED, transport="direct", version=Version(1))
    many = closed("p")
    done = msgspec.structs.replace(many.done, engines=(report,) * 2048)
    with contextlib.closing(SqliteJournal(tmp_path / "j")) as journal:
        journal.write(taken(1))
        journal.write(msgspec.structs.replace(many, done=done))
        (size,) = journal._db.execute("SELECT max(length(record)) FROM event").fetchone()
        assert size < 1000
        assert len(journal.restore()[POLICY].answers[RequestId("p")].done.engines) == 2048


def test_a_journal_of_the_second_schema_keeps_what_was_committed(tmp_path: Path) -> None:
    """It stands in its audit trail only, and is read there once."""
    with contextlib.closing(SqliteJournal(tmp_path / "j")) as journal:
        for record in RECORDS:
            journal.write(record)
        known = journal.restore()
        for statement in ("DROP TABLE past", "DROP INDEX event_of_channel", "UPDATE meta SET schema = 2"):
            journal._db.execute(statement)
    for _ in range(2):
        with contextlib.closing(SqliteJournal(tmp_path / "j")) as journal:
            assert journal.restore()[POLICY].history == known[POLICY].history != ()


# Which file becomes a journal. What is refused is left as it was: its mode, its bytes and its times.


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


def test_the_run_of_a_channel_is_kept_until_the_channel_is_forgotten(tmp_path: Path) -> None:
    """By the record of the grant, so it costs no write of its own; a journal of an earlier release has none (N60)."""
    journal = SqliteJournal(tmp_path / "j")
    journal.write(msgspec.structs.replace(taken(1), run="exp-1"))
    journal.write(taken(2))
    journal.close()
    again = SqliteJournal(tmp_path / "j")
    assert again.restore()[Channel("policy")].owner == ChannelOwner("exp-1", taken(1).holder)
    again.write(msgspec.structs.replace(taken(2**24), run="exp-2"))
    assert again.restore()[Channel("policy")].owner == ChannelOwner("exp-2", taken(1).holder)
    again.forget([Channel("policy")])
    again.write(taken(2**25))
    assert again.restore()[Channel("policy")].owner is None
    again._db.execute("DROP TABLE owner")
    again.close()
    earlier = SqliteJournal(tmp_path / "j")
    assert earlier.restore()[Channel("policy")].owner is None
    earlier.close()


def test_a_file_that_cannot_be_looked_at_is_not_one_that_was_taken_away(tmp_path: Path) -> None:
    """A disk with an error ends no coordinator: what is to be written waits for it (F18)."""
    journal = SqliteJournal(tmp_path / "j")
    journal.write(taken(1))
    log, journal._log = journal._log, loop_at(tmp_path / "loop")
    for call in (journal.check, lambda: journal.write(taken(2))):
        with pytest.raises(JournalUnwritable, match="cannot be looked at"):
            call()
    journal._log = log
    journal.write(taken(2))
    journal.close()
