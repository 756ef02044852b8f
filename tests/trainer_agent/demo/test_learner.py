"""The demo's policy on real Megatron ranks: what it loads is what is served, and what it learns is what is rewarded."""

import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from weightbus.trainer_agent.demo import checkpoint
from weightbus.trainer_agent.demo.processes import Programs

PROGRAM = Path(__file__).parents[2] / "kit" / "demo_ranks.py"
RANKS = 2


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two tensor-parallel ranks said of themselves."""
    folder = tmp_path_factory.mktemp("learner")
    checkpoint.write(folder / "checkpoint", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    with Programs(folder) as programs:
        ranks = [
            programs.start(
                f"rank{rank}",
                [sys.executable, "-W", "ignore", str(PROGRAM), str(folder / "checkpoint")],
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(RANKS),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "CUDA_VISIBLE_DEVICES": "",
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.process.wait(120)
        programs.check(may_end=ranks)
    return json.loads(ranks[0].log.read_text().splitlines()[-1])


@pytest.mark.real
def test_the_ranks_hold_the_checkpoint_bit_for_bit(judged: dict[str, Any]) -> None:
    """Trainer and engines start from the same weights: what the ranks would publish is what the engines loaded."""
    assert judged["same"]


@pytest.mark.real
def test_a_few_steps_favour_wanted_tokens(judged: dict[str, Any]) -> None:
    """The policy gradient points at the reward, on every tensor-parallel rank."""
    assert judged["before"] == pytest.approx(0.25, abs=0.02)
    assert judged["after"] > judged["before"] + 0.005


@pytest.mark.real
def test_every_kind_of_weight_learns(judged: dict[str, Any]) -> None:
    """Nothing is left out of the backward pass; norms may be too coarse in bfloat16 to move at once."""
    assert [name for name in judged["unchanged"] if not name.endswith("norm.weight")] == []
