"""A slice of `make bench-control`: that it works, and prints its last line. What it measures here says nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("control.py")
AGENTS = 64


@pytest.mark.timeout(200)
def test_a_small_fleet_is_measured() -> None:
    """Agents connect, take rounds and beat, beside bare sockets; none is lost, and the result is one JSON object."""
    command = [sys.executable, str(PROGRAM), f"--agents={AGENTS}", "--repetitions=1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=190, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["agents"] == AGENTS
    assert found["connections_broken"] == 0
    assert found["barrier_ratio"] > 0
    assert found["heartbeats_per_s"] > 0
    assert found["barrier_ms"].keys() == {"prepare", "resume"}
