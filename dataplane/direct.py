"""Straight from the trainer's memory into the engine's parameters: the trainer's half.

Nothing is sent: readers open what the ranks export and copy by themselves. This half says what there is, agrees to the
plans, and keeps the trainer waiting until every reader has finished. The receiver's half is direct_receiver.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final

from . import direct_wire as wire
from .deadline import Deadline
from .errors import DataplaneError, DeadlineExceeded, PeerLost, TransferFailed
from .exports import ExportMap
from .frames import FrameListener, Frames
from .local import open_runtime_dir
from .pieces import Pieces
from .plan import make_plan
from .recording import Recording
from .transport import JOIN_S, Address, Peer, Session, Slot, Tabled

_LOOK_S: Final = 0.1
"""How soon a wait notices that a peer was withdrawn; everything else wakes it at once."""
_PACKET_S: Final = 10.0
"""For a peer that stands still in the middle of what it says or is told, and for the first words of one that comes."""


@dataclass(frozen=True, eq=False)
class Exposed:
    """Everything that the ranks of a trainer let others read."""

    pieces: Pieces
    """Of all ranks, in the tensors of the manifest that is published."""
    exports: tuple[ExportMap, ...]
    exporters: tuple[wire.Exporting, ...]

    @cached_property
    def given(self) -> wire.Layout:
        """What a receiver keeps from round to round, in whatever generation it lies."""
        return wire.Layout(pieces=self.pieces.encode(), exports=tuple([export.encode() for export in self.exports]))

    @cached_property
    def layout(self) -> str:
        """Names that."""
        parts = (self.given.pieces, *self.given.exports)
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()

    def again(self, exporters: tuple[wire.Exporting, ...]) -> Exposed:
        """The same layout, in another generation or round."""
        found = replace(self, exporters=exporters)
        vars(found).update(given=self.given, layout=self.layout)  # which take as long as the layout is large
        return found


class _Peer:
    def __init__(self, engine: str) -> None:
        self.engine = engine
        """Empty for somebody who has not said yet who it is."""
        self.frames: Frames | None = None
        self.finished = False
        self.asks = False
        """For the digest table, which it has not got yet."""
        self.unread: deque[memoryview] = deque()
        """What it is told and has no room for yet."""
        self.moved_at = 0.0
        """When it last had room."""
        self.heard_at = 0.0
        """When anything of what it says last came; or it did."""

    def push(self) -> None:
        """Tell it what it has room for now. Raises `PeerLost`."""
        while self.frames is not None and self.unread:
            left = self.frames.push(self.unread[0])
            if len(left) < len(self.unread[0]):
                self.moved_at = time.monotonic()
            if left:
                self.unread[0] = left
                return
            self.unread.popleft()


class DirectSender:
    """Implements `Sender` and `Tabling`. At each offer `expose` says where the version that is published lies."""

    def __init__(self, runtime_dir: Path, channel: str, expose: Callable[[], Exposed]) -> None:
        self._runtime_dir = runtime_dir
        self._channel = channel
        self._expose = expose
        self._exposed: Exposed | None = None
        self._layout = ""
        self._epoch = 0
        self._failed: dict[str, str] = {}
        self._withdrawn: dict[str, str] = {}
        self._peers: dict[str, _Peer] = {}
        self._guests: list[_Peer] = []
        """Who has come and has said nothing yet."""
        self._agreed: set[str] = set()
        self._listener: FrameListener | None = None
        self._selector: selectors.BaseSelector | None = None
        self._lock = threading.Lock()
        """Of the three below: the table comes from any thread."""
        self._table: memoryview | None = None
        """As it is said; memory that all who are told share."""
        self._follows: bool | None = None
        """The session was begun without its table; null before the first."""
        self._wake = -1
        """An eventfd of `_selector`, while something is on offer."""

    @property
    def failed(self) -> dict[str, str]:
        """Engines that did not take the version, with the reason."""
        return self._failed

    @property
    def spared(self) -> frozenset[str]:
        """Nobody: no engine fails for another."""
        return frozenset()

    def offer(self, session: Session, peers: Sequence[Peer]) -> Address:
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
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        with self._lock:
            self._table, self._follows = None, session.table is None
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._selector.register(self._wake, selectors.EVENT_READ, None)
        return Address(os.fspath(path))

    def tabled(self, tabled: Tabled) -> None:
        """Implements `Tabling`: whoever has asked for it is told, and whoever will.

        To be called when `offer` has returned; after `close` it says nothing. Raises `TransferFailed` for a session
        that was begun with its table or has got it, and for one that is larger than any.
        """
        table = wire.Table(table=tabled.table.encode(), seal=tabled.seal)
        if len(table.table) > wire.MOST_TABLE_BYTES or len(table.seal) > wire.MOST_SEAL_BYTES:
            raise TransferFailed(
                f"a digest table of {len(table.table)} bytes, sealed by {len(table.seal)}, is too large"
            )
        framed = wire.as_framed(table)
        with self._lock:
            if not self._follows:
                raise TransferFailed(
                    "no digest table is to follow: nothing was offered, or it was offered with its table"
                )
            if self._table is not None:
                raise TransferFailed("the digest table was given before, and there is one for each session")
            self._table = framed
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def ready(self, deadline_s: float, join_s: float = JOIN_S) -> None:
        """Wait until every peer has connected, or is in `failed`."""
        self._wait(min(deadline_s, join_s), lambda peer: peer.frames is None, "did not come")
        self._require_some()

    def send(self, index: int, slot: Slot, deadline_s: float) -> None:
        """Nothing is sent; whoever speaks meanwhile is answered."""
        del index, slot, deadline_s
        self._pump(0.0)
        self._require_some()

    def reclaim(self, index: int, deadline_s: float) -> None:
        """Nobody reads buckets."""
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
        selector, self._selector = self._selector, None  # first: whoever waits in it finds out by this
        if selector is not None:
            selector.close()
        guests, self._guests = self._guests, []
        for peer in (*self._peers.values(), *guests):
            if peer.frames is not None:
                peer.frames.close()
        self._peers = {}
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

    def _pump(self, timeout_s: float) -> None:
        selector = self._listening()
        try:
            self._drop_lost()
            for key, events in selector.select(timeout_s):
                if key.data is not None:
                    if events & selectors.EVENT_WRITE:
                        self._push(key.data)
                    if events & selectors.EVENT_READ:
                        self._hear(key.data)
                elif key.fileobj is self._listener:
                    self._admit()
                else:
                    self._woken()
        except (ValueError, KeyError, RuntimeError, OSError) as error:
            if self._selector is selector:
                raise
            raise TransferFailed("the sender was closed") from error

    def _listening(self) -> selectors.BaseSelector:
        """Raises `TransferFailed` when nothing is on offer, any more: it may have been closed by another thread."""
        if self._selector is None:
            raise TransferFailed("nothing is on offer: call offer first")
        return self._selector

    def _drop_lost(self) -> None:
        """Who was withdrawn, who does not read, and who does not go on with what it says."""
        now = time.monotonic()
        for peer in tuple(self._peers.values()):
            if peer.engine in self._withdrawn:
                self._drop(peer, self._withdrawn[peer.engine])
            elif peer.unread and now - peer.moved_at > _PACKET_S:
                self._drop(peer, f"it has read nothing for {_PACKET_S:.1f} s of what it was told")
            elif peer.frames is not None and peer.frames.halfway and now - peer.heard_at > _PACKET_S:
                self._drop(peer, f"it has stood still for {_PACKET_S:.1f} s in the middle of what it said")
        for guest in tuple(self._guests):
            if now - guest.moved_at > _PACKET_S:
                self._drop(guest, "")

    def _admit(self) -> None:
        """Somebody has come. A peer that never says who it is is named at the deadline."""
        selector, listener = self._listening(), self._listener
        if listener is None:
            raise TransferFailed("the sender was closed")
        guest = _Peer("")
        try:
            guest.frames = listener.accept(Deadline(_LOOK_S), "a receiver")
        except DeadlineExceeded:  # it is gone again
            return
        guest.moved_at = time.monotonic()
        self._guests.append(guest)
        try:
            selector.register(guest.frames, selectors.EVENT_READ, guest)
        except (ValueError, KeyError, OSError):
            guest.frames.close()
            raise

    def _greet(self, guest: _Peer, hello: wire.ToSender) -> None:
        """Its first words. Raises `PeerLost`."""
        reason = self._refusal(hello)
        if reason or not isinstance(hello, wire.Hello):
            guest.unread.append(wire.as_framed(wire.Refused(epoch=self._epoch, reason=reason)))
            guest.push()
            return self._drop(guest, "")
        assert self._exposed is not None
        welcome = wire.Welcome(epoch=self._epoch, layout=self._layout, exporters=self._exposed.exporters)
        guest.unread.append(wire.as_framed(welcome))
        guest.push()
        peer = self._peers[hello.engine]
        peer.frames, peer.unread, peer.moved_at = guest.frames, guest.unread, time.monotonic()
        self._guests = [each for each in self._guests if each is not guest]
        assert peer.frames is not None
        self._listening().modify(peer.frames, selectors.EVENT_READ, peer)
        guest.frames = None
        return self._watch(peer)

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
            self._tell(peer, table)

    def _tell(self, peer: _Peer, framed: memoryview) -> None:
        """As it reads: one that does not keeps nobody else waiting. Raises `PeerLost`."""
        if not peer.unread:
            peer.moved_at = time.monotonic()
        peer.unread.append(framed)
        peer.push()
        self._watch(peer)

    def _push(self, peer: _Peer) -> None:
        """It has room again."""
        try:
            peer.push()
            self._watch(peer)
        except DataplaneError as error:
            self._drop(peer, str(error))

    def _watch(self, peer: _Peer) -> None:
        """For what it says, and for room where it is to be told something."""
        selector = self._listening()
        if peer.frames is not None:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unread else 0)
            if selector.get_key(peer.frames).events != wanted:
                selector.modify(peer.frames, wanted, peer)

    def _refusal(self, hello: wire.ToSender) -> str:
        if not isinstance(hello, wire.Hello):
            return f"a receiver begins with Hello, not with {type(hello).__name__}"
        if (hello.channel, hello.epoch) != (self._channel, self._epoch):
            return f"this is channel {self._channel!r} at epoch {self._epoch}"
        peer = self._peers.get(hello.engine)
        if peer is None:
            return f"{hello.engine!r} does not take part: {self._failed.get(hello.engine, 'it was not invited')}"
        return f"{hello.engine!r} is connected already" if peer.frames is not None else ""

    def _hear(self, peer: _Peer) -> None:
        if peer.frames is None:  # dropped by an earlier event of the same batch
            return
        peer.heard_at = time.monotonic()
        try:
            message = wire.pull_receiver(peer.frames)
            if message is not None and not peer.engine:
                self._greet(peer, message)
            elif message is not None:
                self._answer(peer, message)
        except DataplaneError as error:
            self._drop(peer, str(error))

    def _answer(self, peer: _Peer, message: wire.ToSender) -> None:
        """Raises `DataplaneError`."""
        match message:
            case wire.GiveLayout():
                assert self._exposed is not None
                self._tell(peer, wire.as_framed(self._exposed.given))
            case wire.Propose() as proposed:
                for each in proposed.plans:
                    self._agree(each)
                self._tell(peer, wire.as_framed(wire.Agreed()))
            case wire.GiveTable() if self._follows:
                peer.asks = True
                self._give_table(peer)
            case wire.Finished():
                peer.finished = True
            case wire.Failed(reason=reason):
                self._drop(peer, reason)
            case _:
                self._drop(peer, f"it said {type(message).__name__} out of turn")

    def _agree(self, proposal: wire.Proposal) -> None:
        """Make the same plan. Raises `TransferFailed` when it is another one."""
        if proposal.plan in self._agreed:
            return
        assert self._exposed is not None
        recording = Recording.decode(proposal.recording, self._exposed.pieces.tensors)
        plan = make_plan(self._exposed.pieces, self._exposed.exports, recording, proposal.reader)
        if plan.digest() != proposal.plan:
            raise TransferFailed(
                f"worker {proposal.reader.rank} planned {proposal.plan[:12]}, the trainer {plan.digest()[:12]} from "
                "the same layouts: both sides must run one version of weightbus"
            )
        self._agreed.add(proposal.plan)

    def _drop(self, peer: _Peer, reason: str) -> None:
        """Of somebody who has not said who it is, without a word."""
        frames, peer.frames = peer.frames, None
        if frames is not None:
            if peer.engine and not peer.finished and not peer.unread:
                self._say_goodbye(frames, reason)
            peer.unread.clear()
            try:
                if self._selector is not None:
                    self._selector.unregister(frames)
            finally:
                frames.close()
        if not peer.engine:
            self._guests = [guest for guest in self._guests if guest is not peer]
        elif not peer.finished:  # it has the version: going away afterwards is its right
            self._failed.setdefault(peer.engine, reason)
            self._peers.pop(peer.engine, None)

    def _say_goodbye(self, frames: Frames, reason: str) -> None:
        try:
            wire.say(frames, wire.Failed(reason=reason), Deadline(1.0))
        except (PeerLost, DataplaneError):
            return  # it is gone, nothing to tell

    def _require_some(self) -> None:
        if not self._peers:
            reasons = "; ".join(f"{engine}: {reason}" for engine, reason in self._failed.items())
            raise TransferFailed(f"no engine is left to serve ({reasons})")
