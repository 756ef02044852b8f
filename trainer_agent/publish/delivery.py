"""The transfer of one epoch on the trainer's side: every bucket to every receiver, by one lane per transport.

A lane is a thread that owns one `Sender` for the epoch, so that a slow transport does not delay another and the
driver's thread stays free to assemble, to command ranks and to hear the coordinator. A staging buffer is written again
only after every lane has reclaimed the bucket in it. Where pipeline stages send their own buckets
(bucket_staging.py), that holds for the buffers of each stage, and a row of buckets, one of each stage, is assembled
at a time.

A lane never raises: its error becomes the failure of the engines that it serves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import torch

from weightbus.control.log import get_log
from weightbus.control.protocol import Endpoint, TransportKind
from weightbus.dataplane.errors import DataplaneError, DeadlineExceeded, TransferFailed
from weightbus.dataplane.tensors import Sources
from weightbus.dataplane.transports import (
    Address,
    Dividing,
    Peer,
    Sender,
    StagingBuffer,
    Tabled,
    Tabling,
    TransferSession,
    registry as transports,
)

_OFFER_S: Final = 30.0
"""Seconds for a sender to open. A sender that takes longer is not offered, and its engines fail."""

_log = get_log(__name__)


class DeliveryStopped(TransferFailed):
    """The driver stopped the transfer."""


class Delivery:
    """Sends the buckets of `session` through `senders`. Used by the driver's thread only."""

    def __init__(  # noqa: PLR0917  made in one place
        self,
        session: TransferSession,
        senders: Mapping[TransportKind, Sender],
        peers: Mapping[TransportKind, Sequence[Peer]],
        buffers: Sequence[StagingBuffer],
        deadline_s: float,
        sources: Sources | None = None,
    ) -> None:
        """`sources`: which rank sends which bucket; None if this rank sends all of them."""
        self.session, self.epoch, self.buffers = session, session.epoch, buffers
        self.buckets = len(session.manifest.buckets)
        self.sources = sources or Sources.one(self.buckets)
        self.deadline = time.monotonic() + deadline_s
        self.changed = threading.Condition()
        """Guards the fields below and those of lanes."""
        self.assembled = 0
        """Number of buckets that are, or were, in their staging buffers."""
        self.connectable = False
        """True once receivers can know the offers."""
        self._table_sent = False
        self._lanes = [_Lane(self, kind, senders[kind], peers[kind]) for kind in sorted(peers)]

    def open(self) -> tuple[Endpoint, ...]:
        """Start the lanes and return their offers. A lane that cannot open is left out: its engines have failed."""
        for lane in self._lanes:
            lane.thread.start()
        with self.changed:
            self.changed.wait_for(lambda: all(lane.address or lane.over for lane in self._lanes), _OFFER_S)
            return tuple(
                Endpoint(transport=lane.kind, **msgspec.structs.asdict(lane.address))
                for lane in self._lanes
                if lane.address is not None
            )

    def offers_received(self) -> None:
        """The coordinator knows the offers: from now on receivers can connect, and lanes wait for them."""
        with self.changed:
            self.connectable = True
            self.changed.notify_all()

    def send_digest_table(self, tabled: Tabled) -> None:
        """Give receivers the digest table of a session that began without. To be called after `open`; counts once."""
        if not self._table_sent:
            self._table_sent = True
            for lane in self._lanes:
                lane.send_digest_table(tabled)

    @property
    def unopened(self) -> dict[str, str]:
        """Engines without an offer, because their lane failed to open; values are reasons."""
        with self.changed:
            silence = f"the sender did not open within {_OFFER_S:g} s"
            return {
                peer.engine: lane.failed.get(peer.engine, silence)
                for lane in self._lanes
                if lane.address is None
                for peer in lane.peers
            }

    def wanted(self) -> range | None:
        """Buckets to assemble now; None while a staging buffer is in use, or when all buckets are assembled."""
        with self.changed:
            if self.assembled >= self.buckets:
                return None
            row = self.sources.row_at(self.assembled)
            alive = [lane for lane in self._lanes if not lane.over and not lane.in_place]
            taken = self.sources.needed(row, len(self.buffers))
            return row if alive and all(lane.reclaimed > taken for lane in alive) else None

    def filled(self, count: int) -> None:
        """The first `count` buckets are in their staging buffers."""
        with self.changed:
            self.assembled = count
            self.changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Return when a lane has made progress, or after `timeout_s`."""
        with self.changed:
            if not all(lane.over for lane in self._lanes):
                self.changed.wait(timeout_s)

    @property
    def over(self) -> bool:
        """True if every lane has ended."""
        with self.changed:
            return all(lane.over for lane in self._lanes)

    @property
    def failed(self) -> dict[str, str]:
        """Engines that did not receive everything, with the reason."""
        with self.changed:
            return {engine: reason for lane in self._lanes for engine, reason in lane.failed.items()}

    @property
    def spared(self) -> tuple[str, ...]:
        """Engines of `failed` to which nothing was sent because another engine failed first."""
        with self.changed:
            return tuple(engine for lane in self._lanes for engine in sorted(lane.spared))

    @property
    def differing(self) -> tuple[str, ...]:
        """Tensors that another rank found changed since they were digested."""
        with self.changed:
            return tuple(name for lane in self._lanes for name in lane.differing)

    def withdraw(self, engines: Mapping[str, str]) -> None:
        """Stop waiting for engines that the coordinator excluded; values are reasons."""
        with self.changed:
            running = [lane for lane in self._lanes if lane.address and not lane.over]
        for lane in running:
            lane.withdraw(engines)

    def stop(self, timeout_s: float = 10.0) -> tuple[TransportKind, ...]:
        """Stop all lanes. Returns the transports whose lane did not end in time: their senders must not be reused."""
        with self.changed:
            running = [lane for lane in self._lanes if not lane.over]
            for lane in running:
                lane.stopped = True
            self.changed.notify_all()
        for lane in running:
            lane.close()  # from outside, which ends any wait inside the sender
        with self.changed:
            self.changed.wait_for(lambda: all(lane.over for lane in running), timeout_s)
            return tuple(lane.kind for lane in running if not lane.over)


class _Lane:
    """One transport's part of a delivery."""

    def __init__(self, of: Delivery, kind: TransportKind, sender: Sender, peers: Sequence[Peer]) -> None:
        self.kind = kind
        self.in_place = transports.by_name(kind).in_place
        self.peers = peers
        self.address: Address | None = None
        self.over = self.stopped = False
        self.reclaimed = 0
        self.failed: dict[str, str] = {}
        self.spared: frozenset[str] = frozenset()
        self.differing: tuple[str, ...] = ()
        self._of, self._sender = of, sender
        self._closing = threading.Lock()
        self.thread = threading.Thread(target=self._run, name=f"weightbus-{kind}", daemon=True)

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

    def close(self) -> None:
        """Close the sender; does not raise. The lane and the driver may call this at the same moment.

        An error then means that the lane was in the middle of a call: it closes the sender again when the call has
        returned.
        """
        with self._closing:
            try:
                self._sender.close()
            except Exception as error:  # noqa: BLE001  the driver has to abandon the round, the lane to end
                reason = f"{type(error).__name__}: {error}"
                _log.info("sender_not_closed", transport=self.kind, epoch=self._of.epoch, reason=reason)

    def _run(self) -> None:
        reason = ""
        try:
            self._send()
        except DataplaneError as error:
            reason = str(error) or type(error).__name__
        except Exception as error:  # noqa: BLE001  it is logged, and is the failure of this lane's engines
            _log.exception("sender_failed", transport=self.kind, epoch=self._of.epoch)
            reason = f"{type(error).__name__}: {error}"
        finally:
            # Read before closing: the failures belong to the session that is being closed.
            failed, spared = dict(self._sender.failed), self._sender.spared
            differing = tuple(self._sender.differing) if isinstance(self._sender, Dividing) else ()
            if reason:
                failed = {peer.engine: failed.get(peer.engine, reason) for peer in self.peers}
            self.close()
            with self._of.changed:
                self.failed, self.spared, self.differing, self.over = failed, spared, differing, True
                self._of.changed.notify_all()

    def _send(self) -> None:
        of, sender = self._of, self._sender
        memory = of.buffers[0].memory
        if memory.device.type == "cuda":
            torch.cuda.set_device(memory.device)
        address = sender.offer(of.session, self.peers)
        with of.changed:
            self.address = address
            of.changed.notify_all()
            of.changed.wait_for(lambda: of.connectable or self.stopped, self._left("the offer to be told"))
        sender.ready(self._left("the receivers"))
        if self.in_place:
            return sender.finish(self._left("the receivers to finish"))
        depth = len(of.buffers)
        for row in of.sources.rows:
            self._reclaim(of.sources.needed(row, depth))
            for index in row:
                self._await(index)
                slot = of.buffers[of.sources.place(index) % depth]
                sender.send(index, slot, self._left(f"bucket {index} to be taken"))
        sender.finish(self._left("the last bucket to be confirmed"))
        return self._reclaim(of.buckets - 1)

    def _reclaim(self, last: int) -> None:
        """Reclaim every bucket up to `last`."""
        for index in range(self.reclaimed, last + 1):
            self._sender.reclaim(index, self._left(f"bucket {index} to be let go of"))
            with self._of.changed:
                self.reclaimed = index + 1
                self._of.changed.notify_all()

    def _await(self, index: int) -> None:
        of = self._of
        with of.changed:
            if not of.changed.wait_for(lambda: of.assembled > index or self.stopped, self._left(f"bucket {index}")):
                raise DeadlineExceeded(f"bucket {index} to be assembled", max(0.0, of.deadline - time.monotonic()))
            self._left(f"bucket {index}")

    def _left(self, waiting_for: str) -> float:
        """Seconds until the deadline. Raises if it has passed, or if the driver stopped the transfer."""
        if self.stopped:
            raise DeliveryStopped("the transfer was called off")
        left = self._of.deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(waiting_for, 0.0)
        return left
