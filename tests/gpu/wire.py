"""How fast a schedule's turns go from one GPU to another, beside a bare send of as many bytes: no server, no trainer.

    python3 tests/gpu/wire.py [--gigabytes N]      two CUDA devices, NCCL
    python3 tests/gpu/wire.py --device cpu         over gloo

Rows of 3 MB, experts of Qwen3-30B-A3B, lie in one order in the sender's memory and in another one in the receiver's,
which takes them beside what it holds. Each line is one way to cut them: MB that a pair of ranks moves in a turn, from
how many on a row is a message of its own, and turns under way at a time. Prints one JSON object, seconds on the wire of
every round; `--out` writes it too. Exits with 1 unless everything arrived.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rig

from weightbus.dataplane.copy.copy_cuda import copy_engine_for
from weightbus.dataplane.memory.export_map import ExportedTensor, ExportMap, Region
from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.processes.process_groups import serve_store
from weightbus.dataplane.reshard.load_trace import LoadTarget, LoadTrace
from weightbus.dataplane.reshard.reshard_plan import PlanReader, ReshardPlan, make_plan
from weightbus.dataplane.reshard.send_schedule import make_send_schedule
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shard, Shards, ShardView
from weightbus.dataplane.transports.sends import message_queues as queues
from weightbus.dataplane.transports.sends.p2p_group import P2PGroup

SHAPE = (768, 2048)
ROW = 2 * SHAPE[0] * SHAPE[1]
WAYS = (
    (128, 16, 2),
    (256, 16, 2),
    (512, 16, 2),
    (1024, 16, 2),
    (2048, 16, 2),
    (256, 16, 4),
    (512, 16, 4),
    (1024, 1, 2),
)
ROUNDS = 4
CHUNK_BYTES = 512 * 1024 * 1024
"""Of the bare send: what is one message."""
BARE_ROUNDS = 5
FORM_S = 60.0
TURN_S = 30.0


def plan_of(rows: int) -> ReshardPlan:
    """`rows` experts, which the receiver stacks and the sender has the other way round."""
    tensors = tuple(TensorSpec(f"e{index}", "bfloat16", SHAPE) for index in range(rows))
    box, steps = Box.whole(SHAPE), (SHAPE[1], 1)
    held = [
        Shard(each.name, box, "bfloat16", ShardView(0, (rows - 1 - at) * ROW // 2, steps))
        for at, each in enumerate(tensors)
    ]
    wanted = [Shard(each.name, box, "bfloat16", ShardView(0, at * ROW // 2, steps)) for at, each in enumerate(tensors)]
    export = ExportMap(0, "here", (Region(rows * ROW, "cpu"),), (ExportedTensor(0, 0),))
    target = LoadTarget("stacked", "bfloat16", (rows, *SHAPE), (SHAPE[0] * SHAPE[1], *steps), parameter=True)
    recording = LoadTrace(0, (target,), Shards.of(tensors, wanted))
    return make_plan(
        Shards.of(tensors, held), [export], recording, PlanReader(rank=0, host="there", device="cpu", sent_to=True)
    )


def fill(memory: torch.Tensor, seed: int, *, turned: bool) -> None:
    """Every row from its number and `seed`; the last one first if `turned`."""
    rows = memory.view(-1, ROW // 8, 8).view(torch.int64)
    number = torch.arange(len(rows), device=memory.device)
    number = (number.flip(0) if turned else number).view(-1, 1, 1)
    place = torch.arange(rows.shape[1], device=memory.device).view(1, -1, 1)
    torch.add(place * 0x9E3779B1, number * 0x85EBCA6B + seed, out=rows)


def end(rank: int, port: int, device: str, nbytes: int) -> dict[str, Any]:
    """Rank 0 sends, rank 1 receives: the bare send, then every way."""
    from torch._C._distributed_c10d import TCPStore

    where = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    peers = frozenset({1 - rank})
    to, from_ = (peers, frozenset[int]()) if rank == 0 else (frozenset[int](), peers)
    group = P2PGroup.form(store, "wire", "127.0.0.1", where, rank, 2, Deadline(FORM_S), to=to, from_=from_)
    rows = nbytes // ROW
    memory = torch.empty(rows * ROW, dtype=torch.uint8, device=where)
    plan = plan_of(rows)
    found: dict[str, Any] = {"bytes": rows * ROW, "bare_sendrecv_s": bare(group, rank, memory), "equal": True}
    for seed, (turn_mb, alone_mb, under_way) in enumerate(WAYS):
        queues.UNDER_WAY = under_way  # type: ignore[misc]
        made = make_send_schedule(plan, 1, turn_mb << 20, alone_mb << 20)
        messages, pack = made.of_rank(0, plan)
        times: list[float] = []
        box: Any
        engine = copy_engine_for(where)
        if rank:
            box = queues.ReceiveQueue(made.messages, made.unpack, [memory], engine, where, beside=True)
        else:
            fill(memory, seed, turned=True)
            box = queues.SendQueue([queues.PeerPart(1, messages, pack)], [memory], engine)
        for _ in range(ROUNDS):
            meet(group, where)
            began = time.perf_counter()
            box.receive(group, TURN_S) if rank else box.send(group, TURN_S)
            times.append(time.perf_counter() - began)
        if rank:
            memory.fill_(0xA5)
            box.swap()
            expected = torch.empty_like(memory)
            fill(expected, seed, turned=False)
            found["equal"] = found["equal"] and torch.equal(expected, memory)
            del expected
        box.close()
        found[f"{turn_mb} MB a turn, {alone_mb} MB alone, {under_way} under way"] = {
            "seconds": times, "of_bare": found["bare_sendrecv_s"] / min(times), "turns": messages.chunks,
            "messages": len(messages), "staging_bytes": box.staging_bytes,
        }  # fmt: skip
    group.close()
    return found


def bare(group: P2PGroup, rank: int, memory: torch.Tensor) -> float:
    """Seconds for as many bytes, put into the queue one message after another, and waited for once. The best."""
    move = group._backend.recv if rank else group._backend.send
    parts = memory.split(CHUNK_BYTES)
    times = []
    for _ in range(BARE_ROUNDS):
        began = time.perf_counter()
        for work in [move([part], 1 - rank, 0) for part in parts]:
            work.wait()
        if memory.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def meet(group: P2PGroup, device: torch.device) -> None:
    """Both are here."""
    word = torch.zeros(1, device=device)
    group._backend.allreduce([word]).wait()
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gigabytes", type=float, help="31 on GPUs")
    parser.add_argument("--out", help="folder for the JSON file")
    parser.add_argument("--end", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    nbytes = int(1e9 * (args.gigabytes or (31 if args.device == "cuda" else 0.1)))
    if args.end:
        sys.stdout.write("\n" + json.dumps(end(int(args.end[0]), int(args.end[1]), args.device, nbytes)))
        return 0
    store = serve_store("127.0.0.1")
    again = [sys.executable, __file__, f"--device={args.device}", f"--gigabytes={nbytes / 1e9}", "--end"]
    environment = rig.ranks_environment(args.device)
    ends = [
        subprocess.Popen(
            [*again, str(rank), str(store.port)], stdout=subprocess.PIPE, env={**os.environ, **environment}
        )
        for rank in (0, 1)
    ]
    # NCCL may say something first.
    sent, received = (json.loads(each.communicate()[0].splitlines()[-1]) for each in ends)
    described = rig.describe("wire.py", args.device, {**rig.QWEN3_30B_A3B, "num_hidden_layers": 0})
    found = {**described, "model": "rows of 768 x 2048, bfloat16", **received, "of_the_sender": sent}
    rig.write_result(args.out, "wire", found)
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if found["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
