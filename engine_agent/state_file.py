"""The record of an engine on disk: one small file, replaced atomically, written before any effect that depends on it.

Also the locks that keep the sidecars of one host apart, and files that are whole after a power cut.

A record is waited for where the machine must not go on without it, and not where it may: that a verified version waits
for its commit, or that it is served, takes as long to make durable as the commit, and nothing depends on it. Until such
a record is on disk, the file has a worse state than the true one, as after any failed write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar
from urllib.parse import urlsplit

import msgspec

from weightbus.control.log import get_log

from .errors import StateInUse, StateUnreadable, StateUnwritable
from .machine import (
    Effect,
    EngineMachine,
    Event,
    Operated,
    OperationFailed,
    Receive,
    Remember,
    RunOperation,
    StateRecord,
)

Record = TypeVar("Record")
CLOSE_S: Final = 10.0
HUNG_S: Final = 2.0
"""Seconds after which a write counts as failed, as in the coordinator's journal."""
_LOG: Final = get_log(__name__)
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_NETWORK: Final = Path("/proc/self/ns/net")


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
        """The record that was written last; None without one. Raises `StateUnreadable` on anything else."""
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


class StateWriter(Generic[Record]):
    """Writes records in order, on a thread of its own. Used from one other thread.

    A disk that hangs is one that fails: its caller goes on after `HUNG_S`, and a server stays paused no longer for it.
    What hangs may reach the disk later, but before every newer record.
    """

    def __init__(self, write: Callable[[Record], None]) -> None:
        """`write` makes a record durable, or raises `OSError`."""
        self._write = write
        self._bell = threading.Condition()
        self._waiting: Record | None = None
        self._numbers = self._begun = self._ended = 0
        """Numbers of the records that was given, begun and written last. One that a newer one replaced is skipped."""
        self._began_at = 0.0
        self._error: OSError | None = None
        """Why the record that ended last could not be written."""
        self._failure: tuple[Record, OSError] | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def now(self, record: Record) -> None:
        """Make `record` durable before returning; an older record that was to be written late is dropped.

        Raises `OSError`, also where the disk has not answered for `HUNG_S`; at once while it still hangs.
        """
        with self._bell:
            hung = self._hung_s() >= HUNG_S
            number = self._give(record)
            if not hung:
                self._bell.wait_for(lambda: self._ended >= number, HUNG_S)
            if self._ended < number:
                self._waiting = None  # the caller tries again with what is true then
                raise OSError(errno.ETIMEDOUT, f"its disk has not answered for {self._hung_s():.0f} s")
            self._failure, error = None, self._error
        if error is not None:
            raise error

    def later(self, record: Record) -> None:
        """Begin to write `record`, and return."""
        with self._bell:
            self._give(record)

    def failure(self) -> tuple[Record, OSError] | None:
        """A record that could not be written late, and the error; reported once."""
        found, self._failure = self._failure, None
        return found

    def close(self) -> None:
        """Wait for the write that was begun, `CLOSE_S` at most: a disk that hangs must not hold the sidecar."""
        with self._bell:
            self._closing = True
            self._bell.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                _LOG.warning("record_not_written", waited_s=CLOSE_S, reason="the disk of state_dir does not answer")
            else:
                self._thread, self._closing = None, False

    def _hung_s(self) -> float:
        """Seconds for which the present write has not ended."""
        return time.monotonic() - self._began_at if self._begun > self._ended else 0.0

    def _give(self, record: Record) -> int:
        self._waiting = record
        self._numbers += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="records", daemon=True)
            self._thread.start()
        self._bell.notify_all()
        return self._numbers

    def _run(self) -> None:
        while True:
            with self._bell:
                self._bell.wait_for(lambda: self._waiting is not None or self._closing)
                if (record := self._waiting) is None:
                    return
                self._waiting, self._begun, self._began_at = None, self._numbers, time.monotonic()
            error = self._try(record)
            with self._bell:
                self._ended, self._error = self._begun, error
                self._failure = (record, error) if error and self._begun == self._numbers else None
                self._bell.notify_all()

    def _try(self, record: Record) -> OSError | None:
        try:
            self._write(record)
        except OSError as error:
            return error
        return None


class EffectDispatcher:
    """Gives events to one machine and carries its effects out in order. Drive it from one thread.

    Owns no thread and no socket, so that the simulator runs this very class.
    """

    def __init__(
        self,
        machine: EngineMachine,
        write: Callable[[StateRecord], None],
        carry_out: Callable[[Effect], None],
        post: Callable[[Event], None],
        write_late: Callable[[StateRecord], None],
    ) -> None:
        """`write` makes a record durable or raises `OSError`; `post` gives back an event for the next turn.

        `write_late` begins to write one that nothing depends on; should it fail, `lost` is to be told.
        """
        self.machine: Final = machine
        self.unsaved: StateRecord | None = None
        """A record that could not be written yet."""
        self.problem = ""
        """The reason; empty without one."""
        self._write, self._carry_out, self._post, self._write_late = write, carry_out, post, write_late

    def dispatch(self, event: Event, now: float) -> None:
        """Hand `event` to the machine, check its invariants, carry out its effects."""
        effects = self.machine.handle(event, now)
        self.machine.check()
        for effect in effects:
            if isinstance(effect, Remember) and effect.late:
                self._write_late(effect.record)
            elif isinstance(effect, Remember):
                self._remember(effect.record)
            elif self.unsaved and isinstance(effect, RunOperation) and isinstance(effect.operation, Receive):
                # After a crash the record would not tell that weights are mixed: the transfer does not begin.
                self._post(Operated(effect.number, OperationFailed(self.problem)))
            else:
                self._carry_out(effect)

    def lost(self, record: StateRecord, error: OSError) -> None:
        """`record` could not be written late, and no newer one was since."""
        self.unsaved = record
        self.problem = f"the record cannot be written: {error.strerror or error}"

    def retry(self) -> None:
        """Try again to write a record that could not be written."""
        if self.unsaved is not None:
            self._remember(self.unsaved)

    def _remember(self, record: StateRecord) -> None:
        """Write it; if that is impossible, keep it for `retry`.

        A record that stays behind is of a worse state than the true one, but for the one before a transfer.
        """
        try:
            self._write(record)
        except OSError as error:
            self.lost(record, error)
        else:
            self.unsaved, self.problem = None, ""


class LockHeld(Exception):
    """Another process holds the lock; `holder` is the name that it wrote."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        super().__init__(f"held by {holder or 'another process'}")


class ProcessLock:
    """One lock file. It stays after the release: removing it might remove that of a successor."""

    def __init__(self, path: Path, holder: str) -> None:
        self.path = path
        self._holder = holder
        self._lock: weakref.finalize[[int], ProcessLock] | None = None

    def take(self) -> None:
        """Hold it until `release` or the end of this process. Raises `LockHeld`, or OSError for the file."""
        lock = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._lock = weakref.finalize(self, os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(lock, 256, 0).decode(errors="replace").strip()
            self.release()
            raise LockHeld(holder) from error
        with contextlib.suppress(OSError):  # a full disk: the lock holds, only the name of its holder is missing
            os.truncate(lock, 0)
            os.pwrite(lock, f"{self._holder}\n".encode(), 0)

    def release(self) -> None:
        """Let another process take it."""
        if self._lock is not None:
            self._lock()


def server_claim(folder: Path, url: str, agent: str) -> ProcessLock:
    """The claim on the server behind `url`, for the agents that share `folder` on this host.

    A loopback address means another server in another network namespace, as containers have them, so that is part of
    the lock's name. The process behind the port is not: the lock outlives a restart of the server.
    """
    parts = urlsplit(url if "//" in url else f"//{url}")
    host = "loopback" if parts.hostname in _LOOPBACK else parts.hostname
    server = hashlib.sha256(f"{_network()} {host} {parts.port}".encode()).hexdigest()[:16]
    return ProcessLock(folder / f"server-{server}.lock", f"{agent} (process {os.getpid()})")


def _network() -> str:
    try:
        return str(_NETWORK.stat().st_ino)
    except OSError:  # not a Linux kernel
        return ""


def write_durably(path: Path, content: bytes) -> None:
    """Replace the file `path` in one step: when this returns, a crash of the machine does not undo it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_fresh(path, content).replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_fresh(path: Path, content: bytes) -> Path:
    """Write `content` beside `path`, synced; returns where it lies until it is put in place."""
    fresh = path.parent / f"{path.name}.new"  # another one for each file: they are written by several threads
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return fresh
