"""A slice of the simulation for CI, and that it deserves to be believed: deterministic, and able to fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from weightbus.control.machine.channel import MAX_HISTORY, MAX_ROUND_REPLIES
from weightbus.control.machine.engine_registry import EngineRegistry
from weightbus.control.machine.states import Route, TransferEnds
from weightbus.control.protocol.messages import AgentId, TransportKind
from weightbus.control.server import event_loop as server

from .campaign import Tally, run_chunk
from .invariants import INVARIANTS
from .loop import MOST_STEPS
from .scenario import KINDS, MOMENTS, Fault, draw
from .shrink import shrink
from .story import tell
from .world import World, simulate

ROOT = Path(__file__).parents[2]
SLICE = int(os.environ.get("WEIGHTBUS_SEEDS", "100"))
"""Seeds in CI. `make simulate SEEDS=100000` runs more."""


def test_no_seed_of_the_slice_breaks_a_promise() -> None:
    """Storms of crashes, losses, partitions and half-dead engines break none of the named invariants (S17)."""
    tally = Tally()
    for ended in run_chunk(range(SLICE)):
        tally.add(ended)
    assert not tally.failed, tell(draw(tally.failed[0].seed))
    assert tally.faults > 20 * SLICE
    assert tally.messages > 100 * SLICE


@pytest.mark.parametrize("seed", [3834, 25664])
def test_an_engine_that_repeats_a_report_that_does_not_arrive_is_not_taken_for_silent(seed: int) -> None:
    """Into a cut link, for longer than the judge waits; it was a false alarm."""
    assert simulate(draw(seed)).violation == ""


def test_no_journal_that_is_set_back_breaks_a_promise() -> None:
    """Older copies of the journal, or none: versions are lost then, and no epoch is given out twice."""
    found = run_chunk(range(SLICE), setbacks=True)
    assert [(ended.seed, ended.violation) for ended in found if ended.violation] == []
    assert sum(ended.committed > 0 for ended in found) > SLICE / 2


@pytest.mark.parametrize("seed", [26])
def test_no_storm_that_outlasts_every_memory_breaks_a_promise(seed: int) -> None:
    """More versions than the history and the remembered replies have room for; and as many steps as that takes."""
    ended = simulate(draw(seed, times=10.0))
    assert ended.violation == ""
    assert ended.steps > MOST_STEPS
    assert ended.committed > MAX_HISTORY > MAX_ROUND_REPLIES


class Nonsense:
    """Chooses nonsensical routes."""

    def __init__(self) -> None:
        self._random = Random(7)

    def __call__(self, fleet: Mapping[AgentId, TransferEnds]) -> Mapping[AgentId, Route]:
        return {name: self._route(ends) for name, ends in fleet.items()}

    def _route(self, ends: TransferEnds) -> Route:
        pick = self._random.choice
        gpus = pick(((), ("GPU-1",), ("GPU-1", "GPU-2")))
        return Route(
            pick((None, *TransportKind)),
            "",
            shares_gpu=pick((True, False)),
            supports_deferred_digests=ends.both_await_tables,
            gpus=gpus,
        )


def test_no_promise_depends_on_the_choice_of_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    """routing.py may be wrong in any way: versions are lost then, and never anything that was promised."""
    monkeypatch.setattr(server, "Router", Nonsense)
    routes = EngineRegistry.routes

    def chosen_anew(registry: EngineRegistry, *args: Any, **options: Any) -> Mapping[AgentId, Route]:
        """A choice that is kept while the fleet is the same could leave an engine without a transport for good."""
        registry._routed = ()
        return routes(registry, *args, **options)

    monkeypatch.setattr(EngineRegistry, "routes", chosen_anew)
    found = run_chunk(seed for seed in range(SLICE) if not _somebody_is_apart(seed))
    assert [(ended.seed, ended.violation) for ended in found if ended.violation] == []
    assert sum(ended.committed for ended in found) > SLICE


def _somebody_is_apart(seed: int) -> bool:
    return any(engine.apart_from for engine in draw(seed).engines)


def test_an_engine_that_has_no_part_in_a_round_is_left_alone() -> None:
    """An engine for which a trainer has no transport is among the storms, for all trainers and for some."""
    apart = [seed for seed in range(8 * SLICE) if _somebody_is_apart(seed)]
    assert [(each.seed, each.violation) for each in run_chunk(apart) if each.violation] == []
    drawn = [draw(seed) for seed in apart]
    assert {len(each.trainers) - len(each.engines[-1].apart_from) for each in drawn} == {0, 1}


def test_the_same_seed_takes_the_same_course_in_any_process() -> None:
    """Nothing depends on hash seeds, addresses or clocks: two processes agree on every line of every story."""
    traces = []
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "tests.simulation", "--trace", "0", "8"]
        env = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        traces.append(done.stdout)
    assert traces[0] == traces[1]
    assert len(set(traces[0].split())) == 16


def test_seeds_make_all_kinds_of_faults() -> None:
    """The scenarios of a few hundred seeds leave no kind of fault, and no moment of a round, untried."""
    faults = [fault for seed in range(400) for fault in draw(seed).faults]
    seldom = {"data-cut", "stall", "power", "wrong-table", "table-lost", "setback", "disk-hang", "revoke"}
    seldom |= {"record-lost", "renamed", "second", "foreign-load", "foreign-resume"}
    assert {fault.kind for fault in faults} == {*KINDS, *seldom}
    assert any(draw(seed).sealed for seed in range(20))
    assert any(draw(seed).open_tables for seed in range(20))
    assert any(draw(seed).sqlite for seed in range(8)), "the course of none that is compared has the real journal"
    assert {fault.kind for fault in faults if fault.power} == {"trap"}
    assert {fault.target[0] for fault in faults if fault.power or fault.kind == "power"} == {"c", "e"}
    assert {fault.moment for fault in faults} == {"", *MOMENTS}
    assert {fault.where for fault in faults} == {"", "before", "during", "after"}


@pytest.mark.parametrize("seed", [3, 4, 6])
def test_without_faults_every_round_commits(seed: int) -> None:
    """The simulation itself loses nothing: in calm weather no engine is excluded and no request is refused."""
    calm = msgspec.structs.replace(draw(seed), faults=(), weather=type(draw(seed).weather)(), min_engines=0)
    world = World(calm, telling=True)
    ended = world.run()
    assert ended.violation == ""
    assert ended.committed > 2
    assert not [line for line in world.loop.story if "aborted" in line and "round" in line]


def test_a_lie_is_found_and_shrunk() -> None:
    """A server with a label of another program is found out, and the story keeps only the fault that matters."""
    scenario = next(s for s in map(draw, range(100)) if len(s.faults) > 4)
    lie = Fault(at=5.0, kind="mislabel", target=scenario.engines[0].name)
    with_lie = msgspec.structs.replace(scenario, faults=(*scenario.faults, lie))
    found = simulate(with_lie).violation
    assert found.startswith("true-labels")
    smallest = shrink(with_lie, "true-labels")
    assert [fault.kind for fault in smallest.faults] == ["mislabel"]
    story = tell(smallest)
    assert INVARIANTS["true-labels"] in story
    assert "JUDGE" in story
