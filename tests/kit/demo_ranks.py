"""One rank of the demo's learners, judged by themselves: `python demo_ranks.py CHECKPOINTS`, with torch's environment.

Rank 0 prints one line of JSON, for each trainer of ``CHECKPOINTS/<trainer>``: whether the ranks together hold the
checkpoint bit for bit, the share of probability that the policy gives to wanted tokens before and after some steps,
and what did not change.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from exporting import export
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as gather

from weightbus.trainer_agent.demo import toy_task as task
from weightbus.trainer_agent.demo.commands import TrainerKind
from weightbus.trainer_agent.demo.megatron_learner import MegatronLearner
from weightbus.trainer_agent.sources.megatron.cpu_emulation import install
from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource

STEPS = 10
MEGATRONS = (TrainerKind.MEGATRON, TrainerKind.MEGATRON_MOE)


def rows() -> torch.Tensor:
    """Random prompts and responses: what a policy that has learned nothing writes."""
    generator = torch.Generator().manual_seed(7)
    prompts = torch.tensor(task.prompts(1, 1))
    return torch.cat(
        [prompts, torch.randint(task.VOCABULARY, (len(prompts), task.RESPONSE_TOKENS), generator=generator)], 1
    )


def wanted(learner: MegatronLearner, tokens: torch.Tensor) -> float:
    """The mean probability of a wanted token, everywhere in `tokens`."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        logits = gather(learner.model(tokens, positions, None).float())
    return float(logits.softmax(-1)[..., : task.WANTED].sum(-1).mean())


def judge(folder: Path, trainer: TrainerKind) -> dict[str, object]:
    """Load, compare, learn, compare. On the root, the verdict."""
    learner = MegatronLearner(folder, 1, task.policy_of(trainer))
    source = MegatronSource(learner.model, hf_config=folder, timeout_s=60.0)
    before = export(source, 1 << 16)
    tokens = rows()
    odds = wanted(learner, tokens)
    for _ in range(STEPS):
        learner.learn(tokens, torch.ones(len(tokens), task.RESPONSE_TOKENS))
    later = wanted(learner, tokens)
    after = export(source, 1 << 16)
    source.close()
    given = task.read_checkpoint(folder)
    same = before.keys() == given.keys() and all(torch.equal(before[name], given[name]) for name in given)
    unchanged = [name for name in before if torch.equal(before[name], after[name])]
    return {"same": same, "before": odds, "after": later, "unchanged": unchanged}


def main(folder: Path) -> None:
    """One trainer after another: importing Megatron takes longer than all of them."""
    torch.set_num_threads(1)
    install()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found: dict[str, object] = {}
    for trainer in MEGATRONS:
        found[trainer] = judge(folder / trainer, trainer)
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
