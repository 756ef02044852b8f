"""The program that measures the meeting runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_the_program_measures_what_it_is_asked_for() -> None:
    """A look at all together costs less than one at each: by far, but here only that it does."""
    program = Path(__file__).with_name("meeting.py")
    asked = ["--engines", "2", "200", "--times", "5"]
    done = subprocess.run([sys.executable, program, *asked], capture_output=True, text=True, check=True, timeout=120)

    few, many = json.loads(done.stdout)["of"]
    assert (few["engines"], many["engines"]) == (2, 200)
    assert many["ratio"] > 1
    assert sum(many["look_ms"].values()) < many["one_by_one_ms"]
