"""What transformers computes from a checkpoint folder: `python tests/kit/hf_folder.py FOLDER OUT_FILE`.

Prints, as JSON, the names that it missed or did not expect.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_families import TOKENS
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
model, loading = AutoModelForCausalLM.from_pretrained(Path(sys.argv[1]), output_loading_info=True, dtype=torch.float32)
with torch.no_grad():
    save_file({"logits": model.eval()(torch.tensor(TOKENS)).logits.contiguous()}, sys.argv[2])
sys.stdout.write(json.dumps({key: sorted(map(str, value)) for key, value in loading.items() if value}))
