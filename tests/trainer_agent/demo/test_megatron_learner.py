"""The demo's policy on real Megatron ranks: what it loads is what is served, and what it learns is what is rewarded."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from weightbus.trainer_agent.demo import toy_task as task
from weightbus.trainer_agent.demo.child_processes import Programs
from weightbus.trainer_agent.demo.commands import TrainerKind

from ...kit.ports import free_port

PROGRAM = Path(__file__).parents[2] / "kit" / "demo_ranks.py"
RANKS = 2


MEGATRONS = (TrainerKind.MEGATRON, TrainerKind.MEGATRON_MOE)


@pytest.fixture(scope="module")
def judged_all(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What two ranks said of themselves, by trainer."""
    folder = tmp_path_factory.mktemp("learner")
    for trainer in MEGATRONS:
        task.write_checkpoint(folder / trainer, 1, task.policy_of(trainer))
    port = str(free_port())
    with Programs(folder) as programs:
        ranks = [
            programs.start(
                f"rank{rank}",
                [sys.executable, "-W", "ignore", str(PROGRAM), str(folder)],
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
    found: dict[str, dict[str, Any]] = json.loads(ranks[0].log.read_text().splitlines()[-1])
    return found


@pytest.fixture(params=MEGATRONS, ids=str)
def judged(request: pytest.FixtureRequest, judged_all: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Tensor parallel, and with experts spread over the ranks."""
    return judged_all[request.param]


@pytest.mark.real
def test_the_ranks_hold_the_checkpoint_bit_for_bit(judged: dict[str, Any]) -> None:
    """Trainer and engines start from the same weights: what the ranks would publish is what the engines loaded."""
    assert judged["same"]


@pytest.mark.real
def test_a_few_steps_favor_wanted_tokens(judged: dict[str, Any]) -> None:
    """The policy gradient points at the reward, on every rank."""
    assert judged["before"] == pytest.approx(0.25, abs=0.02)
    assert judged["after"] > judged["before"] + 0.005


@pytest.mark.real
def test_every_kind_of_weight_learns(judged: dict[str, Any]) -> None:
    """Nothing is left out of the backward pass; norms may be too coarse in bfloat16 to move at once."""
    assert [name for name in judged["unchanged"] if not name.endswith("norm.weight")] == []
