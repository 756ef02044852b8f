"""Other parties at the server, and answers of another generation: what the machine makes of them."""

from __future__ import annotations

import pytest

from weightbus.control.protocol.messages import EngineHealth, PauseMode
from weightbus.engine_agent.machine.engine_machine import HOLD_S, EngineMachine
from weightbus.engine_agent.machine.events import (
    Effect,
    ForeignAct,
    Label,
    OperationFailed,
    PauseServer,
    Receive,
    ReleaseServer,
    ServerWatched,
)
from weightbus.engine_agent.machine.weight_state import WeightState

from ..world import CHANNEL, World, only

DOUBTED = OperationFailed("another launch answered", doubted=True)
HOLDS = PauseServer(PauseMode.RETRACT.value, HOLD_S)


def watched(world: World, *, generates: bool | None = True, changed: str = "", late: int = 0) -> tuple[Effect, ...]:
    """A look that begins now, or began `late` operations ago."""
    return world.event(ServerWatched(world.machine.view().operations - late, generates, changed))


def foreign(effects: tuple[Effect, ...]) -> list[str]:
    return [effect.what for effect in effects if isinstance(effect, ForeignAct)]


def test_weights_of_another_party_are_an_unknown_version_until_a_whole_one_is_proven() -> None:
    """Off the ready list, on disk, paused; the next version brings the engine back (F35, N57)."""
    world = World()
    world.to_serving()
    assert foreign(watched(world, changed="labeled '77'")) == ["weights"]
    view = world.machine.view()
    assert (view.health, view.held, view.weights) == (EngineHealth.PENDING, None, WeightState.UNKNOWN)
    assert view.reason == "labeled '77'"
    assert world.record is not None
    assert world.record.health is EngineHealth.PENDING
    assert world.doing == HOLDS
    world.end()
    assert not foreign(watched(world, generates=False, changed="labeled '77'"))
    world.to_serving(2, 8)
    assert world.machine.view().health is EngineHealth.CLEAN


def test_a_pause_of_another_party_takes_a_ready_engine_off_the_list_and_is_left_to_it() -> None:
    """Neither time nor a settling command ends it; once the server generates it is what it was (F35, N57)."""
    world = World()
    world.to_serving()
    held = world.machine.view().held
    assert foreign(watched(world, generates=False)) == ["pause"]
    assert not foreign(watched(world, generates=False))
    view = world.machine.view()
    assert (view.health, view.held) == (EngineHealth.PENDING, None)
    assert "another party has paused the server" in view.reason
    world.tick(3600.0)
    assert world.doing is None
    failed = only(world.abort(2))
    assert failed.health is EngineHealth.PENDING
    assert world.doing is None
    watched(world)
    view = world.machine.view()
    assert (view.health, view.held, view.reason) == (EngineHealth.CLEAN, held, "")


def test_a_version_ends_the_pause_of_another_party() -> None:
    """A round pauses and resumes every server of its channel (N57)."""
    world = World()
    world.to_serving()
    watched(world, generates=False)
    world.to_serving(2, 8)
    assert world.machine.view().health is EngineHealth.CLEAN


def test_where_it_is_wanted_a_pause_of_another_party_is_ended_at_once() -> None:
    """The setting `ends_pauses` (N57)."""
    world = World(up=False, joined=False)
    world.machine = EngineMachine(CHANNEL, "life1", None, ends_pauses=True)
    world.found()
    world.welcome()
    world.to_serving()
    world.tick(5.0, heard=True)
    watched(world, generates=False)
    assert world.doing == ReleaseServer(None, False, HOLD_S)
    world.end()
    assert world.machine.view().health is EngineHealth.CLEAN


@pytest.mark.parametrize("state", ["paused", "dirty", "loaded"])
def test_a_server_that_another_party_let_generate_is_paused_again(state: str) -> None:
    """A half-loaded one, or with a version not committed, at once; a clean one before it takes a version (G1)."""
    world = World()
    world.to_loaded() if state == "loaded" else world.to_paused()
    if state == "dirty":
        world.transfer()
        world.fail(dirty=True)
    assert foreign(watched(world)) == ["resume"]
    if state == "paused":
        assert "not paused" in only(world.transfer()).reason
        return
    assert world.doing == HOLDS
    world.end()
    assert not foreign(watched(world, generates=False))


def test_a_look_that_began_before_an_operation_tells_nothing() -> None:
    """The sidecar's own pause is no other party's (N57)."""
    world = World()
    world.to_serving()
    assert watched(world, generates=False, changed="labeled '6'", late=1) == ()
    world.prepare(2, 8)
    assert watched(world, generates=False) == ()
    world.end()
    assert world.machine.view().health is EngineHealth.CLEAN


def test_a_server_that_does_not_tell_is_believed() -> None:
    """Older releases do not tell whether they are paused."""
    world = World()
    world.to_paused()
    assert watched(world, generates=None) == ()
    world.abort()
    world.end()
    assert watched(world, generates=None) == ()


@pytest.mark.parametrize("at", ["verify", "label", "release"])
def test_a_version_that_met_another_generation_is_not_served(at: str) -> None:
    """In doubt is failed: dirty, held back, and repaired by the next version (F33, N37)."""
    world = World()
    world.slow_label = True
    world.to_paused()
    world.transfer()
    world.end()
    if at == "verify":
        failed = only(world.end(DOUBTED))
    else:
        world.end()
        assert isinstance(world.doing, Label)
        world.end(DOUBTED if at == "label" else None)
        if at == "label":
            world.end()  # the pause of a server that must not generate
        failed = only(world.commit() if at == "label" else (world.commit(), world.end(DOUBTED))[1])
    assert failed.health is EngineHealth.DIRTY
    view = world.machine.view()
    assert (view.health, view.held) == (EngineHealth.DIRTY, None)
    if world.doing is not None:
        assert world.doing == HOLDS
        world.end()
    world.slow_label = False
    world.to_serving(2, 8)
    assert world.machine.view().health is EngineHealth.CLEAN


def test_a_transfer_is_told_of_a_server_that_another_party_changed() -> None:
    """Any weight may be another one, what the version leaves as well; not once a version was proven (N57, N64, F39)."""
    world = World()
    world.to_serving()
    watched(world, changed="labeled '77'")
    world.end()
    for epoch, unknown in ((2, True), (3, False)):
        world.to_paused(epoch, 6 + epoch)
        world.transfer(epoch, 6 + epoch)
        assert isinstance(world.doing, Receive)
        assert world.doing.unknown is unknown
        world.end()
        world.end()
        world.commit(epoch, 6 + epoch)
        world.end()
