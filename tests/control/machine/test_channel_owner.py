"""A channel belongs to one training run: another one is refused until it says that it takes the channel."""

from __future__ import annotations

import pytest

from weightbus.control.machine import status
from weightbus.control.machine.channel import ChannelOwner
from weightbus.control.protocol.messages import Acquire, Granted, RefusalCode, Refused, Release, Version

from ..world import CHANNEL, Trainer, World


def acquire(world: World, trainer: Trainer, run: str, version: int, *, takeover: bool = False) -> RefusalCode | None:
    """Ask for the lease, and give it back; the code of the refusal, if it was refused."""
    trainer.inbox.clear()
    trainer.stop_before = Release
    message = Acquire(request=trainer.key(), channel=CHANNEL, version=Version(version), run=run, takeover=takeover)
    trainer.say(message)
    world.settle()
    for each in trainer.inbox:
        if isinstance(each, Refused):
            return each.code
        if isinstance(each, Granted):
            trainer.say(Release(request=trainer.key(), channel=CHANNEL, epoch=each.epoch))
            world.settle()
            return None
    raise AssertionError(trainer.inbox)


@pytest.fixture
def world() -> World:
    return World()


def two(world: World) -> tuple[Trainer, Trainer]:
    return world.trainer("t0"), world.trainer("t1")


def test_another_run_is_refused_and_told_whose_channel_it_is(world: World) -> None:
    """It names the run, its trainer and what to do; the run that has the channel goes on (N60)."""
    first, second = two(world)
    assert acquire(world, first, "exp-1", 1) is None
    assert acquire(world, second, "exp-2", 2) is RefusalCode.CHANNEL_TAKEN
    (refused,) = second.got(Refused)
    assert isinstance(refused, Refused)
    for word in ("exp-1", "t0", "exp-2", "takeover"):
        assert word in refused.reason
    assert refused.retry_after_s == 0
    assert acquire(world, first, "exp-1", 3) is None


def test_a_run_that_was_taken_over_is_told_at_its_next_version(world: World) -> None:
    """And takes the channel back by the same word only (N60)."""
    first, second = two(world)
    assert acquire(world, first, "exp-1", 1) is None
    assert acquire(world, second, "exp-2", 2, takeover=True) is None
    assert acquire(world, first, "exp-1", 3) is RefusalCode.CHANNEL_TAKEN
    assert acquire(world, second, "exp-2", 4) is None
    assert acquire(world, first, "exp-1", 5, takeover=True) is None
    assert acquire(world, second, "exp-2", 6) is RefusalCode.CHANNEL_TAKEN


def test_a_run_goes_on_after_any_restart(world: World) -> None:
    """Of its job, under another trainer's name too, and of the coordinator: the owner is durable (N60)."""
    first, second = two(world)
    assert acquire(world, first, "exp-1", 1) is None
    first.die()
    first.live()
    world.advance(20.0)
    assert acquire(world, first, "exp-1", 2) is None
    assert acquire(world, second, "exp-1", 3) is None, "the same run, wherever it is resumed"
    world.restart()
    world.advance(20.0)
    assert world.machine.channels[CHANNEL].owner == ChannelOwner("exp-1", second.name)
    assert acquire(world, first, "exp-2", 4) is RefusalCode.CHANNEL_TAKEN
    assert acquire(world, second, "exp-1", 5) is None
    assert status.parse(status.encode(world.machine.status(world.now))).channels[CHANNEL].owner == "exp-1"


def test_a_trainer_that_names_no_run_is_neither_asked_nor_does_it_take_the_channel(world: World) -> None:
    """An older release, or an operator's rollback (N44, N60)."""
    first, second = two(world)
    assert acquire(world, second, "", 1) is None
    assert acquire(world, first, "exp-1", 2) is None
    assert acquire(world, second, "", 3) is None
    assert acquire(world, first, "exp-1", 4) is None


def test_a_run_is_told_at_once_while_another_has_the_lease(world: World) -> None:
    """It does not wait for a lease that it would not get (N60)."""
    first, second = two(world)
    assert acquire(world, first, "exp-1", 1) is None
    first.stop_before = Release
    first.say(Acquire(request=first.key(), channel=CHANNEL, version=Version(2), run="exp-1"))
    world.settle()
    assert acquire(world, second, "exp-2", 3) is RefusalCode.CHANNEL_TAKEN
    assert acquire(world, second, "exp-2", 3, takeover=True) is RefusalCode.LEASE_HELD
