"""The order of waves, which changes as little as it must, and the ranks of a group in the commands of a round."""

from __future__ import annotations

from hypothesis import given, strategies as st

from tests.control.world import CHANNEL, digest, engine_info
from weightbus.control.machine.participants import Participant, RoundCommands, wave_order
from weightbus.control.machine.states import EnginePhase, Limits
from weightbus.control.protocol.messages import (
    AgentId,
    Endpoint,
    Epoch,
    Publish,
    RequestId,
    Transfer,
    TransportKind,
    Version,
)

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


def member(name: str, tp: int, transport: TransportKind) -> Participant:
    return Participant(
        name=AgentId(name),
        info=engine_info(name, tp=tp),
        phase=EnginePhase.PREPARED,
        epoch=Epoch(1),
        transport=transport,
    )


def test_every_worker_of_a_group_has_a_rank_of_its_own() -> None:
    """0 is the trainer's; an engine has one for each of its workers; an engine with another transport has none."""
    publish = Publish(
        request=RequestId("k"),
        channel=CHANNEL,
        epoch=Epoch(1),
        version=Version(1),
        manifest=digest(b"manifest"),
        table=digest(b"table"),
        bytes=1,
        buckets=1,
    )
    group, alone = TransportKind.DISTRIBUTED, TransportKind.LOCAL
    members = [member("e0", 2, group), member("e1", 4, alone), member("e2", 3, group), member("e3", 1, group)]
    orders = RoundCommands(publish, Limits())
    send = orders.send(Epoch(1), members)
    assert [(each.transport, each.tp) for each in send.receivers] == [(group, 2), (alone, 4), (group, 3), (group, 1)]
    told = [
        orders.transfer(each, Endpoint(transport=group, address="a")) for each in members if each.transport is group
    ]
    assert [each.rank_offset for each in told if isinstance(each, Transfer)] == [1, 3, 6]
