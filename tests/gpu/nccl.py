"""Proof and figures for sends over NCCL: out of a Megatron-core trainer on one GPU into real SGLang on another one.

    python3 tests/gpu/nccl.py                       two CUDA devices. Qwen3-30B-A3B shapes, 24 layers, 31 GB
    python3 tests/gpu/nccl.py --config FILE         another model, by its config.json
    python3 tests/gpu/nccl.py --device cpu          the same steps with tiny models, over gloo

Versions come by `sends`, by `distributed`, by SGLang's flattened buckets, and by a broadcast for each tensor as slime
drives it (stock_paths.py), all into the same server. Its own checksums of its live parameters must be the same every
way, and other ones after they were overwritten with noise. A bare send of as many bytes as its worker takes, by its
sidecar's plan, is the floor: a wire that is faster has carried fewer (rig.MOST_OF_PLAIN), and the program fails.
Prediction layers are left unless `--predictions` has them trained and sent. Deaths over NCCL are in deaths.py, joining
engines in joiner.py.

Prints one JSON object; `--out FOLDER` writes nccl.json there after every step, so that a run that is cut short leaves
its figures. Exits with 1 unless everything was equal.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import direct
import rig

PLACE = "remote"
STEADY = 3
CHUNK_BYTES = 512 * 1024 * 1024
"""Size of one message of the bare send."""
BARE_ROUNDS = 5
FORM_S = 60.0


def orchestrate(args: argparse.Namespace) -> int:
    """Start coordinator, server, sidecar and trainer; write what the trainer has measured so far."""
    from weightbus.trainer_agent.demo.child_processes import Programs

    work = Path(tempfile.mkdtemp(prefix="wb-nccl-"))
    hf = rig.model_of(args)
    rig.write_model(work / "model", hf)
    flags: tuple[str, ...] = (rig.LOADER,)
    if args.device == "cuda":
        flags += (f"--mem-fraction-static={args.memory}", *rig.GRAPHS)

    def write(problem: str) -> dict[str, Any]:
        file = work / "result.json"
        measured = json.loads(file.read_text()) if file.exists() else {}
        found = {**rig.describe("nccl.py", args.device, hf), "equal": False, **measured}
        problem = problem or found.get("problem", "")
        if problem:
            found |= {"problem": problem, "equal": False}
        rig.write_result(args.out, f"nccl-{Path(args.config or '').stem}".rstrip("-"), found)
        return found

    with Programs(work) as programs:
        layout = rig.start_coordinator(programs, work)
        engine = rig.Engine(PLACE, 1, 1, flags, "available", sidecar=rig.takes_part(args))
        rig.start_engine(programs, args.device, work, engine, layout)
        rig.write_layout(work, layout)
        command = [sys.executable, __file__, "--trainer-of", str(work), *rig.arguments()]
        trainer = programs.start("trainer", command, env=rig.ranks_environment(args.device))
        problem = rig.follow(programs, trainer, work, args=args, name="nccl", news=lambda: write("under way"))
    found = write(problem)
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if found["equal"] else 1


def train(args: argparse.Namespace) -> None:
    """Bring versions every way, and compare what the server holds; results are written after every step."""
    import torch

    work = Path(args.trainer_of)
    layout, hf = rig.read_layout(work), rig.read_config(work)
    rig.prepare(hf, args.device)
    from shards import LayoutShards

    fleet = rig.Fleet(layout, hf["max_position_embeddings"])
    source = LayoutShards(hf, torch.device(args.device, 0), 2, predictions=args.predictions, tp=2)
    found: dict[str, Any] = {}

    def say(**more: Any) -> None:
        found.update(more)
        rig.write_found(work, found)
        rig.log(", ".join(more))

    fleet.wait_ready(args.deadline)
    numbers = itertools.count(1)
    first = next(numbers)
    source.refill(first)
    with direct.rounds(source, layout, PLACE, "sends") as (publish_one, agent):
        manifest = agent.manifest
        reports = [publish_one(first, fleet)]
    ours = fleet.checksum(PLACE)
    taken = fleet.takes(PLACE, "sends")
    left = [each.name for each in manifest.left]
    say(bytes=taken, version_bytes=manifest.nbytes, left=left, first=reports[0], equal=False)
    fleet.overwrite(PLACE)
    noise = fleet.checksum(PLACE)
    with direct.rounds(source, layout, PLACE, "distributed") as (publish_one, _):
        stock_report = publish_one(next(numbers), fleet)
    equal = ours == fleet.checksum(PLACE) != noise and stock_report["outcome"].endswith("committed")
    say(distributed=stock_report, equal_distributed=equal)
    with direct.rounds(source, layout, PLACE, "sends") as (publish_one, _):
        for version in itertools.islice(numbers, STEADY + 1):
            source.refill(version)
            with direct.generating(fleet, PLACE, active=True) as client:
                report = publish_one(version, fleet)
            reports.append({**report, **client.gaps()})
            say(sends=reports)
    equal = equal and all(each["outcome"].endswith("committed") for each in reports)
    wire = min(each["sidecar_s"].get("step:transfer_wire", 0.0) for each in reports[2:])
    say(
        shard_to_shard_s=wire,
        normal_round_s=min(each["publish_s"] for each in reports[2:]),
        pause_gap_s=min((each["pause_gap_s"] for each in reports if "pause_gap_s" in each), default=None),
        taken=fleet._http.get(fleet.url(PLACE, "sidecar") + "/status").json().get("taken"),
    )
    floor = bare(args.device, taken)
    of_bare = floor["bare_sendrecv_s"] / wire if wire else None
    say(**floor, of_bare_send=of_bare, problem=rig.too_fast(of_bare, "a bare send"))
    say(equal=stock_updates(source, manifest, fleet, say) and equal)
    source.close()


def stock_updates(source: Any, manifest: Any, fleet: rig.Fleet, say: Callable[..., None]) -> bool:
    """SGLang's own ways, beside ours: whether each left what the server held before."""
    from stock_paths import StockPath

    ours, equal = fleet.checksum(PLACE), True
    with StockPath(fleet.url(PLACE), source.device) as stock:
        for flattened, key in ((True, "flattened_distributed_s"), (False, "slime_distributed_s")):
            fleet.overwrite(PLACE)
            took = min(stock.update(source, manifest, flattened=flattened) for _ in range(2))
            equal = equal and ours == fleet.checksum(PLACE)
            say(**{key: took, f"equal_{key.removesuffix('_distributed_s')}": equal})
    return equal


def bare(device: str, nbytes: int) -> dict[str, Any]:
    """Seconds for a plain send of as many bytes to another process, and memory that an idle group of the two keeps."""
    from weightbus.dataplane.processes.process_groups import serve_store

    store = serve_store("127.0.0.1")
    command = [sys.executable, __file__, f"--device={device}", "--bare-end", f"{nbytes}", f"{store.port}"]
    other = subprocess.Popen(command, env=dict(os.environ))
    try:
        return bare_end(device, nbytes, store.port, 0)
    finally:
        other.kill()
        other.wait(FORM_S)


def bare_end(device: str, nbytes: int, port: int, rank: int) -> dict[str, Any]:
    """One end of it: messages are put into the queue one after another, and waited for once. The best of several."""
    import torch
    from torch._C._distributed_c10d import TCPStore

    from weightbus.dataplane.processes.connections import Deadline
    from weightbus.dataplane.transports.sends.p2p_group import P2PGroup

    where = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    memory = torch.zeros(min(nbytes, CHUNK_BYTES), dtype=torch.uint8, device=where)
    free = torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else 0
    began = time.perf_counter()
    group = P2PGroup.form(store, "bare", "127.0.0.1", where, rank, 2, Deadline(FORM_S))
    formed = time.perf_counter() - began
    sizes = [CHUNK_BYTES] * (nbytes // CHUNK_BYTES) + [nbytes % CHUNK_BYTES] * bool(nbytes % CHUNK_BYTES)
    move = group._backend.recv if rank else group._backend.send
    times = []
    if where.type == "cuda":
        torch.cuda.set_device(where)
    for _ in range(BARE_ROUNDS):
        began = time.perf_counter()
        for work in [move([memory[:size]], 1 - rank, 0) for size in sizes]:
            work.wait()
        if where.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    idle = free - torch.cuda.mem_get_info(where)[0] if where.type == "cuda" else None
    return {"bare_sendrecv_s": min(times), "form_group_s": formed, "idle_group_bytes": idle}


def main() -> int:
    parser = rig.parser(__doc__, memory=0.6, deadline=400.0)
    parser.add_argument("--layers", type=int, default=24, help="of the model's 48")
    parser.add_argument("--config", help="config.json of another model")
    rig.ask_for_predictions(parser)
    parser.add_argument("--bare-end", nargs=2, type=int, help=argparse.SUPPRESS)
    rig.ask_who_takes_part(parser)
    args = parser.parse_args()
    if args.bare_end:
        bare_end(args.device, *args.bare_end, 1)
        return 0
    if args.trainer_of:
        train(args)
        return 0
    return orchestrate(args)


if __name__ == "__main__":
    sys.exit(main())
