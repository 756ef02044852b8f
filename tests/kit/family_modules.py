"""The program of one rank: each family as a transformers module, alone and sharded by FSDP2, against its files.

    python tests/kit/family_modules.py RANK WORLD RENDEZVOUS_FILE CHECKPOINTS OUT FAMILY...

The root writes ``OUT/<family>.json``: for each source what differs, bit for bit, from the files in bfloat16 and from
what FP8 blocks make of that; or the refusal.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
from pathlib import Path
from typing import Any

import exporting
import quantizing
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from tiny_families import FAMILIES, predicted_tensors
from torch import nn
from torch.distributed.fsdp import fully_shard

from weightbus.dataplane.tensors.manifest import Manifest
from weightbus.trainer_agent.quantized.quantized_source import quantized
from weightbus.trainer_agent.source import Source, SourceError
from weightbus.trainer_agent.sources.hf_module import FSDPSource, HFModuleSource

BUCKET_BYTES = 40_000
FLOAT32 = ("e_score_correction_bias", "A_log", ".norm.weight")
"""What may stay in float32."""


def loaded(family: str, folder: Path) -> nn.Module:
    """The module of a checkpoint; prediction layers have none in transformers."""
    tiny = FAMILIES[family]
    kind = getattr(transformers, tiny.made_as or tiny.architecture)
    module: nn.Module = kind.from_pretrained(folder, dtype=torch.float32)
    return module.eval()


def sharded(module: nn.Module) -> nn.Module:
    """By blocks of layers, then the rest."""
    for each in list(module.modules()):
        if isinstance(each, nn.ModuleList) and any(True for _ in each.parameters()):
            for layer in each:
                if isinstance(layer, nn.Module) and "Layer" in type(layer).__name__:
                    fully_shard(layer)
    fully_shard(module)
    return module


def verdict_of(source: Source, expected: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """What differs from the files; and quantized, from what whole tensors give."""
    found = exporting.export(source, BUCKET_BYTES)
    kept = {spec.name for spec in source.tensors() if spec.dtype == "float32"}
    expected = {name: tensor if name in kept else tensor.to(torch.bfloat16) for name, tensor in expected.items()}
    odd = exporting.differing(found, expected) if source.root else []
    odd += [name for name in kept if not name.endswith(FLOAT32)]
    config = quantizing.config(16, [spec.name for spec in source.tensors()])
    eight = quantized(source, config)
    manifest = Manifest.of(source.model, eight.tensors(), BUCKET_BYTES)

    def assemble(index: int, out: torch.Tensor) -> None:
        eight.assemble(manifest, index, out if eight.root else None)

    made = quantizing.collected(manifest, assemble)
    differs = quantizing.differing(made, quantizing.whole(expected, config)) if source.root else []
    return {"odd": odd[:5], "fp8": differs[:5]}


def run(family: str, checkpoints: Path) -> dict[str, Any]:
    """Both sources of one family."""
    folder = checkpoints / family
    # A part of a whole model, which transformers has a class of.
    folder = alone if (alone := folder / "alone").is_dir() else folder
    expected = load_file(folder / "model.safetensors")
    verdicts: dict[str, Any] = {}
    predicted = _predicted(family, folder, expected)
    expected = {name: tensor for name, tensor in expected.items() if name not in predicted}
    try:
        verdicts["HF"] = (
            verdict_of(HFModuleSource(loaded(family, folder), dtype=torch.bfloat16), expected)
            if dist.get_rank() == 0
            else None
        )
    except SourceError as error:
        verdicts["HF"] = str(error)
    try:
        source = FSDPSource(sharded(loaded(family, folder)), dtype=torch.bfloat16, timeout_s=60.0)
        verdicts["FSDP2"] = verdict_of(source, expected)
        source.close()
    except SourceError as error:
        verdicts["FSDP2"] = str(error)
    return verdicts


def _predicted(family: str, folder: Path, tensors: dict[str, torch.Tensor]) -> set[str]:
    if not FAMILIES[family].predictions:
        return set()
    config = json.loads((folder / "config.json").read_text())
    prefixes = tuple(predicted_tensors(family, config.get("text_config", config)))
    return {name for name in tensors if name.startswith(prefixes)}


def main() -> None:
    rank, world, rendezvous = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    checkpoints, out = Path(sys.argv[4]), Path(sys.argv[5])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=dt.timedelta(seconds=120)
    )
    for family in sys.argv[6:]:
        verdict = run(family, checkpoints)
        if rank == 0:
            (out / f"{family}.json").write_text(json.dumps(verdict))
            print(family, verdict, flush=True)  # noqa: T201  a program's output
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
