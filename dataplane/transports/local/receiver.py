"""Same host: the engine agent's half. Takes buckets out of the trainer's memory and has the server load them.

Host memory is copied into memory of our own, the copy is compared with the digest table, and only then does the server
hear of it, while the next bucket is being copied. GPU memory is passed through: the server's workers open the trainer's
allocation themselves, and nothing here has looked at it (`Receipt.checked` says so).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as FutureTimeout, wait
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...digest import tensor_digest as integrity
from ...errors import DataplaneError, DeadlineExceeded, PeerLost, StaleSession, TransferFailed
from ...memory import CudaMemory, HostMemory, TorchSharedBuffers, ipc_handles as handles, posix_shm as segments
from ...processes import Deadline, bucket_timeout_s, open_runtime_dir
from ..interface import Address, EngineServer, Receipt, SharedBucket, TransferSession
from .messages import (
    BucketDone,
    BucketReady,
    Failed,
    Finished,
    Hello,
    ReceiverConnection,
    Refused,
    ToReceiver,
    Welcome,
    connect,
    failed,
)


class LocalReceiver:
    """Serves one engine. Its staging memory outlives rounds; a session's mappings of the trainer's memory do not."""

    def __init__(self, runtime_dir: Path) -> None:
        self._runtime_dir = runtime_dir
        self._memory = TorchSharedBuffers(runtime_dir)
        self._maps: dict[str, npt.NDArray[np.uint8]] = {}
        self._connection: ReceiverConnection | None = None
        self._loader: ThreadPoolExecutor | None = None
        self._touched = False

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
        """Take every bucket and load it into `server`."""
        del rank_offset  # there is no group here
        self.close()
        self._touched = False
        deadline = Deadline(deadline_s)
        open_runtime_dir(self._runtime_dir)
        connection = self._connection = connect(address.address, deadline)
        try:
            self._shake_hands(connection, session, engine, deadline)
            checked = self._take_all(connection, session, server, deadline)
        except Exception as error:
            _tell(connection, failed(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self.close()
        return Receipt(session.manifest.nbytes, len(session.manifest.buckets), checked)

    def close(self) -> None:
        """Hang up and let go of the trainer's memory."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._maps = {}

    def shutdown(self) -> None:
        """Let go of everything. A load that is under way is not waited for."""
        self.close()
        if self._loader is not None:
            self._loader.shutdown(wait=False)
            self._loader = None
        self._memory.close()

    # -- a session ---------------------------------------------------------------------------------------------------

    def _shake_hands(
        self, connection: ReceiverConnection, session: TransferSession, engine: str, deadline: Deadline
    ) -> None:
        connection.say(Hello(channel=session.channel, epoch=session.epoch, engine=engine))
        reply = connection.hear(deadline, "the sender's welcome")
        if isinstance(reply, Refused | Welcome) and reply.epoch != session.epoch:
            raise StaleSession(reply.epoch, session.epoch)
        if not isinstance(reply, Welcome):
            raise PeerLost(f"the sender refused this engine: {_reason(reply)}")

    def _take_all(
        self, connection: ReceiverConnection, session: TransferSession, server: EngineServer, deadline: Deadline
    ) -> bool:
        checked = True
        loads: list[Future[None]] = []
        try:
            for index in range(len(session.manifest.buckets)):
                message = _announcement(connection, index, deadline)
                memory = handles.decode(message.handle)
                if isinstance(memory, CudaMemory):
                    checked = False
                    loads.append(self._load(session, server, index, memory, loads, deadline))
                    _finished(loads[index], index, deadline)
                else:
                    self._copy(session, index, memory, loads, deadline)
                    loads.append(self._load(session, server, index, None, loads, deadline))
                connection.say(BucketDone(index=index, generation=message.generation))
        except BaseException:
            # The server may still be loading a complete bucket: until it has answered, that must not be forgotten.
            wait(loads, deadline.left())
            raise
        for index, load in enumerate(loads):
            _finished(load, index, deadline)
        _tell(connection, Finished())
        return checked

    def _copy(
        self,
        session: TransferSession,
        index: int,
        segment: handles.HostSegment,
        loads: list[Future[None]],
        deadline: Deadline,
    ) -> None:
        """Copy bucket `index` into our own memory and check it, once the server is done with what lay there."""
        manifest, bucket = session.manifest, session.manifest.buckets[index]
        self._memory.reserve(manifest.largest_bucket, len(manifest.buckets), deadline)
        before = index - self._memory.count
        for earlier, load in enumerate(loads):
            if earlier <= before or load.done():
                _finished(load, earlier, deadline)
        if segment.name not in self._maps:
            self._maps[segment.name] = segments.map_readonly(segment.name, segment.nbytes)
        source = self._maps[segment.name]
        if len(source) < bucket.nbytes:
            raise TransferFailed(f"bucket {index} has {bucket.nbytes} bytes, its memory only {len(source)}")
        target = self._memory.memory(index % self._memory.count)[: bucket.nbytes]
        np.copyto(target.numpy(), source[: bucket.nbytes])
        names = [tensor.name for tensor in manifest.tensors_of(index)]
        integrity.check_digests(target, manifest.offsets_of(index), session.known.of_bucket(bucket), names)

    def _load(  # noqa: PLR0917  a bucket's way
        self,
        session: TransferSession,
        server: EngineServer,
        index: int,
        memory: CudaMemory | None,
        loads: Sequence[Future[None]],
        deadline: Deadline,
    ) -> Future[None]:
        """Have the server load bucket `index` from `memory`, or from our own slot, on the loading thread.

        Not after one of the `loads` before it has failed: of a server that stands still nothing more is asked.
        """
        lent: HostMemory | CudaMemory = memory or self._memory.lend(index % self._memory.count, server.tp)
        manifest = session.manifest
        bucket = SharedBucket(index, manifest.buckets[index], manifest.tensors_of(index), lent)
        if self._loader is None:
            self._loader = ThreadPoolExecutor(1, "weightbus-load")
        left = min(deadline.check(f"time to load bucket {index}"), bucket_timeout_s(bucket.spec.nbytes))
        self._touched = True
        before = loads[-1] if loads else None

        def ask() -> None:
            if before is not None and before.exception() is not None:  # it has ended: there is one thread
                raise TransferFailed(f"bucket {index} was not asked for: the one before it was not loaded")
            server.load_shared(bucket, left)

        return self._loader.submit(ask)


def _announcement(connection: ReceiverConnection, index: int, deadline: Deadline) -> BucketReady:
    message = connection.hear(deadline, f"bucket {index}")
    if not isinstance(message, BucketReady) or message.index != index:
        raise PeerLost(f"the sender gave up before bucket {index}: {_reason(message)}")
    return message


def _finished(load: Future[None], index: int, deadline: Deadline) -> None:
    try:
        load.result(deadline.left())
    except FutureTimeout as error:
        if load.done():  # the server's own TimeoutError: on 3.11 it is the same class
            raise TransferFailed(f"the server did not load bucket {index}: {error!r}") from error
        raise DeadlineExceeded(f"the server to load bucket {index}", deadline.seconds) from error


def _reason(message: ToReceiver) -> str:
    return message.reason if isinstance(message, Refused | Failed) else repr(message)


def _tell(connection: ReceiverConnection, message: Failed | Finished) -> None:
    """Tell the sender how it ended. That it is gone changes nothing any more: the outcome here is decided."""
    try:
        connection.say(message)
    except DataplaneError:
        return
