"""The benchmark of assembly: what it compares is the same, and its last line is what it promises."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "gather.py"


@pytest.mark.real
def test_all_ways_give_the_same_tensors(tmp_path: Path) -> None:
    """On two gloo ranks, over several buckets; the verdict is one JSON object on the last line, and in the file.

    The parameters are a real model's, read by a real source; they lie where the model of the GPU figures is laid out.
    """
    command = [
        sys.executable,
        str(PROGRAM),
        "--repetitions",
        "1",
        "--out",
        str(tmp_path),
        "--save",
        str(tmp_path / "v"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert verdict == json.loads((tmp_path / "v").read_text())
    assert verdict["model"] == "megatron"
    assert verdict["equal"] is True
    assert verdict["as_laid_out"] is True
    assert verdict["buckets"] > 3
    assert {"speedup_vs_sync", "speedup_vs_async", "peak_extra_buckets"} <= verdict.keys()
    assert all(verdict[way]["seconds"] > 0 for way in ("sync", "async", "ours"))


@pytest.mark.real
def test_a_rank_that_fails_ends_the_run_with_what_was_measured(tmp_path: Path) -> None:
    """A shape that cannot be cut: an error in the object, and no process left waiting."""
    command = [sys.executable, str(PROGRAM), "--model", "laid-out", "--ranks", "3", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "rank" in json.loads(done.stdout.splitlines()[-1])["error"]
