"""How large turns are tried: smaller at once where less may do, larger again when that has gone well for a while."""

from __future__ import annotations

import pytest

from weightbus.dataplane.reshard.send_schedule import MIN_PAIR_BYTES
from weightbus.dataplane.transports.sends import sender as turn_ceiling
from weightbus.dataplane.transports.sends.sender import FIRST, LESS, ChunkLimit

MOST = 1024 * MIN_PAIR_BYTES


class Sender:
    """Versions over a link that carries so many bytes in a turn, each tried until it comes through."""

    def __init__(self) -> None:
        self.ceiling = ChunkLimit()
        self.versions = 0
        self.failed: list[int] = []
        """Versions that needed another attempt, once for each."""

    def send(self, carries: int, versions: int = 1, most: int = MOST) -> int:
        """Returns the size of the turns in which the last of them came through."""
        size = 0
        for _ in range(versions):
            self.versions += 1
            while (size := self.ceiling.under(most)) > carries:
                assert size > MIN_PAIR_BYTES, "it never comes through"
                self.ceiling.lower(size, most)
                self.failed.append(self.versions)
            self.ceiling.worked(self.versions)
        return size


def test_nothing_is_cut_where_all_goes_well() -> None:
    """Whatever a group of that size may have."""
    sender = Sender()
    assert sender.send(MOST, 10 * FIRST) == MOST
    assert sender.ceiling.under(1) == 1
    assert not sender.failed


def test_every_failure_takes_an_eighth_and_none_less_than_the_least() -> None:
    """With the advice of the error from there on."""
    ceiling, sizes = ChunkLimit(), list[int]()
    for _ in range(6):
        sizes.append(ceiling.under(MOST))
        ceiling.lower(sizes[-1], MOST)
    assert [size // MIN_PAIR_BYTES for size in sizes] == [1024, 128, 16, 2, 1, 1]
    assert ceiling.under(MIN_PAIR_BYTES) == MIN_PAIR_BYTES
    assert ceiling.under(16) == 16, "a group that has less anyway"


def test_what_failed_is_what_was_tried() -> None:
    """Which may be less than a group of that size could have: schedules stay when a group shrinks."""
    ceiling = ChunkLimit()
    ceiling.lower(MOST // 8, MOST)
    assert ceiling.under(MOST) == MOST // 8 // LESS


def test_a_rank_that_sends_to_more_gives_each_of_them_less() -> None:
    """Link and memory are the rank's, and not a pair's."""
    ceiling = ChunkLimit()
    ceiling.lower(MOST, MOST)
    assert ceiling.under(MOST // 4) == MOST // 4 // LESS


def test_turns_grow_back_in_steps() -> None:
    """A peer that was stopped is no reason for ever. What turned out well is all there is, and forgets the past."""
    sender = Sender()
    sender.send(MOST // 64)
    sizes = [sender.send(MOST) for _ in range(3 * FIRST - 1)]
    assert sizes == [MOST // 64] * (FIRST - 1) + [MOST // LESS] * FIRST + [MOST] * FIRST
    assert sender.send(MOST // LESS) == MOST // LESS
    assert [sender.send(MOST) for _ in range(FIRST)] == [MOST // LESS] * (FIRST - 1) + [MOST]


def test_what_fails_again_is_tried_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every try costs a version an attempt and an engine a pause; up to some rarity, for links are repaired."""
    monkeypatch.setattr(turn_ceiling, "MOST", 4 * FIRST)
    sender = Sender()
    sender.send(MOST // LESS, 20 * FIRST)
    gaps = [after - before for before, after in zip(sender.failed, sender.failed[1:], strict=False)]
    assert gaps == [FIRST, 2 * FIRST, *[4 * FIRST] * 4]


def test_a_failure_soon_after_it_grew_is_one_of_the_larger_turns() -> None:
    """A link may carry them now and then."""
    sender = Sender()
    sender.send(MOST // LESS)
    sender.send(MOST, 2 * FIRST - 2)
    assert sender.ceiling.under(MOST) == MOST
    sender.send(MOST // LESS)
    sender.send(MOST, 2 * FIRST - 2)
    assert sender.ceiling.under(MOST) == MOST // LESS
    sender.send(MOST)
    assert sender.ceiling.under(MOST) == MOST
    sender.send(MOST, 2 * FIRST)  # so they do: that is forgotten
    sender.send(MOST // LESS)
    sender.send(MOST, FIRST - 1)
    assert sender.ceiling.under(MOST) == MOST


def test_one_version_counts_once() -> None:
    """Engines that take turns have a group each."""
    sender = Sender()
    sender.send(MOST // LESS)
    for _ in range(10 * FIRST):
        sender.ceiling.worked(sender.versions)
    assert sender.ceiling.under(MOST) == MOST // LESS
