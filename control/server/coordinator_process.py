"""The coordinator as a process: builds bus, journal, machine and HTTP port from settings, and runs them to the end."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Final

from ..bus import RouterBus, ServerKeys
from ..journal import Journal, SqliteJournal
from ..log import get_log
from ..security import keys_folder
from .event_loop import EventLoop
from .http_server import HttpPort, Readiness
from .metrics import Metrics, MetricSource
from .reporter import ObservationReporter, TimedJournal
from .settings import CoordinatorSettings

STALLED_S: Final = 5.0
"""Seconds without a step after which the loop, which steps every second, counts as stuck."""


def read_keys(settings: CoordinatorSettings) -> ServerKeys | None:
    """The coordinator's keys and allow-list; None with ``insecure_loopback``. Raises `PeerKeyError`."""
    return None if settings.insecure_loopback else ServerKeys.read(keys_folder(settings.keys))


class CoordinatorProcess:
    """One coordinator. All sockets are bound and the journal is open once constructed; `run` serves until `stop`."""

    def __init__(self, settings: CoordinatorSettings, journal: Journal | None = None) -> None:
        """`journal`: None opens the SQLite journal of the settings. A given journal is closed by this process too."""
        keys = read_keys(settings)
        metrics = Metrics(MetricSource.COORDINATOR)
        reporter = ObservationReporter(metrics)
        showing = threading.Lock()
        with contextlib.ExitStack() as undo:
            bus = RouterBus(settings.bind, settings.router_port, keys)
            undo.callback(bus.close)
            journal = journal or SqliteJournal(settings.journal)
            undo.callback(journal.close)

            def show() -> None:
                view = self.server.status
                with showing:
                    reporter.show(view)
                    reporter.count_connections(bus.connections)
                    reporter.count_throttled(bus.throttled)

            timed = TimedJournal(journal, metrics)
            self.server = EventLoop(bus, timed, settings.limits(), observe=reporter.observe, keyed=keys is not None)
            self.http = HttpPort(
                settings.http_bind,
                settings.http_port,
                registry=metrics.registry,
                refresh=show,
                readiness=self.readiness,
                status=lambda: self.server.status_json,
                plan=lambda: self.server.plan_json,
            )
            undo.callback(self.http.stop)
            self._undo = undo.pop_all()
        self.router_port = bus.router_port
        self._log = get_log(__name__)
        self._settings = settings
        self._boot = journal.boot
        self._keys = keys

    def run(self) -> None:
        """Serve until `stop`, then release all resources. Raises the error that broke the loop."""
        with self._undo:
            self.http.start()
            self._log.info(
                "coordinator_started",
                boot=self._boot,
                bind=self._settings.bind,
                router_port=self.router_port,
                http=f"http://{self._settings.http_bind}:{self.http.port}",
                journal=self._settings.store or str(self._settings.journal),
                keys="" if self._keys is None else str(self._keys.trust.path),
            )
            self.server.run()
            self._log.info("coordinator_stopped")

    def close(self) -> None:
        """Release all resources without having run."""
        self._undo.close()

    def stop(self) -> None:
        """End `run`; from any thread or signal handler."""
        self.server.stop()

    def reload_allow_list(self) -> None:
        """Read the allow-list now instead of at its next poll. Safe in a signal handler."""
        if self._keys is not None:
            self._keys.trust.expire()
        self.server.reload_allow_list()

    def readiness(self) -> Readiness:
        """Ready while agents are served and a version could be committed."""
        machine = self.server.machine  # another thread's: single values may be read, nothing may be walked
        stuck_s = time.monotonic() - self.server.stepped_at
        if machine.stopping:
            return Readiness(False, "stopping")
        if self._keys is not None and self._keys.trust.problem:
            return Readiness(
                False, "the allow-list cannot be used: no agent is let in until it is right; the log says why"
            )
        if machine.read_only:
            return Readiness(False, "the journal takes no writes: nothing is granted until it does")
        if stuck_s > STALLED_S:
            return Readiness(False, f"the loop has not moved for {stuck_s:.1f} s")
        return Readiness(True, f"boot {machine.boot}, {len(machine.membership)} agents")
