"""The allow-list: replaced atomically, checked when read, followed, and without trust while invalid."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import msgspec
import pytest
import structlog

from tests.kit.disk_calls import DiskCalls
from weightbus.control.bus.sockets import new_keypair
from weightbus.control.machine.effects import Principal
from weightbus.control.protocol.errors import PeerKeyError
from weightbus.control.protocol.messages import AgentId, Channel, Role
from weightbus.control.security.trust import (
    ALLOW_LIST_FILE,
    RELOAD_S,
    AllowList,
    AllowListEntry,
    edit_allow_list,
    read_allow_list,
    signing_key_of,
)

HERE = (Channel("policy"),)


def new_entry(role: Role = Role.ENGINE, channels: tuple[str, ...] = HERE) -> AllowListEntry:
    pair = new_keypair()
    return AllowListEntry(role, channels, pair.public, signing_key_of(pair.secret))


E0 = new_entry()
T0 = new_entry(Role.TRAINER, ("policy", "*"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A list that trusts e0 and t0."""
    with edit_allow_list(tmp_path / ALLOW_LIST_FILE) as agents:
        agents.update(e0=E0, t0=T0)
    return tmp_path / ALLOW_LIST_FILE


def test_what_is_written_is_read(path: Path) -> None:
    """Every key that Z85 allows survives the file; other users may not write it."""
    assert read_allow_list(path).agents == {"e0": E0, "t0": T0}
    assert path.stat().st_mode & 0o777 == 0o600
    for number in range(200):
        with edit_allow_list(path) as agents:
            agents["e0"] = new_entry()
            wanted = agents["e0"]
        assert read_allow_list(path).agents["e0"] == wanted, number


def test_an_edit_survives_a_power_cut(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal survives a crash: the file's bytes are synced before its name, and its name before the answer."""
    disk = DiskCalls(monkeypatch)
    with edit_allow_list(path) as agents:
        del agents["e0"]
    assert disk.calls == [("sync file", "trust.new"), ("rename to", ALLOW_LIST_FILE), ("sync folder", path.parent.name)]
    assert disk.synced["trust.new"] == path.read_bytes()


def test_no_change_writes_nothing(path: Path) -> None:
    """Saying the same again leaves the file as it is, comments of its owner included."""
    path.write_text(path.read_text() + "# ours\n")
    before = path.stat()
    with edit_allow_list(path) as agents:
        agents["e0"] = E0
    after = path.stat()  # but for the time of the last look
    assert (after.st_ino, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )


def _add(path: Path, name: str) -> None:
    with edit_allow_list(path) as agents:
        agents[name] = new_entry()


def test_editors_at_the_same_time_lose_nothing(path: Path) -> None:
    """Two that add agents wait for each other."""
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add, args=(path, f"n{index}")) for index in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert set(read_allow_list(path).agents) == {"e0", "t0", *(f"n{index}" for index in range(8))}


def test_an_edit_that_fails_changes_nothing(path: Path) -> None:
    """The old list stays, whole, and the next editor is not locked out."""
    before = path.read_bytes()
    with pytest.raises(RuntimeError), edit_allow_list(path) as agents:
        agents.clear()
        raise RuntimeError
    assert path.read_bytes() == before
    _add(path, "e1")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('role = "engine"', 'role = "king"', "'king'.*; expected one of trainer, engine, observer"),
        ('channels = ["policy"]', "channels = []", "length"),
        (
            'channels = ["policy"]',
            'channels = ["../x"]',
            'expected a channel: up to 64 of .* or "\\*", any - at .*channels',
        ),
        (E0.key, E0.key[:-1], "expected the key in the agent's .pub: 40 characters"),
        (E0.key, T0.key, "same key"),
        (E0.signing_key, E0.signing_key[:-1] + "X", 'expected what follows "ed25519:"'),
        ('role = "engine"', 'role = "engine"\nmore = 1', "more"),
        ("[agents", "[names", "names"),
        ('"e0"', '"e 0"', "expected a name: up to 64"),
        ('"e0"', '"e0', "line"),
        ("[agents", "\xff", "decode|Invalid|line"),
    ],
    ids=("role", "no-channels", "channel", "short", "same", "signing", "field", "section", "name", "line", "bytes"),
)
def test_what_is_wrong_is_named(path: Path, old: str, new: str, problem: str) -> None:
    """Nothing is guessed: one wrong entry spoils the list, and the message says which."""
    path.write_bytes(path.read_text().replace(old, new, 1).encode("latin-1"))
    with pytest.raises(PeerKeyError, match=problem) as refused:
        read_allow_list(path)
    assert "move it away, and then run `weightbus trust add`" in str(refused.value)
    assert "regex" not in str(refused.value)


def test_a_list_that_others_may_write_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write access to the file decides which trainer may publish (S7)."""
    for mode in (0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(PeerKeyError, match="chmod"):
            read_allow_list(path)
    path.chmod(0o644)
    assert read_allow_list(path).agents
    os.chown(path, 65534, 65534)
    with pytest.raises(PeerKeyError, match="belongs to user 65534"):
        read_allow_list(path)
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert read_allow_list(path).agents


def test_a_missing_list_is_named(tmp_path: Path) -> None:
    """The message says how one is made."""
    with pytest.raises(PeerKeyError, match="weightbus trust add"):
        read_allow_list(tmp_path / ALLOW_LIST_FILE)
    assert AllowList(tmp_path / ALLOW_LIST_FILE).principals() == {}


def test_the_list_is_followed(path: Path) -> None:
    """A change is seen with the next look, at once when asked to; what did not change is the same object."""
    now = [0.0]
    trust = AllowList(path, lambda: now[0])
    known = trust.principals()
    assert known[E0.key] == Principal(AgentId("e0"), Role.ENGINE, HERE)
    with edit_allow_list(path) as agents:
        del agents["e0"]
    assert trust.principals() is known
    assert E0.key not in trust.principals(fresh=True)
    with edit_allow_list(path) as agents:
        agents["e0"] = E0
    assert E0.key not in trust.principals()
    now[0] = RELOAD_S
    found = trust.principals()
    assert E0.key in found
    assert trust.principals(fresh=True) is found


def test_an_unchanged_principal_stays_the_same_object(path: Path) -> None:
    """A change of one entry leaves the principals of the others the same objects, which are compared by identity."""
    with edit_allow_list(path) as agents:
        agents["other"] = msgspec.structs.replace(E0, key="o" * 40)
    trust = AllowList(path)
    before = trust.principals()
    with edit_allow_list(path) as agents:
        agents["e0"] = msgspec.structs.replace(E0, channels=("elsewhere",))
    after = trust.principals(fresh=True)
    assert after["o" * 40] is before["o" * 40]
    assert after[E0.key].channels == ("elsewhere",)


def test_an_invalid_list_trusts_no_agent(path: Path) -> None:
    """While the file is missing or invalid no agent is let in; the reason is told, and a valid file is used at once.

    (S7)
    """
    trust = AllowList(path)
    good = path.read_bytes()
    for spoil in (path.unlink, lambda: path.write_text("nonsense")):
        spoil()
        assert trust.principals(fresh=True) == {}
        assert trust.problem
        path.write_bytes(good)
        assert set(trust.principals(fresh=True)) == {E0.key, T0.key}
        assert trust.problem == ""
    path.chmod(0o666)
    assert trust.principals(fresh=True) == {}


def test_an_invalid_list_is_logged_once(path: Path) -> None:
    """One log line with the reason, even without a connected agent; and one when the file is valid again."""
    trust = AllowList(path)
    good = path.read_bytes()
    with structlog.testing.capture_logs() as lines:
        path.write_text("nonsense")
        for _ in range(3):
            trust.principals(fresh=True)
        path.write_bytes(good)
        trust.principals(fresh=True)
    assert [(line["event"], line["log_level"]) for line in lines] == [
        ("nobody_is_trusted", "error"),
        ("trusted_again", "info"),
    ]
    assert str(path) in lines[0]["reason"]


def test_a_signal_has_it_read_again(path: Path) -> None:
    """`expire` (SIGHUP) makes the next look read the file, however it seems."""
    trust = AllowList(path, lambda: 0.0)
    with edit_allow_list(path) as agents:
        del agents["e0"]
    trust.expire()
    assert E0.key not in trust.principals()
