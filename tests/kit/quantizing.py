"""Sources whose weights are quantized on their way, compared with whole tensors that are quantized at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from weightbus.dataplane.quantize import quantize_tasks as quantize_torch
from weightbus.dataplane.quantize.schemes import quantized_tensors, read_quantization_config
from weightbus.dataplane.tensors.manifest import Manifest, TensorSpec
from weightbus.dataplane.tensors.shards import Shards
from weightbus.trainer_agent.assembly.assembler import DTYPES

FP8: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "modules_to_not_convert": ["eh_proj", "merging_layer"],  # of which names do not tell, and there are no files
}  # fmt: skip


STACKED = (".experts.gate_up_proj", ".experts.down_proj")
"""Tensors that hold all experts of a layer, which no scheme quantizes."""


def config(block: int, names: Iterable[str] = ()) -> dict[str, Any]:
    """The config of a checkpoint in FP8 with blocks that tiny models have several of.

    Of its tensors, `names`, those that hold all experts of a layer are left as they are.
    """
    kept = [
        *FP8["modules_to_not_convert"],
        *sorted({name.rpartition(".")[0] for name in names if name.endswith(STACKED)}),
    ]
    return {"quantization_config": {**FP8, "weight_block_size": [block, block], "modules_to_not_convert": kept}}


def whole(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What `config` makes of these tensors, each at once."""
    quantization = read_quantization_config(config)
    assert quantization is not None
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        spec = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        scheme = quantization.scheme_of(spec)
        if scheme is None:
            found[name] = tensor
            continue
        made = {
            each.name: torch.empty(each.shape, dtype=DTYPES[each.dtype]) for each in quantized_tensors(spec, scheme)
        }
        quantize_torch.quantize(scheme, tensor, tuple(made.values()))
        found |= made
    return found


def differing(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Names that are not in both, or not bit for bit the same."""

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return sorted(
        name
        for name in found.keys() | expected.keys()
        if name not in found
        or name not in expected
        or found[name].shape != expected[name].shape
        or found[name].dtype != expected[name].dtype
        or not torch.equal(bits(found[name]), bits(expected[name]))
    )


class Held:
    """One rank of a layout, as `LocatedSource` and `Source` ask for it: pieces, and the memory that they are in."""

    model = "M"
    device = torch.device("cpu")

    def __init__(self, rank: int, shards: Shards, memory: Sequence[torch.Tensor], exchange: Any) -> None:
        self.rank = rank
        self.root = rank == 0
        self.shards = shards
        self.exchange = exchange
        self._memory = memory

    def tensors(self) -> Sequence[TensorSpec]:
        return self.shards.tensors

    def memory(self) -> Sequence[torch.Tensor]:
        return self._memory

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        raise AssertionError(f"bucket {index} of {manifest.model} was asked for whole: {out}")

    def agree(self, blob: bytes | None) -> bytes:
        return blob or b""


def collected(manifest: Manifest, assemble: Callable[[int, torch.Tensor], None]) -> dict[str, torch.Tensor]:
    """Every tensor of a manifest, out of its buckets."""
    found: dict[str, torch.Tensor] = {}
    for index, bucket in enumerate(manifest.buckets):
        out = torch.full((bucket.nbytes,), 0xA5, dtype=torch.uint8)
        assemble(index, out)
        for spec, at in zip(manifest.tensors_of(index), manifest.offsets_of(index), strict=False):
            found[spec.name] = out[at : at + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape)
    return found
