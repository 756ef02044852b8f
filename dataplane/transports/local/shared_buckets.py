"""Both halves of the local transport: whole buckets lie in memory of the trainer's, and only its names travel.

Each message is one packet of a Unix SEQPACKET socket: msgpack, tagged by ``type``. Both ends insist on one user id.

A dead sidecar is noticed by its closed socket (or its pidfd, should a child of it hold the socket open), a stopped one
by the deadline of the call that waits for it; either is named in `failed`, and the others go on. A peer that was
dropped at a deadline may still be reading a slot that is then written again. It cannot do harm: it either finds the
digests wrong or, on a GPU, its session closed before it could confirm, and its engine is quarantined.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout, wait
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ...errors import DataplaneError, DeadlineExceeded, PeerLost, TransferFailed
from ...memory import CudaMemory, HostMemory, HostSegment, TorchSharedBuffers, decode_handle, map_readonly
from ...processes import (
    Deadline,
    PacketFrames,
    WireEnd,
    WireMessage,
    bucket_timeout_s,
    open_runtime_dir,
    why_not_private,
)
from ..interface import Address, EngineServer, Peer, Receipt, StagingBuffer, TransferSession
from ..sessions import BucketLoads, SidecarConnection, SocketSender, check_bucket, reason_of, shake_hands

_TELL_S: Final = 1.0
_Text = Annotated[str, msgspec.Meta(max_length=2048)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Hello(WireMessage, frozen=True, tag="Hello"):
    """Receiver, first: its engine, and the epoch that it was told to take."""

    channel: _Text
    epoch: _Count
    engine: _Text


class Welcome(WireMessage, frozen=True, tag="Welcome"):
    """Sender: the receiver takes part."""

    epoch: _Count


class Refused(WireMessage, frozen=True, tag="Refused"):
    """Sender: the receiver does not take part. `epoch` is the sender's."""

    epoch: _Count
    reason: _Text


class BucketReady(WireMessage, frozen=True, tag="BucketReady"):
    """Sender: bucket `index` lies in `handle` (memory/shared_memory.py) until the receiver is done with it."""

    index: _Count
    generation: _Count
    """Counts the buckets this sender ever announced; `BucketDone` repeats it."""
    handle: bytes


class BucketDone(WireMessage, frozen=True, tag="BucketDone"):
    """Receiver: it will not read the memory of bucket `index` any more."""

    index: _Count
    generation: _Count


class BucketsLoaded(WireMessage, frozen=True, tag="Finished"):
    """Receiver: every bucket was loaded."""


class Failed(WireMessage, frozen=True, tag="Failed"):
    """Either side: it gives up."""

    reason: _Text


ToReceiver = Welcome | Refused | BucketReady | Failed
ToSender = Hello | BucketDone | BucketsLoaded | Failed

RECEIVER: Final = WireEnd[ToSender, ToReceiver](ToReceiver)
SENDER: Final = WireEnd[ToReceiver, ToSender](ToSender)


class _Engine(SidecarConnection):
    """One sidecar as the sender knows it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.pidfd = -1
        self.reading: dict[int, int] = {}
        """Buckets announced and not confirmed: index -> generation."""


class LocalSender(SocketSender[_Engine]):
    """Serves every engine of this host."""

    def __init__(self, runtime_dir: Path, channel: str) -> None:
        super().__init__(runtime_dir, channel, _Engine)
        self._generation = 0

    def offer(self, session: TransferSession, peers: Sequence[Peer]) -> Address:
        """Listen for `peers` on a socket of this epoch."""
        self.close()
        return self._listen(session, peers, "", PacketFrames)

    def send(self, index: int, slot: StagingBuffer, deadline_s: float) -> None:
        """Announce bucket `index`; does not wait for receivers to take it."""
        del deadline_s  # announcing never blocks
        self._pump(0.0)
        if slot.memory.device.type == "cuda":
            # What packed the bucket runs on a stream that the reader's process knows nothing of.
            torch.cuda.current_stream(slot.memory.device).synchronize()
        self._generation += 1
        ready = SENDER.encode(BucketReady(index=index, generation=self._generation, handle=slot.exported))
        for peer in tuple(self._peers.values()):
            if peer.frames is not None:
                peer.reading[index] = self._generation
                try:
                    self._on_offer().send(peer, ready)
                except PeerLost as error:
                    self._lost(peer, str(error))
        self._require_some(self._peers)

    def reclaim(self, index: int, deadline_s: float) -> None:
        """Wait until no peer reads bucket `index` any more; a peer that still does at the deadline is dropped."""
        self._wait(deadline_s, lambda peer: index in peer.reading, f"was still reading bucket {index}")

    def _introduced(self, packet: bytes) -> Hello | None:
        message = SENDER.decode(packet)
        return message if isinstance(message, Hello) else None

    def _welcome(self) -> bytes:
        return SENDER.encode(Welcome(epoch=self._epoch))

    def _refused(self, reason: str) -> bytes:
        return SENDER.encode(Refused(epoch=self._epoch, reason=reason))

    def _gave_up(self, reason: str) -> bytes:
        return SENDER.encode(Failed(reason=reason[:2048]))

    def _greet(self, guest: _Engine, peer: _Engine) -> None:
        super()._greet(guest, peer)
        if peer.frames is None or peer.frames.pid == os.getpid():
            return
        try:  # a child that inherited the socket would hide its parent's death; the pidfd does not lie
            peer.pidfd = os.pidfd_open(peer.frames.pid)
        except OSError:  # another PID namespace, or gone this instant: the socket will tell
            return
        self._on_offer().watch(peer.pidfd, lambda: self._lost(peer, "its process died"))

    def _answer(self, peer: _Engine, packet: bytes) -> None:
        match SENDER.decode(packet):
            case BucketDone(index=index, generation=generation) if peer.reading.get(index) == generation:
                del peer.reading[index]
            case BucketsLoaded() if not peer.reading:
                peer.finished = True
            case Failed(reason=reason):
                self._drop(peer, reason)
            case message:
                self._drop(peer, f"it said {message!r} out of turn")

    def _drop(self, peer: _Engine, reason: str) -> None:
        self._forget_process(peer)
        if peer.finished:  # it reads no bucket any more, also none that was announced after it had finished
            peer.reading.clear()
        super()._drop(peer, reason)

    def close(self) -> None:
        """Close every connection; peers that are not finished are told."""
        for peer in tuple(self._peers.values()):
            self._forget_process(peer)
        super().close()

    def _forget_process(self, peer: _Engine) -> None:
        pidfd, peer.pidfd = peer.pidfd, -1
        if pidfd >= 0:
            if self._pool is not None:
                self._pool.unwatch(pidfd)
            os.close(pidfd)


class LocalReceiver:
    """Serves one engine. Its staging memory outlives rounds; a session's mappings of the trainer's memory do not.

    Host memory is copied into memory of its own, the copy is compared with the digest table, and only then does the
    server hear of it, while the next bucket is being copied. GPU memory is passed through: the server's workers open
    the trainer's allocation themselves, and nothing here has looked at it (`Receipt.checked` says so).
    """

    def __init__(self, runtime_dir: Path) -> None:
        self._runtime_dir = runtime_dir
        self._memory = TorchSharedBuffers(runtime_dir)
        self._maps: dict[str, npt.NDArray[np.uint8]] = {}
        self._connection: PacketFrames | None = None
        self._loads = BucketLoads()
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
        """Take every bucket and load it into `server`."""
        del rank_offset  # there is no group here
        self.close()
        self.touched = False
        deadline = Deadline(deadline_s)
        open_runtime_dir(self._runtime_dir)
        connection = self._connection = connect(address.address, deadline)
        try:
            hello = Hello(channel=session.channel, epoch=session.epoch, engine=engine)
            shake_hands(RECEIVER, connection, hello, session.epoch, Welcome, deadline)
            checked = self._take_all(connection, session, server, deadline)
            _tell(connection, BucketsLoaded())
        except Exception as error:
            _tell(connection, Failed(reason=f"{type(error).__name__}: {error}"[:2048]))
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
        self._loads.shutdown()
        self._memory.close()

    def _take_all(
        self, connection: PacketFrames, session: TransferSession, server: EngineServer, deadline: Deadline
    ) -> bool:
        """Whether every byte was compared with the digest table."""
        checked, loads, tp = True, self._loads, server.tp
        loads.asked = []
        try:
            for index, bucket in enumerate(session.manifest.buckets):
                message = _announced(connection, index, deadline)
                theirs = decode_handle(message.handle)
                passed_on = isinstance(theirs, CudaMemory)
                lent = theirs if isinstance(theirs, CudaMemory) else self._copy(session, index, theirs, tp, deadline)
                within_s = min(deadline.check(f"time to load bucket {index}"), bucket_timeout_s(bucket.nbytes))
                self.touched = True
                loads.ask(session, index, lent, server, within_s)
                if passed_on:
                    checked = False
                    self._loaded(index, deadline)
                RECEIVER.say(connection, BucketDone(index=index, generation=message.generation), deadline)
        except BaseException:
            # The server may still be loading a complete bucket: until it has answered, that must not be forgotten.
            wait(loads.asked, deadline.left())
            raise
        for index in range(len(loads.asked)):
            self._loaded(index, deadline)
        return checked

    def _copy(
        self,
        session: TransferSession,
        index: int,
        segment: HostSegment,
        tp: int,
        deadline: Deadline,
    ) -> HostMemory:
        """Copy bucket `index` into our own memory and check it, once the server is done with what lay there."""
        manifest, bucket = session.manifest, session.manifest.buckets[index]
        self._memory.reserve(manifest.largest_bucket, len(manifest.buckets), deadline)
        slot = index % self._memory.count
        self._loads.settle_slot(index, self._memory.count, lambda earlier: self._loaded(earlier, deadline))
        if segment.name not in self._maps:
            self._maps[segment.name] = map_readonly(segment.name, segment.nbytes)
        source = self._maps[segment.name]
        if len(source) < bucket.nbytes:
            raise TransferFailed(f"bucket {index} has {bucket.nbytes} bytes, its memory only {len(source)}")
        target = self._memory.memory(slot)[: bucket.nbytes]
        np.copyto(target.numpy(), source[: bucket.nbytes])
        check_bucket(session, index, target)
        return self._memory.lend(slot, tp)

    def _loaded(self, index: int, deadline: Deadline) -> None:
        """Wait until the server has loaded bucket `index`. Raises what that failed with, `DeadlineExceeded`."""
        load = self._loads.asked[index]
        try:
            load.result(deadline.left())
        except FutureTimeout as error:
            if load.done():  # the server's own TimeoutError: on 3.11 it is the same class
                raise TransferFailed(f"the server did not load bucket {index}: {error!r}") from error
            raise DeadlineExceeded(f"the server to load bucket {index}", deadline.seconds) from error


def _announced(connection: PacketFrames, index: int, deadline: Deadline) -> BucketReady:
    message = RECEIVER.hear(connection, deadline, f"bucket {index}")
    if not isinstance(message, BucketReady) or message.index != index:
        raise PeerLost(f"the sender gave up before bucket {index}: {reason_of(message)}")
    return message


def _tell(connection: PacketFrames, message: Failed | BucketsLoaded) -> None:
    """Tell the sender how it ended. That it is gone changes nothing any more: the outcome here is decided."""
    with contextlib.suppress(DataplaneError):
        RECEIVER.say(connection, message, Deadline(_TELL_S))


def connect(path: str, deadline: Deadline) -> PacketFrames:
    """Connect to a sender. Raises `PeerLost` when no process of this user listens there.

    The path came over the network: only a socket of this user, in a folder that no other can enter, is spoken to.
    """
    where = Path(path)
    if reason := why_not_private(where.parent, stat.S_IFDIR) or why_not_private(where, stat.S_IFSOCK):
        raise PeerLost(f"the sender's socket is not one to be trusted: {reason}")
    return PacketFrames.connect(path, deadline)
