"""The coordinator's real journal, on files that a crash leaves as a disk would.

SQLite itself cannot be told which process dies when. So its files, which are in memory, are taken away from it at a
death and put back as a power cut or a half-done write would have left them: the write-ahead log ends anywhere behind
what was synced, or has a hole there. What a new life makes of that is SQLite's own recovery, and its checksums'.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from weightbus.control.journal import sqlite_journal as real
from weightbus.control.machine.effects import AnyRecord

SECTOR: Final = 512
_SALT: Final = slice(16, 24)
"""Of the log's header: another one after it was begun anew."""
_FULL: Final = 2
"""PRAGMA synchronous: every commit is synced. Below that, the log is synced at checkpoints only."""
_MEMORY: Final = Path("/dev/shm")


class _Journal(real.SqliteJournal):
    def _tell_of_a_beginning(self, found: str) -> None:
        """Every world begins anew."""


class SqliteDisk:
    """The two files of one journal. They outlive the coordinator, and vanish with the world."""

    def __init__(self, rng: random.Random, wall: Callable[[], float]) -> None:
        self._rng, self._wall = rng, wall
        self._folder = tempfile.TemporaryDirectory(
            prefix="sim-journal-", dir=_MEMORY if _MEMORY.is_dir() else None, ignore_cleanup_errors=True
        )
        self._path = Path(self._folder.name) / "journal.db"
        self._log = Path(f"{self._path}-wal")
        self._journal: _Journal | None = None
        self._synced = 0
        """Bytes of the log that surely are on the disk."""
        self._salt = b""
        self._syncs = True

    def open(self, stride: int) -> real.SqliteJournal:
        """A new life. Raises what the journal raises."""
        before = self._size()
        journal = self._journal = _Journal(self._path, self._wall, by=stride)
        (level,) = journal._db.execute("PRAGMA synchronous").fetchone()
        self._syncs = level >= _FULL
        if self._salt != self._header():  # recovered, and begun anew: that is synced at any level
            before = 0
        self._note(before)
        return journal

    @contextmanager
    def writing(self, record: AnyRecord) -> Generator[None]:
        """Write `record`. Should the body be left by a death, the log ends in the middle of it."""
        assert self._journal is not None
        before = self._size()
        self._journal.write(record)
        try:
            yield
        except BaseException:
            self._cut(before, torn=False)
            raise
        self._note(self._synced)

    def crash(self) -> None:
        """The process is gone: SQLite leaves its files as they are."""
        if self._journal is None:
            return
        kept = [(path, path.read_bytes()) for path in (self._path, self._log) if path.exists()]
        self._journal.close()  # and tidies up, which a process that dies does not
        self._journal = None
        for path, content in kept:
            path.write_bytes(content)

    def lose_power(self) -> None:
        """What was not synced is lost from the end backwards, and torn where it ends."""
        if self._size() > self._synced and self._header() == self._salt:
            self._cut(self._synced, torn=True)

    def discard(self) -> None:
        """The world is over."""
        self.crash()
        self._folder.cleanup()

    def _cut(self, start: int, *, torn: bool) -> None:
        """The log ends somewhere from `start` on."""
        self.crash()
        content = self._log.read_bytes() if self._log.exists() else b""
        if len(content) <= start:
            return
        end = len(content) if self._rng.random() < 0.25 else self._rng.randrange(start, len(content))
        kept = bytearray(content[:end])
        if torn and end - start > SECTOR and self._rng.random() < 0.5:
            hole = self._rng.randrange(start, end - SECTOR)
            kept[hole : hole + SECTOR] = bytes(SECTOR)
        self._log.write_bytes(bytes(kept))

    def _note(self, before: int) -> None:
        self._synced, self._salt = self._size() if self._syncs else before, self._header()

    def _size(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0

    def _header(self) -> bytes:
        if not self._log.exists():
            return b""
        with self._log.open("rb") as file:
            return file.read(32)[_SALT]
