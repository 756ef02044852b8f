"""Locks that keep the sidecars of one host apart. A dead process holds none."""

import contextlib
import fcntl
import hashlib
import os
import weakref
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_NETWORK: Final = Path("/proc/self/ns/net")


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
