"""The allow-list as a process knows it: which changes of the file are decisions, and which are errors."""

from __future__ import annotations

import errno
import gc
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import structlog

from weightbus.control.bus.sockets import new_keypair
from weightbus.control.machine.effects import Principal
from weightbus.control.protocol.messages import AgentId, Channel, Role
from weightbus.control.security import allow_list as followed, trust as file
from weightbus.control.security.allow_list import RELOAD_S, AllowList
from weightbus.control.security.trust import ALLOW_LIST_FILE, AllowListEntry, edit_allow_list, signing_key_of

HERE = (Channel("policy"),)


def new_entry(role: Role = Role.ENGINE, channels: tuple[str, ...] = HERE) -> AllowListEntry:
    pair = new_keypair()
    return AllowListEntry(role, channels, pair.public, signing_key_of(pair.secret))


E0 = new_entry()
T0 = new_entry(Role.TRAINER, ("policy", "*"))
BOTH = {E0.key, T0.key}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A list that trusts e0 and t0."""
    with edit_allow_list(tmp_path / ALLOW_LIST_FILE) as agents:
        agents.update(e0=E0, t0=T0)
    return tmp_path / ALLOW_LIST_FILE


class Looked:
    """A list that is looked at when asked, and its clock."""

    def __init__(self, path: Path) -> None:
        self.now = 0.0
        self.list = AllowList(path, lambda: self.now, follow=False)

    def keys(self, *, later: float = 0.0) -> set[str]:
        self.now += later
        self.list.look()
        return set(self.list.principals())

    def settled(self) -> set[str]:
        """After the file has been at rest."""
        self.keys()
        return self.keys(later=RELOAD_S)


def test_a_replaced_file_counts_at_once(path: Path) -> None:
    """What did not change is the same object, and nothing is read without a look."""
    looked = Looked(path)
    known = looked.list.principals()
    assert known[E0.key] == Principal(AgentId("e0"), Role.ENGINE, HERE)
    with edit_allow_list(path) as agents:
        del agents["e0"]
    assert looked.list.principals() is known
    assert looked.keys() == {T0.key}
    with edit_allow_list(path) as agents:
        agents["e0"] = E0
    assert looked.keys() == BOTH
    found = looked.list.principals()
    looked.keys()
    assert looked.list.principals() is found


def test_an_unchanged_principal_stays_the_same_object(path: Path) -> None:
    """A change of one entry leaves the principals of the others the same objects, which are compared by identity."""
    with edit_allow_list(path) as agents:
        agents["other"] = msgspec.structs.replace(E0, key="o" * 40)
    looked = Looked(path)
    before = looked.list.principals()
    with edit_allow_list(path) as agents:
        agents["e0"] = msgspec.structs.replace(E0, channels=("elsewhere",))
    looked.keys()
    after = looked.list.principals()
    assert after["o" * 40] is before["o" * 40]
    assert after[E0.key].channels == ("elsewhere",)


def test_a_file_in_the_middle_of_an_edit_does_not_count(path: Path) -> None:
    """An editor that writes in place, or renames the file first, is not taken to have removed all agents (N45)."""
    written = path.read_bytes()
    good = written[written.index(b"[agents") :]  # as one writes it by hand: no last line is announced
    path.write_bytes(good)
    looked = Looked(path)
    half = good[: good.index(b"[agents", 1)]
    for content in (half, b"", good):
        path.write_bytes(content)
        assert looked.keys(later=RELOAD_S) == BOTH
    moved = path.with_suffix(".bak")
    path.rename(moved)
    assert looked.keys(later=RELOAD_S) == BOTH
    moved.rename(path)
    assert looked.settled() == BOTH
    path.write_bytes(half)
    assert len(looked.settled()) == 1  # nobody goes on writing: it is what is wanted


def test_a_file_that_was_cut_behind_an_entry_never_counts(path: Path) -> None:
    """One that `weightbus trust` wrote tells its end, however long it rests without: the list before stands (N45)."""
    looked, whole = Looked(path), path.read_bytes()
    path.write_bytes(whole[: whole.index(b"[agents", whole.index(b"[agents") + 1)])
    assert looked.settled() == BOTH
    assert "is cut" in looked.list.warning
    path.write_bytes(whole)
    assert looked.settled() == BOTH
    assert looked.list.warning == ""


@pytest.mark.parametrize(
    ("change", "reason"), [(Path.unlink, "is not there"), (lambda path: path.chmod(0o622), "others may write it")]
)
def test_a_missing_or_open_list_trusts_no_agent(path: Path, change: Callable[[Path], object], reason: str) -> None:
    """The reason is told and logged once; a right file is used at once (S7, N45)."""
    looked, good = Looked(path), path.read_bytes()
    with structlog.testing.capture_logs() as lines:
        change(path)
        assert looked.settled() == set()
        assert reason in looked.list.problem
        looked.settled()
        path.unlink(missing_ok=True)
        path.with_suffix(".new").write_bytes(good)
        path.with_suffix(".new").rename(path)
        assert looked.settled() == BOTH  # its inode may be the old one's
        assert looked.list.problem == looked.list.warning == ""
    assert [(line["event"], line["log_level"]) for line in lines] == [
        ("nobody_is_trusted", "error"),
        ("trusted_again", "info"),
    ]


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text("nonsense"),
        lambda path: path.write_text(""),
        lambda path: path.write_text("a = " + "[" * 100_000),
        lambda path: path.write_bytes(path.read_bytes()[:-40]),
        lambda path: path.write_text("# the comments alone\n"),
        lambda path: replaced(path, os.mkfifo),
        lambda path: replaced(path, Path.mkdir),
        lambda path: replaced(path, lambda at: at.symlink_to(at)),
        lambda path: path.write_bytes(b"# x\n" * (file.MOST_BYTES // 4 + 1)),
    ],
    ids=("nonsense", "empty", "deep", "half", "head", "pipe", "folder", "loop", "huge"),
)
def test_a_file_that_cannot_be_used_changes_nothing(path: Path, spoil: Callable[[Path], object]) -> None:
    """The list in force stands; that is logged once, shown, and over as soon as the file is right (S7, N45)."""
    looked, good = Looked(path), path.read_bytes()
    with structlog.testing.capture_logs() as lines:
        spoil(path)
        for _ in range(3):
            assert looked.settled() == BOTH
        assert str(path) in looked.list.warning
        assert "the list that was read before stands" in looked.list.warning
        assert looked.list.problem == ""
        if path.is_dir():
            path.rmdir()
        path.with_suffix(".new").write_bytes(good)
        path.with_suffix(".new").rename(path)
        assert looked.settled() == BOTH
        assert looked.list.warning == ""
    assert [(line["event"], line["log_level"]) for line in lines] == [
        ("allow_list_not_in_force", "error"),
        ("allow_list_in_force", "info"),
    ]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_read_that_fails_is_repeated(path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The change is taken with the first look that can read it, though the file did not change again (N45)."""
    looked, opened = Looked(path), os.open

    def fails(at: object, *arguments: int) -> int:
        if at == path:
            raise OSError(number, os.strerror(number))
        return opened(at, *arguments)  # type: ignore[arg-type]

    with edit_allow_list(path) as agents:
        del agents["e0"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fails)
        assert looked.keys() == BOTH
        assert os.strerror(number) in looked.list.warning
    assert looked.keys() == {T0.key}
    assert looked.list.warning == ""


def test_a_file_is_read_though_descriptors_have_run_out(path: Path) -> None:
    """One is kept for it."""
    looked = Looked(path)
    with edit_allow_list(path) as agents:
        del agents["e0"]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (64 + max(map(int, (each.name for each in Path("/proc/self/fd").iterdir()))), hard)
    )
    try:
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        assert looked.keys() == {T0.key}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in taken:
            os.close(each)


def test_at_the_start_an_unusable_file_trusts_no_agent(path: Path) -> None:
    """There is no earlier list to go on with."""
    good = path.read_bytes()
    path.write_text("nonsense")
    looked = Looked(path)
    assert looked.keys() == set()
    assert looked.list.problem
    path.write_bytes(good)
    assert looked.settled() == BOTH
    assert looked.list.problem == ""


def test_a_signal_has_it_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`expire` (SIGHUP) makes the next look read the file, however it seems."""
    looked = Looked(path)
    monkeypatch.setattr(followed, "_stamp", lambda _path: (1, 1))
    looked.settled()
    with edit_allow_list(path) as agents:
        del agents["e0"]
    assert looked.settled() == BOTH
    looked.list.expire()
    assert looked.keys() == {T0.key}


# -- the thread --------------------------------------------------------------------------------------------------------


class Disk:
    """A disk that can hang."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.well = threading.Event()
        self.well.set()
        stamp = followed._stamp

        def slow(path: Path) -> object:
            self.well.wait(60)
            return stamp(path)

        monkeypatch.setattr(followed, "_stamp", slow)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(monkeypatch)
    yield disk
    disk.well.set()


def until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_file_is_followed(path: Path) -> None:
    """A change is seen by itself, and at once by a caller that asks for a fresh look."""
    trust = AllowList(path)
    with edit_allow_list(path) as agents:
        del agents["e0"]
    assert set(trust.principals(fresh=True)) == {T0.key}
    with edit_allow_list(path) as agents:
        agents["e0"] = E0
    until(lambda: set(trust.principals()) == BOTH)
    assert set(trust.agents()) == {"e0", "t0"}


def test_nobody_waits_for_a_hung_disk(path: Path, disk: Disk) -> None:
    """The list in force is given; a fresh look is waited for once; the hang is logged once and shown (N45)."""
    trust = AllowList(path)
    disk.well.clear()
    with edit_allow_list(path) as agents:
        del agents["e0"]
    with structlog.testing.capture_logs() as lines:
        until(lambda: bool(trust.warning))
        began = time.monotonic()
        for _ in range(50):
            assert set(trust.principals()) == BOTH
            assert set(trust.principals(fresh=True)) == BOTH
            assert set(trust.agents()) == {"e0", "t0"}
        assert time.monotonic() - began < followed.HUNG_S
        assert "its disk has not answered" in trust.warning
    assert [line["event"] for line in lines] == ["allow_list_not_in_force"]
    disk.well.set()
    until(lambda: set(trust.principals()) == {T0.key})
    assert trust.warning == ""


def _fails(_list: AllowList, _now: float) -> None:
    raise ZeroDivisionError


def test_the_thread_outlives_errors_and_ends_with_its_list(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours in one look ends nothing; a list that is gone leaves no thread behind."""
    before = set(threading.enumerate())
    held = [AllowList(path)]
    (thread,) = set(threading.enumerate()) - before
    with monkeypatch.context() as patch:
        patch.setattr(AllowList, "_look", _fails)
        until(lambda: "ZeroDivisionError" in held[0].warning)
    until(lambda: not held[0].warning)
    assert set(held[0].principals(fresh=True)) == BOTH
    held.clear()
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
