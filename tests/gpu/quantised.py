"""Quantisation on a GPU: the kernels against the reference bit for bit, then how fast they are.

    python3 tests/gpu/quantised.py [--gigabytes N] [--out FILE]         one CUDA device
    python3 tests/gpu/quantised.py --dry-run                            no GPU: the same steps with torch on the CPU

Prints one JSON object and exits with 1 unless every scheme was equal. Weights are those of Qwen3-30B-A3B's experts,
2048 x 768, and as many as fill `--gigabytes`. `quantise_s` is the time for FP8 in blocks of 128 x 128 from bfloat16,
`bandwidth` its bytes read and written by second, `of_copy` the same beside a plain copy in the same run. Rounds
(`bf16_round_s`, `fp8_round_s`, `peer_*`) need servers and are null here.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import msgspec
import torch

from weightbus.dataplane import quantise_torch
from weightbus.dataplane.manifest import TensorSpec
from weightbus.dataplane.quantisation import SCHEMES, Scheme, fp8_block, int4
from weightbus.dataplane.quantise import Task, prepare

EXPERT = (2048, 768)
ROUNDS = 12
ODD = ((200, 384), (136, 256), (8, 128), (2048, 768), (129, 4096))


def weight(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Like a trained weight, with blocks of zeros and magnitudes that are 1.75 times a power of two."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-12, 4, (shape[0], 1), generator=generator))
    values = torch.randn(shape, generator=generator) * spread
    values[: shape[0] // 3, : shape[1] // 2] = 0
    values[-1, -1] = 14.0
    return values.to(dtype)


def outputs(scheme: Scheme, shape: tuple[int, int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Memory for the parts of one weight."""
    parts = [part for part in scheme.parts(TensorSpec("w.weight", "bfloat16", shape)) if part.cell[0]]
    return tuple(torch.zeros(part.shape, dtype=getattr(torch, part.dtype), device=device) for part in parts)


def equal(scheme: Scheme, device: torch.device) -> bool:
    """Every shape, from both dtypes, as the reference on the CPU has it."""
    for shape in ODD:
        if scheme.objection(shape):
            continue
        for dtype in (torch.bfloat16, torch.float32):
            values = weight(shape, dtype)
            expected, found = outputs(scheme, shape, torch.device("cpu")), outputs(scheme, shape, device)
            quantise_torch.quantise(scheme, values.bfloat16(), expected)
            prepare([Task(scheme, values.to(device), torch.bfloat16, found)], device).run()
            for one, other in zip(expected, found, strict=True):
                if not torch.equal(one.view(-1).view(torch.uint8), other.cpu().view(-1).view(torch.uint8)):
                    print(f"{scheme.name} differs for {shape} {dtype}", file=sys.stderr)  # noqa: T201
                    return False
    return True


def seconds(device: torch.device, run: Callable[[], object]) -> float:
    """The best of some runs."""
    found = []
    for _ in range(ROUNDS):
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


def speed(scheme: Scheme, device: torch.device, nbytes: int) -> dict[str, float]:
    """Experts that fill `nbytes` of bfloat16."""
    count = max(1, nbytes // (2 * EXPERT[0] * EXPERT[1]))
    source = torch.randn((count, *EXPERT), device=device, dtype=torch.bfloat16)
    outs = [outputs(scheme, EXPERT, device) for _ in range(count)]
    tasks = prepare([Task(scheme, source[index], torch.bfloat16, outs[index]) for index in range(count)], device)
    read, written = source.nbytes, sum(each.nbytes for parts in outs for each in parts)
    took = seconds(device, tasks.run)
    target = torch.empty_like(source)
    copied = seconds(device, lambda: target.copy_(source))
    bandwidth, plain = (read + written) / took, 2 * read / copied
    return {
        "bytes_bf16": read, "bytes_quantised": written, "quantise_s": took, "bandwidth": bandwidth,
        "copy_bandwidth": plain, "of_copy": bandwidth / plain,
    }  # fmt: skip


def divided(device: torch.device, nbytes: int) -> dict[str, object]:
    """FP8 in blocks with the divider's own quotients: whether they have the same bits, and how fast."""
    from weightbus.dataplane import quantise_cuda

    scheme, launch = fp8_block((128, 128)), quantise_cuda.launch
    try:
        quantise_cuda.launch = lambda kind, table, **_: launch(kind, table, fast=False)
        return {"equal": equal(scheme, device), **speed(scheme, device, nbytes)}
    finally:
        quantise_cuda.launch = launch


def main() -> int:
    """Check, then measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device("cpu" if given.dry_run else "cuda")
    nbytes = 1 << 24 if given.dry_run else int(given.gigabytes * 1e9)
    schemes = [*SCHEMES, int4(32, symmetric=True), int4(32, symmetric=False)]
    found = {f"{each.name}-{each.block[1]}": equal(each, device) for each in schemes}
    measured = {each.name: speed(each, device, nbytes) for each in SCHEMES}
    block = measured["fp8-block"]
    result: dict[str, object] = {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": "cpu, a dry run" if given.dry_run else torch.cuda.get_device_name(),
        "command": " ".join(["python3", "tests/gpu/quantised.py", *sys.argv[1:]]),
        "model": f"experts {EXPERT[0]} x {EXPERT[1]}",
        **block,
        "bf16_round_s": None, "fp8_round_s": None, "peer_bf16_s": None, "peer_fp8_s": None,
        "equal": all(found.values()),
        "schemes": measured,
        "equal_by_scheme": found,
        "ieee_division": None if given.dry_run else divided(device, nbytes),
    }  # fmt: skip
    text = msgspec.json.format(json.dumps(result), indent=2)
    print(text)  # noqa: T201
    if given.out:
        given.out.write_text(text + "\n")
    return 0 if result["equal"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
