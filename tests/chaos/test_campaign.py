"""A slice of `make chaos`: real processes are killed, stopped and parted during rounds, and nothing is lost or mixed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CYCLES = 4
HERE = Path(__file__).parent


@pytest.mark.real
@pytest.mark.timeout(400)
def test_a_slice_of_the_campaign() -> None:
    """Whatever strikes, a committed version stays, every token has one maker, and all engines are ready again."""
    argv = [sys.executable, str(HERE / "campaign.py"), f"--cycles={CYCLES}", "--seed=5"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=380, check=False)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
    last = ended.stdout.splitlines()[-1]
    assert last.startswith(f"cycles={CYCLES} lost_acks=0 mixed_tokens=0 worst_fault_to_safe_s=")


def test_the_plan_leaves_no_fault_out() -> None:
    """Every fault comes before any comes again, and the seed decides the order."""
    sys.path.insert(0, str(HERE))
    from campaign import STATES, plan

    faults = [f"fault {number}" for number in range(9)]
    found = plan(faults, 18, seed=1)
    assert sorted(fault for fault, _ in found[:9]) == faults
    assert {state for _, state in found} <= set(STATES)
    assert found == plan(faults, 18, seed=1) != plan(faults, 18, seed=2)
