"""Polls the server: whether it is there, and still the same process generation. Reports changes only.

The label is asked for, which is answered without the workers: a server that is busy loading is not lost. A label that
this sidecar has not set, or a process that ended, means another process generation even if no poll ever failed. A
server of which a worker has died still answers for seconds, until it ends: it is reported gone at once.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

from ..engines import Engine, EngineFacts, start_time
from ..errors import ServerError, ServerSilent
from ..machine import ServerFound, ServerGone

PATIENCE: Final = 3
"""Polls without an answer, or broken connections, before the server counts as gone."""
_RETRY_S: Final = 0.2
_WORKERS_S: Final = 0.2
"""Seconds between two looks whether all workers live, where they can be seen."""
_START_S: Final = 3.0
"""A server that starts answers its health check with 503 at once; one that is paused does not answer it at all."""


class ServerMonitor:
    """One thread from `start` to `stop`. `report` is called on it."""

    def __init__(
        self,
        server: Engine,
        report: Callable[[ServerFound | ServerGone], None],
        poll_s: float = 1.0,
        timeout_s: float = 5.0,
    ) -> None:
        self._server = server
        self._report = report
        self._poll_s = poll_s
        self._timeout_s = timeout_s
        self._known: EngineFacts | None = None
        self._workers: dict[int, int] = {}
        """Start time of each worker of this process generation, by process id."""
        self._up = False
        self._misses = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server-watch", daemon=True)
        self.failure: BaseException | None = None
        """The error that ended the thread, if one did."""

    def start(self) -> None:
        """Begin to poll."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(self._timeout_s + _START_S + 1)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.poll()
                hurry = self._up and self._misses
                self._rest(min(self._poll_s, _RETRY_S) if hurry else self._poll_s)
        except BaseException as error:
            self.failure = error
            raise

    def _rest(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self._stopping.wait(min(left, _WORKERS_S)):
            if self._worker_died():
                return

    def poll(self) -> None:
        """Look once."""
        if self._worker_died():
            return
        try:
            if not self._up or self._process_ended() or self._server.label(self._timeout_s) != self._server.last_label:
                self._find()
            self._misses = 0
        except ServerError as error:
            self._missed(error)

    def _process_ended(self) -> bool:
        process = self._known.process if self._known else None
        return process is not None and start_time(process[0]) != process[1]

    def _worker_died(self) -> bool:
        """Whether a worker has died, after which the server will end."""
        if self._process_ended():
            self._workers = {}
        died = [pid for pid, started in self._workers.items() if start_time(pid) != started]
        if died and self._up:
            self._up = False
            reason = f"its worker has died, process {died[0]}"
            self._server.abandon(reason)
            self._report(ServerGone(reason))
        return bool(died)

    def _find(self) -> None:
        """Read the facts. A new process generation counts once its start is over: pausing its warm-up would end it."""
        facts = self._server.identify(self._timeout_s)
        if self._known is None or facts.identity != self._known.identity:
            self._started()
            self._workers = dict(self._server.workers())
        self._known, self._up = facts, True
        self._report(ServerFound(facts.identity, facts.label, facts.model_path, facts.undefined))

    def _started(self) -> None:
        try:
            self._server.alive(_START_S)
        except ServerSilent:
            return  # paused, or busy; in any case not starting

    def _missed(self, error: ServerError) -> None:
        self._misses += 1
        ended = self._process_ended()
        if self._up and (ended or self._misses >= PATIENCE):
            self._up = False
            self._report(ServerGone(str(error)))
