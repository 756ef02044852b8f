"""Metrics are declared once; logs are for people or for machines."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from prometheus_client import generate_latest

from weightbus.control.protocol.errors import InvariantBroken
from weightbus.control.server import metrics as telemetry
from weightbus.control.server.metrics import (
    METRICS,
    MetricKind,
    Metrics,
    MetricSource,
    RepeatedWarnings,
    configure_logging,
    markdown_table,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.mark.parametrize("side", MetricSource)
def test_every_metric_of_a_side_is_exposed(side: MetricSource) -> None:
    """What is declared is what a scraper sees, with its help; nothing else is."""
    text = generate_latest(Metrics(side).registry).decode()
    exposed = {name for name in re.findall(r"^# HELP (\S+)", text, re.MULTILINE) if not name.endswith("_created")}
    assert exposed == {each.name for each in METRICS if each.side is side}


def test_names_follow_prometheus() -> None:
    """Unique, prefixed, counters end in _total, histograms are in seconds."""
    names = [each.name for each in METRICS]
    assert len(set(names)) == len(names)
    for each in METRICS:
        assert re.fullmatch(r"weightbus_[a-z_]+", each.name)
        assert (each.kind is MetricKind.COUNTER) == each.name.endswith("_total")
        assert each.kind is not MetricKind.HISTOGRAM or each.name.endswith("_seconds")


def test_values_arrive() -> None:
    """Gauges are set, counters raised, histograms observed."""
    metrics = Metrics(MetricSource.COORDINATOR)
    metrics.set(telemetry.COMMITTED_VERSION, 5, channel="c")
    metrics.add(telemetry.ROUNDS, channel="c", outcome="committed")
    metrics.add(telemetry.ROUNDS, 2, channel="c", outcome="committed")
    metrics.observe(telemetry.PAUSE_SECONDS, 0.2, channel="c")
    value = metrics.registry.get_sample_value
    assert value("weightbus_committed_version", {"channel": "c"}) == 5
    assert value("weightbus_rounds_total", {"channel": "c", "outcome": "committed"}) == 3
    assert value("weightbus_pause_seconds_sum", {"channel": "c"}) == 0.2


def test_replaced_labels_leave_no_ghosts() -> None:
    """A lease holder or engine that is gone is gone from the metrics."""
    metrics = Metrics(MetricSource.COORDINATOR)
    metrics.replace(telemetry.LEASE_INFO, {("c", "t0"): 1, ("d", "t1"): 1})
    metrics.replace(telemetry.LEASE_INFO, {("c", "t2"): 1, ("d", "t1"): 1})
    samples = {
        tuple(sample.labels.values())
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "weightbus_lease_info"
    }
    assert samples == {("c", "t2"), ("d", "t1")}


def test_misuse_is_our_bug() -> None:
    """A metric of another side or kind raises instead of being dropped."""
    with pytest.raises(InvariantBroken, match="gauge of the coordinator"):
        Metrics(MetricSource.ENGINE).set(telemetry.COMMITTED_VERSION, 1, channel="c")
    with pytest.raises(InvariantBroken, match="used as counter"):
        Metrics(MetricSource.COORDINATOR).add(telemetry.COMMITTED_VERSION, channel="c")


def test_table_lists_every_metric() -> None:
    """control/README.md's table is made of the declarations."""
    rows = markdown_table().splitlines()
    assert len(rows) == len(METRICS) + 2
    assert all(row.count("|") == rows[0].count("|") for row in rows)
    assert f"| `{METRICS[0].name}` | gauge | `channel` |" in rows[2]


@pytest.mark.parametrize(("style", "is_json"), [("json", True), ("auto", True), ("human", False)])
def test_log_lines(capsys: pytest.CaptureFixture[str], style: str, is_json: bool) -> None:
    """JSON where no terminal is, text for people where asked for; below the level nothing is said."""
    configure_logging("info", style)
    log = structlog.get_logger()
    log.debug("hidden")
    log.info("round_ended", version=3)
    (line,) = capsys.readouterr().err.splitlines()
    assert "round_ended" in line
    if is_json:
        entry = json.loads(line)
        assert (entry["event"], entry["level"], entry["version"]) == ("round_ended", "info", 3)


def test_a_warning_that_is_repeated_is_logged_once_a_minute_with_its_number() -> None:
    """Also with other seconds in its text; another agent's, another version's or an info line is another one."""
    now = [100.0]
    passes = RepeatedWarnings(lambda: now[0])

    def said(seconds: int, level: str = "warning", **fields: object) -> Any:
        line = {"event": "silent", "level": level, "reason": f"no answer in {seconds} s", **fields}
        with contextlib.suppress(structlog.DropEvent):
            return passes(None, level, line).get("repeated", 0)
        return None

    assert [said(1, agent="e0"), said(2, agent="e0"), said(3, agent="e0")] == [0, None, None]
    assert [said(1, agent="e1"), said(1, agent="e0", version=8)] == [0, 0]
    assert [said(1, "info"), said(1, "info")] == [0, 0]
    now[0] += 60.0
    assert [said(64, agent="e0"), said(65, agent="e0")] == [2, None]
    now[0] += 600.0
    assert [said(9, agent="e1"), said(9, agent="e0")] == [0, 1]


def test_a_log_for_people_has_no_colors_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    """Where standard error is no terminal, as here."""
    configure_logging("info", "human")
    structlog.get_logger().warning("journal_hangs", since=3)
    assert "\x1b" not in capsys.readouterr().err


def test_a_traceback_in_json_has_no_local_variables(capsys: pytest.CaptureFixture[str]) -> None:
    """Keys and tokens are among them, and logs are read by others."""
    configure_logging("info", "json")
    try:
        _failing("a token of its own", 6)
    except ValueError:
        structlog.get_logger().exception("failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["exception"][0]["exc_value"] == "a token of 6 letters"
    assert "of its own" not in line


def _failing(token: str, letters: int) -> None:
    message = f"a token of {letters} letters"
    assert token
    raise ValueError(message)
