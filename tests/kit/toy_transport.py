"""A transport of the tests' own: every bucket is a file in a folder that both sides see.

It is a complete one: it satisfies the contract (tests/dataplane/transport_contract.py). `TOY` is what its folder in the
product, or an entry point of another distribution, would declare.

    <runtime_dir>/toy-<channel>/<epoch>/
        sender             locked by the sender until its session ends
        <index>.bucket     the bytes of a bucket
        <engine>.here      locked by a receiver that has come, while it receives
        <engine>.done      the receiver has loaded every bucket
        <engine>.failed    why the receiver has failed

A lock ends with the process that holds it: so each side notices that the other has died.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import torch

from weightbus.dataplane.errors import DataplaneError, PeerLost, StaleSession, TransferFailed, Unsupported
from weightbus.dataplane.memory.shared_memory import TorchSharedBuffers
from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.transports.interface import (
    JOIN_S,
    Address,
    EngineServer,
    LoadedBy,
    Peer,
    Receipt,
    ReceiverContext,
    SenderContext,
    SharedBucket,
    StagingBuffer,
    TransferSession,
    Transport,
)
from weightbus.dataplane.transports.sessions import check_bucket

_LOOK_S = 0.005


class FolderSender:
    """The trainer's half: writes files, and waits in the end until each engine has read them."""

    def __init__(self, context: SenderContext) -> None:
        if context.runtime_dir is None:
            raise Unsupported("the toy transport needs runtime_dir, a folder that both sides see")
        self.failed: dict[str, str] = {}
        self.spared: frozenset[str] = frozenset()
        self._root = context.runtime_dir / f"toy-{context.channel}"
        self._folder: Path | None = None
        self._held = contextlib.ExitStack()
        """The lock of the folder."""
        self._engines: set[str] = set()
        """Receivers that have not confirmed the last bucket, and have not failed."""
        self._settling = threading.Lock()
        """Held to change `_engines` and `failed`: `withdraw` is called from any thread."""

    def offer(self, session: TransferSession, peers: Sequence[Peer]) -> Address:
        self.close()
        self.failed, self._engines = {}, {peer.engine for peer in peers}
        self._folder = self._root / str(session.epoch)
        self._folder.mkdir(parents=True)
        self._held.enter_context(locked(self._folder / "sender"))
        return Address(str(self._folder))

    def ready(self, deadline_s: float, join_s: float = JOIN_S) -> None:
        folder, until = self._there(), Deadline(min(join_s, deadline_s))
        self._wait(lambda engine: (folder / f"{engine}.here").exists(), until, f"it did not come within {join_s} s")
        self._require_engines()

    def send(self, index: int, slot: StagingBuffer, deadline_s: float) -> None:
        del deadline_s
        made = self._there() / f"{index}.part"
        made.write_bytes(slot.memory.numpy().tobytes())
        made.rename(made.with_suffix(".bucket"))
        self._require_engines()

    def reclaim(self, index: int, deadline_s: float) -> None:
        del index, deadline_s  # no engine reads a slot

    def finish(self, deadline_s: float) -> None:
        self._there()
        self._wait(lambda _: False, Deadline(deadline_s), f"it has not confirmed the last bucket after {deadline_s} s")

    def withdraw(self, engine: str, reason: str) -> None:
        if self._folder is not None and not (self._folder / f"{engine}.done").exists():
            self._fail(engine, reason)

    def close(self) -> None:
        if self._folder is not None:
            self._held.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _wait(self, reached: Callable[[str], bool], deadline: Deadline, overdue: str) -> None:
        """Until each engine has `reached` a point, is done or has failed; those that are `overdue` fail."""
        while waiting := [engine for engine in tuple(self._engines) if not self._is_settled(engine, reached)]:
            if not deadline.left():
                for engine in waiting:
                    self._fail(engine, overdue)
            time.sleep(_LOOK_S)

    def _is_settled(self, engine: str, reached: Callable[[str], bool]) -> bool:
        here, done, failed = (self._there() / f"{engine}.{what}" for what in ("here", "done", "failed"))
        gone = here.exists() and not is_locked(here)  # asked first: a receiver lets go after its last word
        if done.exists():
            with self._settling:
                self._engines.discard(engine)
        elif failed.exists():
            self._fail(engine, failed.read_text())
        elif gone:
            self._fail(engine, "its agent died in the transfer")
        return engine not in self._engines or reached(engine)

    def _fail(self, engine: str, reason: str) -> None:
        with self._settling:
            if engine in self._engines:
                self._engines.discard(engine)
                self.failed[engine] = reason

    def _require_engines(self) -> None:
        if self.failed and not self._engines:
            raise TransferFailed(f"no engine is left: {self.failed}")

    def _there(self) -> Path:
        if self._folder is None:
            raise TransferFailed("call offer first")
        return self._folder


class FolderReceiver:
    """The engine's half: copies each file into memory that the server's workers map, and compares it with the table."""

    def __init__(self, context: ReceiverContext) -> None:
        if context.runtime_dir is None:
            raise Unsupported("the toy transport needs runtime_dir, a folder that both sides see")
        self.touched = False
        self._memory = TorchSharedBuffers(context.runtime_dir)

    def receive(  # noqa: PLR0917 - as the interface has it
        self,
        session: TransferSession,
        address: Address,
        engine: str,
        rank_offset: int,
        server: EngineServer,
        deadline_s: float,
    ) -> Receipt:
        del rank_offset
        self.touched = False
        folder = Path(address.address)
        if int(folder.name) != session.epoch:
            raise StaleSession(int(folder.name), session.epoch)
        try:
            with locked(folder / f"{engine}.here"):
                try:
                    self._load(folder, session, server, Deadline(deadline_s))
                except DataplaneError as error:
                    write(folder / f"{engine}.failed", f"{type(error).__name__}: {error}")
                    raise
                write(folder / f"{engine}.done", "")
        except OSError as error:
            raise PeerLost(f"the sender has removed {folder}: {error}") from error
        return Receipt(session.manifest.nbytes, len(session.manifest.buckets), checked=True)

    def close(self) -> None:
        """Nothing belongs to a session."""

    def shutdown(self) -> None:
        self._memory.close()

    def _load(self, folder: Path, session: TransferSession, server: EngineServer, deadline: Deadline) -> None:
        manifest = session.manifest
        self._memory.reserve(manifest.largest_bucket, 1, deadline)
        for index, bucket in enumerate(manifest.buckets):
            path = folder / f"{index}.bucket"
            while not path.exists():
                if not is_locked(folder / "sender") and not path.exists():
                    raise PeerLost(f"the sender is gone, and bucket {index} is not there")
                deadline.check(f"bucket {index}")
                time.sleep(_LOOK_S)
            memory = self._memory.memory(0)[: bucket.nbytes]
            memory.copy_(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)[: bucket.nbytes])
            check_bucket(session, index, memory)
            lent = SharedBucket(index, bucket, manifest.tensors_of(index), self._memory.lend(0, server.tp))
            self.touched = True
            server.load_shared(lent, deadline.check("the server"))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Make the file and hold its lock. It has its name only once it is locked."""
    made = path.with_name(f"{path.name}.part")
    with made.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        made.rename(path)
        yield


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock; False where there is no file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def write(path: Path, text: str) -> None:
    """Write the file so that no reader finds a part of it."""
    made = path.with_name(f"{path.name}.part")
    made.write_text(text)
    made.replace(path)


TOY: Final = Transport(name="toy", sender=FolderSender, receiver=FolderReceiver, loaded_by=LoadedBy.SHARED_MEMORY)
