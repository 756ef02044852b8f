"""Names that tiny models of transformers' own classes have before and after `fully_shard`.

    python tests/kit/sharded_names.py OUT [PART/PARTS [CLASS...]]

Every class of a causal or conditional language model is built from its own default config, made small, on the meta
device, and asked for the tensors of its checkpoint. Writes OUT, a JSON object: class -> "same", "differs: ..." or
"not built: ..." (a config that cannot be made small by its common fields, a package that is not here) or
"refused: ..." (its tensors are no slices). Needs the CPU shim where torchvision was built for CUDA.
"""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers.models.auto import modeling_auto

from weightbus.trainer_agent.source import SourceError
from weightbus.trainer_agent.sources.checkpoint_conversion import slices, stored_tensors

SMALL: dict[str, int] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_head": 4,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "pad_token_id": 0,
}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "decoder_layers")
MAPPINGS = ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")


def classes() -> list[tuple[str, str]]:
    """Model type and class name of every class, each class once."""
    found: dict[str, str] = {}
    for mapping in MAPPINGS:
        for kind, name in getattr(modeling_auto, mapping).items():
            for each in [name] if isinstance(name, str) else name:
                found.setdefault(each, kind)
    return sorted((kind, name) for name, kind in found.items())


def assign(config: Any, key: str, value: object) -> None:
    """Set a field, unless the config derives it from others."""
    with suppress(AttributeError):
        setattr(config, key, value)


def shrink(config: Any, *, layers_only: bool) -> None:
    """Make a config and its sections small: their depth, and their widths unless `layers_only`."""
    for key in LAYERS:
        if isinstance(getattr(config, key, None), int):
            assign(config, key, min(2, getattr(config, key)))
    if isinstance(kinds := getattr(config, "layer_types", None), list):
        assign(config, "layer_types", kinds[:2])
    if not layers_only:
        for key, value in SMALL.items():
            if isinstance(getattr(config, key, None), int):
                assign(config, key, value)
    for key, section in list(vars(config).items()):
        if key.endswith("_config") and hasattr(section, "to_dict"):
            shrink(section, layers_only=layers_only)


def build(kind: str, name: str) -> nn.Module:
    """The model on the meta device, of two layers; of small widths if the class can be built with them."""
    errors: list[Exception] = []
    for layers_only in (True, False):
        try:
            config = transformers.AutoConfig.for_model(kind)
            shrink(config, layers_only=layers_only)
            with torch.device("meta"):
                return getattr(transformers, name)._from_config(config)
        except Exception as error:  # noqa: BLE001  # whatever a class says of a small config
            errors.append(error)
    raise errors[0]


def names(module: nn.Module) -> list[str]:
    """Names of the tensors of a module's checkpoint."""
    shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors(module).items()}
    return [each.tensor for each in slices(module, shapes)]


def compare(kind: str, name: str) -> str:
    """What sharding a model changed in its names."""
    try:
        module = build(kind, name)
    except Exception as error:  # noqa: BLE001  # whatever a class says of a small config
        return f"not built: {type(error).__name__}: {str(error)[:100]}"
    try:
        before = names(module)
    except SourceError as error:
        return f"refused: {str(error)[:160]}"
    for part in module.modules():
        if isinstance(part, nn.ModuleList):
            for layer in part:
                held = list(layer.parameters())
                inside = isinstance(layer, nn.ModuleList | nn.ModuleDict)
                if held and not inside and not any(isinstance(each, DTensor) for each in held):
                    fully_shard(layer)
    fully_shard(module)
    try:
        after = names(module)
    except SourceError as error:  # tied tensors that were sharded apart
        return f"refused once sharded: {str(error)[:160]}"
    if before == after:
        return "same"
    odd = sorted(set(after) - set(before)) or ["another order"]
    return f"differs: {len(odd)} of {len(after)}, such as {odd[0]}"


def main(out: Path, part: int, parts: int, always: list[str]) -> None:
    """Every class of the slice, and those of `always`."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    told: dict[str, str] = {}
    for at, (kind, name) in enumerate(classes()):
        if at % parts != part and name not in always:
            continue
        told[name] = compare(kind, name)
        out.write_text(json.dumps(told, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    PART, _, PARTS = (sys.argv[2] if len(sys.argv) > 2 else "0/1").partition("/")
    main(Path(sys.argv[1]), int(PART), int(PARTS), sys.argv[3:])
