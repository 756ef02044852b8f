"""Versions that are announced before their digest table is known: which may be, and what has to be looked after then.

The devices of all ranks digest while the coordinator prepares engines, and, where these copy out of other devices,
while they copy. publication.py says what is promised in such a round.
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
from .publisher_context import Bus, PublisherContext

_log = get_log(__name__)
SETTLE_S: Final = 30.0
"""For a device to finish what was begun for a version. It takes milliseconds; one that takes so long stands still."""
_CANNOT_WAIT: Final = "the digest table follows in this round, and {} cannot wait for it: a later version will do"


def allowed(of: PublisherContext, version: int, granted: Granted) -> bool:
    """Whether a version may be announced without its table: the coordinator says so, and nothing here is against it.

    Not one that may be committed already: that only its table tells. Not one that is kept as files, which are of
    buckets. Not before a first one went by this sender.
    """
    newer = granted.committed is None or version > granted.committed.version
    able = isinstance(of.senders.get(TransportKind.DIRECT), Tabling)
    kept = of.archive is not None and of.archive.keeps(version)
    wanted = granted.may_leave_open and of.settings.open_tables and of.mode is Mode.LIVE
    return wanted and newer and able and not kept and of.staging.may_leave_open


def give(bus: Bus, table: DigestTable, deadline_s: float) -> threading.Thread:
    """Have the coordinator given a table that was just closed, by a thread that ends then, or in vain.

    The report that names it, on which a commit waits, finds it there; whatever was in vain is put with that.
    """

    def put() -> None:
        try:
            bus.put_blob(table.encode(), deadline_s, table.digest())
        except WeightbusError as error:
            _log.debug("table_not_given", error=str(error))

    thread = threading.Thread(target=put, name="weightbus-table", daemon=True)
    thread.start()
    return thread


def unable(peers: dict[TransportKind, list[Peer]], senders: Mapping[TransportKind, Sender]) -> dict[str, str]:
    """Takes those out of `peers` that came after the lease and cannot wait for a table; who they are, and why."""
    kinds = [kind for kind in peers if not isinstance(senders[kind], Tabling)]
    return {peer.engine: _CANNOT_WAIT.format(kind.value) for kind in kinds for peer in peers.pop(kind)}


def first(staging: BucketStaging, receivers: Sequence[ReceivingEngine]) -> bool:
    """Whether the table is waited for before the offer: a copy on the same device would wait for what is made there."""
    return any(each.shares for each in receivers) or staging.buffers[0].memory.device.type == "cpu"


def settle(staging: BucketStaging, version: int, watch: Stopwatch, result: PublicationResult) -> PublicationResult:
    """The publication is over, however it ended: what still reads the weights ends before they are stepped.

    Where a device does not come to that end, the weights are lost to us, whatever `result` says of the version; one
    that is committed stays so.
    """
    if staging.open:
        try:
            staging.close_table(version, watch)
        except Exception as error:  # noqa: BLE001  the next publication finds what is wrong
            _log.warning("digests_not_settled", error=f"{type(error).__name__}: {error}")
    return settled(result, staging.settle)


def settled(result: PublicationResult, settle: Callable[[float], None]) -> PublicationResult:
    """`result`, once `settle` has waited for this rank's device; or that it waited in vain."""
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
