"""What transformers computes from folders: `python tests/kit/hf_folder.py FOLDER OUT_FILE [FOLDER OUT_FILE ..]`.

Prints, as one JSON list, the names that it missed or did not expect in each.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_families import TOKENS
from transformers import AutoModelForCausalLM


def judge(folder: str, out: str) -> dict[str, Sequence[str]]:
    """Load one, compute, and say what was odd."""
    model, loading = AutoModelForCausalLM.from_pretrained(Path(folder), output_loading_info=True, dtype=torch.float32)
    with torch.no_grad():
        save_file({"logits": model.eval()(torch.tensor(TOKENS)).logits.contiguous()}, out)
    return {key: sorted(map(str, value)) for key, value in loading.items() if value}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps([judge(*pair) for pair in zip(sys.argv[1::2], sys.argv[2::2], strict=True)]))
