"""Unused channels make room for others, by a command and by nothing else."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from weightbus.control.cli.entry_point import main
from weightbus.control.journal.sqlite_journal import SqliteJournal
from weightbus.control.protocol.messages import Channel

from ..journal_contract import closed, commit, taken


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("weightbus.control.cli.commands.configure_logging", lambda *_: None)
    path = tmp_path / "journal.sqlite"
    journal = SqliteJournal(path)
    for record in (taken(1), commit(7, 1), closed("p"), taken(4, "run-1"), closed("r", "run-1")):
        journal.write(record)
    journal.close()
    return path


def test_what_is_named_is_forgotten_and_the_rest_kept(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Versions, answers and history: a channel of that name begins anew. The audit trail records it."""
    assert main(["forget-channel", "policy", "--journal", str(path)]) == 0
    said = capsys.readouterr()
    assert said.out == "forgotten policy\n"
    assert "every engine that served it refuses what is published there" in said.err
    journal = SqliteJournal(path)
    assert list(journal.restore()) == ["run-1"]
    assert list(journal.restore()[Channel("run-1")].answers) == ["r"]
    assert journal.audit()[-1] == {"record": "ChannelForgotten", "channel": "policy"}
    journal.write(taken(1))
    anew = journal.restore()[Channel("policy")]
    assert (anew.epoch, anew.committed, dict(anew.answers), anew.history) == (1, None, {}, ())
    journal.close()


def test_a_file_and_a_store_are_not_named_together(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of them would be left as it is, without a word."""
    assert main(["forget-channel", "policy", "--journal", str(path), "--store", "etcd://127.0.0.1:1"]) == 2
    assert "name the one that is meant" in capsys.readouterr().err
    journal = SqliteJournal(path)
    assert sorted(journal.restore()) == ["policy", "run-1"]
    journal.close()


def test_a_name_that_is_not_known_changes_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor do those beside it: it is likely to be a typing error."""
    assert main(["forget-channel", "run-1", "run-2", "--journal", str(path)]) == 1
    assert capsys.readouterr().out == "kept      run-1\nnot known run-2\n"
    journal = SqliteJournal(path)
    assert sorted(journal.restore()) == ["policy", "run-1"]
    journal.close()


def test_of_several_all_are_forgotten_or_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens between the first and the last: here the disk is full."""
    forgotten: list[str] = []
    forget = SqliteJournal._forget

    def fills(self: SqliteJournal, channel: Channel) -> None:
        if forgotten:
            raise sqlite3.OperationalError("database or disk is full")
        forgotten.append(channel)
        forget(self, channel)

    with monkeypatch.context() as patched:
        patched.setattr(SqliteJournal, "_forget", fills)
        assert main(["forget-channel", "run-1", "policy", "--journal", str(path)]) == 1
    assert forgotten == ["run-1"]
    journal = SqliteJournal(path)
    assert sorted(journal.restore()) == ["policy", "run-1"]
    assert "ChannelForgotten" not in [line["record"] for line in journal.audit()]
    journal.close()
    assert main(["forget-channel", "run-1", "policy", "run-1", "--journal", str(path)]) == 0
    journal = SqliteJournal(path)
    assert dict(journal.restore()) == {}
    journal.close()


def test_not_while_a_coordinator_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Agents of the channel may be there. Nor is a journal made that was not."""
    journal = SqliteJournal(path)
    assert main(["forget-channel", "policy", "--journal", str(path)]) == 1
    assert "is another coordinator running on it" in capsys.readouterr().err
    assert sorted(journal.restore()) == ["policy", "run-1"]
    journal.close()
    assert main(["forget-channel", "policy", "--journal", str(path.with_name("other"))]) == 2
    assert not path.with_name("other").exists()
