"""Any host that sees the same file system: a complete Hugging Face checkpoint per version, loaded from its folder.

    <checkpoint_dir>/<channel>/v<version>-e<epoch>          the checkpoint; appears complete, by one rename
    <checkpoint_dir>/<channel>/v<version>-e<epoch>.tmp      being written
    <checkpoint_dir>/<channel>/v<version>-e<epoch>.session  its readers (checkpoint_transport.py)

Buckets become shards one by one, so the sender needs no memory beyond its staging. Receivers compare every tensor of
the files with the digest table before the server is told of them. The newest `KEEP` checkpoints stay, and any that an
engine still reads.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from ...errors import PeerLost, StaleSession, TransferFailed, Unsupported
from ...processes import Deadline
from ..interface import JOIN_S, Address, EngineServer, Peer, Receipt, StagingBuffer, TransferSession
from ..sessions import SenderState, check_bucket
from .checkpoint_files import NOTES, CheckpointWriter, Notes, read_shard, shard_name

POLL_S: Final = 0.02
_SENDER: Final = "sender.json"
_RECORD_BYTES: Final = 16 * 1024
"""Every record has this length, so that a new one covers the old one; no reason escapes to more."""


class _State(msgspec.Struct, frozen=True):
    state: Literal["reading", "done", "failed"]
    reason: str = ""


class SessionFolder:
    """The folder beside a checkpoint in which its sender and its readers each hold the lock of a file.

        sender.json        what is being written; locked by the sender until its session ends
        reader-<engine>    made by the sender; locked and written by the engine's agent: reading, done, failed

    A lock goes away with its process, on a shared file system too (flock over NFS is a byte-range lock on the server),
    so a file that says ``reading`` without a lock is an agent that died.
    """

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


KEEP: Final = 2
"""Checkpoints that stay: the newest, and the one before it for engines that come late."""

_CHECKPOINT: Final = re.compile(r"^v(\d+)-e(\d+)$")


class DiskSender(SenderState):
    """Writes checkpoints below `checkpoint_dir`; config and tokenizer files come from `hf_config_dir`, if given."""

    def __init__(self, checkpoint_dir: Path, channel: str, hf_config_dir: Path | None = None, keep: int = KEEP) -> None:
        super().__init__()
        self._root = checkpoint_dir / channel
        self._hf_config_dir = hf_config_dir
        self._keep = keep
        self._session: TransferSession | None = None
        self._folder: SessionFolder | None = None
        self._writer: CheckpointWriter | None = None
        self._target = self._root
        self._live: set[str] = set()
        self._complete = False

    def offer(self, session: TransferSession, peers: Sequence[Peer]) -> Address:
        """Begin a checkpoint. Raises `Unsupported` when the folder cannot be written."""
        self.close()
        self._begin_session()
        self._session, self._complete = session, False
        self._live = {peer.engine for peer in peers}
        self._target = self._root / f"v{session.version}-e{session.epoch}"
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            self._discard_unfinished()
            self._writer = CheckpointWriter(self._target, session.manifest, self._hf_config_dir)
            self._writer.begin()
            self._folder = SessionFolder.create(self._target, _notes(session), sorted(self._live))
        except OSError as error:
            raise Unsupported(f"{self._root} cannot take a checkpoint: {error}") from error
        return Address(os.fspath(self._target.absolute()))

    def ready(self, deadline_s: float, join_s: float = JOIN_S) -> None:
        """Wait until every engine's agent has come to read, or is in `failed`: agents that have not within `join_s`."""
        self._wait(min(deadline_s, join_s), lambda engine: self._reader(engine).state == "", "did not come")
        self._require_some(self._live)

    def send(self, index: int, slot: StagingBuffer, deadline_s: float) -> None:
        """Write bucket `index` as a shard; returns when it is on the disk."""
        del deadline_s  # a write cannot be called off
        _, writer = self._on_offer()
        self._drop_withdrawn()
        self._require_some(self._live)
        try:
            writer.add(index, slot.memory)
        except OSError as error:
            self._fail_all(f"shard {index} could not be written: {error}")
            raise TransferFailed(f"shard {index} could not be written to {writer.writing}: {error}") from error

    def finish(self, deadline_s: float) -> None:
        """Let the checkpoint appear, and wait until every engine has loaded it or is in `failed`."""
        session, writer = self._on_offer()
        try:
            writer.finish(_notes(session))
            self._complete = True
        except OSError as error:
            self._fail_all(f"the checkpoint could not be completed: {error}")
            return
        self._wait(deadline_s, lambda engine: self._reader(engine).state != "done", "had not loaded the checkpoint")
        self._prune()

    def close(self) -> None:
        """End the session; an incomplete checkpoint is removed, a complete one stays."""
        if self._session is None:
            return
        if self._folder is not None:
            self._folder.release()
            self._folder = None
        if self._writer is not None and not self._complete:
            self._writer.discard()
        self._writer = None
        self._session = None

    # -- writing -----------------------------------------------------------------------------------------------------

    def _on_offer(self) -> tuple[TransferSession, CheckpointWriter]:
        if self._session is None or self._writer is None:
            raise TransferFailed("nothing is on offer: call offer first")
        return self._session, self._writer

    def _discard_unfinished(self) -> None:
        """A crashed sender's leftovers: no other trainer writes in this channel while this one holds its lease."""
        for leftover in self._root.glob("v*-e*.tmp"):
            shutil.rmtree(leftover)
        for session in self._root.glob("v*-e*.session"):
            folder = SessionFolder(session)
            if not session.with_suffix("").exists() and not folder.being_read():
                folder.remove()

    def _prune(self) -> None:
        """Remove all but the newest checkpoints, leaving the ones that are being read for a later round."""
        found = [(int(m[2]), path) for path in self._root.iterdir() if (m := _CHECKPOINT.match(path.name))]
        for _, path in sorted(found)[: -self._keep]:
            folder = SessionFolder.of(path)
            if not folder.being_read():
                folder.remove()
                shutil.rmtree(path, ignore_errors=True)

    # -- readers -----------------------------------------------------------------------------------------------------

    def _reader(self, engine: str) -> CheckpointReader:
        assert self._folder is not None
        return self._folder.reader(engine)

    def _wait(self, deadline_s: float, pending: Callable[[str], bool], reproach: str) -> None:
        deadline = Deadline(deadline_s)
        self._on_offer()
        while True:
            for engine in sorted(self._live):
                reader = self._reader(engine)
                if reader.state == "failed":
                    self._drop(engine, reader.reason)
                elif reader.state == "reading" and reader.died():
                    self._drop(engine, "its agent died while it read the checkpoint")
            self._drop_withdrawn()
            waiting = [engine for engine in sorted(self._live) if pending(engine)]
            if not waiting:
                return
            if not deadline.left():
                for engine in waiting:
                    self._drop(engine, f"{reproach} within {deadline_s:.1f} s")
                return
            time.sleep(min(POLL_S, deadline.left()))

    def _drop_withdrawn(self) -> None:
        for engine, reason in tuple(self._withdrawn.items()):
            if engine in self._live and self._reader(engine).state != "done":
                self._drop(engine, reason)

    def _drop(self, engine: str, reason: str) -> None:
        self.failed.setdefault(engine, reason)
        self._live.discard(engine)

    def _fail_all(self, reason: str) -> None:
        for engine in sorted(self._live):
            self._drop(engine, reason)


class DiskReceiver:
    """Reads a checkpoint once it is complete, compares every tensor, and has the server load the folder."""

    def __init__(self) -> None:
        self.touched = False
        self._reader: CheckpointReader | None = None

    def receive(  # noqa: PLR0917
        self,
        session: TransferSession,
        address: Address,
        engine: str,
        rank_offset: int,
        server: EngineServer,
        deadline_s: float,
    ) -> Receipt:
        """Wait for the checkpoint, check it, load it."""
        del rank_offset  # there is no group here
        self.close()
        self.touched = False
        deadline = Deadline(deadline_s)
        target = Path(address.address)
        folder = SessionFolder.of(target)
        folder.check(_notes(session))
        reader = self._reader = folder.reader(engine)
        reader.come(deadline)
        try:
            self._await_checkpoint(folder, target, deadline)
            self._check(target, session)
            self.touched = True
            server.load_checkpoint(os.fspath(target), deadline.check("time to load the checkpoint"))
            reader.note("done")
        except Exception as error:
            reader.note("failed", f"{type(error).__name__}: {error}")
            raise
        finally:
            self.close()
        return Receipt(session.manifest.nbytes, len(session.manifest.buckets), checked=True)

    def close(self) -> None:
        """Stop being a reader."""
        if self._reader is not None:
            self._reader.go()
            self._reader = None

    def shutdown(self) -> None:
        """Nothing outlives a session."""
        self.close()

    def _await_checkpoint(self, folder: SessionFolder, target: Path, deadline: Deadline) -> None:
        while not target.is_dir():
            if not folder.sender_alive() and not target.is_dir():
                raise PeerLost(f"the sender ended before {target} was complete")
            time.sleep(min(POLL_S, deadline.check(f"the checkpoint {target}")))

    def _check(self, target: Path, session: TransferSession) -> None:
        try:
            found = msgspec.json.decode((target / NOTES).read_bytes(), type=Notes)
        except (OSError, ValueError) as error:
            raise TransferFailed(f"{target} is not a weightbus checkpoint: {error}") from error
        if found != _notes(session):
            raise TransferFailed(f"{target} holds {found}, expected {_notes(session)}")
        check_tensors(target, session)


def check_tensors(target: Path, session: TransferSession) -> None:
    """Raise `DigestMismatch` unless every tensor of the checkpoint is the one of the session's table."""
    for index in range(len(session.manifest.buckets)):
        path = target / shard_name(session.manifest, index)
        check_bucket(session, index, read_shard(path, session.manifest, index))


def _notes(session: TransferSession) -> Notes:
    return Notes(
        channel=session.channel,
        epoch=session.epoch,
        version=session.version,
        manifest=session.manifest.digest(),
        table=session.known.digest(),
    )
