"""Sessions between a sender and its engines, apart from how bytes travel: the parts that several transports share.

`SenderState` is the outcome for each engine as a sender keeps it; `SocketSender` is a sender to whose Unix socket the
sidecars of this host connect; `shake_hands` begins a session on the sidecar's side, and `BucketLoads` has its server
load buckets while the next ones arrive.
"""

from __future__ import annotations

import contextlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

import torch

from ..digest import tensor_digest
from ..errors import DataplaneError, DeadlineExceeded, PeerLost, StaleSession, TransferFailed
from ..memory import CudaMemory, HostMemory
from ..processes import (
    ConnectionPool,
    Deadline,
    FrameListener,
    Frames,
    PooledConnection,
    WireEnd,
    WireMessage,
    open_runtime_dir,
)
from .interface import JOIN_S, Address, EngineServer, Peer, SharedBucket, TransferSession

_LOOK_S: Final = 0.05
"""How soon a wait notices that a peer was withdrawn; everything else wakes it at once."""
_LOG: Final = logging.getLogger(__name__)


class SenderState:
    """The engines of a session that fail, as a sender keeps them."""

    def __init__(self) -> None:
        self.failed: dict[str, str] = {}
        """Reasons, by engine that does not get the version. Grows only, until the next `offer`."""
        self.spared: frozenset[str] = frozenset()
        """Those of `failed` that were well, and to which nothing was sent. Empty where no engine fails for another."""
        self._withdrawn: dict[str, str] = {}

    def withdraw(self, engine: str, reason: str) -> None:
        """Fail `engine` when this sender waits, or sends, the next time. From any thread."""
        self._withdrawn.setdefault(engine, reason)

    def reclaim(self, index: int, deadline_s: float) -> None:
        """Return at once: no engine reads a staging buffer, or not after `send` has returned."""

    def _begin_session(self) -> None:
        self.failed, self.spared, self._withdrawn = {}, frozenset(), {}

    def _require_some(self, engines: Collection[object]) -> None:
        """Raise `TransferFailed` when none of `engines` is left."""
        if not engines:
            reasons = "; ".join(f"{engine}: {reason}" for engine, reason in self.failed.items())
            raise TransferFailed(f"no engine is left to serve ({reasons})")


class SidecarConnection(PooledConnection):
    """A sidecar that is connected, or is expected to connect."""

    finished: bool = False
    """It has confirmed the last bucket."""


class _Hello(Protocol):
    @property
    def channel(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    @property
    def engine(self) -> str: ...


C = TypeVar("C", bound=SidecarConnection)


class SocketSender(SenderState, ABC, Generic[C]):
    """A sender to whose Unix socket, in a folder of this user alone, the sidecars of this host connect.

    A subclass says what they are told, and takes what they say. A silent sidecar keeps no other waiting.
    """

    def __init__(self, runtime_dir: Path, channel: str, connection: type[C]) -> None:
        super().__init__()
        self._runtime_dir = runtime_dir
        self._channel = channel
        self._connection = connection
        self._epoch = 0
        self._peers: dict[str, C] = {}
        """Engines of this session that have not failed."""
        self._listener: FrameListener | None = None
        self._pool: ConnectionPool[C] | None = None
        self._refusing = False
        """A connection of this session could not be accepted, which is logged once."""

    @abstractmethod
    def _introduced(self, packet: bytes) -> _Hello | None:
        """The first message of a connection; null for any other. Raises `PeerLost`."""

    @abstractmethod
    def _welcome(self) -> bytes:
        """The answer to a sidecar that takes part."""

    @abstractmethod
    def _refused(self, reason: str) -> bytes:
        """The answer to one that does not."""

    @abstractmethod
    def _gave_up(self, reason: str) -> bytes:
        """The last message to a sidecar that takes part no longer."""

    @abstractmethod
    def _answer(self, peer: C, packet: bytes) -> None:
        """Take a message of `peer`. Raises `DataplaneError`."""

    def ready(self, deadline_s: float, join_s: float = JOIN_S) -> None:
        """Wait until every peer has connected, or is in `failed`: peers that have not within `join_s`."""
        self._wait(min(deadline_s, join_s), lambda peer: peer.frames is None, "did not come")
        self._require_some(self._peers)

    def finish(self, deadline_s: float) -> None:
        """Wait until every peer holds the version, or is in `failed`."""
        self._wait(deadline_s, lambda peer: not peer.finished, "had not finished")

    def close(self) -> None:
        """Hang up; peers that are not finished are told."""
        pool, listener = self._pool, self._listener
        if pool is not None:
            pool.end()
            for peer in tuple(self._peers.values()):
                pool.drop(peer, b"" if peer.finished else self._gave_up("the sender closed this session"))
            pool.close()
        self._peers, self._pool, self._listener = {}, None, None
        if listener is not None:
            listener.close()

    def _listen(self, session: TransferSession, peers: Sequence[Peer], suffix: str, frames: type[Frames]) -> Address:
        """Begin a session: listen for `peers` on a socket of its epoch."""
        self._begin_session()
        self._epoch, self._refusing = session.epoch, False
        self._peers = {peer.engine: self._connection(peer.engine) for peer in peers}
        open_runtime_dir(self._runtime_dir)
        path = self._runtime_dir / f"{self._channel}-{session.epoch}-{os.getpid()}{suffix}.sock"
        self._listener = FrameListener(path, frames)
        self._pool = ConnectionPool(self._heard, self._lost)
        self._pool.watch(self._listener, self._admit)
        return Address(os.fspath(path))

    def _wait(self, deadline_s: float, pending: Callable[[C], bool], reproach: str) -> None:
        """Serve connections until no peer is `pending`; drop pending ones at the deadline, with the `reproach`."""
        deadline = Deadline(deadline_s)
        self._pump(0.0)
        while late := [peer for peer in self._peers.values() if pending(peer)]:
            left = deadline.left()
            if not left:
                for peer in late:
                    self._drop(peer, f"{reproach} within {deadline_s:.1f} s")
                return
            self._pump(min(left, _LOOK_S))

    def _pump(self, timeout_s: float) -> None:
        pool = self._on_offer()
        for engine, reason in tuple(self._withdrawn.items()):
            if (peer := self._peers.get(engine)) is not None:  # `close` in another thread empties it
                self._lost(peer, reason)
        pool.poll(timeout_s)

    def _on_offer(self) -> ConnectionPool[C]:
        """Raises `TransferFailed` when nothing is on offer, any more: it may have been closed by another thread."""
        if self._pool is None:
            raise TransferFailed("nothing is on offer: call offer first")
        return self._pool

    def _admit(self) -> None:
        """Accept a connection. A sidecar that never names its engine is failed at the deadline."""
        pool, listener = self._on_offer(), self._listener
        if listener is None:
            raise TransferFailed("the sender was closed")
        try:
            frames = listener.accept(Deadline(_LOOK_S), "a receiver")
        except DeadlineExceeded:  # it is gone again
            return
        except PeerLost as error:  # such as too many open files; or the sender is closed, which the next look finds
            if not (self._refusing or pool.ended):
                _LOG.warning("a connection to %s was not accepted, and is tried again: %s", listener.path, error)
                self._refusing = True
            return
        pool.add(self._connection(""), frames)

    def _heard(self, peer: C, packet: bytes) -> None:
        if peer.name:
            return self._answer(peer, packet)
        hello = self._introduced(packet)
        if reason := self._refusal(hello):
            return self._on_offer().drop(peer, self._refused(reason))
        assert hello is not None
        return self._greet(peer, self._peers[hello.engine])

    def _greet(self, guest: C, peer: C) -> None:
        """`guest` is the connection of `peer`."""
        pool = self._on_offer()
        pool.send(guest, self._welcome())
        pool.identify(guest, peer)

    def _refusal(self, hello: _Hello | None) -> str:
        if hello is None:
            return "a receiver begins with Hello"
        if (hello.channel, hello.epoch) != (self._channel, self._epoch):
            return f"this is channel {self._channel!r} at epoch {self._epoch}"
        peer = self._peers.get(hello.engine)
        if peer is None:
            return f"{hello.engine!r} does not take part: {self.failed.get(hello.engine, 'it was not invited')}"
        return f"{hello.engine!r} is connected already" if peer.frames is not None else ""

    def _lost(self, peer: C, reason: str) -> None:
        """Drop `peer`. What it said before still counts, and knows the reason better."""
        with contextlib.suppress(DataplaneError):  # it is gone
            while peer.name and peer.frames is not None and (packet := peer.frames.pull()) is not None:
                self._answer(peer, packet)
        self._drop(peer, reason)

    def _drop(self, peer: C, reason: str) -> None:
        """Fail `peer`, or hang up on a connection that has not named its engine, which is told nothing."""
        told = bool(peer.name) and not peer.finished
        if self._pool is not None:
            self._pool.drop(peer, self._gave_up(reason) if told else b"")
        if told:  # it has the version otherwise: going away afterwards is its right
            self.failed.setdefault(peer.name, reason)
            self._peers.pop(peer.name, None)


W = TypeVar("W", bound=WireMessage)
Out = TypeVar("Out", bound=WireMessage)
In = TypeVar("In", bound=WireMessage)


def shake_hands(  # noqa: PLR0917  both ends of a greeting
    end: WireEnd[Out, In],
    frames: Frames,
    hello: Out,
    epoch: int,
    welcome: type[W],
    deadline: Deadline,
) -> W:
    """Say `hello` to a sender, and hear its `welcome`. Raises `StaleSession` for another epoch, `PeerLost`."""
    end.say(frames, hello, deadline)
    reply = end.hear(frames, deadline, "the sender's welcome")
    theirs = getattr(reply, "epoch", epoch)  # of a welcome, and of a refusal
    if theirs != epoch:
        raise StaleSession(theirs, epoch)
    if not isinstance(reply, welcome):
        raise PeerLost(f"the sender refused this engine: {reason_of(reply)}")
    return reply


def reason_of(message: WireMessage) -> str:
    """Why the other side has given up; or what else it said, out of turn."""
    return str(getattr(message, "reason", message.kind))


def check_bucket(session: TransferSession, index: int, memory: torch.Tensor) -> None:
    """Raise `DigestMismatch` unless `memory` holds bucket `index` as the session's digest table has it."""
    manifest = session.manifest
    names = [tensor.name for tensor in manifest.tensors_of(index)]
    wanted = session.known.of_bucket(manifest.buckets[index])
    tensor_digest.check_digests(memory, manifest.offsets_of(index), wanted, names)


class BucketLoads:
    """What a server was asked to load in one session, on a thread that asks for one bucket at a time."""

    def __init__(self) -> None:
        self.asked: list[Future[None]] = []
        """By bucket."""
        self._thread: ThreadPoolExecutor | None = None

    def settle_slot(self, index: int, slots: int, settle: Callable[[int], None]) -> None:
        """`settle` the loads that read the slot of bucket `index`, and all that have ended: one may have failed."""
        for earlier, load in enumerate(self.asked):
            if earlier <= index - slots or load.done():
                settle(earlier)

    def ask(
        self, session: TransferSession, index: int, lent: HostMemory | CudaMemory, server: EngineServer, within_s: float
    ) -> None:
        """Have `server` load bucket `index` from `lent`.

        Not after the one before it has failed: of a server that stands still nothing more is asked.
        """
        bucket = SharedBucket(index, session.manifest.buckets[index], session.manifest.tensors_of(index), lent)
        before = self.asked[-1] if self.asked else None

        def load() -> None:
            if before is not None and (before.cancelled() or before.exception() is not None):  # there is one thread
                raise TransferFailed(f"bucket {index} was not asked for: the one before it was not loaded")
            server.load_shared(bucket, within_s)

        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "weightbus-load")
        self.asked.append(self._thread.submit(load))

    def shutdown(self) -> None:
        """Ask for nothing more. A load that is under way is not waited for."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None
