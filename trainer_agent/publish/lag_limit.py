"""Limit on how far training may be ahead of what engines serve (`max_lag`): the rule, and the wait for it.

    lag = the version that training goes on from - the oldest version that a request may be answered with

The coordinator keeps engines that are too far behind the committed version off its ready list (`Policy.max_lag`). The
trainer does the other half: a snapshot's `publish` returns when training from it would not exceed `max_lag`.
"""

from __future__ import annotations

import enum
import time
from typing import Final, Protocol

import msgspec

from weightbus.control.log import get_log
from weightbus.control.machine import LENT, ChannelView, parse
from weightbus.control.protocol import CoordinatorUnreachable, Malformed, RequestRefused

from ..settings import TrainerSettings
from .background_publisher import BackgroundPublisher
from .rank_commands import CommandedRanks, KeepWaiting

_log = get_log(__name__)

_SILENT: Final = frozenset({"lost", "dirty", "pending", LENT, "quarantined"})
"""States of engines, as the status names them, in which an engine answers no request."""


class LagDecision(enum.Enum):
    """What a training loop does now."""

    GO = "go"
    """Train on."""
    WAIT = "wait"
    """Wait: a publication runs that may bring engines closer."""
    TOO_FAR = "too far"
    """Stop: no publication runs that would help, or not in time."""


class LagStatus(msgspec.Struct, frozen=True):
    """Training is too far ahead of what engines serve."""

    version: int
    serving: int | None
    """The oldest version that is served; None if the coordinator did not answer."""
    max_lag: int
    reason: str

    def __str__(self) -> str:
        """Found and expected lag, and the reason."""
        if self.serving is None:
            found = f"what engines serve is not known, version {self.version} would be trained from"
        else:
            lag = self.version - self.serving
            found = f"version {self.version} is {lag} ahead of what engines serve ({self.serving})"
        return f"{found}, max_lag is {self.max_lag}, {self.reason}"


def oldest_served(channel: ChannelView | None, max_lag: int) -> int:
    """The oldest version that a request may be answered with; 0 stands for the weights of a launch.

    An engine in a round counts with the version it had: it may be left out, and go on with that. Engines that are lost
    or quarantined, or more than `max_lag` behind the committed version, receive no requests before they have the next
    one.
    """
    if channel is None or channel.committed is None:
        return 0
    committed = channel.committed.version
    versions = (each.version for each in channel.engines.values() if each.state not in _SILENT)
    return min((committed, *(each for each in versions if each is not None and 0 <= committed - each <= max_lag)))


def lag_decision(version: int, serving: int | None, max_lag: int, *, coming: bool, expired: bool) -> LagDecision:
    """Whether to train from `version`; `serving` is the oldest version served, None if that is unknown.

    `coming`: a publication has not ended. `expired`: no time is left to wait.
    """
    if serving is not None and version - serving <= max_lag:
        return LagDecision.GO
    if expired or (serving is not None and not coming):
        return LagDecision.TOO_FAR
    return LagDecision.WAIT


class StatusClient(Protocol):
    """The part of control's `BusClient` that is used here."""

    def status(self, deadline_s: float = 10.0) -> bytes:
        """The coordinator's status document."""
        ...


class LagLimit:
    """Blocks one training loop. All methods are called on its thread, on rank 0."""

    def __init__(self, settings: TrainerSettings, coordinator: StatusClient, background: BackgroundPublisher) -> None:
        self._settings = settings
        self._coordinator = coordinator
        self._background = background

    def wait_until_allowed(self, version: int, ranks: CommandedRanks) -> LagStatus | None:
        """Block until training may go on from `version`; returns why if it may not. Collective."""
        max_lag = self._settings.max_lag
        if max_lag is None:
            return None
        deadline = time.monotonic() + self._settings.lag_timeout_s
        while True:
            # Read before the status: the status then includes versions of publications that have ended.
            ended, coming = self._background.ended, self._background.pending > 0
            serving, silence = self._serving(max_lag)
            expired = time.monotonic() >= deadline
            match lag_decision(version, serving, max_lag, coming=coming, expired=expired):
                case LagDecision.GO:
                    return None
                case LagDecision.TOO_FAR:
                    waited = f"after {self._settings.lag_timeout_s:.0f} s (lag_timeout_s)"
                    ahead = LagStatus(
                        version, serving, max_lag, silence or (waited if expired else "and nothing is coming")
                    )
                    _log.error("too_far_ahead", channel=self._settings.channel, reason=str(ahead))
                    return ahead
                case LagDecision.WAIT:
                    ranks.tell(KeepWaiting())
                    left = max(0.0, deadline - time.monotonic())
                    self._background.wait_for_end(ended, min(self._settings.beat_s, left))

    def _serving(self, max_lag: int) -> tuple[int | None, str]:
        try:
            document = self._coordinator.status(self._settings.request_timeout_s)
            return oldest_served(parse(document).channels.get(self._settings.channel), max_lag), ""
        except (CoordinatorUnreachable, RequestRefused, Malformed) as error:
            return None, str(error)
