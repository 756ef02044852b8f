"""Refusals are all counted; of a flood only so many are logged."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from weightbus.control.machine.effects import Refusal
from weightbus.control.protocol.messages import Digest, EngineHealth, HeldVersion, Prepare, RefusalCode, Step, Version
from weightbus.control.server.metrics import REFUSALS_LOGGED, Metrics, MetricSource, ObservationReporter

from ..world import CHANNEL, World


def test_a_flood_of_refusals_is_counted_and_hardly_logged() -> None:
    """Strangers cannot fill the disk with our log; how many lines were left out is said, and nothing is uncounted."""
    now = [0.0]
    metrics = Metrics(MetricSource.COORDINATOR)
    with capture_logs() as lines:
        reporter = ObservationReporter(metrics, lambda: now[0])
        for number in range(1000):
            now[0] = number / 500  # two seconds
            reporter.observe(Refusal(agent="?", message="?", code=RefusalCode.NOT_ALLOWED, reason="x"))
        now[0] = 10.0
        reporter.observe(Refusal(agent="?", message="?", code=RefusalCode.NOT_ALLOWED, reason="last"))
    counted = metrics.registry.get_sample_value("weightbus_messages_refused_total", {"code": "not_allowed"})
    assert counted == 1001
    assert len([line for line in lines if line["event"] == "refusal"]) == 2 * REFUSALS_LOGGED + 1
    assert sum(line["count"] for line in lines if line["event"] == "refusals_not_logged") == 1000 - 2 * REFUSALS_LOGGED


@pytest.mark.parametrize(
    ("message", "code", "told"),
    [
        ("Serving", RefusalCode.STALE_EPOCH, False),
        ("Publish", RefusalCode.STALE_EPOCH, True),
        ("Serving", RefusalCode.NOT_ALLOWED, True),
    ],
)
def test_an_engine_s_late_answer_is_counted_and_not_told(message: str, code: RefusalCode, told: bool) -> None:
    """A late engine is normal and need do nothing. A late trainer has lost its lease."""
    metrics = Metrics(MetricSource.COORDINATOR)
    with capture_logs() as lines:
        ObservationReporter(metrics).observe(Refusal(agent="e0", message=message, code=code, reason="x"))
    assert [line["log_level"] for line in lines] == ["info" if told else "debug"]
    assert metrics.registry.get_sample_value("weightbus_messages_refused_total", {"code": code.value}) == 1


def test_connections_are_counted_as_the_bus_counts_them() -> None:
    """The counters follow, however often they are brought up to date."""
    metrics = Metrics(MetricSource.COORDINATOR)
    reporter = ObservationReporter(metrics)
    for accepted in (0, 3, 3, 10):
        reporter.count({"accepted": accepted, "refused": accepted // 2}, {})
    value = metrics.registry.get_sample_value
    assert value("weightbus_connections_total", {"event": "accepted"}) == 10
    assert value("weightbus_connections_total", {"event": "refused"}) == 5


def held(version: int, table: str = "c" * 64) -> HeldVersion:
    return HeldVersion(version=Version(version), manifest=Digest("d" * 64), table=Digest(table))


def shown(world: World, engine: str) -> tuple[float | None, float | None]:
    """Version and lag, as the gauges have them."""
    metrics = Metrics(MetricSource.COORDINATOR)
    ObservationReporter(metrics).show(world.machine.status(world.now))
    value, labels = metrics.registry.get_sample_value, {"channel": CHANNEL, "engine": engine}
    return value("weightbus_engine_version", labels), value("weightbus_engine_version_lag", labels)


@pytest.mark.parametrize("health", [EngineHealth.CLEAN, EngineHealth.PENDING])
def test_a_version_that_was_never_committed_here_is_none(health: EngineHealth) -> None:
    """An engine may report any version: one of another store's channel, or one never committed."""
    world = World()
    engine, trainer = world.engine("e0"), world.trainer()

    def says(held: HeldVersion) -> tuple[float | None, float | None]:
        engine.held, engine.health = held, health
        world.advance(world.limits.heartbeat_s)
        view = world.machine.status(world.now).channels[CHANNEL].engines["e0"]
        assert view.version == held.version, "people see what it says"
        return shown(world, "e0")

    assert says(held(5)) == (-1, 0), "nothing is committed"
    engine.held, engine.health = None, EngineHealth.CLEAN
    for version in (3, 7):
        world.publish(trainer, version)
        assert shown(world, "e0") == (version, 0)
    assert says(held(5)) == (-1, 7), "it was left out"
    assert says(held(8)) == (-1, 7), "it comes from elsewhere"
    assert says(held(7)) == (-1, 7), "the number is this channel's, the weights are not"
    assert says(held(3)) == (3, 4)


def test_an_engine_that_missed_a_rollback_lags_by_its_whole_version() -> None:
    """It holds a version that was committed once, above the committed one: that is not to be up to date."""
    world = World()
    world.engine("e0")
    behind, trainer = world.engine("e1", url="http://e1"), world.trainer()
    world.publish(trainer, 7)
    behind.fail(Prepare, Step.PREPARE)
    trainer.rollback = True
    world.publish(trainer, 4)
    assert shown(world, "e0") == (4, 0)
    assert shown(world, "e1") == (7, 4)
