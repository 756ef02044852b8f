"""Ranks that speak to each other over gloo."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "kit" / "plain_ranks.py"


@pytest.mark.real
@pytest.mark.timeout(180)
def test_overlapping_groups_speak_and_are_built_again(tmp_path: Path) -> None:
    """Sources over parts of the world and over all of it live beside each other, and after a close new ones work."""
    command = [sys.executable, str(PROGRAM)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for process in ranks:
            said, _ = process.communicate(timeout=150)
            assert process.returncode == 0, said
            assert said.endswith("spoke\n")
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
