"""Straight from the trainer's memory into the engine's parameters: the trainer's half.

Nothing is sent: readers open what the ranks export and copy by themselves. This half says what there is, agrees to the
plans, and keeps the trainer waiting until every reader has finished. The receiver's half is receiver.py.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ...errors import DataplaneError, DeadlineExceeded, TransferFailed
from ...processes import ConnectionPool, Deadline, FrameListener, PooledConnection, open_runtime_dir
from ...reshard import LoadTrace, make_plan
from ..exported_weights import ExportedWeights
from ..interface import JOIN_S, Address, Peer, Slot, Tabled, TransferSession
from . import messages as wire

_REMEMBERED: Final = 4096
_LOOK_S: Final = 0.1
"""How soon a wait notices that a peer was withdrawn; everything else wakes it at once."""


class _Peer(PooledConnection):
    finished: bool = False
    asks: bool = False
    """For the digest table, which it has not got yet."""


class DirectSender:
    """Implements `Sender` and `Tabling`. At each offer `expose` says where the version that is published lies."""

    def __init__(self, runtime_dir: Path, channel: str, expose: Callable[[], ExportedWeights]) -> None:
        self._runtime_dir = runtime_dir
        self._channel = channel
        self._expose = expose
        self._exposed: ExportedWeights | None = None
        self._layout = ""
        self._given: bytes | None = None
        """The encoded layout; one buffer for all receivers."""
        self._epoch = 0
        self._failed: dict[str, str] = {}
        self._withdrawn: dict[str, str] = {}
        self._peers: dict[str, _Peer] = {}
        self._agreed: set[str] = set()
        self._listener: FrameListener | None = None
        self._pool: ConnectionPool[_Peer] | None = None
        self._lock = threading.Lock()
        """Of the three below: the table comes from any thread."""
        self._table: bytes | None = None
        """The encoded digest table; one buffer for all receivers."""
        self._follows: bool | None = None
        """The session was begun without its table; null before the first."""
        self._wake = -1
        """An eventfd of `_pool`, while something is on offer."""

    @property
    def failed(self) -> dict[str, str]:
        """Engines that did not take the version, with the reason."""
        return self._failed

    @property
    def spared(self) -> frozenset[str]:
        """Always empty: no engine fails for another."""
        return frozenset()

    def offer(self, session: TransferSession, peers: Sequence[Peer]) -> Address:
        """Export the memory, and listen for `peers` on a socket of this epoch."""
        self.close()
        exposed = self._expose()
        if exposed.pieces.tensors != session.manifest.tensors:
            raise TransferFailed("the exported pieces are of other tensors than the manifest: expose what is published")
        layout = exposed.layout
        if layout != self._layout:
            self._agreed.clear()
        self._exposed, self._layout = exposed, layout
        self._epoch, self._failed, self._withdrawn = session.epoch, {}, {}
        self._peers = {peer.engine: _Peer(peer.engine) for peer in peers}
        open_runtime_dir(self._runtime_dir)
        path = self._runtime_dir / f"{self._channel}-{session.epoch}-{os.getpid()}-d.sock"
        self._listener = FrameListener(path)
        self._pool = ConnectionPool(self._heard, self._drop)
        self._pool.watch(self._listener, self._admit)
        with self._lock:
            self._table, self._follows = None, session.table is None
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._pool.watch(self._wake, self._woken)
        return Address(os.fspath(path))

    def tabled(self, tabled: Tabled) -> None:
        """Implements `Tabling`: receivers that have asked for it are told, and those that ask later.

        To be called when `offer` has returned; after `close` it says nothing. Raises `TransferFailed` for a session
        that was begun with its table or has got it, and for one that is larger than any.
        """
        table = wire.Table(table=tabled.table.encode(), seal=tabled.seal)
        if len(table.table) > wire.MOST_TABLE_BYTES or len(table.seal) > wire.MOST_SEAL_BYTES:
            raise TransferFailed(
                f"a digest table of {len(table.table)} bytes, sealed by {len(table.seal)}, is too large"
            )
        said = wire.SENDER.encode(table)
        with self._lock:
            if not self._follows:
                raise TransferFailed(
                    "no digest table is to follow: nothing was offered, or it was offered with its table"
                )
            if self._table is not None:
                raise TransferFailed("the digest table was given before, and there is one for each session")
            self._table = said
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def ready(self, deadline_s: float, join_s: float = JOIN_S) -> None:
        """Wait until every peer has connected, or is in `failed`."""
        self._wait(min(deadline_s, join_s), lambda peer: peer.frames is None, "did not come")
        self._require_some()

    def send(self, index: int, slot: Slot, deadline_s: float) -> None:
        """Sends nothing; answers receivers that have spoken meanwhile."""
        del index, slot, deadline_s
        self._pump(0.0)
        self._require_some()

    def reclaim(self, index: int, deadline_s: float) -> None:
        """Returns at once: no receiver reads buckets."""
        del index, deadline_s
        self._pump(0.0)

    def finish(self, deadline_s: float) -> None:
        """Wait until every peer holds the version, or is in `failed`."""
        self._wait(deadline_s, lambda peer: not peer.finished, "had not finished")

    def withdraw(self, engine: str, reason: str) -> None:
        """Drop `engine` when this sender waits the next time."""
        self._withdrawn.setdefault(engine, reason)

    def close(self) -> None:
        """Hang up. Exported memory stays exported: it belongs to the exporters."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        self._peers, self._given = {}, None
        with self._lock:
            wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    # -- peers --------------------------------------------------------------------------------------------------------

    def _wait(self, deadline_s: float, pending: Callable[[_Peer], bool], reproach: str) -> None:
        deadline = Deadline(deadline_s)
        while late := [peer for peer in self._peers.values() if pending(peer)]:
            left = deadline.left()
            if not left:
                for peer in late:
                    self._drop(peer, f"{reproach} within {deadline_s:.1f} s")
                return
            self._pump(min(left, _LOOK_S))
        self._on_offer()

    def _pump(self, timeout_s: float) -> None:
        pool = self._on_offer()
        for peer in tuple(self._peers.values()):
            if peer.name in self._withdrawn:
                self._drop(peer, self._withdrawn[peer.name])
        pool.poll(timeout_s)

    def _on_offer(self) -> ConnectionPool[_Peer]:
        """Raises `TransferFailed` when nothing is on offer, any more: it may have been closed by another thread."""
        if self._pool is None:
            raise TransferFailed("nothing is on offer: call offer first")
        return self._pool

    def _admit(self) -> None:
        """Accept a connection. A receiver that never names its engine is failed at the deadline."""
        pool, listener = self._on_offer(), self._listener
        if listener is None:
            raise TransferFailed("the sender was closed")
        try:
            frames = listener.accept(Deadline(_LOOK_S), "a receiver")
        except DeadlineExceeded:  # it is gone again
            return
        pool.add(_Peer(""), frames)

    def _greet(self, guest: _Peer, hello: wire.ToSender) -> None:
        """Its first words. Raises `PeerLost`."""
        pool, reason = self._on_offer(), self._refusal(hello)
        if reason or not isinstance(hello, wire.Hello):
            return pool.drop(guest, wire.SENDER.encode(wire.Refused(epoch=self._epoch, reason=reason)))
        assert self._exposed is not None
        welcome = wire.Welcome(epoch=self._epoch, layout=self._layout, exporters=self._exposed.exporters)
        pool.send(guest, wire.SENDER.encode(welcome))
        return pool.identify(guest, self._peers[hello.engine])

    def _woken(self) -> None:
        """The digest table has come."""
        with self._lock, contextlib.suppress(BlockingIOError, OSError):  # closed meanwhile
            os.eventfd_read(self._wake)
        for peer in tuple(self._peers.values()):
            try:
                self._give_table(peer)
            except DataplaneError as error:
                self._drop(peer, str(error))

    def _give_table(self, peer: _Peer) -> None:
        """To one that asks for it, once it is there. Raises `PeerLost`."""
        with self._lock:
            table = self._table
        if table is not None and peer.asks and peer.frames is not None:
            peer.asks = False
            self._on_offer().send(peer, table)

    def _refusal(self, hello: wire.ToSender) -> str:
        if not isinstance(hello, wire.Hello):
            return f"a receiver begins with Hello, not with {hello.kind}"
        if (hello.channel, hello.epoch) != (self._channel, self._epoch):
            return f"this is channel {self._channel!r} at epoch {self._epoch}"
        peer = self._peers.get(hello.engine)
        if peer is None:
            return f"{hello.engine!r} does not take part: {self._failed.get(hello.engine, 'it was not invited')}"
        return f"{hello.engine!r} is connected already" if peer.frames is not None else ""

    def _heard(self, peer: _Peer, packet: bytes) -> None:
        """Raises `DataplaneError`."""
        message = wire.SENDER.decode(packet)
        if peer.name:
            self._answer(peer, message)
        else:
            self._greet(peer, message)

    def _answer(self, peer: _Peer, message: wire.ToSender) -> None:
        """Raises `DataplaneError`."""
        match message:
            case wire.GiveLayout():
                self._on_offer().send(peer, self._layout_to_give())
            case wire.Propose() as proposed:
                for each in proposed.plans:
                    self._agree(each)
                self._on_offer().send(peer, wire.SENDER.encode(wire.Agreed()))
            case wire.GiveTable() if self._follows:
                peer.asks = True
                self._give_table(peer)
            case wire.Finished():
                peer.finished = True
            case wire.Failed(reason=reason):
                self._drop(peer, reason)
            case _:
                self._drop(peer, f"it said {message.kind} out of turn")

    def _layout_to_give(self) -> bytes:
        if self._given is None:
            assert self._exposed is not None
            self._given = wire.SENDER.encode(self._exposed.given)
        return self._given

    def _agree(self, proposal: wire.Proposal) -> None:
        """Make the same plan. Raises `TransferFailed` when it is another one."""
        if proposal.plan in self._agreed:
            return
        assert self._exposed is not None
        recording = LoadTrace.decode(proposal.recording, self._exposed.pieces.tensors)
        plan = make_plan(self._exposed.pieces, self._exposed.exports, recording, proposal.reader)
        if plan.digest() != proposal.plan:
            raise TransferFailed(
                f"worker {proposal.reader.rank} planned {proposal.plan[:12]}, the trainer {plan.digest()[:12]} from "
                "the same layouts: both sides must run one version of weightbus"
            )
        if len(self._agreed) >= _REMEMBERED:  # of a fleet that changes for weeks; its present engines do not ask again
            self._agreed.clear()
        self._agreed.add(proposal.plan)

    def _drop(self, peer: _Peer, reason: str) -> None:
        """Fail `peer`, or hang up on a connection that has not named its engine, which is told nothing."""
        told = peer.name and not peer.finished
        if self._pool is not None:
            self._pool.drop(peer, wire.SENDER.encode(wire.Failed(reason=reason)) if told else b"")
        if told:  # it has the version otherwise: going away afterwards is its right
            self._failed.setdefault(peer.name, reason)
            self._peers.pop(peer.name, None)

    def _require_some(self) -> None:
        if not self._peers:
            reasons = "; ".join(f"{engine}: {reason}" for engine, reason in self._failed.items())
            raise TransferFailed(f"no engine is left to serve ({reasons})")
