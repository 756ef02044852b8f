"""Proof and figures for sends: out of the GPU of a Megatron-core trainer into a real SGLang on another one, by NCCL.

Each version is published by `sends`, and, for comparison and as the oracle, by SGLang's own flattened buckets over NCCL
(`distributed`) into the same server. Afterwards the server's own checksums of its live parameters must be the same, and
other ones after they were overwritten with noise in between. A bare send of as many bytes between two processes, by the
same group code, is the floor.

    python3 tests/gpu/nccl.py                       two CUDA devices. Qwen3-30B-A3B shapes, 24 layers, 31 GB
    python3 tests/gpu/nccl.py --config FILE         another model, by its config.json
    python3 tests/gpu/nccl.py --device cpu          the same steps with a tiny model, over gloo

Prints one JSON object; `--out FOLDER` writes nccl.json there. Exits with 1 unless everything was equal. Not measured
yet, and null: `slime_distributed_s` (512 MB buckets, a broadcast for each tensor) and `survivors_serving_s`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import direct
import rig

PLACE = "remote"
CHUNK_BYTES = 512 * 1024 * 1024
"""Of the bare send: what a rank moves in a turn."""
FORM_S = 120.0


def orchestrate(args: argparse.Namespace) -> int:
    """Start everything, run the trainer, print what it measured."""
    from weightbus.trainer_agent.demo.processes import Programs

    work = Path(tempfile.mkdtemp(prefix="wb-nccl-"))
    hf = json.loads(Path(args.config).read_text()) if args.config else dict(rig.QWEN3_30B_A3B)
    if args.device == "cpu" and not args.config:
        hf = dict(rig.TINY_MOE)
    if not args.config:
        hf["num_hidden_layers"] = args.layers
    rig.write_model(work / "model", hf)
    with Programs(work) as programs:
        layout = rig.start_coordinator(programs, work)
        flags: tuple[str, ...] = (rig.LOADER,)
        if args.device == "cuda":
            flags += (f"--mem-fraction-static={args.memory}", "--cuda-graph-max-bs=4")
        rig.start_engine(programs, args.device, work, rig.Engine(PLACE, 1, 1, flags, "available"), layout)
        (work / "layout.json").write_text(json.dumps(layout))
        command = [sys.executable, __file__, "--trainer-of", str(work), *rig.arguments()]
        environment = {**rig.ranks_environment(args.device), "NCCL_CUMEM_ENABLE": "0"}  # as SGLang's workers have it
        trainer = programs.start("trainer", command, env=environment)
        rig.wait(
            "the trainer", lambda: trainer.process.poll() is not None, args.deadline, lambda: programs.check([trainer])
        )
        programs.check([trainer])
        measured = json.loads((work / "result.json").read_text())
    found = {**rig.describe("nccl.py", args.device, hf), **measured}
    if args.out:
        (Path(args.out) / "nccl.json").write_text(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if found["equal"] else 1


def train(args: argparse.Namespace) -> None:
    """Publish both ways, let the server say what it holds, write down what it took."""
    import torch
    from shards import Shards

    work = Path(args.trainer_of)
    layout, hf = rig.read_layout(work), rig.read_config(work)
    if args.device == "cpu":
        from weightbus.trainer_agent import megatron_cpu

        megatron_cpu.install()
    fleet = rig.Fleet(layout, hf["max_position_embeddings"])
    source = Shards(hf, torch.device(args.device, 0), 2, tp=2)
    fleet.wait_ready(args.deadline)
    numbers = itertools.count(1)
    first, oracle = next(numbers), next(numbers)
    source.refill(first)
    with direct.rounds(source, layout, PLACE, "sends") as (publish_one, agent):
        nbytes = agent.manifest.nbytes
        reports = [publish_one(first, fleet)]
    ours = fleet.checksum(PLACE)
    fleet.overwrite(PLACE)
    noise = fleet.checksum(PLACE)
    with direct.rounds(source, layout, PLACE, "distributed") as (publish_one, _):
        stock_report = publish_one(oracle, fleet)
    stock = fleet.checksum(PLACE)
    steady = []
    with direct.rounds(source, layout, PLACE, "sends") as (publish_one, _):
        for version in itertools.islice(numbers, direct.STEADY + 1):
            source.refill(version)
            with direct.generating(fleet, PLACE, active=True) as client:
                report = publish_one(version, fleet)
            steady.append({**report, **client.gaps()})
    reports += steady
    source.close()
    sent = [each["sidecar_s"].get("step:transfer_wire", 0.0) for each in steady[1:]]
    calls = stock_report["sidecar_s"]
    result = {
        "bytes": nbytes,
        "shard_to_shard_s": min(sent),
        "bare_sendrecv_s": bare(args.device, nbytes),
        "flattened_distributed_s": sum(s for key, s in calls.items() if key.startswith("call:update_weights")),
        "slime_distributed_s": None,
        "survivors_serving_s": None,
        "pause_gap_s": min((each["pause_gap_s"] for each in steady if "pause_gap_s" in each), default=None),
        "equal": ours == stock != noise and all(each["outcome"].endswith("committed") for each in reports),
        "sends": reports,
        "flattened_bucket": stock_report,
    }
    (work / "result.json").write_text(json.dumps(result))


def bare(device: str, nbytes: int) -> float:
    """Seconds for a plain send of as many bytes from one process to another."""
    from weightbus.dataplane.broadcast_group import serve_store

    store = serve_store("127.0.0.1")
    given = json.dumps({"device": device, "nbytes": nbytes, "port": store.port})
    other = subprocess.Popen([sys.executable, __file__, "--bare-end", given], env=dict(os.environ))
    try:
        return bare_end(device, nbytes, store.port, 0)
    finally:
        other.wait(FORM_S)


def bare_end(device: str, nbytes: int, port: int, rank: int) -> float:
    """One end of it; the best of five."""
    import torch
    from torch._C._distributed_c10d import TCPStore

    from weightbus.dataplane.deadline import Deadline
    from weightbus.dataplane.pair_group import PairGroup, Parcel

    where = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    group = PairGroup.form(store, "bare", "127.0.0.1", where, rank, 2, Deadline(FORM_S))
    memory = torch.zeros(min(nbytes, CHUNK_BYTES), dtype=torch.uint8, device=where)
    sizes = [CHUNK_BYTES] * (nbytes // CHUNK_BYTES) + [nbytes % CHUNK_BYTES] * bool(nbytes % CHUNK_BYTES)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        for size in sizes:
            parcel = [Parcel(memory[:size], 1 - rank)]
            group.exchange(*((parcel, ()) if rank == 0 else ((), parcel)), Deadline(FORM_S))
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--layers", type=int, default=24, help="of the model's 48")
    parser.add_argument("--config", help="config.json of another model")
    parser.add_argument("--memory", type=float, default=0.4, help="the server's --mem-fraction-static")
    parser.add_argument("--deadline", type=float, default=400.0, help="seconds that any one wait may take")
    parser.add_argument("--out", help="folder for the JSON file")
    parser.add_argument("--trainer-of", help=argparse.SUPPRESS)
    parser.add_argument("--bare-end", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.bare_end:
        given = json.loads(args.bare_end)
        bare_end(given["device"], given["nbytes"], given["port"], 1)
        return 0
    if args.trainer_of:
        train(args)
        return 0
    return orchestrate(args)


if __name__ == "__main__":
    sys.exit(main())
