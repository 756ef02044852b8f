"""Replicas on real gloo ranks are compared: Megatron-core under TP, DP and EP, hybrid FSDP2, and a plain module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KIT = Path(__file__).parents[2] / "kit"
RANKS = 4
RANKS_S = 240.0


def launch(which: str, out: Path) -> list[dict[str, Any]]:
    """What each rank was told."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = []
    for rank in range(RANKS):
        command = [sys.executable, str(KIT / "replica_ranks.py"), str(rank), str(RANKS), str(out / "rendezvous")]
        with (out / f"rank{rank}.log").open("w") as log:
            ranks.append(subprocess.Popen([*command, str(out), which], stdout=log, stderr=log, env=environment))
    try:
        for rank, process in enumerate(ranks):
            assert process.wait(timeout=RANKS_S) == 0, (out / f"rank{rank}.log").read_text()[-4000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def check(told: list[dict[str, Any]], expected: dict[str, tuple[str, list[list[int]]]]) -> None:
    """Equal replicas are equal; the one that was changed is found, and nothing else; on rank 0."""
    for case, (name, sides) in expected.items():
        found = told[0][case]
        assert found["parts"] > 0, case
        assert found["equal"] == 0, case
        assert found["differing"] == 1, case
        assert found["first"] == [[name, sides]], case
        for rank in told:
            # Shards once; then whether the parameters are the same ones, and one table from each rank.
            assert rank[case]["first messages"] == 2, case
            assert rank[case]["messages"] == 1, case
        assert all("parts" not in rank[case] for rank in told[1:])


def test_of_torch_modules(tmp_path: Path) -> None:
    """A norm that one rank of four changed: against its replica in hybrid FSDP, and against all in plain DP."""
    told = launch("torch", tmp_path)
    # Ranks 0 and 2 hold the same shard; rank 2 is the one that was changed.
    shared = ("model.norm.weight", [[0], [2]])
    check(told, {"hybrid": shared, "odd hybrid": shared, "plain": ("model.norm.weight", [[0, 1, 3], [2]])})


def test_of_megatron(tmp_path: Path) -> None:
    """A final norm that one rank changed, where tensor, data and expert parallel ranks replicate it."""
    pytest.importorskip("megatron.core")
    told = launch("megatron", tmp_path)
    alone = ("model.norm.weight", [[0, 1, 3], [2]])
    check(told, {"tp2 dp2": alone, "tp4": alone, "ep2 dp2": alone})
