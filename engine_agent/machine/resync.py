"""Resync from files: an engine that lacks the committed version, and that no round includes, loads it from disk.

The sidecar runs a round with itself: the engine machine gets its commands (`Prepare`, `Pause`, `Transfer`) at the
present epoch, and carries them out under all its rules; the coordinator takes the replies for late ones. In the end the
engine has the committed version, reports it, and is told to serve it. Any round of the coordinator has a higher epoch,
and ends this one.

Pure: the state of the engine and the time in, the next command out.
"""

from __future__ import annotations

import enum
from typing import Final

from weightbus.control.protocol import (
    Abort,
    Channel,
    Endpoint,
    Epoch,
    HeldVersion,
    Pause,
    PauseMode,
    Policy,
    Prepare,
    Step,
    ToEngine,
    Transfer,
    TransportKind,
)

from .engine_machine import ServerView

STEP_S: Final = 120.0
"""Deadline of each step but the load."""
LOAD_S: Final = 1800.0
AGAIN_S: Final = 60.0
"""Seconds to the next attempt after a failed one."""
_SETTLE_S: Final = 2.0
"""Seconds without an operation or progress after which a step counts as failed."""
SAVED: Final = "saved"
"""`Endpoint.group` of a version that is on disk already."""


class ResyncStage(enum.Enum):
    """Progress of a resync."""

    WATCHING = "watching"
    """The engine has the committed version, or a round may still bring it."""
    LOOKING = "looking"
    """The version is searched for in the folder."""
    LOADING = "loading"
    """The engine carries out the commands."""


class Resync:
    """The resync of one engine. Drive it from one thread."""

    def __init__(self, channel: str, after_s: float) -> None:
        """A resync begins after `after_s` seconds without a round."""
        self.stage = ResyncStage.WATCHING
        self._channel = Channel(channel)
        self._after_s = after_s
        self._lacking_since: float | None = None
        self._not_before = float("-inf")
        self._epoch = Epoch(0)
        self._held: HeldVersion | None = None
        self._ahead: list[tuple[Step, Pause | Transfer]] = []
        """Commands that follow, each with the step that the engine must have reached."""
        self._until = 0.0
        self._idle_since: float | None = None
        self._known: int | None = None
        """The newest version known while the server had its memory: only a later one makes it resume its memory."""

    def looks(self, view: ServerView, committed: int | None, now: float) -> bool:
        """Whether to look for the committed version now. `found` or `missed` follows."""
        if self.stage is not ResyncStage.WATCHING:
            return False
        if self._known is None or not view.memory_released:
            there = (committed, view.held.version if view.held else None)
            self._known = max((each for each in there if each is not None), default=None)
        if not self._lacks(view, committed):
            self._lacking_since = None
            return False
        if self._lacking_since is None:
            self._lacking_since = now
        if now < max(self._lacking_since + self._after_s, self._not_before):
            return False
        self.stage = ResyncStage.LOOKING
        return True

    def missed(self, now: float) -> None:
        """Note that the folder lacks the version."""
        self._end(now, self._after_s)

    def found(self, held: HeldVersion, folder: str, view: ServerView, now: float) -> ToEngine | None:
        """Begin with the committed version in `folder`; returns the first command."""
        if not self._lacks(view, held.version):
            self._end(now, 0.0)
            return None
        self.stage, self._held, self._epoch = ResyncStage.LOADING, held, view.epoch
        prepare = Prepare(
            channel=self._channel,
            epoch=self._epoch,
            version=held.version,
            manifest=held.manifest,
            table=held.table,
            transport=TransportKind.DISK,
            policy=Policy(),
            deadline_s=STEP_S,
        )
        pause = Pause(
            channel=self._channel, epoch=self._epoch, mode=PauseMode.RETRACT, lease_s=LOAD_S, deadline_s=STEP_S
        )
        transfer = Transfer(
            channel=self._channel,
            epoch=self._epoch,
            version=held.version,
            manifest=held.manifest,
            table=held.table,
            offer=Endpoint(transport=TransportKind.DISK, address=folder, group=SAVED),
            rank_offset=0,
            deadline_s=LOAD_S,
        )
        self._ahead = [(Step.PREPARE, pause), (Step.PAUSE, transfer)]
        return self._go(prepare, now)

    def step(self, view: ServerView, now: float) -> ToEngine | None:
        """The next command, if it is time for one."""
        if self.stage is not ResyncStage.LOADING:
            return None
        if view.epoch != self._epoch or not view.up or view.held == self._held:
            self._end(now, AGAIN_S)  # a round of the coordinator, another server, or the end
            return None
        if not view.doing and self._ahead and view.reached is self._ahead[0][0]:
            return self._go(self._ahead.pop(0)[1], now)
        if view.doing:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        idle = self._idle_since is not None and now > self._idle_since + _SETTLE_S
        return self._give_up(now) if idle or now > self._until else None

    def _lacks(self, view: ServerView, committed: int | None) -> bool:
        """Whether the engine is idle, in no round, and has an older version than the committed one, or none.

        A server that has released its memory waits for a version that was not committed then.
        """
        if committed is None or not view.up or view.epoch <= 0 or view.doing or view.reached is not None:
            return False
        if view.memory_released and self._known is not None and committed <= self._known:
            return False
        return view.held is None or view.held.version < committed

    def _give_up(self, now: float) -> Abort:
        self._end(now, AGAIN_S)
        return Abort(
            channel=self._channel, epoch=self._epoch, reason="the saved version was not loaded", deadline_s=STEP_S
        )

    def _go(self, command: Prepare | Pause | Transfer, now: float) -> ToEngine:
        self._until, self._idle_since = now + command.deadline_s, None
        return command

    def _end(self, now: float, wait_s: float) -> None:
        self.stage, self._not_before = ResyncStage.WATCHING, now + wait_s
