"""A pause and the transfer that is told with it: the coordinator is not asked in between, and nothing is less safe."""

import errno

import pytest

from weightbus.control import protocol as m
from weightbus.control.protocol.messages import EngineHealth, Step
from weightbus.engine_agent.machine.events import (
    Commanded,
    Effect,
    Event,
    Operated,
    OperationDone,
    Received,
    Remember,
    RunOperation,
    StateRecord,
)
from weightbus.engine_agent.state_file import EffectDispatcher

from ..world import World, answers, cancels, only, ran

CLEAN, DIRTY = EngineHealth.CLEAN, EngineHealth.DIRTY


def to_pausing(world: World) -> tuple[Effect, ...]:
    """Told both at once, the server on its way to a stand. Returns what the `Transfer` led to."""
    world.prepare()
    world.end()
    assert ran(world.pause()) == ["PauseServer"]
    return world.transfer()


def test_a_transfer_waits_behind_its_pause() -> None:
    """It begins as soon as the server stands still, and the pause is answered first."""
    world = World()
    to_pausing(world)
    effects = world.end()
    assert [type(message) for message in answers(effects)] == [m.Paused]
    assert ran(effects) == ["Receive"]
    assert [type(message) for message in answers(world.end())] == [m.Transferred]
    assert isinstance(only(world.end()), m.Verified)


def test_the_record_is_written_while_the_server_comes_to_a_stand() -> None:
    """Once, and before the first byte: the transfer begins with nothing left to write."""
    world = World()
    (remember,) = to_pausing(world)
    assert isinstance(remember, Remember)
    assert (remember.record.health, remember.record.epoch) == (DIRTY, 1)
    assert world.machine.health is CLEAN, "nothing has changed yet"
    assert not [effect for effect in world.end() if isinstance(effect, Remember)]
    assert world.machine.health is DIRTY


@pytest.mark.parametrize("ends", ["aborted", "failed", "the lease"])
def test_a_record_written_ahead_is_set_right(ends: str) -> None:
    """When nothing comes of the transfer, an agent that is restarted finds a clean server clean."""
    world = World()
    to_pausing(world)
    assert world.record is not None
    if ends == "aborted":
        world.abort()
        world.end()
    elif ends == "failed":
        assert only(world.fail()).step is Step.PAUSE
        assert world.doing is None, "what was told with it is not begun"
    else:
        world.fail()
        world.tick(11.0)
    if world.doing is not None:
        world.end()
    assert world.record.health is CLEAN
    again = World(world.record, joined=False)
    assert (again.machine.health, again.doing) == (CLEAN, None)


def test_a_record_written_ahead_holds_a_server_back_after_a_crash() -> None:
    """Between the two its progress is not known: the server waits for a complete version."""
    world = World()
    to_pausing(world)
    again = World(world.record, joined=False)
    assert again.machine.health is DIRTY
    assert ran(again.tick()) == ["PauseServer"] or type(again.doing).__name__ == "PauseServer"


def test_a_repeated_pause_is_answered_while_the_transfer_runs() -> None:
    """Both are told again until the first is answered; what runs is not begun again, nor ended for it."""
    world = World()
    to_pausing(world)
    world.end()
    effects = world.pause()
    assert [type(message) for message in answers(effects)] == [m.Paused]
    assert not cancels(effects)
    assert not answers(world.transfer())
    assert ran(world.end()) == ["Verify"]


def test_a_transfer_without_its_pause_stops_the_server_first() -> None:
    """A message may get lost, also of two that were told together."""
    world = World()
    world.prepare()
    world.end()
    effects = world.transfer()
    assert ran(effects) == ["PauseServer"]
    assert isinstance(effects[-1], Remember)
    assert ran(world.end()) == ["Receive"]
    assert world.machine.paused


def test_both_of_a_later_epoch_wait_for_what_runs() -> None:
    """Driven again while it still comes to a stand for the attempt before: paused and loaded under the new epoch."""
    world = World()
    to_pausing(world)
    assert cancels(world.pause(2))
    world.transfer(2)
    effects = world.fail()
    assert ran(effects) == ["PauseServer"]
    effects = world.end()
    assert [(type(message), message.epoch) for message in answers(effects)] == [(m.Paused, 2)]
    assert ran(effects) == ["Receive"]
    assert world.record is not None
    assert (world.record.health, world.record.epoch) == (DIRTY, 2)


def test_a_version_that_is_proven_while_it_is_taken_needs_no_second_look() -> None:
    """Both are said at once, and the label is set while the coordinator commits."""
    world = World()
    world.slow_label = True
    world.to_paused()
    world.transfer()
    effects = world.end(Received(1000, 2, checked=True, verified_by="live-digest"))
    assert [type(message) for message in answers(effects)] == [m.Transferred, m.Verified]
    assert answers(effects)[1].verified_by == "live-digest"
    assert ran(effects) == ["Label"]
    assert [type(message) for message in answers(world.transfer())] == [], "the label is being set"
    again = world.end()
    assert [type(message) for message in answers(again)] == [m.Transferred, m.Verified]


def test_nothing_is_taken_while_the_record_cannot_be_written() -> None:
    """The disk refused what was to be written ahead: after a crash no record would tell that the weights are mixed."""
    world = World()
    world.prepare()
    world.end()
    begun: list[Effect] = []
    posted: list[Event] = []
    full = True

    def write(_record: StateRecord) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    dispatcher = EffectDispatcher(world.machine, write, begun.append, posted.append, write)
    for told in (world.pause_message(), world.transfer_message()):
        dispatcher.dispatch(Commanded(told), world.now)
    dispatcher.dispatch(Operated(2, OperationDone()), world.now)
    runs = [effect for effect in begun if isinstance(effect, RunOperation)]
    assert [type(run.operation).__name__ for run in runs] == ["PauseServer"]
    (refused,) = posted
    assert isinstance(refused, Operated)
    dispatcher.dispatch(refused, world.now)
    full = False
    dispatcher.retry()
    assert dispatcher.unsaved is None
    failed = [message for message in answers(tuple(begun)) if isinstance(message, m.Failed)]
    assert [(each.step, each.health) for each in failed] == [(Step.TRANSFER, CLEAN)]
