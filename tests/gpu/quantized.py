"""Quantization on a GPU: the kernels against the reference bit for bit, then how fast they are.

    python3 tests/gpu/quantized.py [--gigabytes N] [--out FILE]         one CUDA device
    python3 tests/gpu/quantized.py --only fp8-tensor-0 ...              nothing but those schemes: within a minute
    python3 tests/gpu/quantized.py --dry-run                            no GPU: the same steps with torch on the CPU

Prints one JSON object and exits with 1 unless every scheme was equal. Weights are those of Qwen3-30B-A3B's experts,
2048 x 768, and as many as fill `--gigabytes`. `quantize_s` is the time for FP8 in blocks of 128 x 128 from bfloat16,
`bandwidth` its bytes read and written by second, `of_copy` the same beside a plain copy in the same run. `summed` is
the same with the sums of the digests, whose time belongs beside `quantize_s` and `digest_s` together; `by_registers`
says how long both take by the most registers of a thread, as the kernel has them and not. `by_torch_s` is how long
FP8 by tensor takes without a kernel of ours. It reads every element twice, so that its `of_copy` ends at 0.6. Rounds
(`bf16_round_s`, `fp8_round_s`, `peer_*`) need servers and are null here. `--only` takes keys of `equal_by_scheme`, and
only says of each whether it was `equal`, and how fast.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np
import torch

from weightbus.dataplane.copy.box_digests import make_box_table
from weightbus.dataplane.copy.copy_cuda import copy_engine_for
from weightbus.dataplane.copy.copy_engine import PreparedDigest
from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.memory.shared_memory import bytes_of
from weightbus.dataplane.quantize import quantize_tasks as quantize_torch
from weightbus.dataplane.quantize.quantize_tasks import DigestSums, QuantizeTask, TorchTasks, prepare_tasks, word_layout
from weightbus.dataplane.quantize.schemes import SCHEMES, Scheme, fp8_block, fp8_channel, fp8_tensor, int4
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shards, whole_tensor_shard

EXPERT = (2048, 768)
ROUNDS = 12
ODD = ((200, 384), (136, 256), (8, 128), (2048, 768), (129, 4096))
WIDE = ((136, 384), (2048, 768), (16, 4096), (5, 28672))
"""For schemes whose programs are compiled for every width."""
BOTH = (torch.bfloat16, torch.float32)
MORE = {
    "fp8-tensor-0-scalar": msgspec.structs.replace(fp8_tensor(), scale_dtype="float16", flat=()),
    "fp8-channel-0-wide": fp8_channel(),
    "int4-32": int4(32, symmetric=True),
    "int4-asymmetric-32": int4(32, symmetric=False),
    "int4-0": int4(0, symmetric=True),
    "int4-asymmetric-0": int4(0, symmetric=False),
    "int4-256": int4(256, symmetric=True),
    "int4-asymmetric-24": int4(24, symmetric=False),
}
"""Beside one of each kind."""
KEYS = {**{f"{each.name}-{each.block[1]}": each for each in SCHEMES}, **MORE}


def weight(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0, *, lost: bool = False) -> torch.Tensor:
    """Like a trained weight, with blocks of zeros and magnitudes that are 1.75 times a power of two.

    With `lost` there are a NaN and infinities in it.
    """
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-12, 4, (shape[0], 1), generator=generator))
    values = torch.randn(shape, generator=generator) * spread
    values[: shape[0] // 3, : shape[1] // 2] = 0
    values[-1, -1] = 14.0
    values[1] *= 2.0**-90  # so small that quotients are corrected with larger numbers
    if lost:
        values[2, 5], values[4, 9], values[-2, -2] = -float("nan"), float("inf"), -float("inf")
    return values.to(dtype)


def outputs(scheme: Scheme, shape: tuple[int, int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Memory for the parts of one weight."""
    parts = [part for part in scheme.parts(TensorSpec("w.weight", "bfloat16", shape)) if part.cell[0]]
    return tuple(torch.zeros(part.shape, dtype=getattr(torch, part.dtype), device=device) for part in parts)


def equal(scheme: Scheme, device: torch.device, *, summed: bool = True, wide: bool = False) -> bool:
    """Every shape, from both dtypes, as the reference on the CPU has it; and its sums as tensor_digest.py has them."""
    shapes, dtypes = (WIDE, BOTH[:1]) if wide else (ODD, BOTH)
    cases = [(shape, dtype, lost) for shape in shapes for dtype in dtypes for lost in (False, True)]
    for shape, dtype, lost in cases:
        if scheme.objection(shape):
            continue
        values = weight(shape, dtype, lost=lost)
        expected = outputs(scheme, shape, torch.device("cpu"))
        quantize_torch.quantize(scheme, values.bfloat16(), expected)
        words = word_layout(scheme, Box.whole(shape), shape) if summed else None
        lanes = torch.full((3, 2), 5, device=device)
        for sums in (None, DigestSums(lanes, 1, *words)) if words else (None,):
            found = outputs(scheme, shape, device)
            prepare_tasks([QuantizeTask(scheme, values.to(device), torch.bfloat16, found, sums)], device).run()
            for one, other in zip(expected, found, strict=True):
                if not torch.equal(one.view(-1).view(torch.uint8), other.cpu().view(-1).view(torch.uint8)):
                    print(f"{scheme.name} differs for {shape} {dtype} {lost} {sums}", file=sys.stderr)  # noqa: T201
                    return False
        packed = expected[0].view(-1).view(torch.uint8)
        made = np.ascontiguousarray(lanes[1:2].cpu().numpy().view(np.uint64).T)
        digest = integrity.digest_tensors(packed, (0, len(packed)))
        if words and integrity.finish_digests(made, np.array([len(packed)])) != digest:
            print(f"{scheme.name} is summed up wrongly for {shape} {dtype} {lost}", file=sys.stderr)  # noqa: T201
            return False
    return True


def seconds(device: torch.device, run: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The best of some runs, but for the first two."""
    found = []
    for _ in range(rounds):
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            torch.cuda.synchronize()
            found.append(begin.elapsed_time(end) / 1000)
        else:
            began = perf_counter()
            run()
            found.append(perf_counter() - began)
    return min(found[2:])


@dataclass(frozen=True)
class Many:
    """Experts that fill `nbytes` of bfloat16, and what they become."""

    source: torch.Tensor
    outs: list[tuple[torch.Tensor, ...]]

    @classmethod
    def of(cls, scheme: Scheme, device: torch.device, nbytes: int) -> Many:
        """With random weights."""
        count = max(1, nbytes // (2 * EXPERT[0] * EXPERT[1]))
        source = torch.randn((count, *EXPERT), device=device, dtype=torch.bfloat16)
        return cls(source, [outputs(scheme, EXPERT, device) for _ in range(count)])

    def tasks(self, scheme: Scheme, *, summed: bool = False) -> list[QuantizeTask]:
        """One for each, each with sums of its own if they are `summed`."""
        lanes = torch.zeros((len(self.source), 2), dtype=torch.int64, device=self.source.device)
        words = word_layout(scheme, Box.whole(EXPERT), EXPERT) if summed else None
        return [
            QuantizeTask(
                scheme, self.source[at], torch.bfloat16, outs, None if words is None else DigestSums(lanes, at, *words)
            )
            for at, outs in enumerate(self.outs)
        ]

    def digest(self) -> PreparedDigest:
        """Of all elements, by a pass of its own."""
        specs = [TensorSpec(f"{at}", "float8_e4m3fn", EXPERT) for at in range(len(self.source))]
        pieces = Shards.of(specs, [whole_tensor_shard(spec, spec.dtype, at) for at, spec in enumerate(specs)])
        table = make_box_table(pieces, pieces.storage, np.zeros(len(pieces), np.int64))
        return copy_engine_for(self.source.device).prepare_digest(table, [bytes_of(outs[0]) for outs in self.outs])


def speed(scheme: Scheme, device: torch.device, nbytes: int) -> dict[str, float]:
    """Experts that fill `nbytes` of bfloat16."""
    many = Many.of(scheme, device, nbytes)
    tasks = prepare_tasks(many.tasks(scheme), device)
    read, written = many.source.nbytes, sum(each.nbytes for parts in many.outs for each in parts)
    took = seconds(device, tasks.run)
    target = torch.empty_like(many.source)
    copied = seconds(device, lambda: target.copy_(many.source))
    bandwidth, plain = (read + written) / took, 2 * read / copied
    return {
        "bytes_bf16": read, "bytes_quantized": written, "quantize_s": took, "bandwidth": bandwidth,
        "copy_bandwidth": plain, "of_copy": bandwidth / plain,
    }  # fmt: skip


def by_torch(device: torch.device, nbytes: int) -> float:
    """FP8 by tensor, as what has no kernel is quantized."""
    tasks = TorchTasks(Many.of(fp8_tensor(), device, nbytes).tasks(fp8_tensor()))
    return seconds(device, tasks.run, 3)


def chosen(keys: list[str], device: torch.device, nbytes: int) -> dict[str, dict[str, float | bool]]:
    """Whether these are equal, and how fast they are."""
    return {
        key: {"equal": equal(KEYS[key], device, wide=key in MORE), **speed(KEYS[key], device, nbytes)} for key in keys
    }


def sums(device: torch.device, nbytes: int) -> dict[str, float]:
    """FP8 in blocks with its digests: by one kernel, and by one after the other."""
    scheme = fp8_block((128, 128))
    many = Many.of(scheme, device, nbytes)
    plain, summed = (prepare_tasks(many.tasks(scheme, summed=each), device) for each in (False, True))
    digest = many.digest()
    # In turns: what else the machine does falls on all of them.
    found = {"quantize_s": math.inf, "digest_s": math.inf, "quantize_and_sum_s": math.inf}
    for _ in range(3):
        for name, run in zip(found, (plain.run, digest.run, summed.run), strict=True):
            found[name] = min(found[name], seconds(device, run))
    return {**found, "of_both": found["quantize_and_sum_s"] / (found["quantize_s"] + found["digest_s"])}


def by_registers(device: torch.device, nbytes: int) -> dict[str, dict[str, float]]:
    """Seconds for FP8 in blocks, plain and with sums, with so many registers for a thread at most."""
    from weightbus.dataplane.quantize import quantize_cuda

    scheme, launch = fp8_block((128, 128)), quantize_cuda.launch
    many = Many.of(scheme, device, nbytes)
    found: dict[str, dict[str, float]] = {}
    try:
        for registers in (64, 80, 96, 128, 168):

            def with_registers(
                kind: quantize_cuda.LaunchKind, table: torch.Tensor, most: int = registers, **_: object
            ) -> None:
                launch(kind, table, registers=most)

            quantize_cuda.launch = with_registers  # type: ignore[assignment]
            tasks = {
                name: prepare_tasks(many.tasks(scheme, summed=name == "summed"), device) for name in ("plain", "summed")
            }
            found[f"{registers}"] = {name: seconds(device, each.run) for name, each in tasks.items()}
    finally:
        quantize_cuda.launch = launch
    return found


def divided(device: torch.device, nbytes: int) -> dict[str, object]:
    """FP8 in blocks with the divider's own quotients: whether they have the same bits, and how fast.

    Not summed up: without fused multiply-adds only Triton's interpreter does that.
    """
    from weightbus.dataplane.quantize import quantize_cuda

    scheme, launch = fp8_block((128, 128)), quantize_cuda.launch
    try:
        quantize_cuda.launch = lambda kind, table, **_: launch(kind, table, fast=False)
        return {"equal": equal(scheme, device, summed=False), **speed(scheme, device, nbytes)}
    finally:
        quantize_cuda.launch = launch


def main() -> int:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--only", nargs="+", choices=KEYS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device("cpu" if given.dry_run else "cuda")
    nbytes = 1 << 24 if given.dry_run else int(given.gigabytes * 1e9)
    if given.only:
        some = {**chosen(given.only, device, nbytes), "by_torch_s": by_torch(device, nbytes)}
        print(msgspec.json.format(json.dumps(some), indent=2))  # noqa: T201
        return 0 if all(each["equal"] for each in some.values() if isinstance(each, dict)) else 1
    found = {key: equal(each, device, wide=key in MORE) for key, each in KEYS.items()}
    measured = {each.name: speed(each, device, nbytes) for each in SCHEMES}
    block = measured["fp8-block"]
    result: dict[str, object] = {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": "cpu, a dry run" if given.dry_run else torch.cuda.get_device_name(),
        "command": " ".join(["python3", "tests/gpu/quantized.py", *sys.argv[1:]]),
        "model": f"experts {EXPERT[0]} x {EXPERT[1]}",
        **block,
        "bf16_round_s": None, "fp8_round_s": None, "peer_bf16_s": None, "peer_fp8_s": None,
        "equal": all(found.values()),
        "schemes": measured,
        "equal_by_scheme": found,
        "more": {key: speed(each, device, nbytes) for key, each in MORE.items()},
        "by_torch_s": by_torch(device, nbytes),
        "summed": sums(device, nbytes),
        "ieee_division": None if given.dry_run else divided(device, nbytes),
        "by_registers": None if given.dry_run else by_registers(device, nbytes // 2),
    }  # fmt: skip
    text = msgspec.json.format(json.dumps(result), indent=2)
    print(text)  # noqa: T201
    if given.out:
        given.out.write_text(text + "\n")
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
