"""Gives SGLang's own quantized models what a trainer quantized on its way, without a server.

`python tests/kit/sglang_quantized.py CASE..` prints one JSON object for each case, such as ``qwen3:fp8:tp2:ep1:rank1``:

    quantize random weights as the model's config says, through `quantized`, by buckets
    build SGLang's quantized model, fill it with noise, load the buckets with its own loader
    build SGLang's plain model in another process, load the same weights unquantized
    every parameter of the first, read back by its scales, must be that of the second, as near as the format allows

A CPU server cannot serve these models: SGLang packs FP8 for AMX there, and has no kernel for INT4. On a GPU its loader
is the same one; there it repacks INT4 afterwards.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import sglang_models as kit

_WIDE: dict[str, Any] = {"hidden_size": 256, "head_dim": 128, "intermediate_size": 512}
_FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
SCHEMES: dict[str, dict[str, Any]] = {
    "fp8": {**_FP8, "weight_block_size": [128, 128]},
    "ue8m0": {**_FP8, "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128},
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    },
    "ignoring": {**_FP8, "weight_block_size": [128, 128], "modules_to_not_convert": ["model.layers.0", "lm_head"]},
}


def config_of(model: str) -> kit.Config:
    config = {key: value for key, value in kit.CONFIGS[model].items() if key != "quantization_config"}
    wide = {**_WIDE, "moe_intermediate_size": 256} if "moe_intermediate_size" in config else _WIDE
    return {**config, **wide}


class Tensors:
    """A source of one process over whole tensors. Satisfies `Source`."""

    root = True

    def __init__(self, tensors: Any, model: str) -> None:
        import torch

        self.model = model
        self.device = torch.device("cpu")
        self._tensors = tensors

    def tensors(self) -> Any:
        from weightbus.dataplane.tensors.manifest import TensorSpec

        return [
            TensorSpec(name, str(each.dtype).removeprefix("torch."), tuple(each.shape))
            for name, each in self._tensors.items()
        ]

    def assemble(self, manifest: Any, index: int, out: Any) -> None:
        for spec, at in zip(manifest.tensors_of(index), manifest.offsets_of(index), strict=False):
            tensor = self._tensors[spec.name]
            out[at : at + spec.nbytes].view(tensor.dtype).view(spec.shape).copy_(tensor)

    def agree(self, blob: bytes) -> bytes:
        return blob


def weights(config: kit.Config) -> Any:
    import torch

    torch.manual_seed(3)
    shapes = kit.shapes(config)
    return {
        name: (torch.randn(shape) / 30).to(getattr(torch, kit.dtype_of(name, config))) for name, shape in shapes.items()
    }


def buckets(source: Any) -> Any:
    """What engines receive: tensors by name, cut out of buckets."""
    import torch

    from weightbus.dataplane.tensors.manifest import Manifest

    manifest = Manifest.of(source.model, source.tensors(), 300_000)
    for index, bucket in enumerate(manifest.buckets):
        out = torch.empty(bucket.nbytes, dtype=torch.uint8)
        source.assemble(manifest, index, out)
        for spec, at in zip(manifest.tensors_of(index), manifest.offsets_of(index), strict=False):
            yield spec.name, out[at : at + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)


def plain(config: kit.Config, ranks: dict[str, int], into: Path) -> dict[str, object]:
    """The parameters of the unquantized model."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        model = kit.build(config, folder, **ranks)
    model.load_weights(iter(weights(config).items()))
    torch.save({name: each.detach().clone() for name, each in model.named_parameters()}, into)
    return {}


def case(config: kit.Config, scheme: str, ranks: dict[str, int], expected: Path) -> dict[str, object]:
    import torch

    from weightbus.trainer_agent.quantized.quantized_source import quantized

    config = {**config, "quantization_config": SCHEMES[scheme]}
    with tempfile.TemporaryDirectory() as folder:
        model = kit.build(config, folder, **ranks)
    given = {key: value for key, value in config.items() if key != "quantization_config"}
    source = quantized(Tensors(weights(given), config["architectures"][0]), config)  # type: ignore[arg-type]
    parameters = {name: each for name, each in model.named_parameters() if each.dim()}  # KV scales are none of ours
    for each in parameters.values():
        each.data.view(torch.uint8).fill_(0x7E)  # the largest number of e4m3, and a huge one of the others
    model.load_weights(buckets(source))
    wanted = torch.load(expected, weights_only=True)
    worst, far, exact = 0.0, [], 0
    for name, tensor in wanted.items():
        if f"{name}_packed" in parameters:
            if (error := unpacked(parameters, name, tensor)) > 0.53:
                far.append(name)
            worst = max(worst, error)
            continue
        found, scale = parameters[name], parameters.get(f"{name}_scale_inv")
        if found.dtype != torch.float8_e4m3fn:
            exact += 1
            if not torch.equal(found, tensor):
                far.append(name)
            continue
        assert scale is not None, name
        step = scale.float().repeat_interleave(128, -2).repeat_interleave(128, -1)
        step = step[..., : found.shape[-2], : found.shape[-1]]
        error = (found.float() * step - tensor.float()).abs() / tensor.float().abs().maximum(step * 2**-6)
        worst = max(worst, float(error.max()))
        if error.max() > 1 / 15.9:
            far.append(name)
    quantized_parameters = [
        name for name, each in parameters.items() if each.dtype == torch.float8_e4m3fn or name.endswith("_packed")
    ]
    return {
        "differs": far,
        "worst": worst,
        "quantized": len(quantized_parameters),
        "exact": exact,
        "names": sorted(parameters.keys() - wanted.keys()),
    }


def unpacked(parameters: Any, name: str, wanted: Any) -> float:
    """The largest error of an INT4 parameter, read back by its scales as they were loaded, in steps of its scales.

    Experts lie transposed. Half a step is what rounding takes; scales are in bfloat16.
    """
    import torch

    packed, scale = parameters[f"{name}_packed"], parameters[f"{name}_scale"].float()
    if packed.dim() == 3:
        packed, scale = packed.transpose(1, 2), scale.transpose(1, 2)
    values = ((packed.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15).flatten(-2) - 8
    step = scale.repeat_interleave(128, -1)
    return float(((values * step - wanted.float()).abs() / step).max())


def fork(work: Callable[[], dict[str, object]], name: str) -> None:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            found = work()
            if found:
                print(json.dumps({"case": name, **found}))  # noqa: T201 - what the caller reads
        except BaseException:  # noqa: BLE001 - the fork must not go on as its parent
            print(json.dumps({"case": name, "error": traceback.format_exc()}))  # noqa: T201
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)


def main() -> None:
    import sglang.srt.server_args
    import torch

    torch.set_num_threads(1)
    import sglang.srt.model_loader
    import sglang.srt.models.registry  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:]:
            model, scheme, tp, ep, rank = name.split(":")
            ranks = {"tp": int(tp[2:]), "ep": int(ep[2:]), "rank": int(rank[4:])}
            config, expected = config_of(model), Path(folder, "expected")
            fork(functools.partial(plain, config, ranks, expected), name)
            fork(functools.partial(case, config, scheme, ranks, expected), name)


if __name__ == "__main__":
    main()
