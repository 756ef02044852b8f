"""A verified version whose commit was not heard of, and no coordinator any more: it waits, or is served as such."""

from __future__ import annotations

import pytest

from weightbus.control import protocol as m
from weightbus.control.protocol.messages import EngineHealth, Step
from weightbus.engine_agent.machine.engine_machine import ASLEEP_S, AWAKE_S, ORPHANED_S
from weightbus.engine_agent.machine.events import OrphanPolicy, PauseServer, ReleaseServer
from weightbus.engine_agent.machine.weight_state import WeightState

from ..world import TABLE, World, only, ran

SERVE = OrphanPolicy.SERVE_VERIFIED


def wait(world: World, seconds: float) -> list[str]:
    """Let time pass without a word of the coordinator; what was begun at its end."""
    for _ in range(int(seconds) - 1):
        assert ran(world.tick(1.0)) == []
    return ran(world.tick(1.0))


def served(policy: OrphanPolicy = SERVE) -> World:
    """A server that serves version 7 without its commit."""
    world = World(orphans=policy)
    world.to_loaded()
    world.tick(heard=True)
    assert wait(world, ORPHANED_S) == ["ReleaseServer"]
    world.end()
    return world


def test_by_default_an_orphan_waits_and_says_so() -> None:
    """It never generates from a version that no coordinator has committed; its view raises the alarm (G2, N56)."""
    world = World()
    world.to_loaded()
    world.tick(heard=True)
    for _ in range(int(3 * ORPHANED_S)):
        assert ran(world.tick(1.0)) == []
    view = world.machine.view()
    assert (view.orphaned, view.paused, view.health) == (True, True, EngineHealth.PENDING)
    world.tick(1.0, heard=True)
    assert not world.machine.view().orphaned
    world.commit()
    assert only(world.end()).version == 7


@pytest.mark.parametrize("flush", [True, False])
def test_an_orphan_is_served_with_its_label_and_is_not_clean(flush: bool) -> None:
    """Flushed as its round would have been. Heartbeats call it pending, so no ready list names it (G7, N56)."""
    world = World(orphans=SERVE)
    world.flush = flush
    world.to_loaded()
    world.tick(heard=True)
    assert wait(world, ORPHANED_S) == ["ReleaseServer"]
    assert isinstance(world.doing, ReleaseServer)
    assert (world.doing.version, world.doing.flush) == (7, flush)
    world.end()
    view = world.machine.view()
    assert (view.weights, view.paused, view.health) == (WeightState.ORPHANED, False, EngineHealth.PENDING)
    assert view.held is not None
    assert "not known to be committed" in view.reason
    assert world.record is not None
    assert (world.record.health, world.record.orphaned) == (EngineHealth.PENDING, True)
    assert ran(world.tick(60.0)) == []


def test_the_commit_makes_an_orphan_a_served_version_without_a_pause() -> None:
    """The coordinator is back, and has the version: nothing is asked of the server (N56)."""
    world = served()
    effects = world.commit(2)
    assert ran(effects) == []
    assert only(effects).version == 7
    view = world.machine.view()
    assert (view.weights, view.health, view.reason) == (WeightState.SERVING, EngineHealth.CLEAN, "")
    assert world.record is not None
    assert (world.record.health, world.record.orphaned) == (EngineHealth.CLEAN, False)


def test_an_abort_ends_an_orphan_s_service() -> None:
    """The coordinator is back, and never committed it, or has an older journal: the server is paused (G2, N56)."""
    world = served()
    assert ran(world.abort(2)) == ["PauseServer"]
    failed = only(world.end())
    assert (failed.step, failed.health) == (Step.RESUME, EngineHealth.PENDING)
    assert "not committed" in failed.reason
    assert (world.machine.view().weights, world.machine.view().paused) == (WeightState.LOADED, True)
    world.to_serving(3, 8)
    assert world.machine.view().health is EngineHealth.CLEAN


def test_an_abort_that_cannot_pause_an_orphan_fails_and_is_tried_again() -> None:
    """It is answered as an abort is; the coordinator repeats it, or a round repairs the engine (N56)."""
    world = served()
    world.abort(2)
    assert only(world.fail()).step is Step.RESUME
    assert ran(world.abort(3)) == ["PauseServer"]


def test_the_next_round_takes_an_orphan_in() -> None:
    """It pauses as any server does, also where versions are received beside the served one (N56)."""
    world = served()
    world.prepare(2, 8)
    world.end()
    assert ran(world.pause(2)) == ["PauseServer"]
    world.end()
    assert world.machine.view().weights is WeightState.LOADED
    world.transfer(2, 8)
    world.end()
    world.end()
    world.commit(2, 8)
    assert only(world.end()).version == 8


@pytest.mark.parametrize("policy", OrphanPolicy)
def test_mixed_weights_are_never_served(policy: OrphanPolicy) -> None:
    """Only a whole version mends them; the alarm is raised all the same (G1, N56)."""
    world = World(orphans=policy)
    world.to_paused()
    world.transfer()
    world.fail(dirty=True)
    world.tick(heard=True)
    for _ in range(int(2 * ORPHANED_S)):
        assert ran(world.tick(1.0)) == []
    assert (world.machine.view().orphaned, world.machine.health) == (True, EngineHealth.DIRTY)


@pytest.mark.parametrize("orphaned", [True, False])
def test_an_orphan_survives_its_sidecar(orphaned: bool) -> None:
    """One that was served goes on; one that waited is paused, and is served after the same time (N56)."""
    before = World(orphans=SERVE)
    before.to_loaded()
    record = served().record if orphaned else before.record
    world = World(record, up=False, orphans=SERVE)
    paused = ran(world.found())
    assert paused == ([] if orphaned else ["PauseServer"])
    if paused:
        world.end()
    assert wait(world, ORPHANED_S) == ["ReleaseServer"], "whether it generates is not known"
    world.end()
    assert world.machine.view().weights is WeightState.ORPHANED
    assert ran(world.commit(5)) == []


def test_a_sidecar_that_stood_still_first_reads_what_it_was_told() -> None:
    """A stopped process hears nothing, and finds its messages when it goes on (N56)."""
    world = World(orphans=SERVE)
    world.to_loaded()
    world.tick(heard=True)
    assert ran(world.tick(ORPHANED_S + ASLEEP_S)) == []
    assert not world.machine.view().orphaned
    assert wait(world, AWAKE_S) == ["ReleaseServer"]


def test_a_release_that_fails_is_tried_again() -> None:
    """It may have happened all the same; nothing is served under another label (N56)."""
    world = World(orphans=SERVE)
    world.to_loaded()
    world.tick(heard=True)
    assert wait(world, ORPHANED_S) == ["ReleaseServer"]
    world.fail()
    assert world.machine.view().weights is WeightState.LOADED
    for _ in range(20):
        world.tick(1.0)
        if isinstance(world.doing, ReleaseServer | PauseServer):
            world.end()
    assert world.machine.view().weights is WeightState.ORPHANED


def test_a_commit_of_another_table_is_refused_by_an_orphan() -> None:
    """Its version may have been published again since, with other weights (G5, N56)."""
    world = served()
    failed = only(world.commit(2, table="d" * 64))
    assert isinstance(failed, m.Failed)
    assert failed.step is Step.COMMIT
    assert world.machine.held is not None
    assert world.machine.held.table == TABLE
