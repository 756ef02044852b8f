"""What a sound server must answer, by transformers: `python oracle.py FOLDER SEEDS PROMPTS` prints it as JSON.

For every checkpoint ``FOLDER/seedN`` and every prompt: the greedy tokens, as long as the best token leads clearly.
Where two tokens are nearly equal, bfloat16 kernels may differ and prove nothing.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

STEPS = 8
CLEAR = 0.2
"""Lead of the best logit over the next, in float32. Rounding to bfloat16 moves these models' logits by about 0.05."""


@torch.no_grad()
def answer(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """The greedy tokens that lead clearly."""
    tokens: list[int] = []
    while len(tokens) < STEPS:
        best = model(torch.tensor([prompt + tokens])).logits[0, -1].topk(2)
        if best.values[0] - best.values[1] < CLEAR:
            break
        tokens.append(int(best.indices[0]))
    return tokens


folder, seeds, prompts = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
answers = {}
for seed in range(seeds):
    policy = AutoModelForCausalLM.from_pretrained(folder / f"seed{seed}", dtype=torch.bfloat16).float()
    answers[seed] = [answer(policy, prompt) for prompt in prompts]
sys.stdout.write(json.dumps(answers))
