"""Proof and figures for the stock paths on GPUs: CUDA IPC buckets, an NCCL broadcast group, files. Against real SGLang.

Starts a coordinator, an SGLang server with its sidecar on each of two GPUs, and a Megatron-core trainer with random
weights (tensor parallel over both GPUs). The weights are published to the first server through CUDA IPC and to the
second through NCCL, in whose group it is itself (`--no-hands-on`). Then the first server's parameters are overwritten
with noise and loaded again from files, SGLang's own path. The server's own checksum of its live parameters must be the
same after all three, and differ after the noise.

    python3 tests/gpu/stock.py                       two CUDA devices, Qwen3-8B shapes, 16.4 GB
    python3 tests/gpu/stock.py --device cpu          the same steps with a tiny model, shared memory and gloo
    python3 tests/gpu/stock.py --hands-on            its sidecar is in the group in its place: not measured

Prints one JSON object; `--out` writes it too. Exits with 1 unless everything was equal.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rig

CHANNELS = {"ipc": "local", "nccl": "distributed"}


# -- the orchestrating process -----------------------------------------------------------------------------------------


def orchestrate(args: argparse.Namespace) -> int:
    """Start everything, run the trainer's ranks, print what they measured."""
    from weightbus.trainer_agent.demo.child_processes import Programs

    work = Path(tempfile.mkdtemp(prefix="weightbus-stock-"))
    (work / "model").mkdir()
    hf = dict(rig.QWEN3_8B if args.device == "cuda" else rig.TINY)
    if args.layers:
        hf["num_hidden_layers"] = args.layers
    (work / "model" / "config.json").write_text(json.dumps(hf))
    flags = ("--mem-fraction-static=0.4", "--disable-cuda-graph") if args.device == "cuda" else ()
    with Programs(work) as programs:
        layout = rig.start_coordinator(programs, work)
        for gpu, channel in enumerate(CHANNELS):
            engine = rig.Engine(channel, gpu, flags=flags, sidecar=rig.takes_part(args))
            rig.start_engine(programs, args.device, work, engine, layout)
        rig.write_layout(work, layout)
        arguments = ["--rank-of", str(work), *rig.arguments()]
        command = rig.ranks_command(__file__, args.tp, arguments)
        ranks = programs.start("ranks", command, env=rig.ranks_environment(args.device))
        rig.wait("the ranks", lambda: ranks.process.poll() is not None, args.deadline, lambda: programs.check([ranks]))
        programs.check([ranks])
        result = json.loads((work / "result.json").read_text())
    result = {**rig.describe("stock.py", args.device, hf), **result}
    text = json.dumps(result, indent=1)
    sys.stdout.write(text + "\n")
    if args.out:
        Path(args.out).write_text(text + "\n")
    return 0 if result["equal"] else 1


# -- the trainer's ranks -----------------------------------------------------------------------------------------------


def rank_main(args: argparse.Namespace) -> None:
    """One rank of the trainer: build the model, publish by each way, let the servers say what they hold."""
    import torch
    import torch.distributed as dist

    if args.device == "cpu":
        from weightbus.trainer_agent.sources.megatron import cpu_emulation as megatron_cpu

        megatron_cpu.install()
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", timeout=dt.timedelta(seconds=args.deadline))
    work = Path(args.rank_of)
    layout = rig.read_layout(work)
    from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource

    model = rig.build(rig.read_config(work), args.device, tp=args.tp)
    source = MegatronSource(model, hf_config=work / "model", dtype=torch.bfloat16)
    fleet = rig.Fleet(layout) if dist.get_rank() == 0 else None
    if fleet:
        fleet.wait_ready(args.deadline)
    dist.barrier()
    result: dict[str, Any] = {}
    versions = range(1, args.rounds + 1)
    for channel, transport in CHANNELS.items():
        result[channel] = publish(source, model, layout, (channel, transport), {each: each for each in versions})
    sums = {channel: fleet.checksum(channel)[0] for channel in CHANNELS} if fleet else {}
    if fleet:
        fleet.overwrite("ipc")
        sums["noise"] = fleet.checksum("ipc")[0]
    result["disk"] = publish(source, model, layout, ("ipc", "disk"), {args.rounds + 1: args.rounds})
    if fleet:
        sums["disk"] = fleet.checksum("ipc")[0]
        (work / "result.json").write_text(json.dumps(summary(result, sums)))
    dist.barrier()
    source.close()
    dist.destroy_process_group()


def publish(
    source: Any, model: Any, layout: dict[str, Any], way: tuple[str, str], seeds: dict[int, int]
) -> list[dict[str, Any]]:
    """Publish versions on a channel by a transport, each with the weights of its seed; the reports."""
    import torch

    from weightbus.trainer_agent import TrainerAgent

    channel, transport = way
    agent = TrainerAgent.connect(
        source, channel=channel, name=f"trainer-{channel}", coordinator=f"tcp://127.0.0.1:{layout['bus']}",
        transport=(transport,), checkpoint_dir=Path(layout["checkpoints"]), insecure_loopback=True,
    )  # fmt: skip
    reports = []
    with agent:
        for version, seed in seeds.items():
            rig.refill([parameter for chunk in model for parameter in chunk.parameters()], seed)
            if source.device.type == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            report = agent.publish(version)
            took = time.perf_counter() - began
            rig.log(f"{channel} by {transport}: version {version} in {took:.2f} s, {report.seconds}")
            engine = report.engines[0]
            reports.append(
                {
                    "total_s": took,
                    "bytes": report.bytes,
                    "buckets": report.buckets,
                    "outcome": str(report.outcome),
                    "seconds": report.seconds,
                    "engine_seconds": engine.seconds,
                    "engine": str(engine.outcome),
                    "verified_by": engine.verified_by,
                    "reason": engine.reason,
                }
            )
    return reports


def summary(result: dict[str, Any], sums: dict[str, dict[str, str]]) -> dict[str, Any]:
    """The figures, and whether all ways led to the same parameters."""
    reference = sums["disk"]
    parameters = [name for name in reference if sums["noise"].get(name) != reference[name]]
    committed = all(round_["outcome"] == round_["engine"] == "committed" for way in result.values() for round_ in way)
    return {
        "bytes": result["ipc"][-1]["bytes"],
        "buckets": result["ipc"][-1]["buckets"],
        "ipc_bucket_s": result["ipc"][-1]["engine_seconds"].get("transfer"),
        "nccl_broadcast_s": result["nccl"][-1]["engine_seconds"].get("transfer"),
        "disk_s": result["disk"][-1]["engine_seconds"].get("transfer"),
        "equal": bool(committed and parameters and sums["ipc"] == sums["nccl"] == reference),
        "parameters_compared": len(reference),
        "parameters_changed_by_noise": len(parameters),
        "rounds": result,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the model has")
    parser.add_argument("--tp", type=int, default=2, help="ranks of the trainer")
    parser.add_argument("--rounds", type=int, default=3, help="rounds by each way; the last one counts")
    parser.add_argument("--deadline", type=float, default=400.0, help="seconds that any one wait may take")
    parser.add_argument("--out", help="write the JSON here too")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    rig.ask_who_takes_part(parser)
    args = parser.parse_args()
    if args.rank_of:
        rank_main(args)
        return 0
    return orchestrate(args)


if __name__ == "__main__":
    sys.exit(main())
