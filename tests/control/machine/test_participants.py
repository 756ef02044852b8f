"""The order of waves: an engine that joins or leaves changes no more of them than it must."""

from __future__ import annotations

from hypothesis import given, strategies as st

from weightbus.control.machine.participants import wave_order
from weightbus.control.protocol.messages import AgentId

NAMES = [AgentId(f"e{index}") for index in range(12)]


def names(*numbers: int) -> tuple[AgentId, ...]:
    return tuple(NAMES[number] for number in numbers)


def test_the_first_time_they_come_as_they_are() -> None:
    """And stay so while no engine joins or leaves, in whatever order they are asked for."""
    assert wave_order((), names(2, 0, 1)) == names(2, 0, 1)
    assert wave_order(names(2, 0, 1), names(0, 1, 2)) == names(2, 0, 1)


def test_a_place_that_became_free_is_taken() -> None:
    """By a new engine, or else by the last; other new engines come last."""
    before = names(0, 1, 2, 3, 4, 5)
    assert wave_order(before, names(1, 2, 3, 4, 5)) == names(5, 1, 2, 3, 4)
    assert wave_order(before, names(0, 1, 2, 3)) == names(0, 1, 2, 3)
    assert wave_order(before, names(1, 2, 3, 4)) == names(4, 1, 2, 3)
    assert wave_order(before, names(0, 2, 3, 4, 5, 7, 8)) == names(0, 7, 2, 3, 4, 5, 8)
    assert wave_order(before, names(7)) == names(7)
    assert wave_order(before, ()) == ()


@given(st.lists(st.sampled_from(NAMES), unique=True), st.lists(st.sampled_from(NAMES), unique=True))
def test_every_engine_has_a_wave_and_few_change_theirs(before: list[AgentId], present: list[AgentId]) -> None:
    """No engine twice; no more of the staying ones move than others have left."""
    after = wave_order(before, present)
    assert sorted(after) == sorted(present)
    staying = [name for name in before if name in present]
    moved = [name for name in staying if after.index(name) != before.index(name)]
    assert len(moved) <= len(before) - len(staying)
