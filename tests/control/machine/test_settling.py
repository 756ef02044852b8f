"""What is over when a round, a lease or a coordinator ends, and what engines are told and believed after that."""

from __future__ import annotations

import msgspec
import pytest

from weightbus.control.machine.effects import ConnectionLost, MessageReceived, StopRequested
from weightbus.control.machine.engine_registry import EngineRecord, EngineRegistry
from weightbus.control.machine.membership import Agent
from weightbus.control.machine.participants import PendingCommands
from weightbus.control.machine.routing import Router
from weightbus.control.machine.states import EnginePhase, RoundState
from weightbus.control.protocol.messages import (
    Abandon,
    Abort,
    Channel,
    Commit,
    Digest,
    Epoch,
    HeldVersion,
    Message,
    Offered,
    Outcome,
    Pause,
    Policy,
    Prepare,
    Publish,
    RefusalCode,
    Refused,
    RequestId,
    Sent,
    Serving,
    Step,
    StragglerPolicy,
    Transfer,
    Version,
)

from ..world import CHANNEL, LIMITS, World

V1 = HeldVersion(version=Version(1), manifest=Digest("a" * 64), table=Digest("b" * 64))
V2 = msgspec.structs.replace(V1, version=Version(2), table=Digest("c" * 64))


def fleet_of_one() -> tuple[EngineRegistry, EngineRecord]:
    fleet = EngineRegistry(Channel("policy"), LIMITS, Router(), PendingCommands(LIMITS.retry_s, LIMITS.retry_max_s))
    world = World()
    world.engine("e0")
    agent = world.machine.membership.get(world.agents["e0"].name)
    assert isinstance(agent, Agent)
    return fleet, fleet.joined(agent)


def serving(epoch: int, version: int | None) -> Serving:
    return Serving(
        request=RequestId("s"),
        channel=CHANNEL,
        epoch=Epoch(epoch),
        version=None if version is None else Version(version),
        seconds=0.0,
        paused_s=0.0,
    )


def test_an_engine_that_is_told_something_serves_when_it_has_answered_that() -> None:
    """Not because it served before, and not by an answer to what it was told earlier."""
    fleet, engine = fleet_of_one()
    engine.serving, engine.held = True, V1
    fleet.settle(engine, Epoch(5), V1, 0.0)
    assert not engine.serving
    assert not fleet.answered(engine, serving(4, 1), V1)
    assert not engine.serving
    assert fleet.answered(engine, serving(5, 1), V1)
    assert engine.serving


def test_an_engine_that_never_answered_its_pause_is_not_ready_when_the_round_is_over() -> None:
    """It may stand still: what it said before the round is not what it does now."""
    world = World()
    e0, trainer = world.engine("e0"), world.trainer()
    world.engine("e1")
    world.publish(trainer, 1)

    def deaf(_message: Message) -> None:
        e0.generating, e0.deaf = False, True

    e0.script[Pause] = deaf
    trainer.policy = Policy(min_engines=2)
    trainer.acquire(2)
    world.settle()
    world.advance_until(lambda: world.machine.channels[CHANNEL].round is None, 600.0)
    assert e0.deaf
    assert world.committed == 1, "which it holds"
    assert "e0" not in world.ready
    e0.deaf = False
    world.advance(30.0)
    assert e0.generating


def test_memory_that_was_given_back_is_waited_for_until_the_next_version_only() -> None:
    """Though every heartbeat says again that it is given back."""
    _, engine = fleet_of_one()
    engine.note_memory(V1, released=True)
    assert engine.awaits_newer(V1)
    engine.note_memory(V2, released=True)
    assert not engine.awaits_newer(V2)


def test_a_failure_that_crossed_its_abort_quarantines_no_engine() -> None:
    """It is clean, and has yet to answer the `Abort`."""
    world = World()
    e0, trainer = world.engine("e0"), world.trainer()
    trainer.stop_before = Sent
    got: list[Message] = []
    e0.script[Transfer] = got.append  # type: ignore[assignment]  # answers nothing yet
    aborts: list[Message] = []
    e0.script[Abort] = aborts.append  # type: ignore[assignment]
    trainer.acquire(1)
    world.settle()
    trainer.stop_before, trainer.deaf = None, False
    round_ = world.machine.channels[CHANNEL].round
    assert round_
    trainer.say(Abandon(request=trainer.key(), channel=CHANNEL, epoch=round_.epoch, reason="enough"))
    world.settle()
    assert round_.participants.by_name["e0"].phase is EnginePhase.LEAVING
    e0.say(e0.failed(got[0], Step.TRANSFER, "the group broke"))
    world.settle()
    assert round_.participants.by_name["e0"].phase is EnginePhase.LEAVING
    for answer in e0.answers(aborts[0]):
        e0.say(answer)
    world.settle()
    assert round_.participants.by_name["e0"].phase is EnginePhase.LEFT
    assert world.ready == ("e0",)


def test_an_engine_that_is_back_on_another_connection_is_told_at_once() -> None:
    """And not when the next repetition is due."""
    world = World()
    e0, trainer = world.engine("e0"), world.trainer()
    e0.deaf = True
    trainer.acquire(1)
    world.settle()
    world.advance(3.1)
    told = len(e0.got(Prepare))
    world.handle(ConnectionLost(peer=e0.peer))
    e0.connect()
    world.settle()
    assert len(e0.got(Prepare)) == told + 1


def test_an_engine_that_is_back_before_it_heard_anything_is_told_all_of_it_again() -> None:
    """To stand still and what for, which are said at once: the second is not waited for until time is over."""
    world = World()
    e0, trainer = world.engine("e0"), world.trainer()
    trainer.stop_before = Offered
    trainer.acquire(1)
    world.settle()
    e0.deaf, trainer.deaf, trainer.stop_before = True, False, None
    assert trainer.offering
    trainer.say(trainer.offering)
    world.settle()
    assert (len(e0.got(Pause)), len(e0.got(Transfer))) == (1, 1)
    world.handle(ConnectionLost(peer=e0.peer))
    e0.deaf = False
    e0.connect()
    world.settle()
    assert (len(e0.got(Pause)), len(e0.got(Transfer))) == (2, 2)
    assert world.committed == 1
    assert world.ready == ("e0",)


def test_an_engine_that_failed_at_what_is_over_is_told_to_resume_until_it_has() -> None:
    """Its failure is late: the round that it is about has ended, and its `Abort` was not answered yet."""
    world = World()
    e0, trainer = world.engine("e0"), world.trainer()
    got: list[Message] = []

    def hang(message: Message) -> None:
        got.append(message)
        e0.deaf = True

    e0.script[Transfer] = hang
    trainer.acquire(1)
    world.settle()
    round_ = world.machine.channels[CHANNEL].round
    assert round_
    trainer.say(Abandon(request=trainer.key(), channel=CHANNEL, epoch=round_.epoch, reason="enough"))
    world.settle()
    world.advance_until(lambda: world.machine.channels[CHANNEL].round is None, 100.0)
    e0.say(e0.failed(got[0], Step.TRANSFER, "the group broke"))
    world.settle()
    assert not e0.generating
    e0.deaf = False
    world.advance(world.limits.retry_max_s + 1.0)
    assert e0.generating
    assert world.ready == ("e0",)


def test_an_engine_that_was_settled_is_not_settled_again_by_saying_that_it_heard() -> None:
    """Its heartbeat names the epoch of what it was told, before its server has answered: that is news of nothing."""
    world = World()
    e0, trainer = world.engine("e0"), world.trainer()
    world.publish(trainer, 1)
    told = len(e0.got(Commit))
    e0.ignore(Commit)
    world.restart()
    assert len(e0.got(Commit)) == told + 1
    assert e0.epoch == world.machine.channels[CHANNEL].epoch
    world.handle(MessageReceived(peer=e0.peer, message=e0.heartbeat()))
    world.settle()
    assert len(e0.got(Commit)) == told + 1
    world.advance(world.limits.retry_s)
    assert len(e0.got(Commit)) == told + 2, "as nothing was answered"
    assert world.ready == ("e0",)


def test_a_trainer_that_is_lost_while_bytes_travel_commits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though one engine has proven the version: the other takes something of the trainer's still."""
    world = World()
    world.engine("e0")
    trainer, e1 = world.trainer(), world.engine("e1")
    react = e1.react
    monkeypatch.setattr(e1, "react", lambda message: None if isinstance(message, Transfer) else react(message))
    trainer.stop_before = Sent
    trainer.acquire(1)
    world.settle()
    round_ = world.machine.channels[CHANNEL].round
    assert round_
    assert {name: each.phase for name, each in round_.participants.by_name.items()} == {
        "e0": EnginePhase.VERIFIED, "e1": EnginePhase.TRANSFERRING,
    }  # fmt: skip
    trainer.die()
    world.advance_until(lambda: world.machine.channels[CHANNEL].round is None, 120.0)
    assert world.committed is None


def test_a_disk_that_is_full_between_two_turns_ends_the_round() -> None:
    """The epoch of the next wave is requested once: engines before their wave are excluded, and the rest stands."""
    world = World()
    e0, e1, trainer = world.engine("e0"), world.engine("e1"), world.trainer()
    trainer.policy = Policy(max_paused=1)
    trainer.acquire(1)
    while world.queue and not e0.label:
        world.step()
    world.disk_full = True
    refused = len(world.observed)
    world.settle()
    assert len(world.observed) - refused < 50
    world.disk_full = False
    world.advance_until(lambda: trainer.done is not None, 60.0)
    assert trainer.done
    assert trainer.done.outcome is Outcome.COMMITTED
    assert (e0.label, e1.label) == (1, None)
    assert e1.generating


def test_a_quorum_of_none_waits_for_the_first() -> None:
    """Before an engine has reached a barrier, none is a straggler."""
    world = World()
    e0, trainer = world.engine("e0"), world.trainer()
    trainer.policy = Policy(slow=StragglerPolicy.QUORUM, quorum=0, slow_s=1.0)
    e0.ignore(Prepare)
    e0.deaf = True
    trainer.acquire(1)
    world.settle()
    world.advance(3.0)
    round_ = world.machine.channels[CHANNEL].round
    assert round_
    assert round_.state is RoundState.PREPARING


def test_the_report_says_how_long_an_engine_stood_still() -> None:
    """As the engine measured it."""
    world = World()
    world.engine("e0")
    trainer = world.trainer()
    done = world.publish(trainer, 1)
    assert "paused" in done.engines[0].seconds


def test_a_late_abandon_of_a_lease_before_ends_no_lease() -> None:
    """It is of an epoch that this lease never had."""
    world = World()
    world.engine("e0")
    trainer = world.trainer()
    world.publish(trainer, 1)
    first = trainer.got(Publish) or world.machine.channels[CHANNEL].epoch
    trainer.stop_before = Publish
    trainer.acquire(2)
    world.settle()
    lease = world.machine.channels[CHANNEL].lease
    assert lease
    trainer.stop_before, trainer.deaf = None, False
    assert isinstance(first, int)
    trainer.say(Abandon(request=trainer.key(), channel=CHANNEL, epoch=Epoch(first), reason="late"))
    world.settle()
    assert world.machine.channels[CHANNEL].lease == lease
    refused = trainer.got(Refused)[-1]
    assert isinstance(refused, Refused)
    assert refused.code is RefusalCode.STALE_EPOCH


@pytest.mark.parametrize("published", [False, True])
def test_a_stop_ends_the_lease(*, published: bool) -> None:
    """Nothing more is published under it."""
    world = World()
    world.engine("e0")
    trainer = world.trainer()
    trainer.stop_before = Sent if published else Publish
    trainer.acquire(1)
    world.settle()
    assert world.machine.channels[CHANNEL].lease
    world.handle(StopRequested())
    world.settle()
    assert world.machine.channels[CHANNEL].lease is None
    assert world.machine.stopped
