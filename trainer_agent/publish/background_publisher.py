"""Publishes snapshots in the background of the training loop: one thread of rank 0, no collective, no parameter.

The training loop's thread takes snapshots and enqueues them; the publishing thread drives their publications, in order,
one at a time. Both share one lock.
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
"""Publishes a version from the buffer of the second argument. Does not raise."""


class EngineResyncs(Protocol):
    """Resync of engines that registered after a version was committed. Called on the publishing thread."""

    poll_s: float
    """Seconds between two looks for engines that are behind; 0: never."""

    def behind(self, version: int) -> bool:
        """True if an engine is present without the committed `version`. Does not raise."""
        ...

    def bring(self, version: int, buffer: int) -> None:
        """Deliver the version to these engines, from that buffer. Does not raise."""
        ...


class BackgroundPublisher:
    """Snapshots of rank 0, and the thread that publishes them. All methods are called by the training loop's thread.

    The last committed snapshot is kept until its buffer is needed: engines that register later receive it.
    """

    def __init__(  # noqa: PLR0917  made in one place
        self,
        buffers: list[SnapshotBuffer],
        overlap: Overlap,
        publish: Publish,
        resyncs: EngineResyncs,
        channel: str,
        device: torch.device,
    ) -> None:
        self._buffers = buffers
        self._publish = publish
        self._resyncs = resyncs
        self._last_committed: tuple[int, int] | None = None
        """The version that was committed last, and its buffer, until the buffer is claimed."""
        self._channel = channel
        self._device = device
        self._changed = threading.Condition()
        self._queue = SnapshotQueue(len(buffers), overlap)
        self._ends: dict[int, Future[PublicationEnd]] = {}
        self._ended = 0
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> int:
        """Number of publications that have not ended."""
        with self._changed:
            return self._queue.pending

    def is_pending(self, version: int) -> bool:
        """True if a publication of this version has not ended."""
        with self._changed:
            return version in self._ends

    def idle(self, timeout_s: float) -> bool:
        """Wait until no publication runs; False if that took longer than `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._queue.idle, timeout_s)

    @property
    def ended(self) -> int:
        """Number of publications that have ended."""
        with self._changed:
            return self._ended

    def wait_for_end(self, after: int, timeout_s: float) -> None:
        """Return when more than `after` publications have ended, at the latest after `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended > after, timeout_s)

    def claim(self, timeout_s: float) -> SnapshotClaim | None:
        """Claim a buffer for the next snapshot; None if none became free in time. Superseded versions end here."""
        with self._changed:
            claim = self._queue.claim()
            if claim is None:
                self._changed.wait(timeout_s)
                claim = self._queue.claim()
            if claim and self._last_committed and self._last_committed[1] == claim.buffer:
                self._last_committed = None
            for version in claim.superseded if claim else ():
                self._end(version, EndReason.SUPERSEDED, "a newer snapshot took its place before its round began")
            return claim

    def buffer_of(self, claim: SnapshotClaim) -> SnapshotBuffer:
        """The buffer that was claimed."""
        return self._buffers[claim.buffer]

    def enqueue(self, version: int) -> Future[PublicationEnd]:
        """Publish `version`, which the claimed buffer holds. The future never raises."""
        future: Future[PublicationEnd] = Future()
        with self._changed:
            self._queue.filled(version)
            self._ends[version] = future
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="weightbus-snapshots", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return future

    def discard(self) -> None:
        """Return the claimed buffer unused."""
        with self._changed:
            self._queue.discard()
            self._changed.notify_all()

    def close(self, patience_s: float) -> None:
        """Drop snapshots that have not begun, wait for the running publication, free the buffers."""
        with self._changed:
            self._closing = True
            for version in self._queue.cancel_waiting():
                self._end(version, EndReason.ABORTED, "the agent was closed before its round began")
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(patience_s)
            if self._thread.is_alive():
                _log.warning("snapshot_abandoned", channel=self._channel, patience_s=patience_s)
                return
        for store in self._buffers:
            store.close()

    def _run(self) -> None:
        with self._on_own_stream():
            while True:
                with self._changed:
                    poll_s = self._resyncs.poll_s if self._last_committed else 0.0
                    self._changed.wait_for(lambda: not self._queue.idle or self._closing, poll_s or None)
                    begun, kept = self._queue.begin(), self._last_committed
                    if begun is None and self._closing:
                        return
                if begun is not None:
                    self._publish_next(*begun)
                elif kept is not None:
                    self._resync(*kept)

    def _resync(self, version: int, buffer: int) -> None:
        if not self._resyncs.behind(version):
            return
        with self._changed:
            if self._closing or self._last_committed != (version, buffer) or not self._queue.reuse(buffer):
                return
        self._resyncs.bring(version, buffer)
        with self._changed:
            self._queue.finish()
            self._changed.notify_all()

    def _publish_next(self, version: int, buffer: int) -> None:
        self._buffers[buffer].wait()
        end = self._publish(version, buffer)
        with self._changed:
            self._queue.finish()
            self._last_committed = (version, buffer) if end[0].ending is EndReason.COMMITTED else None
            self._ended += 1
            self._ends.pop(version).set_result(end)
            self._changed.notify_all()

    def _end(self, version: int, ending: EndReason, reason: str) -> None:
        report = PublishReport.unpublished(self._channel, version, Mode.SNAPSHOT, reason)
        self._ends.pop(version).set_result(PublicationEnd(PublicationResult(ending, reason), report, None))
        _log.info("snapshot_dropped", channel=self._channel, version=version, reason=reason)

    @contextlib.contextmanager
    def _on_own_stream(self) -> Generator[None]:
        """Use an own CUDA stream, so that copies do not wait behind the kernels of the next training step."""
        if self._device.type != "cuda":
            yield
            return
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]  # as torch leaves it
            yield
