"""INT4 files in a real server: what a trainer quantises on its way and saves is what SGLang's Marlin kernels serve.

SGLang 0.5.17 repacks INT4 while it loads and cannot load it again, so versions reach such a server as files. For each
model two shards of a trainer are quantised, as a compressed-tensors config says (symmetric, groups of 128), and
written as a checkpoint; compressed-tensors itself unpacks it into a second, plain one. A server started from the first
has to give a prompt the probabilities that a server started from the second gives it: the error beside it, of the
weights as they were before, shows how large a difference is that counts.

    python3 tests/gpu/int4.py [dense moe]      one CUDA device
    python3 tests/gpu/int4.py --device cpu     the same steps, tiny; SGLang has no INT4 on a CPU: the plain one twice

Prints one JSON object; `--out FOLDER` writes int4.json there, after every model. Exits with 1 unless all were equal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rig

INT4 = {
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
}
_TINY = {"hidden_size": 256, "head_dim": 128, "intermediate_size": 512}
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, int | None]]] = {
    "dense": (
        {**rig.QWEN3_8B, "num_hidden_layers": 3, "vocab_size": 32768}, {**rig.TINY, **_TINY}, {"tp": 2},
    ),
    "moe": (
        {**rig.QWEN3_30B_A3B, "num_hidden_layers": 2, "vocab_size": 32768},
        {**rig.TINY_MOE, **_TINY, "moe_intermediate_size": 256}, {"ep": 2, "etp": 1, "dp": 2},
    ),
}  # fmt: skip
"""On a GPU, on a CPU, and the trainer's layout."""
BUCKET_BYTES = 256 << 20
PROMPT = 200
"""Tokens."""
FEW = 0.25
"""Of the difference that quantising makes: two servers of the same weights, by other kernels, differ by less."""


def measure(args: argparse.Namespace, name: str, work: Path) -> dict[str, Any]:
    """Three checkpoints of one model, two servers, one prompt."""
    from weightbus.trainer_agent.demo.processes import Programs

    wide, tiny, layout = MODELS[name]
    hf = dict(wide if args.device == "cuda" else tiny)
    found = write_checkpoints(args, hf, layout, work)
    served = {"int4": "int4" if args.device == "cuda" else "unpacked", "plain": "unpacked"}
    places: dict[str, Any] = {"engines": {}}
    fleet = rig.Fleet(places)
    flags = ("--disable-cuda-graph", f"--mem-fraction-static={args.memory}") if args.device == "cuda" else ()
    with Programs(work) as programs:
        try:
            for place, folder in served.items():
                engine = rig.Engine(place, 0, 1, flags)
                port, _ = rig.start_server(programs, args.device, work / folder, engine, load_format="auto")
                fleet.add(place, port)
            for place in served:
                fleet.wait_serving(place, args.deadline, programs.check)
                rig.log(f"{name}: {place} is there")
            prompt = random.Random(5).choices(range(hf["vocab_size"]), k=PROMPT)
            packed, unpacked = (fleet.logprobs(place, prompt) for place in served)
            tokens = [fleet.tokens(place) for place in served]
            fleet.load("plain", work / "before")
            before = fleet.logprobs("plain", prompt)
        except Exception:
            rig.keep_logs(work, args.out, f"int4-{name}")
            raise
    found |= {
        "difference": difference(packed, unpacked),
        "difference_by_quantising": difference(packed, before),
        "tokens_equal": tokens[0] == tokens[1],
    }
    return {**found, "equal": found["difference"] < FEW * found["difference_by_quantising"]}


def difference(one: list[float], other: list[float]) -> float:
    """Of logarithms of probabilities, in the mean."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def write_checkpoints(
    args: argparse.Namespace, hf: dict[str, Any], layout: dict[str, int | None], work: Path
) -> dict[str, Any]:
    """``before`` quantising; ``int4``; ``unpacked``, as compressed-tensors reads the second one."""
    import torch
    from compressed_tensors.compressors import unpack_from_int32
    from shards import Shards

    from weightbus.dataplane.manifest import Manifest
    from weightbus.trainer_agent.quantised import quantised

    rig.play_cuda(args.device)
    source = Shards(hf, torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu"), 2, **layout)
    source.refill(1)
    packing = quantised(source, {**hf, "quantization_config": INT4})
    plain = Manifest.of(source.model, source.tensors(), BUCKET_BYTES)
    packed = Manifest.of(source.model, packing.tensors(), BUCKET_BYTES)
    save(work / "before", plain, hf, source.device, lambda index, out: source.assemble(plain, index, out))
    whole: dict[str, Any] = {}

    def keep(index: int, out: torch.Tensor) -> None:
        packing.assemble(packed, index, out)
        for spec, at in zip(packed.tensors_of(index), packed.offsets_of(index), strict=False):
            typed = out[at : at + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape)
            whole[spec.name] = typed.cpu()

    save(work / "int4", packed, {**hf, "quantization_config": INT4}, source.device, keep)
    weights = [name.removesuffix("_packed") for name in whole if name.endswith(".weight_packed")]
    for name in weights:
        number, scale = whole.pop(f"{name}_packed"), whole.pop(f"{name}_scale")
        shape = torch.Size(whole.pop(f"{name}_shape").tolist())
        values = unpack_from_int32(number, 4, shape).to(scale.dtype)
        whole[name] = (values.unflatten(-1, (-1, 128)) * scale.unsqueeze(-1)).flatten(-2).bfloat16()

    def fill(index: int, out: torch.Tensor) -> None:
        for spec, at in zip(plain.tensors_of(index), plain.offsets_of(index), strict=False):
            out[at : at + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape).copy_(whole[spec.name])

    save(work / "unpacked", plain, hf, source.device, fill)
    source.close()
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return {"bytes": plain.nbytes, "bytes_quantised": packed.nbytes, "weights": len(weights)}


def save(target: Path, manifest: Any, config: dict[str, Any], device: Any, fill: Callable[[int, Any], None]) -> None:
    """A checkpoint, bucket by bucket, as a trainer writes it."""
    import torch

    from weightbus.dataplane.checkpoint_writer import CheckpointWriter
    from weightbus.dataplane.disk_session import Notes

    beside = {"config.json": json.dumps(config).encode()}
    writer = CheckpointWriter(target, manifest, None)
    writer.begin()
    for index, bucket in enumerate(manifest.buckets):
        memory = torch.zeros(bucket.nbytes, dtype=torch.uint8, device=device)
        fill(index, memory)
        writer.add(index, memory)
    writer.finish(Notes(channel="int4", epoch=1, version=1, manifest=manifest.digest(), table=""), beside)


def main() -> int:
    parser = rig.parser(__doc__, memory=0.3, deadline=240.0, whose="for the servers of a model to come")
    parser.add_argument("model", nargs="*", choices=[[], *MODELS], default=[])
    args = parser.parse_args()
    names = args.model or list(MODELS)
    work = Path(tempfile.mkdtemp(prefix="wb-int4-"))
    found: dict[str, Any] = {**rig.describe("int4.py", args.device, MODELS[names[0]][0]), "equal": False, "models": {}}
    for name in names:
        (work / name).mkdir()
        with contextlib.ExitStack() as stack:
            stack.callback(rig.write_result, args.out, "int4", found)
            try:
                found["models"][name] = measure(args, name, work / name)
            except Exception as error:  # noqa: BLE001  one model is not all of them
                found["models"][name] = {"equal": False, "problem": f"{type(error).__name__}: {error}"}
            found["equal"] = all(found["models"].get(each, {}).get("equal") for each in names)
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if found["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
