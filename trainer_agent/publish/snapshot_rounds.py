"""Rounds whose weights come from a snapshot: of new versions, and of the last one, for engines that come later."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from weightbus.control.log import get_log
from weightbus.control.machine import LENT, ChannelView, parse
from weightbus.control.protocol import WeightbusError

from ..machine import EndReason, Mode, PublishReport, RoundResult
from ..source import Source
from .background_publisher import End
from .bucket_staging import BucketStaging, StagingPool
from .driver import PublicationDriver
from .publisher_context import PublisherContext
from .rank_commands import CommandedRanks
from .snapshot import Store, StoredWeights

_log = get_log(__name__)


class Times(NamedTuple):
    """What a training loop gave for a snapshot, in seconds."""

    snapshot: float
    stood: float


class SnapshotRounds:
    """Driven with the leader's bus, senders and slots, and weights of their own.

    Implements `background.Latecomers`, too.
    """

    def __init__(self, outfit: PublisherContext, pool: StagingPool, source: Source, times: dict[int, Times]) -> None:
        settings, staging = outfit.settings, outfit.staging
        self.stores = [
            Store(staging.manifest, source.device, settings.snapshot_memory) for _ in range(settings.snapshots)
        ]
        self.look_s = settings.catch_up_s
        self._outfit, self._times = outfit, times
        self._warned: set[str] = set()
        """Why engines that are behind were not looked for, as far as that was said."""
        self._outfits: list[PublisherContext] = []
        for store in self.stores:
            stored = StoredWeights(source, store)
            ranks = CommandedRanks(stored)
            own = BucketStaging(stored, staging.manifest, pool, ranks, staging.head_dim)
            self._outfits.append(msgspec.structs.replace(outfit, ranks=ranks, staging=own, mode=Mode.SNAPSHOT))

    def publish(self, version: int, buffer: int) -> End:
        """Drive it to its end."""
        took = self._times.pop(version)
        verdict, report, cause = self._run(PublicationDriver(self._own(buffer), version, stood_s=took.stood), buffer)
        report = msgspec.structs.replace(report, seconds={"snapshot": took.snapshot, **report.seconds})
        log_end(verdict, report)
        return verdict, report, cause

    def behind(self, version: int) -> bool:
        """Whether an engine is here without it, and nobody is about to bring it anything."""
        settings = self._outfit.settings
        try:
            known = parse(self._outfit.bus.status(settings.request_timeout_s)).channels.get(settings.channel)
        except WeightbusError as error:
            self._warn(str(error))
            return False
        return known is not None and known.lease is None and bool(behind_in(known, version))

    def bring(self, version: int, buffer: int) -> None:
        """Drive it to those who lack it. How that ended is in the log."""
        verdict, report, _ = self._run(PublicationDriver(self._own(buffer), version, catch_up=True), buffer)
        log_end(verdict, report)

    def _warn(self, error: str) -> None:
        """Once for each reason: it is looked again in a moment, and the reason may stay."""
        if error not in self._warned and len(self._warned) < _REASONS:
            self._warned.add(error)
            _log.warning("not_looked_for_latecomers", error=error, advice=_ADVICE)

    def _own(self, buffer: int) -> PublisherContext:
        own = self._outfits[buffer]
        own.boot = self._outfit.boot
        return own

    def _run(self, drive: PublicationDriver, buffer: int) -> End:
        try:
            verdict = drive.run()
        except Exception as error:  # noqa: BLE001  it is logged there, and is what the handle raises
            verdict = drive.fail(error)
        self._outfit.boot = self._outfits[buffer].boot
        return verdict, drive.report(verdict), drive.cause


def behind_in(channel: ChannelView | None, version: int) -> tuple[str, ...]:
    """The engines of `channel` that are here and could take its committed version, if that is `version`.

    Who has given its memory back is brought the next one.
    """
    if channel is None or channel.committed is None or channel.committed.version != version:
        return ()
    return tuple(
        name
        for name, engine in channel.engines.items()
        if engine.state not in _NOT_BROUGHT and engine.version != version
    )


def log_end(verdict: RoundResult, report: PublishReport) -> None:
    """One line for each publication."""
    _log.log(
        _LEVELS.get(verdict.ending, _ERROR),
        "publication_over",
        channel=report.channel,
        version=report.version,
        mode=report.mode.value,
        ending=verdict.ending.value,
        reason=verdict.reason,
        seconds=round(report.seconds.get("total", 0.0), 3),
    )


_REASONS: Final = 64
"""Of so many is warned at most: some name what changes."""
_ADVICE: Final = (
    "engines that come later are not brought this version meanwhile: see whether `weightbus status` answers here, and"
    " whether the coordinator is of the same release"
)
_NOT_BROUGHT: Final = frozenset({"lost", LENT})
_INFO: Final = 20
_WARNING: Final = 30
_ERROR: Final = 40
_LEVELS: Final = {EndReason.COMMITTED: _INFO, EndReason.ABORTED: _WARNING, EndReason.LEASE_BUSY: _WARNING}
