"""Refusals are all counted; of a flood only so many are logged."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from weightbus.control.effects import Refusal
from weightbus.control.messages import Code
from weightbus.control.reporter import REFUSALS_LOGGED, Reporter
from weightbus.control.telemetry import Meters, Side


def test_a_flood_of_refusals_is_counted_and_hardly_logged() -> None:
    """Strangers cannot fill the disk with our log; how many lines were left out is said, and nothing is uncounted."""
    now = [0.0]
    meters = Meters(Side.COORDINATOR)
    with capture_logs() as lines:
        reporter = Reporter(meters, lambda: now[0])
        for number in range(1000):
            now[0] = number / 500  # two seconds
            reporter.observe(Refusal(agent="?", message="?", code=Code.NOT_ALLOWED, reason="x"))
        now[0] = 10.0
        reporter.observe(Refusal(agent="?", message="?", code=Code.NOT_ALLOWED, reason="last"))
    counted = meters.registry.get_sample_value("weightbus_messages_refused_total", {"code": "not_allowed"})
    assert counted == 1001
    assert len([line for line in lines if line["event"] == "refusal"]) == 2 * REFUSALS_LOGGED + 1
    assert sum(line["count"] for line in lines if line["event"] == "refusals_not_logged") == 1000 - 2 * REFUSALS_LOGGED


@pytest.mark.parametrize(
    ("message", "code", "told"),
    [("Serving", Code.STALE_EPOCH, False), ("Publish", Code.STALE_EPOCH, True), ("Serving", Code.NOT_ALLOWED, True)],
)
def test_an_engine_s_late_answer_is_counted_and_not_told(message: str, code: Code, told: bool) -> None:
    """To be late is nobody's fault, and the engine need do nothing. A trainer that is late has lost its lease."""
    meters = Meters(Side.COORDINATOR)
    with capture_logs() as lines:
        Reporter(meters).observe(Refusal(agent="e0", message=message, code=code, reason="x"))
    assert [line["log_level"] for line in lines] == ["info" if told else "debug"]
    assert meters.registry.get_sample_value("weightbus_messages_refused_total", {"code": code.value}) == 1


def test_connections_are_counted_as_the_bus_counts_them() -> None:
    """The counters follow, however often they are brought up to date."""
    meters = Meters(Side.COORDINATOR)
    reporter = Reporter(meters)
    for accepted in (0, 3, 3, 10):
        reporter.count_connections({"accepted": accepted, "refused": accepted // 2})
    value = meters.registry.get_sample_value
    assert value("weightbus_connections_total", {"event": "accepted"}) == 10
    assert value("weightbus_connections_total", {"event": "refused"}) == 5
