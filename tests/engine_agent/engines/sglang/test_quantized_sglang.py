"""What a trainer quantizes on its way is what SGLang's own quantized models load, at single ranks, without a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from weightbus.engine_agent.engines.sglang import cpu_server

pytestmark = pytest.mark.real

KIT = Path(__file__).parents[3] / "kit" / "sglang_quantized.py"
CASES = {
    "qwen3:fp8:tp1:ep1:rank0": "_scale_inv",
    "qwen3:ue8m0:tp2:ep1:rank1": "_scale_inv",
    "qwen3:ignoring:tp1:ep1:rank0": "_scale_inv",
    "qwen3-moe:fp8:tp2:ep1:rank1": "_scale_inv",
    "qwen3-moe:fp8:tp2:ep2:rank1": "_scale_inv",
    "qwen3:int4:tp2:ep1:rank1": "_packed",
    "qwen3-moe:int4:tp1:ep1:rank0": "_packed",
}
"""What each has one parameter of for every parameter that is quantized, and the plain model none."""


@pytest.fixture(scope="module")
def found() -> Mapping[str, dict[str, object]]:
    """All cases, by one process: importing SGLang takes longer than all of them."""
    environment = cpu_server.environment(os.environ, 1, [0])
    done = subprocess.run(
        [sys.executable, KIT, *CASES], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    assert len(reports) == len(CASES), done.stdout[-2000:] + done.stderr[-4000:]
    return {str(report["case"]): report for report in reports}


@pytest.mark.parametrize(("case", "suffix"), CASES.items(), ids=CASES)
def test_sglang_loads_what_was_quantized(found: Mapping[str, dict[str, object]], case: str, suffix: str) -> None:
    """Fused, cut and transposed by its loader, read back by their scales: what the plain model has, but for rounding.

    All that is not quantized is there bit for bit.
    """
    report = found[case]

    assert report.get("error") is None
    assert report["differs"] == []
    assert report["quantized"]
    assert report["exact"]
    names = report["names"]
    assert isinstance(names, list)
    assert sum(name.endswith(suffix) for name in names) == report["quantized"]


def test_sglang_leaves_alone_what_was_left_alone(found: Mapping[str, dict[str, object]]) -> None:
    """One of two layers is an exception in the config: half as many parameters are quantized, the others are exact."""
    all_of_it, but_one_layer = found["qwen3:fp8:tp1:ep1:rank0"], found["qwen3:ignoring:tp1:ep1:rank0"]

    quantized, exact = ([int(str(each[key])) for each in (all_of_it, but_one_layer)] for key in ("quantized", "exact"))
    assert quantized[1] == quantized[0] // 2
    assert exact[1] - exact[0] == quantized[0] - quantized[1]
