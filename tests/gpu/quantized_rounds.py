"""Rounds into FP8 servers beside rounds of the same model into bfloat16 servers: what quantizing on the way gains.

One trainer with random weights on the first GPU publishes by the direct transport to a server in bfloat16 and to one
in FP8 blocks, on the same GPU and, where there is a second one, on that. What an FP8 round leaves in its server is
compared with what SGLang's own flattened buckets of the quantized tensors leave there, by the server's own checksums,
with noise in between; engines.py compares with checkpoints.

    python3 tests/gpu/quantized_rounds.py --kernels FILE    one or two CUDA devices, Qwen3-30B-A3B shapes, 24 layers
    python3 tests/gpu/quantized_rounds.py --layers 48       two: 61 GB and 33 GB on either of them, quantized-48.json
    python3 tests/gpu/quantized_rounds.py --device cpu      the same steps, tiny, and nothing quantized

Prints one JSON object, quantized.json with the figures of quantized.py in FILE; `--out FOLDER` writes it there, after
every server. Exits with 1 unless everything was equal. All servers start together and decode with CUDA graphs, as in a
deployment: a server that is asked to pause ends the step that it is in, and an eager one takes as long as a transfer.
The fastest of the rounds and the median are both given; `ways` says whether rounds were announced before their digests
were known, and copied part by part.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import direct
import rig

FIGURES = {"bf16": "bf16_round_s", "fp8": "fp8_round_s", "peer-bf16": "peer_bf16_s", "peer-fp8": "peer_fp8_s"}
"""By server: what its fastest round is called."""
USUAL_LAYERS = 24
"""With more, a trainer's GPU has room for no server."""


def folder_of(place: str) -> str:
    """Of the checkpoint that a server serves."""
    return "model-fp8" if place.endswith("fp8") else "model"


def orchestrate(args: argparse.Namespace) -> int:
    """Start everything, run the trainer, write what it has found so far."""
    from weightbus.trainer_agent.demo.child_processes import Programs

    work = Path(tempfile.mkdtemp(prefix="wb-quantized-"))
    cuda = args.device == "cuda"
    hf = rig.model_of(args)
    rig.write_model(work / "model", hf)
    rig.write_model(work / "model-fp8", {**hf, "quantization_config": rig.FP8} if cuda else hf)
    gpus = direct.gpus() if cuda else 1
    places = [place for place in servers(args) if gpus > 1 or not place.startswith("peer")]
    with Programs(work) as programs:
        layout = rig.start_coordinator(programs, work)
        for place in places:
            flags: tuple[str, ...] = (rig.LOADER,)
            if cuda:
                flags += (f"--mem-fraction-static={args.memory}", *rig.GRAPHS)
                flags += rig.FP8_FLAGS if place.endswith("fp8") else ()
            gpu = 1 if place.startswith("peer") else 0
            engine = rig.Engine(place, gpu, 1, flags, "available", model=folder_of(place))
            rig.start_engine(programs, args.device, work, engine, layout)
        rig.write_layout(work, layout)
        command = [sys.executable, __file__, "--trainer-of", str(work), *rig.arguments()]
        trainer = programs.start("trainer", command, env=rig.ranks_environment(args.device))
        news = lambda: write(args, work, hf, "under way")  # noqa: E731
        problem = rig.follow(programs, trainer, work, args=args, name="quantized-rounds", news=news)
    result = write(args, work, hf, problem)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if result["equal"] and not problem else 1


def servers(args: argparse.Namespace) -> list[str]:
    """The servers that were asked for, or those that there is room for."""
    if args.servers:
        return list(args.servers)
    return [place for place in FIGURES if args.layers <= USUAL_LAYERS or place.startswith("peer")]


def write(args: argparse.Namespace, work: Path, hf: dict[str, Any], problem: str) -> dict[str, Any]:
    """All that is known by now."""
    result = work / "result.json"
    rounds: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    kernels: dict[str, Any] = json.loads(Path(args.kernels).read_text()) if args.kernels else {}
    measured: dict[str, Any] = rounds.get("servers", {})
    seconds = {place: [float(each["publish_s"]) for each in found["steady"]] for place, found in measured.items()}
    found = {
        **kernels,
        **rig.describe("quantized_rounds.py", args.device, hf),
        **{name: min(seconds[place]) if place in seconds else None for place, name in FIGURES.items()},
        "median": {FIGURES[place]: statistics.median(each) for place, each in seconds.items()},
        "median_phases_s": {place: phases(each["steady"]) for place, each in measured.items()},
        "ways": {place: ways(each["steady"]) for place, each in measured.items()},
        "quantize_model_s": rounds.get("quantize_model_s"),
        "round_bytes": {place: each["bytes"] for place, each in measured.items()},
        "equal": bool(kernels.get("equal", not args.kernels))
        and rounds.get("complete") is True
        and all(each["equal"] and committed(each) for each in measured.values()),
        "kernels": {key: kernels.get(key) for key in ("command", "model", "date")},
        "problem": problem,
        "servers": measured,
    }
    layers = f"-{args.layers}" if args.layers != USUAL_LAYERS else ""
    rig.write_result(args.out, f"quantized{layers}", found)
    return found


def committed(found: dict[str, Any]) -> bool:
    """Every round of a server was."""
    reports = (found["first"], found["flattened_bucket"], *found["steady"])
    return all(each["outcome"].endswith("committed") for each in reports)


def ways(steady: list[dict[str, Any]]) -> dict[str, Any]:
    """How many rounds were announced before their digests were known, and how many were copied part by part, by marks.

    With the median of what their workers waited: for digests, and for parts while nothing was copied.
    """
    found: dict[str, Any] = {"rounds": len(steady)}
    for name, step in (("open", "step:transfer_table"), ("pipelined", "step:transfer_wait")):
        those = [each for each in steady if step in each["steps"]]
        found[name] = len(those)
        seconds = [float(each["sidecar_s"].get(step, 0.0)) for each in those]  # what took no time is not there
        found[f"{step.removeprefix('step:')}_s"] = statistics.median(seconds) if seconds else None
    return found


def phases(steady: list[dict[str, Any]]) -> dict[str, float]:
    """The median of every phase of the rounds, by the trainer's watch and, after ``sidecar:``, by the sidecar's."""
    found: dict[str, list[float]] = defaultdict(list)
    for each in steady:
        sidecar = {f"sidecar:{name}": value for name, value in each["sidecar_s"].items()}
        for name, value in {**each["trainer_s"], **sidecar}.items():
            found[name].append(float(value))
    return {name: statistics.median(values) for name, values in found.items()}


def train(args: argparse.Namespace) -> None:
    """The same weights to every server, one after another."""
    import torch
    from shards import LayoutShards

    work = Path(args.trainer_of)
    rig.play_cuda(args.device)
    hf = rig.read_config(work)
    layout = rig.read_layout(work)
    fleet = rig.Fleet(layout, hf["max_position_embeddings"])
    source = LayoutShards(hf, torch.device(args.device, 0), 2, **direct.LAYOUTS["ep2"])
    source.refill(0)
    fleet.wait_ready(args.deadline)
    result: dict[str, Any] = {"servers": {}, "quantize_model_s": quantizing(source, work / "model-fp8")}
    for place in layout["engines"]:
        more = {"hf_config_dir": work / folder_of(place)}
        result["servers"][place] = direct.publish(source, layout, fleet, place, itertools.count(1), more)
        result["complete"] = len(result["servers"]) == len(layout["engines"])
        rig.write_found(work, result)


def quantizing(source: Any, served: Path) -> float | None:
    """Seconds for everything that the trainer holds, into memory that is there already."""
    import torch

    from weightbus.trainer_agent.quantized.quantized_source import ReadableQuantizedSource, quantized

    found = quantized(source, served)
    if not isinstance(found, ReadableQuantizedSource):
        return None
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        began = time.perf_counter()
        found.memory()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    del found
    torch.cuda.empty_cache()
    return min(seconds)


def main() -> int:
    parser = rig.parser(__doc__, memory=0.85, deadline=330.0)
    parser.add_argument("--layers", type=int, default=USUAL_LAYERS, help="of the model's 48")
    parser.add_argument("--kernels", help="what quantized.py has written")
    parser.add_argument(
        "--servers", type=lambda text: text.split(","),
        help=f"some of {','.join(FIGURES)}; all, or with more layers than {USUAL_LAYERS} those on the other GPU",
    )  # fmt: skip
    args = parser.parse_args()
    if args.trainer_of:
        train(args)
        return 0
    return orchestrate(args)


if __name__ == "__main__":
    sys.exit(main())
