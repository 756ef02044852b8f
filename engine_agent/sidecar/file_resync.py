"""Resync from files: an engine that lacks the committed version, and that no round includes, loads it from disk.

The sidecar runs a round with itself: the engine machine gets its commands (`Prepare`, `Pause`, `Transfer`) at the
present epoch, and carries them out under all its rules; the coordinator takes the replies for late ones. In the end the
engine has the committed version, reports it, and is told to serve it. Any round of the coordinator has a higher epoch,
and ends this one.
"""

from __future__ import annotations

import enum
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final

from weightbus.control.bus import BusClient
from weightbus.control.log import get_log
from weightbus.control.machine import parse
from weightbus.control.protocol import (
    Abort,
    Channel,
    ConfigurationError,
    Digest,
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
    Version,
    WeightbusError,
)
from weightbus.dataplane.processes import SerialCalls
from weightbus.dataplane.transports.disk import SavedVersion, place_of

from ..machine import ServerView
from .operation_executor import SAVED, OperationExecutor
from .settings import EngineAgentSettings

STEP_S: Final = 120.0
"""Deadline of each step but the load."""
LOAD_S: Final = 1800.0
AGAIN_S: Final = 60.0
"""Seconds to the next attempt after a failed one."""
_SETTLE_S: Final = 2.0
"""Seconds without an operation or progress after which a step counts as failed."""
_STATUS_S: Final = 10.0

_log = get_log(__name__)


class ResyncStage(enum.Enum):
    """Progress of a resync."""

    WATCHING = "watching"
    """The engine has the committed version, or a round may still bring it."""
    LOOKING = "looking"
    """The version is searched for in the folder."""
    LOADING = "loading"
    """The engine carries out the commands."""


class Resync:
    """When one engine resyncs, and its next command: pure, state of the engine and time in. Driven by one thread."""

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


class FileResync:
    """Looks for the version among the files of a trainer, and drives `Resync`. Used by the sidecar's main thread."""

    def __init__(self, root: Path, settings: EngineAgentSettings, worker: OperationExecutor) -> None:
        """Raises `ConfigurationError` when `root` is no folder. One that is missing may still come."""
        if not root.is_dir():
            if root.exists():
                raise ConfigurationError(f"saved_dir = {root} is a file, the trainer's save_dir is expected")
            reason = "no such folder here: trainers make it with the first version that they keep"
            _log.warning("saved_dir_missing", folder=str(root), reason=reason)
        self._root = root
        self._channel = settings.channel
        self._worker = worker
        self._machine = Resync(settings.channel, settings.saved_after_s)
        self._calls = SerialCalls("saved-versions")
        self._look: Future[SavedVersion | None] | None = None
        self._said = ""
        """Digest table of the version that was last reported missing."""

    def next(self, view: ServerView, coordinator: BusClient, now: float) -> ToEngine | None:
        """The next command for the engine machine, as if the coordinator had sent it; None while there is none."""
        if self._look is not None:
            return self._looked(self._look, view, now) if self._look.done() else None
        if self._machine.looks(view, coordinator.committed, now):
            self._look = self._calls.submit(partial(self._search, coordinator))
            return None
        return self._machine.step(view, now)

    def close(self) -> None:
        """Stop looking. A file system that hangs keeps its thread, which is not waited for."""
        self._calls.give_up()

    def _looked(self, look: Future[SavedVersion | None], view: ServerView, now: float) -> ToEngine | None:
        self._look = None
        found = look.result()
        if found is None:
            self._machine.missed(now)
            return None
        self._worker.saved = found
        notes = found.notes
        held = HeldVersion(version=Version(notes.version), manifest=Digest(notes.manifest), table=Digest(notes.table))
        command = self._machine.found(held, str(found.path), view, now)
        if command is not None:
            _log.info("loading_saved_version", version=notes.version, folder=str(found.path))
        return command

    def _search(self, coordinator: BusClient) -> SavedVersion | None:
        """The committed version, if the folder has it unchanged."""
        try:
            channel = parse(coordinator.status(_STATUS_S)).channels.get(self._channel)
            committed = channel.committed if channel else None
            if committed is None:
                return None
            place = place_of(self._root, self._channel, committed.version)
            found = SavedVersion.read(place)
        except (WeightbusError, OSError) as error:
            _log.warning("saved_version_not_looked_for", reason=str(error))
            return None
        if found is not None and (found.notes.channel, found.notes.table) == (self._channel, committed.table):
            return found
        if self._said != committed.table:
            self._said = committed.table
            reason = "other weights are there" if found else "there is none"
            _log.warning("saved_version_not_found", version=committed.version, folder=str(place), reason=reason)
        return None
