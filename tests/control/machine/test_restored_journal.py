"""A journal that is older than its engines: restored from a copy, or begun anew.

Engines drop what is below the epoch that they have seen. Their heartbeats name it, and the coordinator's next one is
above.
"""

from __future__ import annotations

import pytest

from weightbus.control.machine import channel as module
from weightbus.control.machine.effects import EngineAhead, EpochRaised, EpochTaken, ReadinessChanged
from weightbus.control.protocol.messages import (
    Abort,
    EngineHealth,
    Epoch,
    Granted,
    Outcome,
    Prepare,
    Publish,
    Refused,
    Welcome,
)

from ..world import CHANNEL, Engine, Trainer, World, engine_info

FAR = 10_000


def set_back(kept: int, stride: int = 1) -> tuple[World, Engine, Engine, Trainer]:
    """After twenty rounds, with the first `kept` records of the journal only."""
    world = World()
    e0, e1, trainer = world.engine("e0"), world.engine("e1"), world.trainer()
    for version in range(1, 21):
        assert world.publish(trainer, version).outcome is Outcome.COMMITTED
    del world.records[kept:]
    world.epochs.clear()
    world.stride = stride
    world.restart()
    return world, e0, e1, trainer


def epochs(world: World) -> list[int]:
    return [record.epoch for record in world.records if isinstance(record, EpochTaken | EpochRaised)]


@pytest.mark.parametrize("kept", [0, 3])
def test_versions_are_committed_again_as_soon_as_engines_were_heard(kept: int) -> None:
    """One heartbeat later the channel is above what they have seen, on disk, and the first version is committed.

    (N50, F27)
    """
    world, e0, e1, trainer = set_back(kept)
    seen = e0.epoch
    assert world.machine.channels[CHANNEL].epoch < seen

    world.advance(world.limits.heartbeat_s)
    began = world.now
    done = world.publish(trainer, 21)

    assert done.outcome is Outcome.COMMITTED
    assert world.now - began < 5.0
    assert max(e0.epoch, e1.epoch) > seen
    assert sorted(world.ready) == ["e0", "e1"]
    (noted,) = [each for each in world.observed if isinstance(each, EngineAhead)]
    assert noted.epoch > seen
    assert noted.epoch in epochs(world)


@pytest.mark.parametrize("kept", [0, 3])
def test_no_epoch_of_the_life_that_is_forgotten_is_given_out_again(kept: int) -> None:
    """Neither by the first grant nor by what engines say, nor is an engine settled at one.

    So a late message of that life is older than all that is said in this one.
    """
    world, e0, e1, trainer = set_back(kept, stride=1000)
    e1.epoch, e0.epoch = Epoch(19), Epoch(17)  # and 20 was granted, of which they did not hear
    trainer.stop_before = Publish
    trainer.acquire(21)
    world.settle()
    assert trainer.got(Granted)[-1].epoch >= 1000

    world, e0, e1, trainer = set_back(kept, stride=1000)
    e1.epoch, e0.epoch = Epoch(5000), Epoch(4990)  # and 5001 was granted, of which they did not hear
    world.advance(2 * world.limits.heartbeat_s)
    world.settle()
    assert min(e0.epoch, e1.epoch) > 5500, "both were settled far above"
    assert world.publish(trainer, 21).outcome is Outcome.COMMITTED
    assert min(each for each in epochs(world)[kept // 3 :]) > 20


def test_an_engine_that_is_deaf_to_a_lease_is_settled_above_what_it_has_seen() -> None:
    """It hears nothing at the epoch before the lease, and one that it has seen may have been another's."""
    world, e0, _, trainer = set_back(3, stride=1000)
    trainer.stop_before = Publish
    trainer.acquire(21)
    world.settle()
    lease = trainer.got(Granted)[-1].epoch
    e0.epoch = Epoch(lease + 50)
    world.advance(2 * world.limits.heartbeat_s)
    assert e0.epoch >= lease + 1000


def test_a_round_that_began_before_they_were_heard_says_why_it_came_to_nothing() -> None:
    """It ends as soon as they are, and not when the time of a step is over."""
    world, e0, _, trainer = set_back(3)
    trainer.acquire(21)
    world.settle()
    began = world.now
    world.advance_until(lambda: trainer.done is not None and trainer.done.version == 21)

    assert trainer.done is not None
    assert trainer.done.outcome is Outcome.ABORTED
    assert "an older journal was restored, or one begun anew" in trainer.done.reason
    assert world.now - began <= 2 * world.limits.heartbeat_s
    assert world.publish(trainer, 22).outcome is Outcome.COMMITTED
    assert e0.health is EngineHealth.CLEAN


def test_a_lease_that_no_engine_would_hear_is_asked_for_again() -> None:
    """Granted before they were heard, and used afterwards: refused as stale, which a trainer mends by itself."""
    world, _, _, trainer = set_back(3)
    trainer.stop_before = Publish
    trainer.acquire(21)
    world.settle()
    world.advance(world.limits.heartbeat_s)
    assert trainer.publishing is not None
    trainer.stop_before, trainer.deaf = None, False
    trainer.say(trainer.publishing)
    world.settle()

    assert "acquire again" in trainer.got(Refused)[-1].reason
    assert world.committed == 21


def test_an_engine_that_lies_keeps_no_engine_but_itself_from_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a lease, under it, and in a round. The epoch rises in steps, and not more often than heartbeats come.

    (N50, F27)
    """
    monkeypatch.setattr(module, "MAX_EPOCH_LEAP", 100)
    world = World()
    honest, liar, trainer = world.engine("e0"), world.engine("e1"), world.trainer()
    world.publish(trainer, 1)
    before = world.machine.channels[CHANNEL].epoch
    liar.epoch = FAR  # it hears nothing below, and says so with every heartbeat
    for version in range(2, 6):
        trainer.acquire(version)
        if version % 2:
            world.advance(world.limits.heartbeat_s)
        world.settle()
        world.advance_until(lambda wanted=version: world.committed == wanted, 30.0)  # type: ignore[misc]
    world.advance(3 * world.limits.heartbeat_s)

    assert honest.label == 5
    assert honest.generating
    steps = [record.epoch for record in world.records if isinstance(record, EpochRaised)]
    assert all(after - first <= 100 + 4 for first, after in zip([before, *steps], steps, strict=False))
    assert len(steps) <= world.now / world.limits.heartbeat_s


def test_an_engine_that_lies_fast_raises_no_faster() -> None:
    """Thousands of heartbeats a second, each with a higher epoch: one raise for each that was due, of each channel."""
    world = World()
    liar = world.engine("e1")
    beats = 5
    for beat in range(200 * beats):
        world.now = beat * world.limits.heartbeat_s / 200
        liar.epoch = 2**53 - 1 - beat % 2
        liar.say(liar.heartbeat())
        world.settle()
    steps = [record.epoch for record in world.records if isinstance(record, EpochRaised)]
    assert len(steps) == beats
    assert steps == [(number + 1) * module.MAX_EPOCH_LEAP for number in range(beats)]


def test_an_engine_that_is_gone_keeps_no_channel_from_publishing() -> None:
    """What it has seen was higher; the round does not wait for it."""
    world = World()
    gone, trainer = world.engine("e1"), world.trainer()
    trainer.stop_before = Publish
    trainer.acquire(1)
    world.settle()
    gone.epoch = FAR
    world.advance(2 * world.limits.heartbeat_s)
    gone.die()
    world.advance(world.limits.silence_s + world.limits.heartbeat_s)
    trainer.stop_before, trainer.deaf = None, False
    assert trainer.publishing is not None
    trainer.say(trainer.publishing)
    world.settle()
    assert world.committed == 1
    assert not trainer.got(Refused)


def test_an_engine_that_was_deaf_is_told_what_to_do_before_anything_is_published() -> None:
    """As soon as the channel is above what it has seen: an engine that stood still goes on."""
    world, e0, e1, _ = set_back(0, stride=1000)
    e0.generating = False
    e0.epoch = e1.epoch = 500
    for engine in (e0, e1):
        engine.held = None
    world.advance(2 * world.limits.heartbeat_s)
    assert e0.generating
    assert world.ready == ("e0", "e1")
    told = len(e0.got(Abort))
    world.advance(5 * world.limits.heartbeat_s)
    assert len(e0.got(Abort)) == told, "and that once"


def test_an_engine_that_may_be_paused_by_a_life_that_is_forgotten_is_not_listed() -> None:
    """With a journal begun anew, a clean engine that has seen an epoch may have a `Pause` of that life on its way.

    It is listed when it has said, above that epoch, that it serves: from then on it drops what is late.
    """
    world, e0, _, _ = set_back(0, stride=1000)
    e0.epoch, e0.held, e0.label = 500, None, None
    e0.connect()
    world.settle()
    assert e0.health is EngineHealth.CLEAN
    assert world.machine.channels[CHANNEL].epoch == 0
    assert world.ready == ()
    world.observed.clear()
    world.advance(world.limits.heartbeat_s)
    assert e0.epoch > 1000
    noted = [each for each in world.observed if isinstance(each, EngineAhead | ReadinessChanged)]
    assert [type(each) for each in noted] == [EngineAhead, ReadinessChanged], "and not in between"
    assert world.ready == ("e0",)


def silent(world: World, name: str) -> Engine:
    """An engine that has said `Hello`, and nothing since."""
    engine = Engine(world, name, engine_info(name))
    engine.beats = False
    world.agents[name] = engine
    engine.live()
    world.settle()
    assert engine.got(Welcome)
    return engine


def test_an_engine_that_has_seen_no_epoch_is_listed_with_its_first_heartbeat() -> None:
    """No coordinator can have paused it, and it is told nothing."""
    world = World()
    engine = silent(world, "e0")
    assert world.ready == ()
    world.advance(world.limits.heartbeat_s)
    assert world.ready == ("e0",)
    assert not engine.got(Abort)


@pytest.mark.parametrize("publishes", [True, False])
def test_a_lease_that_comes_before_the_first_heartbeat_keeps_no_engine_from_the_list(publishes: bool) -> None:
    """It takes part in the round, or is told to go on at an epoch below the lease's; it hears either."""
    world = World()
    engine, trainer = silent(world, "e0"), world.trainer()
    trainer.stop_before = None if publishes else Publish
    trainer.acquire(1)
    world.settle()
    assert world.ready == (("e0",) if publishes else ())
    world.advance(world.limits.heartbeat_s)
    assert world.ready == ("e0",)
    assert engine.label == (1 if publishes else None)
    if not publishes:
        trainer.stop_before, trainer.deaf = None, False
        assert trainer.publishing is not None
        trainer.say(trainer.publishing)
        world.settle()
    assert (world.committed, engine.label) == (1, 1)


def test_an_engine_that_comes_under_a_lease_is_not_made_deaf_to_its_round() -> None:
    """It is told to go on at an epoch below the lease's, whatever another engine has raised the channel's to."""
    world = World()
    liar, trainer = world.engine("e1"), world.trainer()
    world.publish(trainer, 1)
    trainer.stop_before = Publish
    trainer.acquire(2)
    world.settle()
    liar.epoch = FAR
    world.advance(2 * world.limits.heartbeat_s)
    assert world.machine.channels[CHANNEL].epoch > FAR
    late = world.engine("e0")
    lease = trainer.got(Granted)[-1].epoch
    assert late.epoch < lease

    trainer.stop_before, trainer.deaf = None, False
    assert trainer.publishing is not None
    trainer.say(trainer.publishing)
    world.settle()
    world.advance_until(lambda: world.committed == 2, 30.0)
    assert late.got(Prepare)[-1].epoch == lease
    assert Epoch(late.epoch) == lease
