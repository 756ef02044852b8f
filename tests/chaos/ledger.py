"""The campaign's own record of what the journal made durable, kept in the coordinator's process by `failpoints.py`.

The product forgets: its audit trail, history and answers are bounded. The ledger is not: a line for each commit, before
and after it is written, and a line for what each life of the coordinator found, appended by one system call each. A
line between the two is missing where the coordinator was killed there; the next life then says which it was.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from weightbus.control.journal.sqlite_journal import SqliteJournal

FILE = "commits"
WRITES, DURABLE, REFUSED, FOUND = "writes", "durable", "refused", "found"
DISOWNS, DISOWNED = "disowns", "disowned"
"""A commit whose write took too long, and that is taken back before anything else is written."""


class Line(NamedTuple):
    """One line. `version` is 0 where a life of the coordinator found no commit."""

    what: str
    channel: str
    version: int
    rollback: bool = False
    at: float = 0.0
    """CLOCK_MONOTONIC, which all processes of a machine share."""


def keep(folder: Path) -> None:
    """From now on, note what this process's journal does."""
    file = os.open(folder / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(what: str, channel: str, version: int, rollback: bool = False) -> None:
        os.write(file, json.dumps(Line(what, channel, version, rollback, time.monotonic())).encode() + b"\n")

    write, restore, disown = SqliteJournal.write, SqliteJournal.restore, SqliteJournal.disown

    @functools.wraps(write)
    def written(self: SqliteJournal, record: Any) -> None:
        if record.__struct_config__.tag != "Committed":
            write(self, record)
            return
        commit = record.channel, record.version, record.rollback
        note(WRITES, *commit)
        try:
            write(self, record)
        except BaseException:
            note(REFUSED, *commit)
            raise
        note(DURABLE, *commit)

    @functools.wraps(disown)
    def disowned(self: SqliteJournal, record: Any) -> None:
        if record.__struct_config__.tag != "Committed":
            disown(self, record)
            return
        note(DISOWNS, record.channel, record.version)
        disown(self, record)
        note(DISOWNED, record.channel, record.version)

    @functools.wraps(restore)
    def restored(self: SqliteJournal) -> Any:
        found = restore(self)
        for channel, known in found.items():
            note(FOUND, channel, known.committed.version if known.committed else 0)
        return found

    SqliteJournal.write = written  # type: ignore[method-assign]
    SqliteJournal.restore = restored  # type: ignore[method-assign]
    SqliteJournal.disown = disowned  # type: ignore[method-assign]


def lines(folder: Path) -> Iterator[Line]:
    """Every line, as it was written."""
    path = folder / FILE
    if path.exists():
        with path.open() as file:
            for line in file:
                if line.endswith("\n"):
                    yield Line(*json.loads(line))


class Commits:
    """What was durable in one channel, found out from the lines of a ledger, for any number of versions."""

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._doubtful: list[int] = []
        """Versions whose write was begun, and did not end or was refused, since the last durable one."""
        self.last = self._before = 0
        self.durable: dict[int, float] = {}
        """Version -> when its write was begun first: no engine may serve it before."""
        self.losses: list[str] = []
        """What went back or was not found again."""

    def read(self, found: Iterable[Line]) -> Commits:
        """Take up more lines; returns itself."""
        begun: dict[int, float] = {}
        for line in found:
            if line.channel == self._channel:
                self._take(line, begun)
        return self

    def _take(self, line: Line, begun: dict[int, float]) -> None:
        match line.what:
            case "writes":
                begun.setdefault(line.version, line.at)
                self._doubtful.append(line.version)
            case "durable":
                if line.version < self.last and not line.rollback:
                    self.losses.append(f"the commit of {line.version} follows that of {self.last}")
                self._note(line, begun)
            case "found":
                if line.version != self.last and line.version not in self._doubtful:
                    self.losses.append(f"the journal held {self.last}, and {line.version} was found in it")
                if line.version < self.last:
                    self._forget_above(line.version)
                self._note(line, begun)
            case "disowns":
                self._doubtful.append(self._before)
            case "disowned":
                self._forget_above(self._before)
                self.last = self._before
            case _:
                pass

    def _note(self, line: Line, begun: dict[int, float]) -> None:
        if line.version:
            self.durable.setdefault(line.version, begun.get(line.version, line.at))
        if line.version != self.last:
            self._before = self.last
        self.last, self._doubtful = line.version, []

    def _forget_above(self, version: int) -> None:
        self.durable = {each: at for each, at in self.durable.items() if each <= version}
