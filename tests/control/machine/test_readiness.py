"""An engine listed as ready has said, in this incarnation and on this connection, that it serves, and what."""

from __future__ import annotations

import pytest

from weightbus.control.machine.effects import ConnectionLost
from weightbus.control.machine.states import EnginePhase
from weightbus.control.protocol.messages import (
    Abandon,
    Abort,
    Commit,
    EngineHealth,
    Message,
    Pause,
    Policy,
    Sent,
    Serving,
    Step,
)

from ..world import CHANNEL, World


def test_an_engine_without_a_part_in_a_round_is_not_ready_by_that() -> None:
    """Its server answered the `Commit` of a restarted coordinator with a failure; then a round begins without it.

    After the round it is asked again.
    """
    world = World()
    e0, e1 = world.engine("e0"), world.engine("e1", transports=("disk",), host="h1")
    trainer = world.trainer()
    world.publish(trainer, 1)
    e1.held, e1.label, e1.weights, e1.generating = e0.held, 1, 1, False
    e1.script[Commit] = lambda message: e1.failed(message, Step.RESUME, "the server does not answer")
    world.restart()
    assert world.ready == ("e0",)

    trainer.stop_before = Sent
    trainer.acquire(2)
    world.settle()
    round_ = world.machine.channels[CHANNEL].round
    assert round_
    assert round_.participants.by_name["e1"].phase is EnginePhase.LEFT
    assert "e1" not in world.ready

    trainer.stop_before, trainer.deaf = None, False
    trainer.say(Abandon(request=trainer.key(), channel=CHANNEL, epoch=round_.epoch, reason="enough"))
    world.settle()
    world.advance(5.0)
    assert "e1" in world.ready


@pytest.mark.parametrize("life", ["same", "new"])
def test_an_engine_that_is_through_its_turn_and_comes_back_says_again_that_it_serves(life: str) -> None:
    """While others have their turn: what it said before it was gone is not taken for what is true now."""
    world = World()
    e0, e1 = world.engine("e0"), world.engine("e1")
    trainer = world.trainer()
    trainer.policy = Policy(max_paused=1)
    world.publish(trainer, 1)

    def hold_up(_message: Message) -> None:
        e1.deaf = True

    trainer.acquire(2)
    e1.script[Pause] = hold_up
    while world.queue:
        world.step()
        round_ = world.machine.channels[CHANNEL].round
        if round_ and round_.participants.by_name["e0"].phase is EnginePhase.SERVING:
            break
    e1.deaf = True
    world.settle()
    round_ = world.machine.channels[CHANNEL].round
    assert round_
    assert round_.participants.by_name["e0"].phase is EnginePhase.SERVING
    assert "e0" in world.ready

    e0.generating, e0.deaf = False, True
    world.handle(ConnectionLost(peer=e0.peer))
    e0.connect() if life == "same" else e0.live()
    world.settle()
    assert "e0" not in world.ready
    e0.deaf = False
    world.advance(2.0)
    assert "e0" in world.ready


def test_an_engine_that_serves_another_version_than_it_was_known_to_hold_is_not_ready() -> None:
    """In a channel begun anew: it was broken when it said `Hello`, and says now that it serves a version of before.

    Its next heartbeat says which that is.
    """
    world = World()
    e0, trainer = world.engine("e0"), world.trainer()
    world.publish(trainer, 1)
    held = e0.held
    world.records.clear()
    world.epochs.clear()
    e0.health, e0.held = EngineHealth.DIRTY, None  # what it says in Hello: it is in the middle of a transfer
    e0.epoch, e0.deaf = 0, True
    world.restart()
    assert e0.got(Abort)
    channel = world.machine.channels[CHANNEL]
    e0.health = EngineHealth.CLEAN
    e0.say(
        Serving(
            request=e0.key(),
            channel=CHANNEL,
            epoch=channel.epoch,
            version=held.version if held else None,
            seconds=0.0,
            paused_s=0.0,
        )
    )
    world.settle()
    assert channel.engines["e0"].serving, "it was heard"
    assert world.ready == ()
    e0.held = held
    world.advance(1.0)
    assert world.ready == ()
    e0.held = None
    world.advance(1.0)
    assert world.ready == ("e0",), "its heartbeat is believed"
