"""Errors of `TrainerAgent`, by what the training loop can do about them, and the handle that raises them later.

Errors are raised on every rank of the group alike. An exception that a source raises on this rank (source.py) is the
`__cause__` of `SourceFailed`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from weightbus.control.protocol import RefusalCode, WeightbusError

from .events import EndReason
from .publication import PublicationEnd, PublicationResult, PublishReport


class TrainerError(WeightbusError):
    """Base class of the trainer agent's errors."""


class ConnectFailed(TrainerError):
    """The agent could not be started on every rank: the message says what to check."""


class AgentClosed(TrainerError):
    """The agent was closed, or its source broke: connect a new one."""


class EnginesMissing(TrainerError):
    """Fewer engines than wanted could take a version when the wait for them was over.

    `there` names those that could, `missing` the others that have joined, each with its reason.
    """

    def __init__(
        self, wanted: int, waited_s: float, there: tuple[str, ...], missing: dict[str, str], problem: str = ""
    ) -> None:
        """`problem`: why the coordinator could not be asked at last; empty if it could."""
        self.wanted, self.there, self.missing = wanted, there, missing
        others = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        none = "no other has joined the channel: start `weightbus engine-agent` for it beside each server"
        why = problem or (f"not ready: {others}" if others else none)
        super().__init__(
            f"{len(there)} of {wanted} engines were there after {waited_s:g} s ({', '.join(there) or 'none'}); {why}."
            " See `weightbus status` and the logs of the engine agents"
        )


class TooFarAhead(TrainerError):
    """Training from this version would be further ahead of what engines serve than `max_lag` allows.

    Its snapshot is taken and its publication goes on: `handle` awaits it. The agent stays usable; find what keeps
    engines from loading versions (`weightbus status`), then publish again.
    """

    def __init__(self, reason: str, handle: PublishHandle) -> None:
        self.handle = handle
        super().__init__(f"{reason}: see what keeps engines from taking versions, then publish again")


class RollbackRefused(TrainerError):
    """The channel never had that version, or has none above it. Nothing was changed."""

    def __init__(self, channel: str, version: int, reason: str) -> None:
        self.channel = channel
        self.version = version
        super().__init__(f"channel {channel!r} does not go back to version {version}: {reason}")


class BadCheckpoint(TrainerError):
    """A folder on disk is not a publishable checkpoint: the watcher goes on with the next."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}")


class UnfinishedCheckpoint(BadCheckpoint):
    """A part of the checkpoint is missing, and may still come."""


class PublishFailed(TrainerError):
    """The version was not committed; `report` says how far it came."""

    def __init__(self, result: PublicationResult, report: PublishReport) -> None:
        self.result = result
        self.report = report
        super().__init__(f"version {report.version} was not published ({result.ending.value}): {result.reason}")

    @property
    def code(self) -> RefusalCode | None:
        """The coordinator's refusal code, if it gave one."""
        return self.result.code


class PublishRefused(PublishFailed):
    """A retry does not help: `code` says why (version not newer, not allowed)."""


class TrainerNotTrusted(PublishFailed):
    """The coordinator does not trust this trainer's key, or not any more: the message has the command that mends it.

    Publish again then; a version that was committed before the key was taken off the list is recognized.
    """


class ChannelTaken(PublishFailed):
    """The channel belongs to another run: the message names it, and how to take the channel from it.

    Nothing was published, and nothing will be: stop this run, or connect again with ``takeover=True``.
    """


class LeaseBusy(PublishFailed):
    """Another trainer held the channel until the deadline: publish again later."""


class RoundAborted(PublishFailed):
    """The round was aborted: publish again. `report.engines` says which engines are quarantined; others serve."""


class CoordinatorLost(PublishFailed):
    """No answer: publish again; a version that was committed after all is recognized then."""


class SourceFailed(PublishFailed):
    """The weights could not be read: build the source anew, and connect again.

    Engines that hold all of the previous version may serve it.
    """


class WeightsChanged(PublishFailed):
    """The weights changed while `publish` ran: publish again without stepping them."""


class WeightsNotFinite(PublishFailed):
    """Elements are NaN or infinite, which `nonfinite = "refuse"` does not allow; `report.nonfinite` names tensors.

    No engine heard of the version. The agent stays usable: go back to a checkpoint, and publish again.
    """


class ReplicasDiffer(PublishFailed):
    """Ranks hold different replicas of a parameter, which `replicas = "refuse"` does not allow.

    `report.replicas` names tensors and ranks. No round was begun. The agent stays usable: find what lets replicas drift
    apart (a gradient that is not reduced, a random seed, an optimizer's state), make them equal, and publish again.
    """


class Superseded(PublishFailed):
    """A newer snapshot took its place before its round began, as the setting `overlap` allows: nothing to do."""


_BY_ENDING: Final[dict[EndReason, type[PublishFailed]]] = {
    EndReason.ABORTED: RoundAborted,
    EndReason.REFUSED: PublishRefused,
    EndReason.NOT_TRUSTED: TrainerNotTrusted,
    EndReason.CHANNEL_TAKEN: ChannelTaken,
    EndReason.LEASE_BUSY: LeaseBusy,
    EndReason.COORDINATOR_LOST: CoordinatorLost,
    EndReason.SOURCE_FAILED: SourceFailed,
    EndReason.WEIGHTS_CHANGED: WeightsChanged,
    EndReason.NOT_FINITE: WeightsNotFinite,
    EndReason.REPLICAS_DIFFER: ReplicasDiffer,
    EndReason.SUPERSEDED: Superseded,
}


def failure_of(end: PublicationEnd) -> PublishFailed:
    """The error that the end of a version that was not committed stands for."""
    failure = _BY_ENDING.get(end.result.ending, PublishFailed)(end.result, end.report)
    failure.__cause__ = end.cause
    return failure


class PublishHandle:
    """Publication of one snapshot, made by `TrainerAgent.publish`. Dropping the handle does not stop it."""

    def __init__(
        self,
        version: int,
        conclude: Callable[[], PublishReport],
        over: Callable[[], bool] | None = None,
        stood_s: float = 0.0,
    ) -> None:
        self.version = version
        self.stood_s = stood_s
        """Seconds for which `publish` blocked training: for engines to catch up (`max_lag`), or for a free buffer."""
        self._conclude = conclude
        self._over = over
        self._end: PublishReport | PublishFailed | None = None

    def over(self) -> bool:
        """True if `wait` would return at once. Not collective: before `wait`, only rank 0 knows."""
        return self._end is not None or (self._over is not None and self._over())

    def wait(self) -> PublishReport:
        """Block until the publication has ended; return its report or raise its `PublishFailed`. Collective, once.

        Further calls return or raise the same at once, on any rank.
        """
        if self._end is None:
            try:
                self._end = self._conclude()
            except PublishFailed as failure:
                self._end = failure
        if isinstance(self._end, PublishFailed):
            raise self._end
        return self._end
