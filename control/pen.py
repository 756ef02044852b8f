"""One record is written at a time, and whether the journal takes any. Pure.

While `writing` is set, the coordinator takes up nothing new: whatever an answer or a command depends on is durable
before it leaves.
"""

from __future__ import annotations

from typing import NamedTuple

from .effects import AnyRecord, JournalChanged, Persist, Probe
from .errors import IllegalMove, InvariantBroken
from .events import Persisted, PersistFailed, Token
from .ids import Channel
from .outbox import Outbox


class Written(NamedTuple):
    """How a write went."""

    record: AnyRecord
    channel: Channel | None
    failed: str | None
    """Why the record is not durable."""


class Pen:
    """Asks the driver to write, and takes its answers."""

    def __init__(self, out: Outbox, probe_s: float) -> None:
        self.writing: tuple[Persist, Channel | None] | None = None
        self.read_only = False
        self.probe_at: float | None = None
        """When a journal that takes no writes is tried again."""
        self._out = out
        self._probe_s = probe_s
        self._tokens = 0

    def write(self, record: AnyRecord, channel: Channel | None) -> None:
        """Make `record` durable; `channel` waits for it."""
        if self.writing:
            raise InvariantBroken(f"{record} was to be written while {self.writing[0].record} still is")
        self._tokens += 1
        persist = Persist(token=Token(self._tokens), record=record)
        self.writing = (persist, channel)
        self._out.persist(persist)

    def written(self, event: Persisted | PersistFailed, now: float) -> Written:
        """The driver says how it went. Raises `IllegalMove` on a token not given out."""
        if self.writing is None or self.writing[0].token != event.token:
            expected = self.writing[0].token if self.writing else "none"
            raise IllegalMove("coordinator", f"writing {expected}", f"{type(event).__name__}({event.token})")
        (persist, channel), self.writing = self.writing, None
        failed = event.reason if isinstance(event, PersistFailed) else None
        if (failed is not None) is not self.read_only:
            self.read_only = failed is not None
            self._out.observe(JournalChanged(writable=not self.read_only, reason=failed or ""))
        self.probe_at = now + self._probe_s if self.read_only else None
        return Written(persist.record, channel, failed)

    def tick(self, now: float) -> None:
        """Time has passed: try again whether the journal takes a record."""
        if self.probe_at is not None and now >= self.probe_at:
            self.probe_at = now + self._probe_s
            self.write(Probe(), None)
