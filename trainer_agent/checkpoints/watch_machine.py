"""Decides which folder of checkpoints to publish, and when. Pure: events and the time in, effects out.

    Listed -> Inspect -> Inspected -> Publish -> Ended
                                 `-> RejectFolder         `-> Skip, Reject, or the same again later

A folder is inspected when nothing in it has changed for `settle_s`, and again only after a change. The newest complete
checkpoint is published, older ones are skipped. A folder that stays incomplete for `stale_s` is rejected, once.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import assert_never

import msgspec

from weightbus.control.protocol import MAX_VERSION


class Folder(msgspec.Struct, frozen=True):
    """A folder whose name contains a version. Its fingerprint changes with every change of its files."""

    name: str
    version: int
    fingerprint: str


class FolderState(enum.Enum):
    """State of a folder with its current fingerprint."""

    CHANGED = "changed"
    """Not inspected since its last change."""
    LOOKING = "looking"
    """Being inspected or published."""
    UNFINISHED = "unfinished"
    """A part of the checkpoint is missing."""
    DUE_AGAIN = "due again"
    """Its inspection or its publication failed, and is retried."""
    CLOSED = "closed"
    """Published, skipped or rejected. A rejected folder is inspected again when it changes."""


class FolderResult(enum.Enum):
    """Result of an inspection or a publication."""

    FINISHED = "finished"
    UNFINISHED = "unfinished"
    BAD = "bad"
    """The folder can never be published as it is."""
    PUBLISHED = "published"
    OLDER = "older"
    """The channel's committed version is as high, or higher."""
    FAILED = "failed"
    """The inspection or the publication failed, and may succeed later."""


class Listed(msgspec.Struct, frozen=True):
    """The folders found. `latest` is the version in the trainer's own marker, None without a marker."""

    folders: tuple[Folder, ...]
    latest: int | None = None


class _Result(msgspec.Struct, frozen=True):
    name: str
    verdict: FolderResult
    reason: str = ""


class Inspected(_Result, frozen=True):
    """Result of `Inspect`."""


class PublishEnded(_Result, frozen=True):
    """Result of `PublishFolder`."""


Event = Listed | Inspected | PublishEnded


class Inspect(msgspec.Struct, frozen=True):
    """Check that the folder is a complete checkpoint, and answer with `Inspected`."""

    name: str


class PublishFolder(msgspec.Struct, frozen=True):
    """Publish the folder as `version`, and answer with `PublishEnded`."""

    name: str
    version: int


class Skip(msgspec.Struct, frozen=True):
    """The folder is not published, because a later version is. Once for each folder."""

    name: str
    version: int
    reason: str


class RejectFolder(msgspec.Struct, frozen=True):
    """The folder is no publishable checkpoint. Once for each state of the folder."""

    name: str
    version: int
    reason: str


class FolderChanged(msgspec.Struct, frozen=True):
    """The folder changed after its publication, which has no effect: versions never change. Reported once."""

    name: str
    version: int


Effect = Inspect | PublishFolder | Skip | RejectFolder | FolderChanged


class WatchLimits(msgspec.Struct, frozen=True):
    """Waiting times of the watcher, in seconds."""

    settle_s: float = 5.0
    stale_s: float = 600.0
    retry_s: float = 5.0
    """Delay before the first retry of a failed inspection or publication; doubled each time up to `longest_retry_s`."""
    longest_retry_s: float = 120.0


class _Entry(msgspec.Struct):
    folder: Folder
    since: float
    state: FolderState = FolderState.CHANGED
    reason: str = ""
    due: float = 0.0
    failures: int = 0
    published: bool = False
    """True if this watcher published the folder with its current fingerprint."""


class WatchMachine:
    """Decisions for one watched folder. One inspection or publication runs at a time."""

    def __init__(self, limits: WatchLimits) -> None:
        self.limits = limits
        self.done: int | None = None
        """The highest version that is published, by this watcher or another trainer."""
        self._entries: dict[str, _Entry] = {}
        self._latest: int | None = None

    def handle(self, event: Event, now: float) -> tuple[Effect, ...]:
        """The effects of `event`."""
        match event:
            case Listed():
                self._latest = event.latest
                late = self._take(event.folders, now)
                return (*late, *self._close_old(), *self._close_stale(now), *self._choose(now))
            case Inspected():
                return self._inspected(event, now)
            case PublishEnded():
                return (*self._ended(event, now), *self._close_old())
            case _:  # pragma: no cover
                assert_never(event)

    def _take(self, folders: Sequence[Folder], now: float) -> tuple[Effect, ...]:
        """Update the entries from a listing; the effects report folders that changed after their publication."""
        known, self._entries = self._entries, {}
        late: list[Effect] = []
        for folder in sorted(folders, key=lambda each: (each.version, each.name)):
            entry = known.get(folder.name)
            if entry is None or (entry.folder != folder and entry.state is not FolderState.LOOKING):
                settled = entry is not None and entry.state is FolderState.CLOSED and not entry.reason
                if entry is not None and entry.published:
                    late.append(FolderChanged(folder.name, folder.version))
                entry = _Entry(folder, now, FolderState.CLOSED if settled else FolderState.CHANGED)
            self._entries[folder.name] = entry
        return tuple(late)

    def _choose(self, now: float) -> tuple[Effect, ...]:
        if any(entry.state is FolderState.LOOKING for entry in self._entries.values()):
            return ()
        for entry in reversed(self._entries.values()):
            if not self._may_look(entry, now):
                continue
            if entry.folder.version > MAX_VERSION:
                return (self._reject(entry, f"a version is at most {MAX_VERSION}: take the step for its name"),)
            twin = self._twin(entry)
            if twin:
                return (self._reject(entry, f"{twin!r} has the same version: give every checkpoint a step of its own"),)
            entry.state = FolderState.LOOKING
            return (Inspect(entry.folder.name),)
        return ()

    def _may_look(self, entry: _Entry, now: float) -> bool:
        if self._latest is not None and entry.folder.version > self._latest:
            return False
        if entry.state is FolderState.DUE_AGAIN:
            return now >= entry.due
        return entry.state is FolderState.CHANGED and now >= entry.since + self.limits.settle_s

    def _twin(self, entry: _Entry) -> str:
        """An earlier folder of the same version."""
        same = [each for each in self._entries.values() if each.folder.version == entry.folder.version]
        return "" if same[0] is entry else same[0].folder.name

    def _inspected(self, event: Inspected, now: float) -> tuple[Effect, ...]:
        entry = self._entries[event.name]
        if event.verdict is FolderResult.FINISHED:
            return (PublishFolder(event.name, entry.folder.version),)
        if event.verdict is FolderResult.BAD:
            return (self._reject(entry, event.reason),)
        if event.verdict is FolderResult.FAILED:
            return self._again(entry, now)
        entry.state, entry.reason = FolderState.UNFINISHED, event.reason
        return ()

    def _ended(self, event: PublishEnded, now: float) -> tuple[Effect, ...]:
        entry = self._entries[event.name]
        match event.verdict:
            case FolderResult.PUBLISHED | FolderResult.OLDER:
                self.done = max(entry.folder.version, self.done or 0)
                entry.state, entry.reason = FolderState.CLOSED, ""
                if event.verdict is FolderResult.PUBLISHED:
                    entry.published = True
                    return ()
                return (Skip(event.name, entry.folder.version, event.reason),)
            case FolderResult.BAD:
                return (self._reject(entry, event.reason),)
            case _:
                return self._again(entry, now)

    def _again(self, entry: _Entry, now: float) -> tuple[Effect, ...]:
        """What was not read says nothing of the folder, whose fingerprint need not change for another look."""
        wait_s = min(self.limits.retry_s * 2**entry.failures, self.limits.longest_retry_s)
        entry.failures += 1
        entry.state, entry.due = FolderState.DUE_AGAIN, now + wait_s
        return ()

    def _close_old(self) -> tuple[Effect, ...]:
        skipped: list[Effect] = []
        for entry in self._entries.values():
            old = self.done is not None and entry.folder.version <= self.done
            if old and entry.state not in (FolderState.CLOSED, FolderState.LOOKING):
                entry.state, entry.reason = FolderState.CLOSED, ""
                reason = f"version {self.done} is published"
                skipped.append(Skip(entry.folder.name, entry.folder.version, reason))
        return tuple(skipped)

    def _close_stale(self, now: float) -> tuple[Effect, ...]:
        stale = [
            entry
            for entry in self._entries.values()
            if entry.state is FolderState.UNFINISHED and now >= entry.since + self.limits.stale_s
        ]
        return tuple(
            self._reject(entry, f"nothing changed for {self.limits.stale_s:g} s: {entry.reason}") for entry in stale
        )

    def _reject(self, entry: _Entry, reason: str) -> RejectFolder:
        entry.state, entry.reason = FolderState.CLOSED, reason
        return RejectFolder(entry.folder.name, entry.folder.version, reason)
