"""Publishes the checkpoints that appear in a folder: the driver of watch_machine.py, for unmodified trainers."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from typing import assert_never

import msgspec

from weightbus.control.log import get_log
from weightbus.control.protocol import RefusalCode, WeightbusError
from weightbus.control.server import (
    CHECKPOINTS,
    LOOKS_FAILED,
    PUBLISH_SECONDS,
    PUBLISHED_VERSION,
    HttpPort,
    Metrics,
    MetricSource,
    Readiness,
)
from weightbus.dataplane.errors import DataplaneError

from ..checkpoints import (
    Checkpoint,
    CheckpointSource,
    CorruptCheckpoint,
    Effect,
    FolderChanged,
    FolderResult,
    Inspect,
    Inspected,
    Listed,
    PublishEnded,
    PublishFolder,
    RejectFolder,
    Skip,
    WatchLimits,
    WatchMachine,
    checkpoint_folder as folders,
    open_checkpoint,
    staging_device,
)
from ..machine import BadCheckpoint, ConnectFailed, PublishFailed, PublishRefused, UnfinishedCheckpoint
from ..publish import TrainerAgent
from ..source import SourceError
from .commands import WatchSettings

_log = get_log(__name__)


class WatchStatus(msgspec.Struct, frozen=True):
    """The document at ``/status``."""

    channel: str
    watch: str
    published: int | None
    publishing: str
    reason: str
    """The reason why the last unpublished folder was not published."""


class Watcher:
    """Watches one folder. `run` blocks until `stop`; a publication that runs is carried to its end first."""

    def __init__(self, settings: WatchSettings) -> None:
        """Raises `ConfigurationError` when the device is not here."""
        self.settings = settings
        self._device = staging_device(settings.device)
        self.metrics = Metrics(MetricSource.TRAINER)
        self._machine = WatchMachine(WatchLimits(settle_s=settings.settle_s, stale_s=settings.stale_s))
        self._stopping = threading.Event()
        self._checkpoint: Checkpoint | None = None
        self._source: CheckpointSource | None = None
        self._agent: TrainerAgent | None = None
        self._publishing = ""
        self._reason = "no checkpoint was published yet"
        self._log = _log.bind(channel=settings.channel, watch=str(settings.watch))

    def run(self) -> None:
        """Look at the folder and publish, until `stop`."""
        http = HttpPort(
            self.settings.http_bind,
            self.settings.http_port,
            registry=self.metrics.registry,
            readiness=lambda: Readiness(self._machine.done is not None, self._reason),
            status=self._status,
        )
        http.start()
        self._log.info("watching", http_port=http.port, pattern=self.settings.pattern)
        try:
            while not self._stopping.is_set():
                self.look()
                self._stopping.wait(self.settings.poll_s)
        finally:
            http.stop()
            self._disconnect()

    def stop(self) -> None:
        """Make `run` return. From any thread or signal handler."""
        self._stopping.set()

    def look(self) -> None:
        """Look at the folder once, and carry out all effects that follow."""
        listed = self._listed()
        effects: deque[Effect] = deque(self._machine.handle(listed, time.monotonic()) if listed else ())
        while effects:
            event = self._perform(effects.popleft())
            if event is not None:
                effects.extend(self._machine.handle(event, time.monotonic()))

    def _listed(self) -> Listed | None:
        settings = self.settings
        try:
            found = tuple(folders.listing(settings.watch, settings.subfolder, re.compile(settings.pattern)))
            return Listed(found, folders.latest(settings.watch))
        except (OSError, BadCheckpoint) as error:
            # Nothing is published while it is not known how far the trainer is; what is the matter may be mended.
            self.metrics.add(LOOKS_FAILED, cause="marker" if isinstance(error, BadCheckpoint) else "folder")
            self._note("watch_paused", error=str(error))
            return None

    def _perform(self, effect: Effect) -> Inspected | PublishEnded | None:
        match effect:
            case Inspect():
                return self._inspect(effect.name)
            case PublishFolder():
                return self._publish(effect)
            case Skip():
                self.metrics.add(CHECKPOINTS, outcome="skipped")
                self._log.info("checkpoint_skipped", folder=effect.name, version=effect.version, reason=effect.reason)
            case FolderChanged():
                advice = "what is served is as it was then; save changed weights under another step"
                self._log.info("checkpoint_changed_late", folder=effect.name, version=effect.version, advice=advice)
            case RejectFolder():
                self.metrics.add(CHECKPOINTS, outcome="bad")
                self._note("checkpoint_bad", folder=effect.name, version=effect.version, error=effect.reason)
            case _:  # pragma: no cover
                assert_never(effect)
        return None

    def _inspect(self, name: str) -> Inspected:
        try:
            settings = self.settings
            folder = settings.watch / name / settings.subfolder
            self._checkpoint = open_checkpoint(
                folder, settings.marker, settings.hf_config_dir, dcp=settings.dcp, dcp_prefix=settings.dcp_prefix
            )
        except UnfinishedCheckpoint as error:
            self._log.debug("checkpoint_unfinished", folder=name, reason=error.reason)
            return Inspected(name, FolderResult.UNFINISHED, str(error))
        except BadCheckpoint as error:
            return Inspected(name, FolderResult.BAD, str(error))
        except FileNotFoundError as error:  # it went while it was looked into
            return Inspected(name, FolderResult.UNFINISHED, str(error))
        except OSError as error:
            self.metrics.add(LOOKS_FAILED, cause="checkpoint")
            self._note("checkpoint_not_read", folder=name, error=str(error))
            return Inspected(name, FolderResult.FAILED, str(error))
        return Inspected(name, FolderResult.FINISHED)

    def _publish(self, effect: PublishFolder) -> PublishEnded:
        self._publishing = effect.name
        try:
            return self._attempt(effect)
        except (PublishFailed, ConnectFailed) as error:
            if isinstance(error, PublishRefused) and error.code is RefusalCode.VERSION_NOT_NEWER:
                return PublishEnded(effect.name, FolderResult.OLDER, str(error))
            if isinstance(error.__cause__, CorruptCheckpoint):
                return self._bad(effect, error.__cause__)
            return self._failed(effect, error)
        except (SourceError, DataplaneError, WeightbusError) as error:
            return self._bad(effect, error)
        except Exception as error:  # noqa: BLE001  one checkpoint does not end the watch; it is logged whole
            self._log.exception("unforeseen", folder=effect.name, version=effect.version)
            return self._failed(effect, error)
        finally:
            self._publishing = ""

    def _bad(self, effect: PublishFolder, error: Exception) -> PublishEnded:
        self._disconnect()
        return PublishEnded(effect.name, FolderResult.BAD, f"{type(error).__name__}: {error}")

    def _failed(self, effect: PublishFolder, error: Exception) -> PublishEnded:
        self.metrics.add(CHECKPOINTS, outcome="failed")
        self._note("checkpoint_not_published", folder=effect.name, version=effect.version, error=str(error))
        self._disconnect()
        return PublishEnded(effect.name, FolderResult.FAILED, str(error))

    def _attempt(self, effect: PublishFolder) -> PublishEnded:
        agent = self._connected()
        committed = agent.committed
        if committed is not None and committed >= effect.version:
            return PublishEnded(effect.name, FolderResult.OLDER, f"version {committed} is committed in the channel")
        report = agent.publish(effect.version)
        self.metrics.add(CHECKPOINTS, outcome="published")
        self.metrics.set(PUBLISHED_VERSION, effect.version)
        self.metrics.observe(PUBLISH_SECONDS, report.seconds["total"])
        self._reason = f"version {effect.version} is published"
        self._log.info("checkpoint_published", folder=effect.name, version=effect.version, report=report.line())
        return PublishEnded(effect.name, FolderResult.PUBLISHED)

    def _connected(self) -> TrainerAgent:
        """The agent for the checkpoint that was inspected last; a new one when its tensors differ."""
        assert self._checkpoint is not None
        if self._agent and self._source and self._source.fits(self._checkpoint):
            self._source.open(self._checkpoint)
            return self._agent
        checkpoint, self._checkpoint = self._checkpoint, None
        self._disconnect()
        self._checkpoint = checkpoint
        self._source = CheckpointSource(checkpoint, self._device)
        self._agent = TrainerAgent.connect(self._source, settings=self.settings)
        return self._agent

    def _disconnect(self) -> None:
        if self._agent is not None:
            self._agent.close()
        if self._source is not None:
            self._source.close()
        if self._checkpoint is not None:
            self._checkpoint.close()
        self._agent = self._source = self._checkpoint = None

    def _note(self, event: str, **what: object) -> None:
        """Log an event and keep it for the status. A repeated event is logged at DEBUG."""
        reason = _printable(f"{event}: {what.get('error', '')}")
        repeated, self._reason = reason == self._reason, reason
        self._log.log(logging.DEBUG if repeated else logging.WARNING, event, **what)

    def _status(self) -> bytes:
        settings = self.settings
        return msgspec.json.encode(
            WatchStatus(
                settings.channel,
                _printable(str(settings.watch)),
                self._machine.done,
                _printable(self._publishing),
                self._reason,
            )
        )


def _printable(text: str) -> str:
    """`text` without the surrogates of file names that are no UTF-8, which JSON cannot carry."""
    return text.encode("utf-8", "backslashreplace").decode()
