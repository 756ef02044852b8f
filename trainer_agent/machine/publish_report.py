"""What `publish` returns: how one version got to the engines, the same on every rank of the trainer."""

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
"""Keys of `PublishReport.seconds`, in the order of the round. Up to ``announce`` and ``total`` the trainer's clock,
the others the coordinator's; ``snapshot`` is how long a training loop stood still for one, ``save`` how long files were
waited for, ``send`` the trainer's half of ``transfer``. ``make`` is how long it took to begin with what engines read of
quantized weights, and with the digests of what they read in place: a GPU goes on with both meanwhile, and ``digest`` is
how long they were waited for after ``acquire``; a CPU has made them by then. Of a version that was announced before it
was digested, ``digest`` lies beside ``prepare`` and ``transfer``. A phase that was not reached is absent."""


class Mode(enum.StrEnum):
    """From where a version is published."""

    LIVE = "live"
    """From the parameters: they must not change until the engines have them, and `publish` returns then."""
    SNAPSHOT = "snapshot"
    """From a copy: `publish` returns when it is taken, and the rest happens behind."""


class PublishReport(msgspec.Struct, frozen=True, kw_only=True):
    """One publication, after it ended."""

    channel: str
    version: int
    epoch: int
    outcome: Outcome
    reason: str = ""
    mode: Mode = Mode.LIVE
    attempts: int = 1
    """Rounds begun; more than one when a coordinator was restarted meanwhile."""
    tensors: int = 0
    buckets: int = 0
    bytes: int = 0
    """Of one copy of the version. What each engine took is in its own report."""
    seconds: dict[str, float] = {}
    engines: tuple[EngineReport, ...] = ()
    manifest: str = ""
    table: str = ""
    """Digest of the digest table: names exactly these bits."""
    saved: str = ""
    """Folder of the version's checkpoint, where it was kept as files."""
    save_error: str = ""
    """Why it was not, though it should have been. The version is none the worse."""

    @classmethod
    def unpublished(cls, channel: str, version: int, mode: Mode, reason: str) -> Self:
        """Of a version whose round never began."""
        return cls(channel=channel, version=version, epoch=0, outcome=Outcome.ABORTED, mode=mode, reason=reason)

    @property
    def committed(self) -> bool:
        """The version is durable, and at least the engines that were required serve it."""
        return self.outcome is Outcome.COMMITTED

    def engines_by(self, outcome: Outcome) -> tuple[str, ...]:
        """Names of the engines that ended like that."""
        return tuple(engine.engine for engine in self.engines if engine.outcome is outcome)

    def line(self) -> str:
        """One line for a training log."""
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
        """Add the time inside to `name`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def total(self) -> float:
        """Seconds since this stopwatch was made."""
        return time.monotonic() - self._started
