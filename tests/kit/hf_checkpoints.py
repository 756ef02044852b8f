"""Writes a tiny checkpoint of every family with transformers, and the logits that it computes of what it loads again.

    python tests/kit/hf_checkpoints.py OUT [family ...]

Needs the server's CPU shim on PYTHONPATH, and no network. ``OUT/<family>`` gets what `save_pretrained` writes, and
``logits.safetensors``; prediction layers, which transformers does not have, are added with random content.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_families import FAMILIES, TOKENS, Tiny, predicted_tensors


def make(name: str, tiny: Tiny, folder: Path) -> None:
    """Write one checkpoint."""
    kind = getattr(transformers, tiny.made_as or tiny.architecture)
    text = {key: value for key, value in tiny.config.items() if key != "torch_dtype"}
    if tiny.vision is None:
        config = kind.config_class(**text)
    else:
        tied = tiny.config["tie_word_embeddings"]
        config = kind.config_class(text_config=text, vision_config=tiny.vision, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = kind(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
        for key, buffer in model.named_buffers():
            if "correction_bias" in key:
                buffer.add_(torch.randn_like(buffer) * 0.01)
    model.save_pretrained(folder)
    loaded, problems = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(problems.values()), problems
    with torch.no_grad():
        logits = loaded.eval()(torch.tensor(TOKENS)).logits
    save_file({"logits": logits.contiguous()}, folder / "logits.safetensors")
    written: dict[str, Any] = json.loads((folder / "config.json").read_text())
    written |= {"architectures": [tiny.architecture], "dtype": "float32", "num_nextn_predict_layers": tiny.predictions}
    if name == "glm5":
        written |= {"indexer_rope_interleave": True}  # older transformers leave out what published configs have
    (folder / "config.json").write_text(json.dumps(written))
    if tiny.predictions:
        add_predictions(name, written, folder)


def add_predictions(name: str, config: dict[str, Any], folder: Path) -> None:
    """Random tensors for the prediction layer, named as published checkpoints name them."""
    tensors = load_file(folder / "model.safetensors")
    hidden = config["hidden_size"]
    shapes = {"": (hidden,), "+": (hidden, 2 * hidden)}
    for key, like in predicted_tensors(name, config).items():
        if like in shapes:
            tensors[key] = torch.randn(shapes[like]) * 0.05
            continue
        for other in [other for other in tensors if other.startswith(like)]:
            tensors[key + other.removeprefix(like)] = torch.randn_like(tensors[other]) * 0.05
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def main() -> None:
    out = Path(sys.argv[1])
    for name in sys.argv[2:] or FAMILIES:
        make(name, FAMILIES[name], out / name)


if __name__ == "__main__":
    main()
