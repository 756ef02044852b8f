"""The record of an engine on disk: one small file, replaced atomically, and the order in which records are written.

A record is written at once where the machine must not go on without it, and by a thread of its own where it may: that a
verified version waits for its commit, or that it is served, takes as long to make durable as the commit, and nothing
depends on it. Until such a record is on disk, the file has a worse state than the true one, as after any failed write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from weightbus.control.log import get_log

from ..durable_file import write_durably, write_fresh
from ..errors import StateInUse, StateUnreadable, StateUnwritable
from ..machine import StateRecord
from .process_lock import LockHeld, ProcessLock

CLOSE_S: Final = 10.0
_LOG: Final = get_log(__name__)


class StateFile:
    """The record of the engine `name` in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.json"
        self._name = name
        # Beside the record, because the record is another file after every write.
        self._claim = ProcessLock(self.path.with_suffix(".lock"), name)

    def claim(self) -> None:
        """Be the only agent of that name here, and prove that a record can be kept. Raises a `ConfigurationError`."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._claim.take()
            fresh = write_fresh(self.path, b"{}")
            fresh.unlink()
        except LockHeld as held:
            raise StateInUse(self.path.parent, self._name) from held
        except OSError as error:
            self.release()
            raise StateUnwritable(self.path.parent, error) from error

    def release(self) -> None:
        """Let another agent claim it."""
        self._claim.release()

    def read(self) -> StateRecord | None:
        """What was written last; None when nothing was. Raises `StateUnreadable` on anything else."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StateUnreadable(f"cannot read {self.path}: {error.strerror}") from error
        try:
            return msgspec.json.decode(content, type=StateRecord)
        except ValueError as error:
            raise StateUnreadable(
                f"{self.path} is not a record of this version ({error}): restart the server, then delete the file"
            ) from error

    def write(self, record: StateRecord) -> None:
        """Make `record` durable: when this returns, a crash of the machine does not undo it."""
        write_durably(self.path, msgspec.json.encode(record))


class StateWriter:
    """Writes records in order. Used from one thread, and owns another."""

    def __init__(self, write: Callable[[StateRecord], None]) -> None:
        """`write` makes a record durable, or raises `OSError`."""
        self._write = write
        self._turn = threading.Lock()
        """Held by the thread that writes."""
        self._bell = threading.Condition()
        self._waiting: StateRecord | None = None
        self._failure: tuple[StateRecord, OSError] | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def now(self, record: StateRecord) -> None:
        """Make `record` durable before returning; an older record that was to be written late is dropped.

        Blocks as long as the disk does.
        """
        with self._bell:
            self._waiting = None
        with self._turn:
            self._write(record)
            self._failure = None

    def later(self, record: StateRecord) -> None:
        """Begin to write `record`, and return."""
        with self._bell:
            self._waiting = record
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="late-records", daemon=True)
                self._thread.start()
            self._bell.notify()

    def failure(self) -> tuple[StateRecord, OSError] | None:
        """A record that could not be written late, and the error; reported once."""
        found, self._failure = self._failure, None
        return found

    def close(self) -> None:
        """Wait for the write that was begun, `CLOSE_S` at most: a disk that hangs must not hold the sidecar."""
        with self._bell:
            self._closing = True
            self._bell.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                _LOG.warning("record_not_written", waited_s=CLOSE_S, reason="the disk of state_dir does not answer")

    def _run(self) -> None:
        while True:
            with self._bell:
                self._bell.wait_for(lambda: self._waiting is not None or self._closing)
                if self._waiting is None:
                    return
            with self._turn:
                with self._bell:
                    record, self._waiting = self._waiting, None
                self._try(record)

    def _try(self, record: StateRecord | None) -> None:
        if record is None:  # a newer one was written meanwhile
            return
        try:
            self._write(record)
        except OSError as error:
            self._failure = (record, error)
