"""Publishes snapshots behind the training loop's back: one thread of the root rank, no collective, no parameter.

The training loop's thread takes snapshots and hands them over; this one drives their publications, in order, one at a
time. Both speak through one lock; nothing is polled.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Protocol

import torch

from weightbus.control.log import get_log

from ..machine import (
    EndReason,
    Mode,
    Overlap,
    PublicationEnd,
    PublicationResult,
    PublishReport,
    SnapshotClaim,
    SnapshotQueue,
)
from .snapshot import SnapshotBuffer

_log = get_log(__name__)


Publish = Callable[[int, int], PublicationEnd]
"""Drives a version, from the buffer of the second argument, to its end. Does not raise."""


class EngineResyncs(Protocol):
    """Engines that came after their version was committed. Both are called on the thread of the snapshots."""

    look_s: float
    """How often they are looked for; 0: never."""

    def behind(self, version: int) -> bool:
        """Whether an engine is here without `version`, which is committed. Does not raise."""
        ...

    def bring(self, version: int, buffer: int) -> None:
        """Bring it to them, from that buffer. Does not raise."""
        ...


class BackgroundPublisher:
    """The snapshots of one leader, and the thread that publishes them. All methods are the training loop's.

    The last one that was committed is kept until its buffer is needed: who comes later is brought it.
    """

    def __init__(  # noqa: PLR0917  made in one place
        self,
        stores: list[SnapshotBuffer],
        overlap: Overlap,
        publish: Publish,
        resyncs: EngineResyncs,
        channel: str,
        device: torch.device,
    ) -> None:
        self._stores = stores
        self._publish = publish
        self._resyncs = resyncs
        self._kept: tuple[int, int] | None = None
        """The version that was committed last, and its buffer, while nothing else is in it."""
        self._channel = channel
        self._device = device
        self._turn = threading.Condition()
        self._queue = SnapshotQueue(len(stores), overlap)
        self._ends: dict[int, Future[PublicationEnd]] = {}
        self._ended = 0
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> int:
        """Publications that have not ended."""
        with self._turn:
            return self._queue.pending

    def is_pending(self, version: int) -> bool:
        """A publication of this version has not ended."""
        with self._turn:
            return version in self._ends

    def idle(self, timeout_s: float) -> bool:
        """Wait until nothing is being published; False when that took longer."""
        with self._turn:
            return self._turn.wait_for(lambda: self._queue.idle, timeout_s)

    @property
    def ended(self) -> int:
        """How many publications have ended so far."""
        with self._turn:
            return self._ended

    def wait_for_end(self, after: int, timeout_s: float) -> None:
        """Return when more than `after` publications have ended, at the latest after `timeout_s`."""
        with self._turn:
            self._turn.wait_for(lambda: self._ended > after, timeout_s)

    def claim(self, timeout_s: float) -> SnapshotClaim | None:
        """A buffer for the next snapshot; None when none became free in time. Superseded versions end here."""
        with self._turn:
            claim = self._queue.claim()
            if claim is None:
                self._turn.wait(timeout_s)
                claim = self._queue.claim()
            if claim and self._kept and self._kept[1] == claim.buffer:
                self._kept = None
            for version in claim.superseded if claim else ():
                self._end(version, EndReason.SUPERSEDED, "a newer snapshot took its place before its round began")
            return claim

    def buffer_of(self, claim: SnapshotClaim) -> SnapshotBuffer:
        """Where the snapshot goes."""
        return self._stores[claim.buffer]

    def enqueue(self, version: int) -> Future[PublicationEnd]:
        """The claimed buffer holds `version`: publish it. The future never raises."""
        future: Future[PublicationEnd] = Future()
        with self._turn:
            self._queue.filled(version)
            self._ends[version] = future
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="weightbus-snapshots", daemon=True)
                self._thread.start()
            self._turn.notify_all()
        return future

    def discard(self) -> None:
        """The claimed buffer could not be filled."""
        with self._turn:
            self._queue.discard()
            self._turn.notify_all()

    def close(self, patience_s: float) -> None:
        """Drop what has not begun, let what has begun end, free the memory."""
        with self._turn:
            self._closing = True
            for version in self._queue.cancel_waiting():
                self._end(version, EndReason.ABORTED, "the agent was closed before its round began")
            self._turn.notify_all()
        if self._thread is not None:
            self._thread.join(patience_s)
            if self._thread.is_alive():
                _log.warning("snapshot_abandoned", channel=self._channel, patience_s=patience_s)
                return
        for store in self._stores:
            store.close()

    def _run(self) -> None:
        with self._on_own_stream():
            while True:
                with self._turn:
                    look_s = self._resyncs.look_s if self._kept else 0.0
                    self._turn.wait_for(lambda: not self._queue.idle or self._closing, look_s or None)
                    begun, kept = self._queue.begin(), self._kept
                    if begun is None and self._closing:
                        return
                if begun is not None:
                    self._carry(*begun)
                elif kept is not None:
                    self._catch_up(*kept)

    def _catch_up(self, version: int, buffer: int) -> None:
        if not self._resyncs.behind(version):
            return
        with self._turn:
            if self._closing or self._kept != (version, buffer) or not self._queue.reuse(buffer):
                return
        self._resyncs.bring(version, buffer)
        with self._turn:
            self._queue.finish()
            self._turn.notify_all()

    def _carry(self, version: int, buffer: int) -> None:
        self._stores[buffer].wait()
        end = self._publish(version, buffer)
        with self._turn:
            self._queue.finish()
            self._kept = (version, buffer) if end[0].ending is EndReason.COMMITTED else None
            self._ended += 1
            self._ends.pop(version).set_result(end)
            self._turn.notify_all()

    def _end(self, version: int, ending: EndReason, reason: str) -> None:
        report = PublishReport.unpublished(self._channel, version, Mode.SNAPSHOT, reason)
        self._ends.pop(version).set_result(PublicationEnd(PublicationResult(ending, reason), report, None))
        _log.info("snapshot_dropped", channel=self._channel, version=version, reason=reason)

    @contextlib.contextmanager
    def _on_own_stream(self) -> Generator[None]:
        """On a GPU: not in line behind the kernels of the next training step."""
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]  # as torch leaves it
            yield
