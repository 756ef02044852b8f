"""What transformers makes of exported tensors: `python tests/kit/hf_logits.py OUT`, beside megatron_ranks.py's files.

Writes ``OUT/oracle.json``: for every case the names that transformers missed or did not expect when it loaded the
tensors as a checkpoint, and how far its logits are from those of the Megatron ranks. A program of its own because
transformers takes seconds to import, and needs the CPU shim where torchvision was built for CUDA.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from megatron_cases import CASES, CONTENTS, TOKENS
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def judge(out: Path, name: str) -> dict[str, object]:
    """Load one case as a checkpoint and compare."""
    folder = out / f"checkpoint-{name}"
    folder.mkdir()
    shutil.copy(out / f"{name}.safetensors", folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONTENTS[CASES[name].content]))
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    with torch.no_grad():
        expected = model.eval()(torch.tensor(TOKENS)).logits
    found = load_file(out / f"{name}.logits.safetensors")["logits"]
    problems = {key: sorted(map(str, value)) for key, value in loading.items() if value}
    return {
        "loading": problems,
        "difference": float((found - expected).abs().max()),
        "scale": float(expected.abs().max()),
    }


def main() -> None:
    """Judge every case that was exported."""
    out = Path(sys.argv[1])
    verdicts = {name: judge(out, name) for name in CASES if (out / f"{name}.safetensors").exists()}
    (out / "oracle.json").write_text(json.dumps(verdicts))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
