"""What happened in a run, for people: the deployment, the faults that were needed, and every event in order."""

from __future__ import annotations

from typing import Final

from .invariants import INVARIANTS
from .scenario import Scenario
from .shrink import shrink
from .world import World

LINES: Final = 60


def tell(scenario: Scenario, lines: int = LINES) -> str:
    """The story of one run, its last `lines` lines."""
    world = World(scenario, telling=True)
    ended = world.run()
    told = [f"seed {scenario.seed}: {ended.violation or 'nothing is wrong'}"]
    name = ended.violation.partition(":")[0]
    if name in INVARIANTS:
        told.append(f"  the promise: {INVARIANTS[name]}")
    engines = ", ".join(f"{each.name} ({'/'.join(each.transports)})" for each in scenario.engines)
    told.append(f"  engines {engines}; trainers {', '.join(scenario.trainers)}; {scenario.buckets} buckets")
    weather = scenario.weather
    told.append(f"  messages lost {weather.lose:g}, repeated {weather.repeat:g}, late {weather.slow:g}")
    told.extend(f"  fault {fault}" for fault in scenario.faults)
    told.append(f"  the last {min(lines, len(world.loop.story))} of {len(world.loop.story)} lines:")
    told.extend(f"    {line}" for line in world.loop.story[-lines:])
    return "\n".join(told)


def tell_shrunk(scenario: Scenario, violation: str, lines: int = LINES) -> str:
    """The same for the smallest scenario that breaks the same invariant."""
    smallest = shrink(scenario, violation.partition(":")[0])
    before, after = len(scenario.faults), len(smallest.faults)
    return f"{tell(smallest, lines)}\n  (shrunk from {before} to {after} faults; `--seed {scenario.seed}` tells all)"
