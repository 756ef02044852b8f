"""POSIX shared memory by name: created, opened, and removed after processes that died.

A name carries its owner (PID namespace, PID, start time), so that the next process can tell leftovers from memory in
use. Memory is reserved when it is created: a full ``/dev/shm`` is an error here and not a SIGBUS in the middle of a
copy.
"""

import contextlib
import itertools
import mmap
import os
import re
import weakref
from pathlib import Path
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from ..errors import OutOfSharedMemory, TransferFailed

DIRECTORY: Final = Path("/dev/shm")  # noqa: S108  where Linux keeps POSIX shared memory
_NAME: Final = re.compile(r"^weightbus-[A-Za-z0-9._-]{0,64}-(\d+)-(\d+)-(\d+)-(\d+)$")
_SERIAL: Final = itertools.count()


class Segment:
    """A named shard of shared memory that this process owns; unlinked by `close`, or when the process ends."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self._unlink = weakref.finalize(self, _unlink_own, DIRECTORY / name, os.getpid())

    @classmethod
    def create(cls, purpose: str, nbytes: int) -> Self:
        """Reserve `nbytes`. Raises `OutOfSharedMemory`."""
        pid = os.getpid()
        name = f"weightbus-{purpose}-{_namespace()}-{pid}-{_started(pid)}-{next(_SERIAL)}"
        if not _NAME.match(name):
            raise ValueError(f"{purpose!r} cannot stand in the name of shared memory (letters, digits, '.', '_', '-')")
        segment = cls(name, nbytes)
        fd = os.open(segment.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            segment.close()
            stat = os.statvfs(DIRECTORY)
            raise OutOfSharedMemory(nbytes, stat.f_bavail * stat.f_frsize) from error
        finally:
            os.close(fd)
        return segment

    @property
    def path(self) -> Path:
        """The file behind the name."""
        return DIRECTORY / self.name

    def close(self) -> None:
        """Unlink the name. Mappings stay valid until they are dropped."""
        self._unlink()


def map_readonly(name: str, nbytes: int) -> npt.NDArray[np.uint8]:
    """Map another process's segment. Raises `TransferFailed` when it is not there, too small or not ours to read."""
    if not _NAME.match(name):
        raise TransferFailed(f"{name!r} is not the name of a weightbus segment")
    try:
        fd = os.open(DIRECTORY / name, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise TransferFailed(f"shared memory {name!r} cannot be opened: {error.strerror}") from error
    try:
        stat = os.fstat(fd)
        if stat.st_uid != os.getuid() or stat.st_size < nbytes:
            raise TransferFailed(
                f"shared memory {name!r} has {stat.st_size} bytes and owner {stat.st_uid}, "
                f"expected {nbytes} bytes and owner {os.getuid()}"
            )
        return np.frombuffer(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ), dtype=np.uint8)
    finally:
        os.close(fd)


def remove_leftovers() -> tuple[str, ...]:
    """Unlink the segments of ended processes of this PID namespace; returns their names."""
    swept: list[str] = []
    for path in DIRECTORY.glob("weightbus-*"):
        match = _NAME.match(path.name)
        if match is None or int(match[1]) != _namespace() or _started(int(match[2])) == int(match[3]):
            continue
        with contextlib.suppress(FileNotFoundError, PermissionError):  # swept by another process, or another user's
            path.unlink()
            swept.append(path.name)
    return tuple(swept)


def _started(pid: int) -> int:
    """Start time of a process in clock ticks since boot; -1 when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return -1
    return int(text.rpartition(")")[2].split()[19])


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _unlink_own(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child inherits the finalizer, not the memory
        path.unlink(missing_ok=True)
