"""What is remembered is bounded, and the last of it stays."""

from __future__ import annotations

from weightbus.control.bus.bounded_set import MOST, BoundedSet


def test_the_last_ones_are_known() -> None:
    """However many were added; who is added once more is one of the last."""
    known = BoundedSet[int](3)
    known.update((1, 2, 3))
    known.add(1)
    known.add(4)
    assert [each in known for each in (1, 2, 3, 4)] == [True, False, True, True]
    assert len(known) == 3
    known.clear()
    assert 4 not in known


def test_months_of_additions_take_no_more_room() -> None:
    """A digest for each version, say."""
    known = BoundedSet[str]()
    for number in range(100 * MOST):
        known.add(str(number))
    assert len(known) == MOST
    assert str(100 * MOST - 1) in known
