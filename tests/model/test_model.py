"""A slice of `make model`: the round as a model, with bugs in it, which are found, and without, in every course."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

EXPLORE = Path(__file__).with_name("explore.sh")


@pytest.mark.skipif(shutil.which("spin") is None, reason="spin is not installed (Debian: apt-get install spin)")
@pytest.mark.timeout(300)
def test_a_slice_of_the_model() -> None:
    """With few epochs and no crashes nothing is violated in any course; a bug that is planted is found."""
    ended = subprocess.run([EXPLORE, "slice"], capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-1000:]
    *_, last = ended.stdout.splitlines()
    found = re.fullmatch(r"model: states=(\d+) violations=0 unwanted_end_states=0", last)
    assert found, last
    assert int(found[1]) > 100_000
    assert re.findall(r"planted (\w+)=0, found", ended.stdout) == ["DIRTY", "MONOTONE"]
