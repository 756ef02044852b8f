"""Resync from files: looks for the committed version among those that a trainer keeps, and drives `Resync`."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final

from weightbus.control.bus import BusClient
from weightbus.control.log import get_log
from weightbus.control.machine import parse
from weightbus.control.protocol import ConfigurationError, Digest, HeldVersion, ToEngine, Version, WeightbusError
from weightbus.dataplane.processes import SerialCalls
from weightbus.dataplane.transports.disk import SavedVersion, place_of

from ..machine import Resync, ServerView
from .operation_executor import OperationExecutor
from .settings import EngineAgentSettings

_STATUS_S: Final = 10.0

_log = get_log(__name__)


class FileResync:
    """The resync of one sidecar. `next` is called by its main thread, again and again."""

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
        except WeightbusError as error:
            _log.warning("saved_version_not_looked_for", reason=str(error))
            return None
        committed = channel.committed if channel else None
        if committed is None:
            return None
        place = place_of(self._root, self._channel, committed.version)
        found = SavedVersion.read(place)
        if found is not None and (found.notes.channel, found.notes.table) == (self._channel, committed.table):
            return found
        if self._said != committed.table:
            self._said = committed.table
            reason = "other weights are there" if found else "there is none"
            _log.warning("saved_version_not_found", version=committed.version, folder=str(place), reason=reason)
        return None
