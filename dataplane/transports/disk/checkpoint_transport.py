"""Any host that sees the same file system: a complete Hugging Face checkpoint per version, loaded from its folder.

    <checkpoint_dir>/<channel>/v<version>-e<epoch>          the checkpoint; appears complete, by one rename
    <checkpoint_dir>/<channel>/v<version>-e<epoch>.tmp      being written
    <checkpoint_dir>/<channel>/v<version>-e<epoch>.session  its readers (checkpoint_locks.py)

Buckets become shards one by one, so the sender needs no memory beyond its staging. Receivers compare every tensor of
the files with the digest table before the server is told of them. The newest `KEEP` checkpoints stay, and any that an
engine still reads.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ...digest import tensor_digest as integrity
from ...errors import PeerLost, TransferFailed, Unsupported
from ...processes import Deadline
from ..interface import JOIN_S, Address, EngineServer, Peer, Receipt, Slot, TransferSession
from . import safetensors_file
from .checkpoint_locks import POLL_S, CheckpointReader, Notes, SessionFolder
from .checkpoint_writer import NOTES, CheckpointWriter

KEEP: Final = 2
"""Checkpoints that stay: the newest, and the one before it for engines that come late."""

_CHECKPOINT: Final = re.compile(r"^v(\d+)-e(\d+)$")


class DiskSender:
    """Writes checkpoints below `checkpoint_dir`; config and tokenizer files come from `hf_config_dir`, if given."""

    def __init__(self, checkpoint_dir: Path, channel: str, hf_config_dir: Path | None = None, keep: int = KEEP) -> None:
        self._root = checkpoint_dir / channel
        self._hf_config_dir = hf_config_dir
        self._keep = keep
        self._session: TransferSession | None = None
        self._folder: SessionFolder | None = None
        self._writer: CheckpointWriter | None = None
        self._target = self._root
        self._live: set[str] = set()
        self._failed: dict[str, str] = {}
        self._withdrawn: dict[str, str] = {}
        self._complete = False

    @property
    def failed(self) -> dict[str, str]:
        """Engines that did not load the checkpoint, with the reason."""
        return self._failed

    @property
    def spared(self) -> frozenset[str]:
        """Always empty: no engine fails for another."""
        return frozenset()

    def offer(self, session: TransferSession, peers: Sequence[Peer]) -> Address:
        """Begin a checkpoint. Raises `Unsupported` when the folder cannot be written."""
        self.close()
        self._session, self._failed, self._withdrawn, self._complete = session, {}, {}, False
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
        self._require_some()

    def send(self, index: int, slot: Slot, deadline_s: float) -> None:
        """Write bucket `index` as a shard; returns when it is on the disk."""
        del deadline_s  # a write cannot be called off
        writer = self._written()
        self._drop_withdrawn()
        self._require_some()
        try:
            writer.add(index, slot.memory)
        except OSError as error:
            self._fail_all(f"shard {index} could not be written: {error}")
            raise TransferFailed(f"shard {index} could not be written to {writer.writing}: {error}") from error

    def reclaim(self, index: int, deadline_s: float) -> None:
        """Nothing to wait for: `send` returned when the bytes were on the disk."""

    def finish(self, deadline_s: float) -> None:
        """Let the checkpoint appear, and wait until every engine has loaded it or is in `failed`."""
        try:
            self._publish()
        except OSError as error:
            self._fail_all(f"the checkpoint could not be completed: {error}")
            return
        self._wait(deadline_s, lambda engine: self._reader(engine).state != "done", "had not loaded the checkpoint")
        self._prune()

    def withdraw(self, engine: str, reason: str) -> None:
        """Drop `engine` when this sender waits, or writes a shard, the next time."""
        self._withdrawn.setdefault(engine, reason)

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

    def _open(self) -> TransferSession:
        if self._session is None:
            raise TransferFailed("nothing is on offer: call offer first")
        return self._session

    def _publish(self) -> None:
        """Let the checkpoint appear."""
        self._written().finish(_notes(self._open()))
        self._complete = True

    def _written(self) -> CheckpointWriter:
        if self._writer is None:
            raise TransferFailed("nothing is on offer: call offer first")
        return self._writer

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
        self._open()
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
        self._failed.setdefault(engine, reason)
        self._live.discard(engine)

    def _fail_all(self, reason: str) -> None:
        for engine in sorted(self._live):
            self._drop(engine, reason)

    def _require_some(self) -> None:
        if not self._live:
            reasons = "; ".join(f"{engine}: {reason}" for engine, reason in self._failed.items())
            raise TransferFailed(f"no engine is left to serve ({reasons})")


class DiskReceiver:
    """Reads a checkpoint once it is complete, compares every tensor, and has the server load the folder."""

    def __init__(self) -> None:
        self._touched = False
        self._reader: CheckpointReader | None = None

    @property
    def touched(self) -> bool:
        """The server was asked to change weights in the last session."""
        return self._touched

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
        self._touched = False
        deadline = Deadline(deadline_s)
        target = Path(address.address)
        folder = SessionFolder.of(target)
        folder.check(_notes(session))
        reader = self._reader = folder.reader(engine)
        reader.come(deadline)
        try:
            self._await_checkpoint(folder, target, deadline)
            self._check(target, session)
            self._touched = True
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
    manifest = session.manifest
    for index, bucket in enumerate(manifest.buckets):
        memory = safetensors_file.read(target / safetensors_file.file_name(manifest, index), manifest, index)
        names = [tensor.name for tensor in manifest.tensors_of(index)]
        integrity.check_digests(memory, manifest.offsets_of(index), session.known.of_bucket(bucket), names)


def _notes(session: TransferSession) -> Notes:
    return Notes(
        channel=session.channel,
        epoch=session.epoch,
        version=session.version,
        manifest=session.manifest.digest(),
        table=session.known.digest(),
    )
