"""A transport of the tests' own: every bucket is a file in a folder that both sides see. Shows all that one has to be.

`TOY` is what its folder in the product, or an entry point of another distribution, would declare.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from weightbus.dataplane.digest import tensor_digest
from weightbus.dataplane.errors import TransferFailed, Unsupported
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

_LOOK_S = 0.005


class FolderSender:
    """The trainer's half: writes files, and waits for a file of each engine in the end."""

    def __init__(self, context: SenderContext) -> None:
        if context.runtime_dir is None:
            raise Unsupported("the toy transport needs runtime_dir, a folder that both sides see")
        self.failed: dict[str, str] = {}
        self.spared: frozenset[str] = frozenset()
        self._root = context.runtime_dir / f"toy-{context.channel}"
        self._folder: Path | None = None
        self._engines: set[str] = set()
        """Receivers that have not confirmed the last bucket, and have not failed."""

    def offer(self, session: TransferSession, peers: Sequence[Peer]) -> Address:
        self.close()
        self.failed, self._engines = {}, {peer.engine for peer in peers}
        self._folder = self._root / str(session.epoch)
        self._folder.mkdir(parents=True)
        return Address(str(self._folder))

    def ready(self, deadline_s: float, join_s: float = JOIN_S) -> None:
        del deadline_s, join_s  # files wait for engines
        self._there()

    def send(self, index: int, slot: StagingBuffer, deadline_s: float) -> None:
        del deadline_s
        made = self._there() / f"{index}.part"
        made.write_bytes(slot.memory.numpy().tobytes())
        made.rename(made.with_suffix(".bucket"))

    def reclaim(self, index: int, deadline_s: float) -> None:
        del index, deadline_s  # no engine reads a slot

    def finish(self, deadline_s: float) -> None:
        folder = self._there()
        wait(Deadline(deadline_s), "the engines", lambda: all(self._confirmed(folder, each) for each in self._engines))

    def withdraw(self, engine: str, reason: str) -> None:
        if engine in self._engines:
            self._engines.discard(engine)
            self.failed[engine] = reason

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _confirmed(self, folder: Path, engine: str) -> bool:
        return (folder / f"{engine}.done").exists()

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
        folder, deadline, manifest = Path(address.address), Deadline(deadline_s), session.manifest
        self._memory.reserve(manifest.largest_bucket, 1, deadline)
        for index, bucket in enumerate(manifest.buckets):
            path = folder / f"{index}.bucket"
            wait(deadline, f"bucket {index}", path.exists)
            memory = self._memory.memory(0)[: bucket.nbytes]
            memory.copy_(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)[: bucket.nbytes])
            tensors = manifest.tensors_of(index)
            wanted = session.known.of_bucket(bucket)
            tensor_digest.check_digests(memory, manifest.offsets_of(index), wanted, [each.name for each in tensors])
            self.touched = True
            server.load_shared(
                SharedBucket(index, bucket, tensors, self._memory.lend(0, server.tp)), deadline.check("the server")
            )
        (folder / f"{engine}.done").touch()
        return Receipt(manifest.nbytes, len(manifest.buckets), checked=True)

    def close(self) -> None:
        """Nothing belongs to a session."""

    def shutdown(self) -> None:
        self._memory.close()


def wait(deadline: Deadline, what: str, done: Callable[[], bool]) -> None:
    """Return once `done`. Raises `DeadlineExceeded`."""
    while not done():
        deadline.check(what)
        time.sleep(_LOOK_S)


TOY: Final = Transport(name="toy", sender=FolderSender, receiver=FolderReceiver, loaded_by=LoadedBy.SHARED_MEMORY)
