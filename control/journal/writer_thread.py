"""Writes of the journal on a thread of its own: a disk that hangs does not stop the coordinator's loop.

One record is written at a time, as the machine asks for them. The loop waits for its result only a moment, and goes on
with messages and deadlines after that. A write that takes longer than `HUNG_S` is reported as failed, and so are all
later ones until it ends. If it succeeds late, the journal is made to disown the record before anything else is written:
the coordinator has gone on without it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final

import msgspec

from ..machine import AnyRecord
from ..protocol import JournalUnwritable
from .interface import Journal

HUNG_S: Final = 2.0
"""Seconds after which a write counts as failed."""
CHECK_S: Final = 0.25
"""Seconds between two checks of the files while nothing is written, and between two tries to disown a record."""
_CLOSE_S: Final = 1.0


class WriteResult(msgspec.Struct, frozen=True):
    """How a write ended; without an error its record is durable."""

    error: Exception | None
    seconds: float = 0.0


class InlineWriter:
    """Writes on the thread of its caller."""

    hung_s = 0.0

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._result: WriteResult | None = None

    def confirm(self) -> None:
        """Raise what `Journal.check` and `Journal.confirm` raise, but that a disk gives no answer."""
        with contextlib.suppress(JournalUnwritable):  # the next record says so, if it lasts
            self._journal.check()
        self._journal.confirm()

    def begin(self, record: AnyRecord) -> None:
        """Write `record`."""
        self._result = _written(self._journal, record)

    def result(self, _wait_s: float) -> WriteResult | None:
        """The result of the last write."""
        return self._result

    def close(self) -> None:
        """Nothing runs that would have to end."""


class WriterThread:
    """Writes on a thread. `begin`, `result` and `confirm` are called by the loop, and do not wait for a disk."""

    def __init__(self, journal: Journal, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """`wake` is called when a result is there."""
        self._journal, self._wake, self._clock = journal, wake, clock
        self._changed = threading.Condition()
        self._record: AnyRecord | None = None
        """The record that the thread writes."""
        self._since = 0.0
        """Time at which its write began."""
        self._given_up = False
        """True once its write was reported as failed."""
        self._result: WriteResult | None = None
        self._broken: Exception | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def confirm(self) -> None:
        """Raise what the thread has found wrong with the journal, or what `Journal.confirm` raises."""
        if self._broken is not None:
            raise self._broken
        self._journal.confirm()

    def begin(self, record: AnyRecord) -> None:
        """Have `record` written. While an earlier write hangs it fails at once."""
        with self._changed:
            if self._record is not None:
                self._result = WriteResult(self._hung())
                return
            self._record, self._since, self._given_up, self._result = record, self._clock(), False, None
            self._changed.notify_all()

    def result(self, wait_s: float) -> WriteResult | None:
        """The result of the last write, for which `wait_s` are waited; None while there is none yet."""
        with self._changed:
            self._changed.wait_for(lambda: self._result is not None, wait_s)
            if self._result is None and self._clock() >= self._since + HUNG_S:
                self._given_up = True
                self._result = WriteResult(self._hung())
            return self._result

    @property
    def hung_s(self) -> float:
        """Seconds for which a write has hung; 0 if none does."""
        return self._clock() - self._since if self._record is not None and self._given_up else 0.0

    def close(self) -> None:
        """End the thread, if its disk lets it end."""
        with self._changed:
            self._closing, self._wake = True, lambda: None
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)

    @property
    def closed(self) -> bool:
        """True once nothing uses the journal any more."""
        return not self._thread.is_alive()

    def _hung(self) -> JournalUnwritable:
        found = f"has not taken a record for {self._clock() - self._since:.0f} s"
        return JournalUnwritable("the journal", found, "does its disk hang? writing is tried again by itself")

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._record is not None or self._closing, CHECK_S)
                if self._closing:
                    return
                record = self._record
            try:
                self._write(record) if record is not None else self._journal.check()
            except JournalUnwritable:
                continue  # the next record says so, if it lasts
            except Exception as error:  # noqa: BLE001  # raised on the loop
                self._broken = error
                self._wake()
                return

    def _write(self, record: AnyRecord) -> None:
        result = _written(self._journal, record)
        with self._changed:
            if not self._given_up:
                self._record, self._result = None, result
                self._changed.notify_all()
        if not self._given_up:
            self._wake()
            return
        if result.error is None:
            self._disown(record)
        elif not isinstance(result.error, JournalUnwritable):
            raise result.error
        with self._changed:
            self._record = None

    def _disown(self, record: AnyRecord) -> None:
        while not self._closing:
            try:
                self._journal.disown(record)
            except JournalUnwritable:
                time.sleep(CHECK_S)
            else:
                return


def _written(journal: Journal, record: AnyRecord) -> WriteResult:
    begun = time.perf_counter()
    try:
        journal.write(record)
    except Exception as error:  # noqa: BLE001  # handed to the loop, which knows the kinds
        return WriteResult(error)
    return WriteResult(None, time.perf_counter() - begun)
