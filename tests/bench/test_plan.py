"""The planning program runs, and both sides make the same plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_program_plans_what_it_is_asked_for() -> None:
    """A small model on few ranks: every tensor is read, by both workers, from ranks that take turns."""
    program = Path(__file__).with_name("plan.py")
    asked = ["--tensors", "240", "--ranks", "8", "--shards", "4"]
    done = subprocess.run([sys.executable, program, *asked], capture_output=True, text=True, check=True, timeout=120)

    found = json.loads(done.stdout)
    assert found["pieces"] == 240 * 8
    assert found["chosen"] == 240 * 4
    assert min(found["regions_by_holder"]) > 0
    assert {"encode_s", "decode_s", "plan_s", "proof_s", "divide_s"} <= found.keys()
