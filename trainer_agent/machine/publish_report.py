"""Report of one publication, returned by `publish`; the same on every rank of the trainer."""

from __future__ import annotations

import enum
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final, Self

import msgspec

from weightbus.control.protocol import EngineReport, Outcome
from weightbus.control.terminal_text import terminal_safe

PHASES: Final = (
    "snapshot",
    "make",
    "acquire",
    "assemble",
    "digest",
    "announce",
    "prepare",
    "offer",
    "pause",
    "transfer",
    "verify",
    "commit",
    "resume",
    "save",
    "total",
)
"""Keys of `PublishReport.seconds`, in the order of the round. A phase that was not reached is absent.

The trainer's clock measures ``snapshot`` to ``announce``, ``save``, ``send`` and ``total``; the coordinator's the
others. ``snapshot``: the training loop was blocked to copy the weights. ``make``: launching the preparation of what
engines read of quantized weights and the digests of memory that engines read in place; a GPU works on both afterwards,
and ``digest`` is the time spent waiting for them after ``acquire``, while a CPU has done both when ``make`` ends. With
deferred digests ``digest`` overlaps ``prepare`` and ``transfer``. ``save``: waiting for checkpoint files. ``send``: the
trainer's half of ``transfer``.
"""


class Mode(enum.StrEnum):
    """Memory from which a version is published."""

    LIVE = "live"
    """The parameters: they must not change until `publish` returns, when engines have them."""
    SNAPSHOT = "snapshot"
    """A copy: `publish` returns when the copy is taken, and the round runs in the background."""


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """One publication, after it has ended."""

    channel: str
    version: int
    epoch: int
    outcome: Outcome
    reason: str = ""
    mode: Mode = Mode.LIVE
    attempts: int = 1
    """Number of rounds begun; more than one if the coordinator restarted meanwhile."""
    tensors: int = 0
    buckets: int = 0
    bytes: int = 0
    """Bytes of one copy of the version. The bytes that each engine received are in its own report."""
    seconds: dict[str, float] = {}
    engines: tuple[EngineReport, ...] = ()
    manifest: str = ""
    table: str = ""
    """Digest of the digest table: identifies the bits of the version."""
    saved: str = ""
    """Folder of the version's checkpoint if one was kept, else empty."""
    save_error: str = ""
    """Why no checkpoint was kept although one was due. The publication is not affected."""

    @classmethod
    def unpublished(cls, channel: str, version: int, mode: Mode, reason: str) -> Self:
        """Report of a version without a round."""
        return cls(channel=channel, version=version, epoch=0, outcome=Outcome.ABORTED, mode=mode, reason=reason)

    @property
    def committed(self) -> bool:
        """True if the version is durable and at least the required engines serve it."""
        return self.outcome is Outcome.COMMITTED

    def engines_by(self, outcome: Outcome) -> tuple[str, ...]:
        """Names of the engines with that outcome."""
        return tuple(engine.engine for engine in self.engines if engine.outcome is outcome)

    def line(self) -> str:
        """The report as one line for a training log."""
        serving = len(self.engines_by(Outcome.COMMITTED))
        phases = " ".join(f"{phase}={self.seconds[phase]:.3f}s" for phase in PHASES if phase in self.seconds)
        size = f"{self.bytes / 1e6:.1f} MB in {self.buckets} buckets"
        how = " from a snapshot" if self.mode is Mode.SNAPSHOT else ""
        why = f" ({self.reason})" if self.reason else ""
        kept = f", saved {self.saved}" if self.saved else f", not saved: {self.save_error}" if self.save_error else ""
        ending = f"{self.outcome.value}{how}{why}"
        return terminal_safe(
            f"version {self.version} {ending}: {size}, {serving}/{len(self.engines)} engines, {phases}{kept}"
        )


class Stopwatch:
    """Seconds by phase, on this process's clock."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None, None, None]:
        """Add the time spent in the block to phase `name`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def total(self) -> float:
        """Seconds since the stopwatch was created."""
        return time.monotonic() - self._started
