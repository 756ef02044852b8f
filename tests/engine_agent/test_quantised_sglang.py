"""What a trainer quantises on its way is what SGLang's own quantised models load, at single ranks, without a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from weightbus.engine_agent import cpu_server

pytestmark = pytest.mark.real

KIT = Path(__file__).parents[1] / "kit" / "sglang_quantised.py"
CASES = (
    "qwen3:fp8:tp1:ep1:rank0",
    "qwen3:ue8m0:tp2:ep1:rank1",
    "qwen3:ignoring:tp1:ep1:rank0",
    "qwen3-moe:fp8:tp2:ep1:rank1",
    "qwen3-moe:fp8:tp2:ep2:rank1",
)
INT4 = ("qwen3:int4:tp2:ep1:rank1", "qwen3-moe:int4:tp1:ep1:rank0")


@pytest.fixture(scope="module")
def found() -> Mapping[str, dict[str, object]]:
    """All cases, by one process: importing SGLang takes longer than all of them."""
    environment = cpu_server.environment(os.environ, 1, [0])
    done = subprocess.run(
        [sys.executable, KIT, *CASES, *INT4], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    assert len(reports) == len(CASES + INT4), done.stdout[-2000:] + done.stderr[-4000:]
    return {str(report["case"]): report for report in reports}


@pytest.mark.parametrize("case", CASES)
def test_sglang_loads_what_was_quantised(found: Mapping[str, dict[str, object]], case: str) -> None:
    """Fused and cut parameters, read back by their scales, are those of the plain model; the rest is bit for bit."""
    report = found[case]

    assert report.get("error") is None
    assert report["differs"] == []
    assert report["quantised"]
    assert report["exact"]
    names = report["names"]
    assert isinstance(names, list)
    assert len(names) == report["quantised"]
    assert all(name.endswith("_scale_inv") for name in names)


@pytest.mark.parametrize("case", INT4)
def test_sglang_loads_what_was_packed(found: Mapping[str, dict[str, object]], case: str) -> None:
    """Eight to a word, fused, cut and transposed by its loader: each within half a step of the plain model's."""
    report = found[case]

    assert report.get("error") is None
    assert report["differs"] == []
    assert report["quantised"]
    assert report["exact"]
    names = report["names"]
    assert isinstance(names, list)
    assert sum(name.endswith("_packed") for name in names) == report["quantised"]
