"""What `TrainerAgent` raises, by what the training loop can do about it. Raised on every rank of the group alike.

    TrainerError
        ConnectFailed           the agent could not be started: the message says what to check
        PublishFailed           the version did not get through; `report` says how far it came
            PublishRefused      asking again does not help: `code` says why (version not newer, not allowed)
            LeaseBusy           another trainer held the channel until the deadline: publish again later
            RoundAborted        the round was called off, engines serve what they served: publish again
            CoordinatorLost     no answer: publish again; a version that was committed after all is then recognized
            SourceFailed        the weights could not be read: build the source anew, and connect again
            WeightsChanged      they were stepped while `publish` ran: publish again, and do not
            Superseded          a newer snapshot took this one's place, as the setting `overlap` allows: nothing to do
        TooFarAhead             engines do not keep up as `max_lag` wants: `handle` is of the version that was taken
        AgentClosed             the agent was closed, or its source broke: connect a new one
        RollbackRefused         the channel never had that version, or has none above it: nothing was changed
        BadCheckpoint           a folder is no checkpoint that can be published: the watcher goes on with the next
            UnfinishedCheckpoint    something of it is missing, and may still come

What a source itself raises on this rank (source.py) is the `__cause__` of `SourceFailed`, where it happened here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from weightbus.control.protocol import RefusalCode, WeightbusError

from .events import EndReason
from .publication import RoundResult
from .publish_report import PublishReport

if TYPE_CHECKING:
    from .publish_handle import PublishHandle


class TrainerError(WeightbusError):
    """Root of the trainer agent's errors."""


class ConnectFailed(TrainerError):
    """The agent could not be started on every rank."""


class AgentClosed(TrainerError):
    """This agent publishes nothing any more."""


class TooFarAhead(TrainerError):
    """Training from this version would be further ahead of what engines serve than `max_lag` allows.

    Its snapshot is taken and its publication goes on: `handle` awaits it. The agent is well; mend what keeps engines
    from taking versions (`weightbus status` says what), then publish again.
    """

    def __init__(self, reason: str, handle: PublishHandle) -> None:
        self.handle = handle
        super().__init__(f"{reason}: see what keeps engines from taking versions, then publish again")


class RollbackRefused(TrainerError):
    """The channel cannot go back to that version. Nothing was changed."""

    def __init__(self, channel: str, version: int, reason: str) -> None:
        self.channel = channel
        self.version = version
        super().__init__(f"channel {channel!r} does not go back to version {version}: {reason}")


class BadCheckpoint(TrainerError):
    """A folder on disk is no checkpoint that can be published."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}")


class UnfinishedCheckpoint(BadCheckpoint):
    """Something of it is missing, and may still come."""


class PublishFailed(TrainerError):
    """The version did not get through."""

    def __init__(self, verdict: RoundResult, report: PublishReport) -> None:
        self.verdict = verdict
        self.report = report
        super().__init__(f"version {report.version} was not published ({verdict.ending.value}): {verdict.reason}")

    @property
    def code(self) -> RefusalCode | None:
        """The coordinator's reason, where it gave one."""
        return self.verdict.code


class PublishRefused(PublishFailed):
    """The coordinator does not allow it, and would not if asked again."""


class LeaseBusy(PublishFailed):
    """Another trainer held the channel until the deadline."""


class RoundAborted(PublishFailed):
    """The round was called off. Engines serve what they served, or are quarantined: `report.engines` says which."""


class CoordinatorLost(PublishFailed):
    """The coordinator did not answer."""


class SourceFailed(PublishFailed):
    """The weights could not be read. Who had all of the version before may serve it: `weightbus status` says so."""


class WeightsChanged(PublishFailed):
    """The weights were not the same when they were read for the second time."""


class Superseded(PublishFailed):
    """A newer snapshot took its place before its round began."""


_BY_ENDING: Final[dict[EndReason, type[PublishFailed]]] = {
    EndReason.ABORTED: RoundAborted,
    EndReason.REFUSED: PublishRefused,
    EndReason.LEASE_BUSY: LeaseBusy,
    EndReason.COORDINATOR_LOST: CoordinatorLost,
    EndReason.SOURCE_FAILED: SourceFailed,
    EndReason.WEIGHTS_CHANGED: WeightsChanged,
    EndReason.SUPERSEDED: Superseded,
    EndReason.INTERNAL: PublishFailed,
}


def raise_for(verdict: RoundResult, report: PublishReport, cause: BaseException | None = None) -> None:
    """Raise what `verdict` stands for; return if it stands for success."""
    if verdict.ending is not EndReason.COMMITTED:
        raise _BY_ENDING[verdict.ending](verdict, report) from cause
