"""Versions that a trainer keeps as files, as engines find and load them by themselves.

    <save_dir>/<channel>/checkpoint-<version>/
        shards, index, config, weightbus.json      a checkpoint like any other (checkpoint_files.py)
        weightbus-manifest.msgpack                 what it consists of
        weightbus-table.msgpack                    its digests, and what engines must report of their parameters
        weightbus-publication.json                 what the trainer announced, with its seal where keys are used

Processes that may write into the folder decide what engines load, within what trainers have signed. An agent whose
server loads a version holds a lock that is shared with others on its notes; a version with such a lock is not taken
away.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from ...errors import TransferFailed
from ...processes import Deadline
from ...tensors import blob_digest
from ..interface import Address, EngineServer, Receipt, TransferSession
from .checkpoint_files import NOTES, Notes
from .checkpoint_transport import check_tensors

MANIFEST: Final = "weightbus-manifest.msgpack"
TABLE: Final = "weightbus-table.msgpack"
PUBLICATION: Final = "weightbus-publication.json"
_NO_LOCKS: Final = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


def place_of(save_dir: Path, channel: str, version: int) -> Path:
    """Where the checkpoint of a version is kept."""
    return save_dir / channel / f"checkpoint-{version}"


class SavedVersion(msgspec.Struct, frozen=True):
    """One version, with everything that is needed to believe, check and load it."""

    path: Path
    notes: Notes
    blobs: Mapping[str, bytes]
    """Manifest and table, by digest."""
    publication: bytes

    @classmethod
    def read(cls, path: Path) -> SavedVersion | None:
        """The version in `path`; None where there is none, or one that was kept without what is needed.

        Raises `OSError` where that cannot be read.
        """
        try:
            notes = msgspec.json.decode((path / NOTES).read_bytes(), type=Notes)
            blobs = {blob_digest(blob): blob for blob in ((path / name).read_bytes() for name in (MANIFEST, TABLE))}
            publication = (path / PUBLICATION).read_bytes()
        except (FileNotFoundError, NotADirectoryError, ValueError):  # the last one of the decoder's, too
            return None
        return cls(path, notes, blobs, publication) if {notes.manifest, notes.table} <= blobs.keys() else None


@contextlib.contextmanager
def staying(path: Path) -> Generator[None]:
    """Keep the version in `path` from being taken away meanwhile. Raises `TransferFailed` where it just was."""
    try:
        with (path / NOTES).open("rb") as notes:
            locked = _lock(notes.fileno(), fcntl.LOCK_SH)
            if not locked or os.fstat(notes.fileno()).st_ino != (path / NOTES).stat().st_ino:
                raise TransferFailed(f"{path} is being taken away, for newer versions")
            yield
    except FileNotFoundError as error:
        raise TransferFailed(f"{path} was taken away, for newer versions") from error


@contextlib.contextmanager
def leaving(path: Path) -> Generator[bool]:
    """Whether the version in `path` may be removed now: no server loads it, and none begins to."""
    try:
        notes = (path / NOTES).open("r+b")
    except FileNotFoundError:  # not one that an agent would load
        yield True
        return
    with notes:
        yield _lock(notes.fileno(), fcntl.LOCK_EX)


def _lock(descriptor: int, how: int) -> bool:
    """False when another process has it. A file system without locks neither protects nor excludes any."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


class SavedReceiver:
    """Has a server load a version that lies there already. Implements `transport.Receiver`; no trainer takes part."""

    def __init__(self) -> None:
        self.touched = False

    def receive(  # noqa: PLR0917
        self,
        session: TransferSession,
        address: Address,
        engine: str,
        rank_offset: int,
        server: EngineServer,
        deadline_s: float,
    ) -> Receipt:
        """Compare every tensor with the table, then have the folder loaded."""
        del engine, rank_offset
        self.touched = False
        deadline = Deadline(deadline_s)
        target = Path(address.address)
        with staying(target):
            return self._load(session, target, server, deadline)

    def close(self) -> None:
        """Nothing is open between calls."""

    def shutdown(self) -> None:
        """Nothing outlives a session."""

    def _load(self, session: TransferSession, target: Path, server: EngineServer, deadline: Deadline) -> Receipt:
        found = SavedVersion.read(target)
        wanted = (session.channel, session.version, session.manifest.digest(), session.known.digest())
        notes = found.notes if found else None
        if notes is None or (notes.channel, notes.version, notes.manifest, notes.table) != wanted:
            raise TransferFailed(f"{target} holds {notes}, expected version {session.version} as it was committed")
        check_tensors(target, session)
        self.touched = True
        server.load_checkpoint(os.fspath(target), deadline.check("time to load the checkpoint"))
        return Receipt(session.manifest.nbytes, len(session.manifest.buckets), checked=True)
