"""Records in their order: at once for whoever must not go on without one, by a thread of its own for who may.

A version that was proven waits for its commit, and when it is served that is said: to make either durable takes as long
as the commit, and nothing depends on it. Until it is on disk the record is of a worse state than the true one, as after
any write that failed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from weightbus.control.log import get_log

from ..machine import StateRecord

CLOSE_S: Final = 10.0
_LOG: Final = get_log(__name__)


class StateWriter:
    """Used from one thread, but for its own."""

    def __init__(self, write: Callable[[StateRecord], None]) -> None:
        """`write` makes a record durable, or raises `OSError`."""
        self._write = write
        self._turn = threading.Lock()
        """Held by whoever writes."""
        self._bell = threading.Condition()
        self._waiting: StateRecord | None = None
        self._failure: tuple[StateRecord, OSError] | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def now(self, record: StateRecord) -> None:
        """When this returns, `record` is durable. What was to be written late is older, and need not be.

        It waits as long as the disk does: nothing that depends on the record may go on without.
        """
        with self._bell:
            self._waiting = None
        with self._turn:
            self._write(record)
            self._failure = None

    def later(self, record: StateRecord) -> None:
        """Begin to write it, and go on."""
        with self._bell:
            self._waiting = record
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="late-records", daemon=True)
                self._thread.start()
            self._bell.notify()

    def failure(self) -> tuple[StateRecord, OSError] | None:
        """A record that could not be written late, and why; once."""
        found, self._failure = self._failure, None
        return found

    def close(self) -> None:
        """Returns when what was begun is written, or `CLOSE_S` later: a disk that hangs must not hold the sidecar."""
        with self._bell:
            self._closing = True
            self._bell.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                _LOG.warning("record_not_written", waited_s=CLOSE_S, reason="the disk of state_dir does not answer")

    def _run(self) -> None:
        while True:
            with self._bell:
                self._bell.wait_for(lambda: self._waiting is not None or self._closing)
                if self._waiting is None:
                    return
            with self._turn:
                with self._bell:
                    record, self._waiting = self._waiting, None
                self._try(record)

    def _try(self, record: StateRecord | None) -> None:
        if record is None:  # a newer one was written meanwhile
            return
        try:
            self._write(record)
        except OSError as error:
            self._failure = (record, error)
