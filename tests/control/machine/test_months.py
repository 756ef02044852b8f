"""A coordinator beside which engines come and go for months: what it holds does not grow with those that went."""

from __future__ import annotations

import pytest

from weightbus.control.machine import coordinator, routing
from weightbus.control.machine.states import Limits
from weightbus.control.server.metrics import Metrics, MetricSource, ObservationReporter

from ...kit.sizes import sizes
from ..world import World

LIMITS = Limits(forget_s=30.0, answers=32)
MOST = 16
"""Of what is remembered by number."""


@pytest.mark.parametrize("dies", [True, False])
def test_engines_that_came_and_went_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch, *, dies: bool) -> None:
    """Each under a name of its own, as an autoscaler gives it, and every one takes part in a round."""
    monkeypatch.setattr(routing, "_REMEMBERED", MOST)
    monkeypatch.setattr(coordinator, "MAX_BLOBS", MOST)
    world, metrics = World(LIMITS), Metrics(MetricSource.COORDINATOR)
    reporter = ObservationReporter(metrics)
    world.engine("stays")
    trainer = world.trainer()
    held: list[int] = []
    shown: list[int] = []
    for number in range(160):
        engine = world.engine(f"pod-{number}")
        world.publish(trainer, 1 + number)
        engine.die() if dies else engine.crash()
        world.advance(2)
        del world.agents[engine.name]
        for what in world.observed:
            reporter.observe(what)
        world.observed.clear()
        reporter.show(world.machine.status(world.now))
        if number >= 80:
            held.append(sum(sizes(world.machine).values()) + sum(sizes(reporter).values()))
            shown.append(sum(len(list(metric.samples)) for metric in metrics.registry.collect()))
    assert max(held[40:]) <= max(held[:40]) * 1.02
    assert max(shown[40:]) <= max(shown[:40]) * 1.02
