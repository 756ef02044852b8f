"""A slice of the planted bugs for CI, another one every day; and that each of them can still be planted."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import msgspec
import pytest

from .invariants import INVARIANTS
from .mutants import Misplanted, hunt, plant, planted
from .mutations import MUTATIONS, Mutation

QUICK = (
    "ack-before-fsync",
    "refused-write-taken-for-durable",
    "forgets-the-commit-at-boot",
    "version-not-monotonic",
    "lists-engines-of-other-versions-as-ready",
    "loads-without-a-pause",
)
"""Found within a few seeds: two of them a day are hunted here. `make mutants` hunts all."""


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[each.name for each in MUTATIONS])
def test_every_bug_can_be_planted(mutation: Mutation) -> None:
    """Its place in the source is there, exactly once, and what is planted is Python."""
    planted(mutation)


def test_a_bug_is_planted_in_a_copy(tmp_path: Path) -> None:
    """The copy has the bug, the source has not."""
    plant(MUTATIONS[0], tmp_path)
    copied = (tmp_path / "weightbus" / MUTATIONS[0].path).read_text(encoding="utf-8")
    assert MUTATIONS[0].found not in copied
    planted(MUTATIONS[0])


def test_a_bug_without_its_place_is_refused() -> None:
    """A mutation of source that has changed says so, and is not counted as missed."""
    with pytest.raises(Misplanted, match="0 times"):
        planted(msgspec.structs.replace(MUTATIONS[0], found="what nobody ever wrote"))


def test_names_are_unique_and_enough() -> None:
    """At least twenty different bugs."""
    names = [each.name for each in MUTATIONS]
    assert len(set(names)) == len(names) >= 20
    assert set(QUICK) <= set(names)


def test_only_the_invariant_counts_that_a_bug_is_known_to_break() -> None:
    """A false alarm, seldom as it may be, is not taken for the eyes of the judge."""
    assert {each.breaks for each in MUTATIONS} <= set(INVARIANTS)
    loud = next(each for each in MUTATIONS if each.name == "ack-before-fsync")
    assert hunt(loud, seeds=3).seed is not None
    assert hunt(msgspec.structs.replace(loud, breaks="memory-bounded"), seeds=3).seed is None


def test_the_bugs_of_the_day_are_found() -> None:
    """The simulation sees planted bugs, in a copy of the real source."""
    day = dt.datetime.now(tz=dt.UTC).date().toordinal()
    for name in (QUICK[day % len(QUICK)], QUICK[(day + 1) % len(QUICK)]):
        found = hunt(next(each for each in MUTATIONS if each.name == name), seeds=40)
        assert found.seed is not None, found
