"""The trainer's half of the direct transport: it says where memory lies, agrees to plans, and waits for readers.

Nothing is sent: workers open what the ranks export and copy by themselves (receiver.py is their sidecar's half). The
trainer is kept waiting until every reader has finished.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from ...errors import DataplaneError, TransferFailed
from ...processes import Frames
from ...reshard import LoadTrace, make_plan
from .. import plan_exchange as wire
from ..interface import Address, ExportedWeights, Peer, StagingBuffer, Tabled, TransferSession
from ..sessions import SidecarConnection, SocketSender

_REMEMBERED: Final = 4096


class _Reader(SidecarConnection):
    asks: bool = False
    """For the digest table, which it has not got yet."""


class DirectSender(SocketSender[_Reader]):
    """Implements `Sender` and `Tabling`. At each offer `expose` says where the version that is published lies."""

    def __init__(self, runtime_dir: Path, channel: str, expose: Callable[[], ExportedWeights]) -> None:
        super().__init__(runtime_dir, channel, _Reader)
        self._expose = expose
        self._exposed: ExportedWeights | None = None
        self._layout = ""
        self._given: bytes | None = None
        """The encoded layout; one buffer for all receivers."""
        self._agreed: set[str] = set()
        self._lock = threading.Lock()
        """Of the three below: the table comes from any thread."""
        self._table: bytes | None = None
        """The encoded digest table; one buffer for all receivers."""
        self._follows: bool | None = None
        """The session was begun without its table; null before the first."""
        self._wake = -1
        """An eventfd of the connection pool, while something is on offer."""

    def offer(self, session: TransferSession, peers: Sequence[Peer]) -> Address:
        """Export the memory, and listen for `peers` on a socket of this epoch."""
        self.close()
        exposed = self._expose()
        if exposed.shards.tensors != session.manifest.tensors:
            raise TransferFailed("the exported shards are of other tensors than the manifest: expose what is published")
        if exposed.layout != self._layout:
            self._agreed.clear()
        self._exposed, self._layout = exposed, exposed.layout
        address = self._listen(session, peers, "-d", Frames)
        with self._lock:
            self._table, self._follows = None, session.table is None
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._on_offer().watch(self._wake, self._woken)
        return address

    def tabled(self, tabled: Tabled) -> None:
        """Implements `Tabling`: receivers that have asked for it are told, and others when they ask.

        To be called when `offer` has returned; after `close` it says nothing. Raises `TransferFailed` for a session
        that was begun with its table or has got it, and for one that is larger than any.
        """
        table = wire.ExpectedTable(table=tabled.table.encode(), seal=tabled.seal)
        if len(table.table) > wire.MOST_TABLE_BYTES or len(table.seal) > wire.MOST_SEAL_BYTES:
            raise TransferFailed(
                f"a digest table of {len(table.table)} bytes with a seal of {len(table.seal)} bytes is too large"
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

    def send(self, index: int, slot: StagingBuffer, deadline_s: float) -> None:
        """Sends nothing; answers receivers that have spoken meanwhile."""
        del index, slot, deadline_s
        self._pump(0.0)
        self._require_some(self._peers)

    def close(self) -> None:
        """Hang up. Exported memory stays exported: it belongs to the exporters."""
        super().close()
        self._given = None
        with self._lock:
            wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)

    # -- peers --------------------------------------------------------------------------------------------------------

    def _introduced(self, packet: bytes) -> wire.Hello | None:
        message = wire.SENDER.decode(packet)
        return message if isinstance(message, wire.Hello) else None

    def _welcome(self) -> bytes:
        assert self._exposed is not None
        welcome = wire.Welcome(epoch=self._epoch, layout=self._layout, exporters=self._exposed.exporters)
        return wire.SENDER.encode(welcome)

    def _refused(self, reason: str) -> bytes:
        return wire.SENDER.encode(wire.Refused(epoch=self._epoch, reason=reason))

    def _gave_up(self, reason: str) -> bytes:
        return wire.SENDER.encode(wire.Failed(reason=reason))

    def _woken(self) -> None:
        """The digest table has come."""
        with self._lock, contextlib.suppress(BlockingIOError, OSError):  # closed meanwhile
            os.eventfd_read(self._wake)
        for peer in tuple(self._peers.values()):
            try:
                self._give_table(peer)
            except DataplaneError as error:
                self._drop(peer, str(error))

    def _give_table(self, peer: _Reader) -> None:
        """To one that asks for it, once it is there. Raises `PeerLost`."""
        with self._lock:
            table = self._table
        if table is not None and peer.asks and peer.frames is not None:
            peer.asks = False
            self._on_offer().send(peer, table)

    def _answer(self, peer: _Reader, packet: bytes) -> None:
        match wire.SENDER.decode(packet):
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
            case message:
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
        recording = LoadTrace.decode(proposal.recording, self._exposed.shards.tensors)
        plan = make_plan(self._exposed.shards, self._exposed.exports, recording, proposal.reader)
        if plan.digest() != proposal.plan:
            raise TransferFailed(
                f"worker {proposal.reader.rank} planned {proposal.plan[:12]}, the trainer {plan.digest()[:12]} from "
                "the same layouts: both sides must run one version of weightbus"
            )
        if len(self._agreed) >= _REMEMBERED:  # of a fleet that changes for weeks; its present engines do not ask again
            self._agreed.clear()
        self._agreed.add(proposal.plan)
