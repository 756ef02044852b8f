"""The judge: lost acks and wrong tokens, from records that the campaign made itself and that forget nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ledger import Commits


class Ack(NamedTuple):
    """The trainer was told that `version` is committed; `at` is CLOCK_MONOTONIC."""

    version: int
    at: float


def lost_acks(acks: Sequence[Ack], commits: Commits) -> list[str]:
    """What the trainer was told that does not hold, and what the journal lost or took back."""
    found = list(commits.losses)
    before = 0
    for ack in acks:
        begun = commits.durable.get(ack.version)
        if begun is None:
            found.append(f"version {ack.version} was answered as committed, and is not durable")
        elif begun > ack.at:
            found.append(f"version {ack.version} was answered as committed {begun - ack.at:.3f} s too early")
        if ack.version < before:
            found.append(f"version {ack.version} was answered as committed after {before}")
        before = max(before, ack.version)
    return found


def uncommitted(seen: Mapping[int, float], commits: Commits, launch: int) -> list[str]:
    """Versions, with when their first token came, that were not committed then."""
    found: list[str] = []
    for version, at in seen.items():
        begun = commits.durable.get(version)
        if version == launch or (begun is not None and begun <= at):
            continue
        found.append(f"version {version} was served, " + ("never committed" if begun is None else "before its commit"))
    return found
