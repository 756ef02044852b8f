"""Makes a failing scenario smaller as long as it still breaks the same invariant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from .network import Weather
from .scenario import Fault, Scenario
from .world import simulate

TRIES: Final = 150
"""Runs spent on one scenario."""


def shrink(scenario: Scenario, invariant: str) -> Scenario:
    """The smallest scenario that was found to break `invariant` too."""
    left = TRIES
    smaller = True
    while smaller and left > 0:
        smaller = False
        for candidate in _candidates(scenario):
            left -= 1
            if left <= 0:
                break
            if simulate(candidate).violation.startswith(invariant):
                scenario, smaller = candidate, True
                break
    return scenario


def _candidates(scenario: Scenario) -> Iterator[Scenario]:
    """Smaller ones, the boldest first."""
    yield from _fewer_faults(scenario)
    yield from _calmer(scenario)
    yield from _fewer_agents(scenario)


def _fewer_faults(scenario: Scenario) -> Iterator[Scenario]:
    faults, replace = scenario.faults, msgspec.structs.replace
    size = len(faults)
    while size > 1:
        size //= 2
        for start in range(0, len(faults), size):
            yield replace(scenario, faults=faults[:start] + faults[start + size :])
    last = max((fault.at + max(fault.lasts, 0.0) for fault in faults), default=0.0)
    for calm_from in (last + 1.0, scenario.calm_from / 2):
        if calm_from < scenario.calm_from - 1.0:
            yield replace(scenario, calm_from=calm_from)


def _calmer(scenario: Scenario) -> Iterator[Scenario]:
    replace = msgspec.structs.replace
    if scenario.weather != Weather():
        yield replace(scenario, weather=Weather())
    for name in ("lose", "repeat", "slow"):
        if getattr(scenario.weather, name):
            yield replace(scenario, weather=replace(scenario.weather, **{name: 0.0}))


def _fewer_agents(scenario: Scenario) -> Iterator[Scenario]:
    faults, replace = scenario.faults, msgspec.structs.replace
    if len(scenario.trainers) > 1:
        for name in scenario.trainers:
            rest = tuple(each for each in scenario.trainers if each != name)
            yield replace(scenario, trainers=rest, faults=_without(faults, name))
    if len(scenario.engines) > 1:
        for spec in scenario.engines:
            rest_engines = tuple(each for each in scenario.engines if each is not spec)
            yield replace(scenario, engines=rest_engines, faults=_without(faults, spec.name))
    if scenario.buckets > 2:
        yield replace(scenario, buckets=2)


def _without(faults: tuple[Fault, ...], name: str) -> tuple[Fault, ...]:
    return tuple(fault for fault in faults if fault.target != name)
