"""Engines that share a GPU: an NCCL group takes it once, which is known before the group is formed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from weightbus.control.machine.effects import RoundEnded
from weightbus.control.machine.routing import PREFERRED
from weightbus.control.protocol.messages import (
    Granted,
    Outcome,
    Policy,
    ProcessLocation,
    Send,
    Step,
    Topology,
    Transfer,
    TransportKind,
    Verified,
)

from ..world import CHANNEL, Agent, Engine, Trainer, World

SENDS, LOCAL, GROUP, DISK = (
    TransportKind.SENDS,
    TransportKind.LOCAL,
    TransportKind.DISTRIBUTED,
    TransportKind.DISK,
)
ROUND = list[tuple[str, TransportKind]]


def on(agent: Agent, *devices: str, host: str = "h1") -> None:
    """Tell where its ranks or workers are."""
    places = tuple(ProcessLocation(rank=rank, host=host, device=device) for rank, device in enumerate(devices))
    agent.say(Topology(request=agent.key(), places=places))
    agent.world.settle()


def fleet(
    gpus: dict[str, tuple[str, ...]], transports: Sequence[TransportKind] = (SENDS, DISK), host: str = "h1"
) -> tuple[World, Trainer]:
    """Engines on these GPUs, and a trainer on one of its own."""
    world = World()
    for name, devices in gpus.items():
        on(world.engine(name, transports=PREFERRED, device="cuda", host=host, tp=len(devices)), *devices)
    trainer = world.trainer("t", transports=tuple(transports), device="cuda")
    on(trainer, "gpu-t", host="h0")
    return world, trainer


def waves(trainer: Trainer) -> list[ROUND]:
    """The engines of each attempt so far, with their transport."""
    sent = [each for each in trainer.got(Send) if isinstance(each, Send)]
    return [[(each.engine, each.transport) for each in send.receivers] for send in sent]


@pytest.mark.parametrize("kind", [SENDS, GROUP])
def test_two_engines_on_one_gpu_are_in_two_groups_of_one_round(kind: TransportKind) -> None:
    """One after the other; an engine with a GPU of its own need not wait, and no attempt is broken off."""
    world, trainer = fleet({"a": ("gpu-0",), "b": ("gpu-0",), "c": ("gpu-1", "gpu-2")}, (kind, DISK))
    done = world.publish(trainer, 1)
    assert waves(trainer) == [[("a", kind), ("c", kind)], [("b", kind)]]
    assert {each.outcome.value for each in done.engines} == {"committed"}
    for name in "abc":
        assert len(world.agents[name].got(Transfer)) == 1, "and none was driven twice"


def test_engines_whose_workers_overlap_take_turns_too() -> None:
    """One GPU in common is enough."""
    world, trainer = fleet({"a": ("gpu-0", "gpu-1"), "b": ("gpu-1", "gpu-2"), "c": ("gpu-2",)})
    world.publish(trainer, 1)
    assert waves(trainer) == [[("a", SENDS), ("c", SENDS)], [("b", SENDS)]]


def test_the_second_one_reads_through_the_host_where_it_can() -> None:
    """Then the group stands from version to version, and both take the version at a time."""
    world, trainer = fleet({"a": ("gpu-0",), "b": ("gpu-0",)}, (SENDS, LOCAL, DISK), host="h0")
    for version in (1, 2):
        done = world.publish(trainer, version)
        assert waves(trainer)[version - 1 :] == [[("a", SENDS), ("b", LOCAL)]]
        assert {each.outcome.value for each in done.engines} == {"committed"}
    granted = trainer.got(Granted)[-1]
    assert isinstance(granted, Granted)
    assert granted.routes == {"a": SENDS, "b": LOCAL}, "the trainer's digests depend on it"


def test_every_gpu_of_the_first_one_is_taken() -> None:
    """Not only that of its first worker."""
    world, trainer = fleet({"a": ("gpu-0", "gpu-1"), "b": ("gpu-1",)}, (SENDS, LOCAL, DISK), host="h0")
    world.publish(trainer, 1)
    assert waves(trainer) == [[("a", SENDS), ("b", LOCAL)]]


def test_every_gpu_of_the_second_one_is_looked_at() -> None:
    """It may be its last worker that is on a GPU of the first one's: both would be in one group."""
    world, trainer = fleet({"a": ("gpu-0", "gpu-1"), "b": ("gpu-2", "gpu-1")}, (SENDS, LOCAL, DISK), host="h0")
    world.publish(trainer, 1)
    assert waves(trainer) == [[("a", SENDS), ("b", LOCAL)]]


def test_the_second_one_takes_its_turn_where_nothing_else_can_serve_it() -> None:
    """It is on another host than the trainer: what needs no group does not reach it."""
    world, trainer = fleet({"a": ("gpu-0",), "b": ("gpu-0",)}, (SENDS, LOCAL, DISK))
    world.publish(trainer, 1)
    assert waves(trainer) == [[("a", SENDS)], [("b", SENDS)]]


def test_the_reason_names_the_engine_in_the_way() -> None:
    """In the plan, with what would help."""
    world, _ = fleet({"a": ("gpu-0",), "b": ("gpu-0",)}, (SENDS, LOCAL, DISK), host="h0")
    near = world.plan.channels[CHANNEL].engines["b"]
    assert near.transport is LOCAL
    assert ("engine a is on GPU gpu-0 too, and NCCL takes no two ranks on one", "serve on GPUs of its own") in [
        (each.found, each.needed) for each in near.faster
    ]
    world, _ = fleet({"a": ("gpu-0",), "b": ("gpu-0",)})
    far = world.plan.channels[CHANNEL].engines["b"]
    assert far.transport is SENDS
    assert "in a group after that of the others: engine a is on GPU gpu-0 too" in far.why


def test_an_engine_that_is_brought_a_version_alone_has_the_group_alone() -> None:
    """A catch-up asks only its own engines: the others' groups are not in its way."""
    world, trainer = fleet({"a": ("gpu-0",)}, (SENDS, LOCAL, DISK), host="h0")
    world.publish(trainer, 1)
    on(world.engine("b", transports=PREFERRED, device="cuda", host="h0"), "gpu-0", host="h0")
    trainer.catch_up = True
    world.publish(trainer, 1)
    assert waves(trainer)[1:] == [[("b", SENDS)]]
    granted = trainer.got(Granted)[-1]
    assert isinstance(granted, Granted)
    assert granted.routes == {"b": SENDS}, "nothing is made for engines that take no part"
    assert world.ready == ("a", "b")


def test_a_failure_of_the_first_does_not_put_both_into_one_group() -> None:
    """It is driven again by itself; the second one's turn comes when it is through."""
    world, trainer = fleet({"a": ("gpu-0",), "b": ("gpu-0",)})
    trainer.policy = Policy(retries=1, min_engines=2)
    first = world.agents["a"]
    assert isinstance(first, Engine)
    first.fail(Transfer, Step.TRANSFER)
    done = world.publish(trainer, 1)
    assert [[name for name, _ in wave] for wave in waves(trainer)] == [["a"], ["a"], ["b"]]
    assert {each.outcome.value for each in done.engines} == {"committed"}


def test_turns_of_a_policy_are_kept() -> None:
    """At most so many stand still at a time, and of these none share a GPU."""
    world, trainer = fleet({"a": ("gpu-0",), "b": ("gpu-0",), "c": ("gpu-1",), "d": ("gpu-1",), "e": ("gpu-2",)})
    trainer.policy = Policy(max_paused=2)
    world.publish(trainer, 1)
    assert [[name for name, _ in wave] for wave in waves(trainer)] == [["a", "c"], ["b", "d"], ["e"]]


def test_engines_that_nccl_takes_for_several_hosts_are_in_one_group() -> None:
    """NCCL's own variable can stand for hosts with GPUs of their own."""
    world, trainer = fleet({"a": ("gpu-0",), "b": ("gpu-0",)})
    for name in "ab":
        place = ProcessLocation(rank=0, host="h1", device="gpu-0", nccl_gpu_id=f"{name}/gpu-0")
        agent = world.agents[name]
        agent.say(Topology(request=agent.key(), places=(place,)))
    world.settle()
    world.publish(trainer, 1)
    assert waves(trainer) == [[("a", SENDS), ("b", SENDS)]]


def test_nothing_is_in_the_way_where_nothing_is_known() -> None:
    """Or where there are no GPUs."""
    world, trainer = fleet({"a": (), "b": ()})
    world.publish(trainer, 1)
    assert waves(trainer) == [[("a", SENDS), ("b", SENDS)]]
    world, trainer = fleet({"a": ("cpu",), "b": ("cpu",)})
    world.publish(trainer, 1)
    assert waves(trainer) == [[("a", SENDS), ("b", SENDS)]]


def test_too_few_are_not_committed_where_no_transport_reaches_the_rest() -> None:
    """The trainer is lost while the first one still proves its version: those that wait for their turn do not count."""
    world, trainer = fleet({"a": ("gpu-0",), "b": ("gpu-0",)})
    trainer.policy = Policy(min_engines=2)
    world.lose = lambda message: isinstance(message, Verified)
    trainer.acquire(1)
    world.settle()
    trainer.die()
    world.advance(12)
    world.lose = lambda _message: False
    world.advance(10)
    assert [each.outcome for each in world.observed if isinstance(each, RoundEnded)] == [Outcome.ABORTED]
    assert world.committed is None
