"""Leases: at most one holder, under an epoch that only grows."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from weightbus.control.machine.effects import Refusal, RoundClosed, RoundEnded, Tick
from weightbus.control.machine.membership import Agent, Lease, LeaseHolder
from weightbus.control.machine.states import YES, Limits, RoundState
from weightbus.control.protocol.messages import (
    Abandon,
    Abort,
    Acquire,
    AgentId,
    Digest,
    Epoch,
    Granted,
    Incarnation,
    Offered,
    Outcome,
    Policy,
    Prepare,
    Publish,
    RefusalCode,
    Refused,
    Release,
    Role,
    RoundDone,
    Sent,
    Transfer,
    Version,
)

from ..world import CHANNEL, World

HELD = Lease(
    holder=AgentId("t0"),
    incarnation=Incarnation("a"),
    epoch=Epoch(5),
    first_epoch=Epoch(4),
    version=Version(1),
    granted_at=0.0,
    heard_at=0.0,
)


def holder(lease: Lease | None) -> LeaseHolder:
    found = LeaseHolder(CHANNEL, Limits(), ())
    found.lease = lease
    return found


def agent(who: str) -> Agent:
    name, life = who.split()
    return Agent(
        name=AgentId(name),
        role=Role.TRAINER,
        channel=CHANNEL,
        incarnation=Incarnation(life),
        peer=None,
        heard_at=0.0,
    )


@pytest.mark.parametrize(
    ("lease", "who", "round_", "code"),
    [
        (None, "t0 a", None, None),
        (None, "t0 a", RoundState.VERIFYING, RefusalCode.LEASE_HELD),
        (HELD, "t0 a", None, None),
        (HELD, "t0 a", RoundState.PREPARING, RefusalCode.NOT_ALLOWED),
        (HELD, "t0 a", RoundState.ABORTING, RefusalCode.LEASE_HELD),
        (HELD, "t0 a", RoundState.RESUMING, RefusalCode.LEASE_HELD),
        (HELD, "t0 b", None, RefusalCode.LEASE_HELD),
        (HELD, "t1 a", None, RefusalCode.LEASE_HELD),
    ],
)
def test_may_acquire(lease: Lease | None, who: str, round_: RoundState | None, code: RefusalCode | None) -> None:
    """A free channel, or one's own unused lease: yes. Anything else: no, with a reason and when to retry.

    One's own round is to be given up first, or has only to come to its end.
    """
    verdict = holder(lease).may_acquire(agent(who), round_, now=1.0)
    assert verdict.code is code
    assert bool(verdict.reason) is (code is not None)
    assert (verdict.retry_after_s > 0) is (code is RefusalCode.LEASE_HELD)


@pytest.mark.parametrize(
    ("lease", "who", "epoch", "code"),
    [
        (HELD, "t0 a", 5, None),
        (HELD, "t0 a", 4, RefusalCode.STALE_EPOCH),
        (HELD, "t0 a", 6, RefusalCode.NOT_ALLOWED),
        (HELD, "t0 b", 5, RefusalCode.STALE_EPOCH),
        (HELD, "t1 a", 5, RefusalCode.STALE_EPOCH),
        (None, "t0 a", 5, RefusalCode.STALE_EPOCH),
    ],
)
def test_epochs_are_compared(lease: Lease | None, who: str, epoch: int, code: RefusalCode | None) -> None:
    """Only the holder's own life, under exactly the current epoch, may act (S17)."""
    assert holder(lease).may_use(agent(who), Epoch(epoch), Epoch(5)).code is code
    assert YES.ok


def codes(world: World, name: str) -> list[RefusalCode]:
    return [message.code for message in world.agents[name].got(Refused) if isinstance(message, Refused)]


def test_second_trainer_waits_until_the_first_is_silent() -> None:
    """A lease ends when its holder is silent for `lease_s`; the next grant has a higher epoch; the first is fenced."""
    world = World()
    first, second = world.trainer("first"), world.trainer("second")
    first.stop_before = Publish
    first.acquire(1)
    world.settle()
    second.acquire(1)
    world.settle()
    assert codes(world, "second") == [RefusalCode.LEASE_HELD]
    first.die()
    world.advance(world.limits.lease_s + 1)
    second.acquire(1)
    world.settle()
    assert world.committed == 1
    granted = [m.epoch for a in (first, second) for m in a.got(Granted) if isinstance(m, Granted)]
    assert granted == [1, 2]


def test_a_round_ends_with_the_lease_of_a_holder_that_is_silent() -> None:
    """Where a lease is shorter than what makes an agent count as lost: the holder is one still, the round is over."""
    world = World(Limits(lease_s=4.0, silence_s=60.0))
    engine, trainer, other = world.engine("e0"), world.trainer(), world.trainer("other")
    trainer.stop_before = Offered
    trainer.acquire(1)
    world.settle()
    assert engine.got(Prepare)
    assert trainer.deaf
    world.now += 3.0
    world.handle(Tick())
    assert world.machine.channels[CHANNEL].round
    world.now += 1.0
    due = world.machine.next_deadline()
    assert due is not None
    assert due <= world.now
    world.handle(Tick())
    world.settle()
    assert world.machine.channels[CHANNEL].lease is None
    assert world.machine.channels[CHANNEL].round is None
    assert world.machine.membership.get(trainer.name)
    (ended,) = [each for each in world.observed if isinstance(each, RoundEnded)]
    assert (ended.outcome, ended.done.reason) == (Outcome.ABORTED, "trainer trainer was silent for 4.0 s")
    assert world.publish(other, 1).outcome is Outcome.COMMITTED


def test_lease_lives_as_long_as_its_holder_says_something() -> None:
    """Heartbeats alone keep a lease; `publish_s` ends one under which nothing happens."""
    world = World()
    trainer = world.trainer()
    trainer.stop_before = Publish
    trainer.acquire(1)
    world.settle()
    world.advance(world.limits.lease_s * 5)
    assert world.machine.channels[CHANNEL].lease
    world.advance(world.limits.publish_s)
    assert world.machine.channels[CHANNEL].lease is None


def test_restarted_trainer_does_not_inherit_its_lease() -> None:
    """A lease belongs to one life of its holder."""
    world = World()
    trainer = world.trainer()
    trainer.stop_before = Publish
    trainer.acquire(1)
    world.settle()
    trainer.die()
    world.now += world.limits.takeover_s
    trainer.deaf, trainer.stop_before = False, None
    trainer.live()
    world.settle()
    assert world.machine.channels[CHANNEL].lease is None
    assert world.publish(trainer, 1).epoch == 2


def test_release_gives_the_channel_back() -> None:
    """A lease given back is free at once; releasing it again is refused as stale, and does no harm."""
    world = World()
    trainer, other = world.trainer(), world.trainer("other")
    trainer.stop_before = Publish
    trainer.acquire(1)
    world.settle()
    release = Release(request=trainer.key(), channel=CHANNEL, epoch=Epoch(1))
    trainer.say(release)
    trainer.say(release)
    trainer.say(Release(request=trainer.key(), channel=CHANNEL, epoch=Epoch(1)))
    world.settle()
    assert codes(world, "trainer") == [RefusalCode.STALE_EPOCH]
    other.acquire(1)
    world.settle()
    assert isinstance(other.inbox[-1], RoundDone)


def test_same_acquire_gets_the_same_grant() -> None:
    """A repeated request does not take a second epoch."""
    world = World()
    trainer = world.trainer()
    trainer.stop_before = Publish
    acquire = Acquire(request=trainer.key(), channel=CHANNEL, version=Version(1))
    trainer.say(acquire)
    trainer.say(acquire)
    world.settle()
    first, second = trainer.got(Granted)
    assert first == second
    assert len(world.records) == 1


def test_versions_do_not_go_back() -> None:
    """A version below the committed one is not granted; the committed one is answered as committed."""
    world = World()
    trainer = world.trainer()
    world.publish(trainer, 5)
    trainer.say(Acquire(request=trainer.key(), channel=CHANNEL, version=Version(4)))
    world.settle()
    assert codes(world, "trainer") == [RefusalCode.VERSION_NOT_NEWER]
    assert "committed already" in world.publish(trainer, 5).reason
    assert world.committed == 5


def test_committed_version_with_other_bits_is_refused() -> None:
    """The committed version may be published again only with the digest table that was committed."""
    world = World()
    trainer = world.trainer()
    world.publish(trainer, 5)
    trainer.stop_before = Publish
    trainer.acquire(5)
    world.settle()
    assert trainer.publishing
    trainer.say(msgspec.structs.replace(trainer.publishing, table=trainer.publishing.manifest))
    world.settle()
    assert codes(world, "trainer") == [RefusalCode.VERSION_NOT_NEWER]


def test_a_key_that_was_used_for_another_question_is_refused() -> None:
    """What was answered is the answer to that question only: another one under its key is refused, and counted."""
    world = World()
    trainer = world.trainer()
    asked = Acquire(request=trainer.key(), channel=CHANNEL, version=Version(1))
    trainer.say(asked)
    world.settle()
    (granted,) = trainer.got(Granted)
    assert isinstance(granted, Granted)
    trainer.say(msgspec.structs.replace(asked, version=Version(2)))
    trainer.say(Release(request=asked.request, channel=CHANNEL, epoch=granted.epoch))
    world.settle()
    refused = [message for message in trainer.got(Refused) if isinstance(message, Refused)]
    assert [each.code for each in refused] == [RefusalCode.NOT_ALLOWED, RefusalCode.NOT_ALLOWED]
    assert "Acquire" in refused[1].reason
    assert [each.message for each in world.observed if isinstance(each, Refusal)] == ["Acquire", "Release"]
    assert len(world.records) == 1
    trainer.say(asked)
    world.settle()
    assert trainer.got(Granted)[-1] == granted


@pytest.mark.parametrize(
    "changes",
    [
        {"version": Version(2)},
        {"table": Digest("0" * 64)},
        {"manifest": Digest("0" * 64)},
        {"catch_up": True},
        {"policy": Policy(min_engines=3)},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("closed", [True, False])
def test_the_key_of_a_round_that_is_over_is_not_for_another_question(changes: dict[str, Any], closed: bool) -> None:
    """Also where only the journal remembers the key: how a round ended is no answer for other weights."""
    world = World()
    trainer = world.trainer()
    world.publish(trainer, 1)
    (published,) = [each for each in trainer.said if isinstance(each, Publish)]
    if not closed:  # the coordinator ended before the round did
        assert isinstance(world.records.pop(), RoundClosed)
    world.restart()
    world.settle()
    before = len(trainer.got(RoundDone))
    trainer.say(msgspec.structs.replace(published, **changes))
    world.settle()
    assert len(trainer.got(RoundDone)) == before
    assert codes(world, "trainer")[-1] is RefusalCode.NOT_ALLOWED
    trainer.say(published)
    world.settle()
    assert len(trainer.got(RoundDone)) > before


@pytest.mark.parametrize("answers", [True, False])
def test_an_engine_that_gave_its_round_up_may_begin_another_one_at_once(answers: bool) -> None:
    """It is told to come again until the engines of the first are through, or were waited for long enough."""
    world = World()
    engine, trainer = world.engine("e0"), world.trainer()
    engine.ignore(Transfer)
    if not answers:
        engine.ignore(Abort)
    trainer.stop_before = Sent
    trainer.acquire(1)
    world.settle()
    assert trainer.sending is not None
    trainer.deaf, trainer.stop_before, trainer.publishing = False, None, None
    trainer.say(Abandon(request=trainer.key(), channel=CHANNEL, epoch=trainer.sending.epoch, reason="no table"))
    while not trainer.got(Refused):
        trainer.say(Acquire(request=trainer.key(), channel=CHANNEL, version=Version(1)))
        for _ in range(2):  # the engine has not spoken yet
            world.step()
    (refused,) = trainer.got(Refused)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.reason) == (
        RefusalCode.LEASE_HELD,
        "your round at epoch 1 is still coming to its end",
    )
    assert 0 < refused.retry_after_s < 1
    world.advance_until(lambda: len(trainer.got(RoundDone)) == 1, 100.0)
    assert world.publish(trainer, 1).outcome is Outcome.COMMITTED
