"""Greedy tokens by transformers: `python oracle.py FOLDER SEEDS PROMPT` prints {seed: tokens} as JSON."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

folder, seeds, prompt = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
tokens = {}
for seed in range(seeds):
    model = AutoModelForCausalLM.from_pretrained(folder / f"seed{seed}", dtype=torch.bfloat16)
    asked = torch.tensor([prompt])
    found = model.generate(
        asked,
        attention_mask=torch.ones_like(asked),
        max_new_tokens=8,
        min_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
    )
    tokens[seed] = found[0, len(prompt) :].tolist()
sys.stdout.write(json.dumps(tokens))
