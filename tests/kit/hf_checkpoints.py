"""Writes a tiny checkpoint of every family with transformers, and the logits that it computes of what it loads again.

    python tests/kit/hf_checkpoints.py OUT [family ...]

Needs the server's CPU shim on PYTHONPATH, and no network. ``OUT/<family>`` gets what `save_pretrained` writes, and
``logits.safetensors``; prediction layers, which transformers does not have, are added with random content.
"""

from __future__ import annotations

import json
import shutil
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
        config = kind.config_class(text_config=text, vision_config=tiny.vision, tie_word_embeddings=tied, **tiny.beside)
    torch.manual_seed(0)
    model = kind(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
        for key, buffer in model.named_buffers():
            if "correction_bias" in key:
                buffer.add_(torch.randn_like(buffer) * 0.01)
    model.save_pretrained(folder)
    as_released(name, model, folder)
    loaded, problems = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(problems.values()), problems
    with torch.no_grad():
        logits = loaded.eval()(torch.tensor(TOKENS)).logits
    save_file({"logits": logits.contiguous()}, folder / "logits.safetensors")
    written: dict[str, Any] = json.loads((folder / "config.json").read_text())
    written |= {"architectures": [tiny.architecture], "dtype": "float32"}
    if tiny.vision and tiny.predictions:
        written["text_config"]["mtp_num_hidden_layers"] = tiny.predictions
    else:
        written["num_nextn_predict_layers"] = tiny.predictions
    if name == "glm5":
        written |= {"indexer_rope_interleave": True}  # older transformers leave out what published configs have
    (folder / "config.json").write_text(json.dumps(written))
    if name == "qwen3_omni":
        as_thinker(folder, written)
    if tiny.predictions:
        add_predictions(name, written.get("text_config", written), folder)


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
            made = torch.randn_like(tensors[other]) * 0.05
            tensors |= one_by_one(key + other.removeprefix(like), made)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def name_layers(folder: Path) -> None:
    """Name decoder layers as releases do: transformers 5.19 loads those, and saves the decoder's as the tower's."""
    tensors = load_file(folder / "model.safetensors")
    decoder = "language_model.model."
    named = {name.replace(f"{decoder}blocks.", f"{decoder}layers."): each for name, each in tensors.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})


def as_thinker(folder: Path, config: dict[str, Any]) -> None:
    """Put the thinker, which stays in a folder as transformers saves it, in the place it has in the whole model."""
    (folder / "alone").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, folder / "alone" / name)
    tensors = load_file(folder / "model.safetensors")
    save_file({f"thinker.{name}": each for name, each in tensors.items()}, folder / "model.safetensors")
    whole = {"architectures": config["architectures"], "dtype": config["dtype"], "thinker_config": config}
    (folder / "config.json").write_text(json.dumps(whole))


def one_by_one(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """A tensor by its name; where it holds all experts, each of them, as prediction layers have them."""
    if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
        return {name: tensor}
    where, _, part = name.rpartition(".")
    halves = {"gate_proj": slice(0, 32), "up_proj": slice(32, 64)} if part == "gate_up_proj" else {part: slice(None)}
    return {
        f"{where}.{expert}.{half}.weight": tensor[expert, rows].clone()
        for expert in range(len(tensor))
        for half, rows in halves.items()
    }


def as_released(name: str, model: torch.nn.Module, folder: Path) -> None:
    """Change what transformers saves of a new model into what releases of the family hold; both are loaded alike."""
    if name == "qwen3_5_moe_vl":
        stack_experts(model, folder)
    if name == "kimi_k25":
        name_layers(folder)


def stack_experts(model: torch.nn.Module, folder: Path) -> None:
    """Hold all experts of a layer in one tensor, as releases do, and transformers in memory."""
    tensors = {
        name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if ".experts." not in name
    }
    tensors |= {name: tensor.clone() for name, tensor in model.state_dict().items() if ".experts." in name}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def main() -> None:
    out = Path(sys.argv[1])
    for name in sys.argv[2:] or FAMILIES:
        make(name, FAMILIES[name], out / name)


if __name__ == "__main__":
    main()
