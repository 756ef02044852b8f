"""Prometheus' files and the Grafana dashboard speak of metrics that exist, with labels that they have."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from weightbus.control.server.metrics import METRICS, UNWATCHED, MetricKind
from weightbus.control.server.settings import CoordinatorSettings

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy/prometheus"
SCRAPED = {"channel", "engine", "job", "instance"}
"""Labels that scraping adds: from prometheus.yml and engines.yml."""


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    return json.loads((ROOT / "deploy/grafana/weightbus.json").read_text())


def queries() -> Iterator[tuple[str, str]]:
    """Every expression, with the words shown beside its result."""
    for rule in rules():
        yield rule["expr"], " ".join(re.findall(r"\$labels\.\w+", str(rule["annotations"])))
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield target["expr"], " ".join(re.findall(r"\{\{\w+\}\}", target["legendFormat"]))


def exposed() -> dict[str, set[str]]:
    """Series name -> labels, as Prometheus sees them."""
    series: dict[str, set[str]] = {}
    for metric in METRICS:
        if metric.kind is MetricKind.HISTOGRAM:
            series[f"{metric.name}_bucket"] = {*metric.labels, "le"}
            series[f"{metric.name}_sum"] = series[f"{metric.name}_count"] = set(metric.labels)
        else:
            series[metric.name] = set(metric.labels)
    return series


@pytest.mark.parametrize(("expression", "shown"), list(queries()))
def test_metrics_and_labels_exist(expression: str, shown: str) -> None:
    """Every metric named is declared in metrics.py, and every label used is one that it carries."""
    known = exposed()
    names = set(re.findall(r"\bweightbus_\w+", expression))
    assert names or "up{" in expression
    assert names <= known.keys(), f"not in metrics.py: {sorted(names - known.keys())}"
    added = SCRAPED if not names or "sidecar" in expression else {"job", "instance"}
    labels = added.union(*(known[name] for name in names))
    matched = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression)
    grouped = [label for inside in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression) for label in inside.split(", ")]
    used = {*matched, *grouped, *re.findall(r"\w+", shown.replace("$labels.", ""))}
    assert used <= labels, f"not a label of {sorted(names)}: {sorted(used - labels)}"


def test_what_is_not_watched_is_said_to_be_for_looking() -> None:
    """A metric is in an alert, on a panel, or named in metrics.py as one that nobody is woken for."""
    named = {name for expression, _ in queries() for name in re.findall(r"\bweightbus_\w+", expression)}
    named |= {re.sub(r"_(bucket|sum|count)$", "", name) for name in named}
    assert {metric.name for metric in METRICS} - named == UNWATCHED


def test_every_alert_is_explained() -> None:
    """An alert has a severity, a summary, a section in the runbook, and a test that sees it fire."""
    runbook = (ROOT / "deploy/README.md").read_text()
    seen = (Path(__file__).parent / "alerts.test.yml").read_text()
    for rule in rules():
        name = rule["alert"]
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert {"summary", "description"} == rule["annotations"].keys()
        assert name in runbook
        assert f'{{alertname="{name}"}}' in seen or f"alertname: {name}\n" in seen


def test_scrapes_where_the_coordinator_is() -> None:
    """The target is the coordinator's default HTTP port, on the loopback, and the rules are loaded."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    [static] = jobs["weightbus-coordinator"]["static_configs"]
    assert static["targets"] == [f"127.0.0.1:{CoordinatorSettings().http_port}"]
    assert config["rule_files"] == ["alerts.yml"]
    [files] = jobs["weightbus-engine"]["file_sd_configs"]
    for entry in yaml.safe_load((PROMETHEUS / files["files"][0]).read_text()):
        assert {"channel", "engine"} == entry["labels"].keys()


def test_dashboard_can_be_imported_anywhere() -> None:
    """No data source is named: the one of whoever imports it is used. Panels have their own numbers."""
    board = dashboard()
    sources = [panel["datasource"]["uid"] for panel in board["panels"]]
    assert set(sources) == {"${datasource}"}
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(numbers) == len(set(numbers))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: Debian's package prometheus has it")
def test_prometheus_accepts_the_files_and_alerts_fire() -> None:
    """The configuration can be loaded, and each alert fires for its cause and only for it."""
    checks = (
        ["check", "config", PROMETHEUS / "prometheus.yml"],
        ["test", "rules", Path(__file__).parent / "alerts.test.yml"],
    )
    for arguments in checks:
        found = subprocess.run(
            ["promtool", *map(str, arguments)], check=False, capture_output=True, text=True, timeout=60
        )
        assert found.returncode == 0, found.stdout + found.stderr
