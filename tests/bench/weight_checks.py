"""What counting elements that are no numbers costs in the pass that digests a version, and comparing replicas.

    python3 tests/bench/weight_checks.py                               on the CPU
    python3 tests/bench/weight_checks.py --device cuda --gigabytes 8         on a GPU (tests/gpu/checks.py)

Both passes, with counts and without, run in turn in this process, over the same memory: packed as a bucket, and in
place as ranks digest what engines copy. Beside them stand a plain copy of the bucket, of which a round over `local`
makes several, and a comparison of replicas of the same memory, which is due every 50th version. Counts and digests are
checked. The last line of standard output is one JSON object; `--save` writes it. Seconds are the best of `--rounds`,
and on a CPU those of this process alone, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weightbus.dataplane.copy import copy_engine_for, make_box_table
from weightbus.dataplane.digest import masks_of, tensor_digest as integrity
from weightbus.dataplane.reshard import digest_replicas, find_replicas
from weightbus.dataplane.tensors import Box, Manifest, Shard, Shards, ShardView, TensorSpec, contiguous_strides

MATRIX = (1024, 1024)


def tensors_of(nbytes: int, dtype: str) -> tuple[TensorSpec, ...]:
    """Matrices and, between them, norms."""
    item = getattr(torch, dtype).itemsize
    count = max(1, nbytes // (MATRIX[0] * MATRIX[1] * item))
    matrices = [TensorSpec(f"layers.{at}.weight", dtype, MATRIX) for at in range(count)]
    return (*matrices, *(TensorSpec(f"layers.{at}.norm", dtype, MATRIX[:1]) for at in range(count)))


def in_turn(ways: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, dict[str, float]]:
    """Seconds of each way, one after another in every round: the best, and the median."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, run in ways.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            clock = time.perf_counter if device.type == "cuda" else time.process_time
            began = clock()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            found[name].append(clock() - began)
    return {name: {"best_s": min(each[1:]), "median_s": statistics.median(each[1:])} for name, each in found.items()}


def percent(found: Mapping[str, Mapping[str, float]], counted: str, plain: str) -> float:
    """How much longer the counted way takes."""
    return round((found[counted]["best_s"] / found[plain]["best_s"] - 1) * 100, 2)


def measure(dtype: str, nbytes: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """One dtype."""
    specs = tensors_of(nbytes, dtype)
    kind: torch.dtype = getattr(torch, dtype)
    manifest = Manifest.of("bench", specs, 1 << 62)
    specs = manifest.tensors
    size = manifest.buckets[0].nbytes
    # Weights of a model; in eight bits they are scaled to the whole range, where counting takes three passes on a CPU.
    scale = 0.02 if kind.itemsize > 1 else 100.0
    values = (torch.randn(size // kind.itemsize, device=device) * scale).clamp_(-400, 400).to(kind)
    bucket, offsets, masks = values.view(torch.uint8), manifest.offsets_of(0), masks_of([each.dtype for each in specs])
    starts = [offset // kind.itemsize for offset in offsets]
    local = [values[a:b] for a, b in pairwise(starts)]
    held = [
        Shard(spec.name, Box.whole(spec.shape), dtype, ShardView(at, 0, contiguous_strides(spec.shape)))
        for at, spec in enumerate(specs)
    ]
    shards = Shards.of(specs, held)
    engine, zeros = copy_engine_for(device), np.zeros(len(specs), np.int64)
    table, regions = make_box_table(shards, shards.storage, zeros), [each.view(torch.uint8) for each in local]
    plain, counted = engine.prepare_digest(table, regions), engine.prepare_digest(table, regions, masks)
    own = find_replicas(Shards.join([shards, Shards.of(specs, held, 1)])).of_rank(0)
    other = torch.empty_like(bucket)
    found = in_turn(
        {
            "packed": lambda: integrity.digest_tensors(bucket, offsets),
            "packed_counted": lambda: integrity.digest_and_count(bucket, offsets, masks),
            "in_place": plain.run,
            "in_place_counted": lambda: (counted.run(), counted.counts()),
            "copy": lambda: other.copy_(bucket),
            "replicas": lambda: digest_replicas(own, local, device, engine),
        },
        rounds,
        device,
    )
    places = [0, len(values) // 2, len(values) - 1]
    for at, value in zip(places, (torch.nan, -torch.nan, torch.inf), strict=True):
        values[at] = value  # of which float8_e4m3fn has no infinity
    odd = int((~torch.isfinite(torch.stack([values[at].float() for at in places]))).sum())
    digests, counts = integrity.digest_and_count(bucket, offsets, masks)
    right = int(counts.sum()) == odd and digests == integrity.digest_tensors(bucket, offsets)
    right &= bool(np.array_equal(counted.run(), plain.run())) and int(counted.counts().sum()) == odd
    return {
        "bytes": size,
        "tensors": len(specs),
        **found,
        "packed_percent": percent(found, "packed_counted", "packed"),
        "in_place_percent": percent(found, "in_place_counted", "in_place"),
        "right": right,
    }


def main(argv: list[str] | None = None, *, device: str = "cpu", gigabytes: float = 0.25) -> int:
    """Measure, print, and compare; 1 unless every count and digest was right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default=device)
    parser.add_argument("--gigabytes", type=float, default=gigabytes)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32", "float8_e4m3fn"])
    parser.add_argument("--save", "--out", type=Path)
    args = parser.parse_args(argv)
    where = torch.device(args.device)
    torch.manual_seed(1)
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python3", *sys.argv]),
        "device": torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        **{dtype: measure(dtype, int(args.gigabytes * 1e9), args.rounds, where) for dtype in args.dtypes},
    }
    result["right"] = all(result[dtype]["right"] for dtype in args.dtypes)
    sys.stdout.write(json.dumps(result) + "\n")
    if args.save is not None:
        args.save.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["right"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
