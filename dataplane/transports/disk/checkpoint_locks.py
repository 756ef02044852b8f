"""Writers and readers of a checkpoint: a folder of small files beside it, each locked by its owner.

    sender.json        what is being written; locked by the sender until its session ends
    reader-<engine>    made by the sender; locked and written by the engine's agent: reading, done, failed

A lock goes away with its process, on a shared file system too (flock over NFS is a byte-range lock on the server), so a
file that says ``reading`` without a lock is an agent that died.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from ...errors import PeerLost, StaleSession, TransferFailed, Unsupported
from ...processes import Deadline

POLL_S: Final = 0.02
_SENDER: Final = "sender.json"
_RECORD_BYTES: Final = 16 * 1024
"""Every record has this length, so that a new one covers the old one; no reason escapes to more."""


class Notes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which bits a checkpoint holds; also stands inside it as weightbus.json."""

    channel: str
    epoch: int
    version: int
    manifest: str
    table: str


class _State(msgspec.Struct, frozen=True):
    state: Literal["reading", "done", "failed"]
    reason: str = ""


class SessionFolder:
    """The folder of one checkpoint, from either side."""

    def __init__(self, path: Path, lock: int = -1) -> None:
        self._path = path
        self._lock = lock

    @classmethod
    def of(cls, checkpoint: Path) -> SessionFolder:
        """The folder that belongs to `checkpoint`, which need not exist."""
        return cls(checkpoint.with_name(checkpoint.name + ".session"))

    @classmethod
    def create(cls, checkpoint: Path, notes: Notes, engines: Sequence[str]) -> SessionFolder:
        """Sender: make the folder and hold its lock."""
        path = checkpoint.with_name(checkpoint.name + ".session")
        path.mkdir()
        for engine in engines:
            (path / f"reader-{engine}").touch()
        lock = os.open(path / _SENDER, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, msgspec.json.encode(notes))
        return cls(path, lock)

    def check(self, expected: Notes) -> None:
        """Receiver: raise unless the sender writes what is expected (`StaleSession` for another epoch)."""
        try:
            found = msgspec.json.decode((self._path / _SENDER).read_bytes(), type=Notes)
        except (OSError, ValueError) as error:
            raise PeerLost(f"{self._path}: is checkpoint_dir the same folder on both sides? {error}") from error
        if found.epoch != expected.epoch:
            raise StaleSession(found.epoch, expected.epoch)
        if found != expected:
            raise TransferFailed(f"{self._path} announces {found}, expected {expected}")

    def sender_alive(self) -> bool:
        """The sender still holds its lock."""
        return _locked(self._path / _SENDER)

    def reader(self, engine: str) -> CheckpointReader:
        """What one engine's agent says, or says through this."""
        return CheckpointReader(self._path / f"reader-{engine}")

    def being_read(self) -> bool:
        """Some agent may still be reading."""
        return any(_locked(path) for path in self._path.glob("reader-*"))

    def release(self) -> None:
        """Sender: the session is over."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._path, ignore_errors=True)


class CheckpointReader:
    """One engine's file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = -1

    def come(self, deadline: Deadline) -> None:
        """Receiver: take the lock. Raises `PeerLost` when the sender did not invite this engine."""
        try:
            self._lock = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise PeerLost(f"{self._path.name} was not invited to this session") from error
        except OSError as error:
            raise Unsupported(f"{self._path} must be writable for the engine agent: {error.strerror}") from error
        while not _try_lock(self._lock, fcntl.LOCK_EX):
            time.sleep(min(POLL_S, deadline.check(f"another agent to let go of {self._path.name}")))
        self.note("reading")

    def note(self, state: Literal["reading", "done", "failed"], reason: str = "") -> None:
        """Receiver: say how it goes."""
        record = msgspec.json.encode(_State(state, reason[: _RECORD_BYTES // 16]))
        os.pwrite(self._lock, record.ljust(_RECORD_BYTES), 0)

    def go(self) -> None:
        """Receiver: let go of the lock."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @property
    def state(self) -> str:
        """``reading``, ``done``, ``failed``, or empty while no reader has come."""
        return self._read().state if self._path.stat().st_size else ""

    @property
    def reason(self) -> str:
        """Why it failed."""
        return self._read().reason

    def died(self) -> bool:
        """The file says that its owner reads, and no process holds its lock."""
        return not _locked(self._path) and self._read().state == "reading"

    def _read(self) -> _State:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=_State)
        except ValueError:  # read while it was being written: the next look will see it whole
            return _State("reading")


def _locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def _try_lock(fd: int, how: int) -> bool:
    try:
        fcntl.flock(fd, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
