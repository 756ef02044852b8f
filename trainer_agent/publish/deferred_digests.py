"""Deferred digests: a version is announced before its digest table is known.

The devices of all ranks digest while the coordinator prepares engines and, where engines copy out of other devices,
while they copy. machine/publication.py says what is promised in such a round. Together with ready flags
(quantized/ready_flags.py) it saves 28 ms of a round of 61 GB of FP8 weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from weightbus.control.log import get_log
from weightbus.control.protocol import Granted, ReceivingEngine, TransportKind, WeightbusError
from weightbus.dataplane.errors import DeadlineExceeded
from weightbus.dataplane.tensors import DigestTable
from weightbus.dataplane.transports import Peer, Sender, Tabling

from ..machine import EndReason, Mode, PublicationResult, Stopwatch
from .bucket_staging import BucketStaging
from .publisher_context import PublisherContext

_log = get_log(__name__)
SETTLE_S: Final = 30.0
"""Seconds for a device to finish what was begun for a version: milliseconds, unless the device is stuck."""
_CANNOT_WAIT: Final = "the digest table follows in this round, and {} cannot wait for it: a later version will do"


class DeferredDigests:
    """The digests of one publication, while they are deferred. Used by its driver."""

    def __init__(self, context: PublisherContext, version: int, watch: Stopwatch) -> None:
        self._context, self._version, self._watch = context, version, watch
        self._pending = False
        """True if the memory is exported and its digests were not collected."""
        self._upload: threading.Thread | None = None
        """Uploads the table to the coordinator."""

    def allowed(self, granted: Granted) -> bool:
        """True if the version may be announced without its table.

        The coordinator must allow it. Excluded are a version that may be committed already, which only its table tells;
        one that is kept as files, which are made of buckets; and the first one that goes by this sender.
        """
        of = self._context
        newer = granted.committed is None or self._version > granted.committed.version
        able = isinstance(of.senders.get(TransportKind.DIRECT), Tabling)
        kept = of.archive is not None and of.archive.keeps(self._version)
        wanted = granted.may_defer_digests and of.settings.open_tables and of.mode is Mode.LIVE
        return wanted and newer and able and not kept and self._digests_begun

    def export(self) -> None:
        """Make the memory readable without waiting for its digests. Once for a publication. Collective."""
        in_place = self._context.staging.in_place
        if in_place is not None and self._context.staging.known is None and not self._pending:
            with self._watch.phase("digest"):
                in_place.export()
            self._pending = True

    def collect(self) -> DigestTable | None:
        """Wait for the digests. Returns the table; None if digests are not available in place. Collective."""
        staging = self._context.staging
        if self._pending and staging.in_place is not None:
            self._pending = False
            with self._watch.phase("digest"):
                digests = staging.in_place.digests()
            if digests is not None:
                staging.take_digests(self._version, digests)
        return staging.known

    def upload(self, table: DigestTable) -> None:
        """Upload `table` to the coordinator, in a thread.

        The delivery report, on which a commit waits, finds it there. If the upload fails, the report uploads it.
        """
        bus, deadline_s = self._context.bus, 6 * self._context.settings.request_timeout_s

        def put() -> None:
            try:
                bus.put_blob(table.encode(), deadline_s, table.digest())
            except WeightbusError as error:
                _log.debug("table_not_given", error=str(error))

        self._upload = threading.Thread(target=put, name="weightbus-table", daemon=True)
        self._upload.start()

    def await_upload(self, timeout_s: float) -> None:
        """Block until the upload has ended, at most `timeout_s`."""
        if self._upload is not None:
            self._upload.join(timeout_s)

    def settle(self, result: PublicationResult) -> PublicationResult:
        """End all reading of the weights, at the end of a publication: they may be stepped afterwards.

        Returns `result`; or that the source failed, if a device does not finish in time. A version that is committed
        stays committed.
        """
        if self._pending:
            try:
                self.collect()
            except Exception as error:  # noqa: BLE001  the next publication finds what is wrong
                _log.warning("digests_not_settled", error=f"{type(error).__name__}: {error}")
        return settle_device(result, self._context.staging.settle)

    @property
    def _digests_begun(self) -> bool:
        staging = self._context.staging
        return staging.known is None and staging.in_place is not None and staging.in_place.digests_begun


def remove_unable(peers: dict[TransportKind, list[Peer]], senders: Mapping[TransportKind, Sender]) -> dict[str, str]:
    """Remove from `peers` the engines that cannot wait for a table; returns the reason for each."""
    kinds = [kind for kind in peers if not isinstance(senders[kind], Tabling)]
    return {peer.engine: _CANNOT_WAIT.format(kind.value) for kind in kinds for peer in peers.pop(kind)}


def needed_before_offer(staging: BucketStaging, receivers: Sequence[ReceivingEngine]) -> bool:
    """True if the digests are awaited before the offer: a copy on the same device would wait for them there."""
    return any(each.shares for each in receivers) or staging.buffers[0].memory.device.type == "cpu"


def settle_device(result: PublicationResult, settle: Callable[[float], None]) -> PublicationResult:
    """`result`, after `settle` has waited for this rank's device; or a failure of the source if it did not finish."""
    try:
        settle(SETTLE_S)
    except RuntimeError as error:  # torch's: the device has failed, and reads nothing any more
        _log.warning("device_failed", error=str(error))
    except DeadlineExceeded as error:
        _log.exception("device_not_settled", ending=result.ending.value)
        if result.ending is not EndReason.COMMITTED:
            return PublicationResult(
                EndReason.SOURCE_FAILED, f"{error}, and may still read the weights ({result.reason})"
            )
    return result
