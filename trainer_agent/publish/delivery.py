"""The transfer of one epoch on the trainer's side: every bucket, to every receiver, by one lane for each transport.

A lane is a thread that owns one `Sender` for the epoch and walks through its order of calls, so that a slow transport
does not hold up another and the leader's thread stays free to assemble, to speak with its ranks and to hear the
coordinator. Buckets of this rank lie in its slots in turn; a slot is written again only after every lane has reclaimed
the bucket that was in it. Where stages send their own buckets (pipeline_broadcast.py) that holds for each stage's
slots, and a row of buckets, one of each stage, is assembled at a time.

A lane never raises: what goes wrong becomes the failure of the engines that it serves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from weightbus.control.log import get_log
from weightbus.control.protocol import Endpoint, TransportKind
from weightbus.dataplane.errors import DataplaneError, DeadlineExceeded, TransferFailed
from weightbus.dataplane.transports import (
    Address,
    Dividing,
    Peer,
    Sender,
    Slot,
    Sources,
    Tabled,
    Tabling,
    TransferSession,
    registry as transports,
)

_OFFER_S: Final = 30.0
"""Opening a sender returns at once; one that does not by then is left out of the offers, and its engines fail."""

_log = get_log(__name__)


class DeliveryStopped(TransferFailed):
    """The leader called the transfer off."""


class Delivery:
    """Sends the buckets of `session` through `senders`. Used by the leader's thread only."""

    def __init__(  # noqa: PLR0917  made in one place
        self,
        session: TransferSession,
        senders: Mapping[TransportKind, Sender],
        peers: Mapping[TransportKind, Sequence[Peer]],
        buffers: Sequence[Slot],
        deadline_s: float,
        sources: Sources | None = None,
    ) -> None:
        """`sources`: who sends what; this rank everything where nothing is said."""
        self.session = session
        self.epoch = session.epoch
        self._turn = threading.Condition()
        deadline = time.monotonic() + deadline_s
        self._buffers = buffers
        self._buckets = len(session.manifest.buckets)
        self._sources = sources or Sources.one(self._buckets)
        self._filled = 0
        self._table_sent = False
        self._lanes = [
            _Lane(kind, senders[kind], peers[kind], session, buffers, deadline, self._turn, self._sources)
            for kind in sorted(peers)
        ]

    def open(self) -> tuple[Endpoint, ...]:
        """Start the lanes and wait for what each of them offers. A lane that cannot is left out: its engines failed."""
        for lane in self._lanes:
            lane.start()
        with self._turn:
            self._turn.wait_for(lambda: all(lane.offered or lane.over for lane in self._lanes), _OFFER_S)
            return tuple(_offer(lane.kind, lane.address) for lane in self._lanes if lane.address is not None)

    def offers_received(self) -> None:
        """The coordinator knows of the offers. Until now no receiver could come, so only now they are waited for."""
        with self._turn:
            for lane in self._lanes:
                lane.offers_received = True
            self._turn.notify_all()

    def send_digest_table(self, tabled: Tabled) -> None:
        """The digest table of a session that was begun without. To be called after `open`; counts once."""
        if not self._table_sent:
            self._table_sent = True
            for lane in self._lanes:
                lane.send_digest_table(tabled)

    @property
    def unopened(self) -> dict[str, str]:
        """Engines whose lane has offered nothing, with the reason."""
        with self._turn:
            silence = f"the sender did not open within {_OFFER_S:g} s"
            return {
                peer.engine: lane.failed.get(peer.engine, silence)
                for lane in self._lanes
                if lane.address is None
                for peer in lane.peers
            }

    def wanted(self) -> range | None:
        """The buckets that should be assembled now; None when a slot is still in use, or all are there."""
        with self._turn:
            if self._filled >= self._buckets:
                return None
            row = self._sources.row_at(self._filled)
            alive = [lane for lane in self._lanes if not lane.over and not lane.in_place]
            taken = self._sources.needed(row, len(self._buffers))
            return row if alive and all(lane.reclaimed > taken for lane in alive) else None

    @property
    def differing(self) -> tuple[str, ...]:
        """Tensors that another rank found changed since they were digested."""
        with self._turn:
            return tuple(name for lane in self._lanes for name in lane.differing)

    def filled(self, count: int) -> None:
        """The first `count` buckets lie in their slots."""
        with self._turn:
            self._filled = count
            for lane in self._lanes:
                lane.filled = count
            self._turn.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Return when a lane went on, or after `timeout_s`."""
        with self._turn:
            if not all(lane.over for lane in self._lanes):
                self._turn.wait(timeout_s)

    @property
    def over(self) -> bool:
        """Every lane came to its end."""
        with self._turn:
            return all(lane.over for lane in self._lanes)

    @property
    def failed(self) -> dict[str, str]:
        """Engines that did not get everything, with the reason."""
        with self._turn:
            return {engine: reason for lane in self._lanes for engine, reason in lane.failed.items()}

    @property
    def spared(self) -> tuple[str, ...]:
        """Those of `failed` that were only kept from it by others, before anything was sent to them."""
        with self._turn:
            return tuple(engine for lane in self._lanes for engine in sorted(lane.spared))

    def withdraw(self, engines: Mapping[str, str]) -> None:
        """Somebody else knows that these have failed, and why: their lanes do not wait for them."""
        with self._turn:
            running = [lane for lane in self._lanes if lane.offered and not lane.over]
        for lane in running:
            lane.withdraw(engines)

    def stop(self, patience_s: float = 10.0) -> tuple[TransportKind, ...]:
        """Break off. Returns the transports whose lane did not end in time: their senders must not be used again."""
        with self._turn:
            running = [lane for lane in self._lanes if not lane.over]
            for lane in running:
                lane.stopped = True
            self._turn.notify_all()
        for lane in running:
            lane.interrupt()
        with self._turn:
            self._turn.wait_for(lambda: all(lane.over for lane in running), patience_s)
            return tuple(lane.kind for lane in running if not lane.over)


class _Lane:
    """One transport's part. Fields are shared under the delivery's condition `turn`."""

    def __init__(  # noqa: PLR0917  made in one place
        self,
        kind: TransportKind,
        sender: Sender,
        peers: Sequence[Peer],
        session: TransferSession,
        buffers: Sequence[Slot],
        deadline: float,
        turn: threading.Condition,
        sources: Sources,
    ) -> None:
        self.kind = kind
        self.in_place = transports.by_name(kind).in_place
        self.address: Address | None = None
        self.offered = self.offers_received = self.over = self.stopped = False
        self.filled = self.reclaimed = 0
        self.failed: dict[str, str] = {}
        self.spared: frozenset[str] = frozenset()
        self.differing: tuple[str, ...] = ()
        self.peers = peers
        self._sender, self._session, self._buffers = sender, session, buffers
        self._deadline, self._turn, self._sources = deadline, turn, sources
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"weightbus-{kind}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send_digest_table(self, tabled: Tabled) -> None:
        if self.address is None or not isinstance(self._sender, Tabling):
            return
        try:
            self._sender.tabled(tabled)
        except DataplaneError as error:
            self.withdraw({peer.engine: f"it cannot be given the digest table: {error}" for peer in self.peers})

    def withdraw(self, engines: Mapping[str, str]) -> None:
        for peer in self.peers:
            if peer.engine in engines:
                self._sender.withdraw(peer.engine, engines[peer.engine])

    def interrupt(self) -> None:
        """Close the sender from outside, which ends any wait inside it. Never raises."""
        self._close()

    def _close(self) -> None:
        """The lane and whoever interrupts it come here at the same moment, and a sender is not made for that.

        What goes wrong is that the lane was in the middle of a call: it closes the sender again when it is out of it.
        """
        with self._closing:
            try:
                self._sender.close()
            except Exception as error:  # noqa: BLE001  the leader has to give the round up, the lane to end
                reason = f"{type(error).__name__}: {error}"
                _log.info("sender_not_closed", transport=self.kind, epoch=self._session.epoch, reason=reason)

    def _run(self) -> None:
        reason = ""
        try:
            self._carry()
        except DataplaneError as error:
            reason = str(error) or type(error).__name__
        except Exception as error:  # noqa: BLE001  it is logged, and is the failure of this lane's engines
            _log.exception("sender_failed", transport=self.kind, epoch=self._session.epoch)
            reason = f"{type(error).__name__}: {error}"
        finally:
            # Read before closing: the failures belong to the session that is being let go of.
            failed, spared = dict(self._sender.failed), self._sender.spared
            differing = tuple(self._sender.differing) if isinstance(self._sender, Dividing) else ()
            if reason:
                failed = {peer.engine: failed.get(peer.engine, reason) for peer in self.peers}
            self._close()
            with self._turn:
                self.failed, self.spared, self.differing, self.over = failed, spared, differing, True
                self._turn.notify_all()

    def _carry(self) -> None:
        memory = self._buffers[0].memory
        if memory.device.type == "cuda":
            torch.cuda.set_device(memory.device)
        address = self._sender.offer(self._session, self.peers)
        with self._turn:
            self.address, self.offered = address, True
            self._turn.notify_all()
            self._turn.wait_for(lambda: self.offers_received or self.stopped, self._left("the offer to be told"))
        self._sender.ready(self._left("the receivers"))
        count, depth = len(self._session.manifest.buckets), len(self._buffers)
        if self.in_place:
            return self._sender.finish(self._left("the receivers to finish"))
        for row in self._sources.rows:
            self._reclaim(self._sources.needed(row, depth))
            for index in row:
                self._await(index)
                slot = self._buffers[self._sources.place(index) % depth]
                self._sender.send(index, slot, self._left(f"bucket {index} to be taken"))
        self._sender.finish(self._left("the last bucket to be confirmed"))
        return self._reclaim(count - 1)

    def _reclaim(self, last: int) -> None:
        """Every bucket up to `last`."""
        for index in range(self.reclaimed, last + 1):
            self._sender.reclaim(index, self._left(f"bucket {index} to be let go of"))
            with self._turn:
                self.reclaimed = index + 1
                self._turn.notify_all()

    def _await(self, index: int) -> None:
        with self._turn:
            if not self._turn.wait_for(lambda: self.filled > index or self.stopped, self._left(f"bucket {index}")):
                raise DeadlineExceeded(f"bucket {index} to be assembled", max(0.0, self._deadline - time.monotonic()))
            if self.stopped:
                raise DeliveryStopped("the transfer was called off")

    def _left(self, waiting_for: str) -> float:
        if self.stopped:
            raise DeliveryStopped("the transfer was called off")
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(waiting_for, 0.0)
        return left


def _offer(kind: TransportKind, address: Address) -> Endpoint:
    return Endpoint(
        transport=kind,
        address=address.address,
        group=address.group,
        backend=address.backend,
        world_size=address.world_size,
        token=address.token,
    )
