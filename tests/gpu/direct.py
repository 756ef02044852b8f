"""Proof and figures for direct transfers: out of a Megatron-core trainer's memory into the parameters of a real SGLang.

Starts a coordinator, SGLang servers with their sidecars, and a trainer with random weights. Each version is published
by the direct transport, and, for comparison and as the oracle, by SGLang's own flattened buckets (the local transport)
into the same server. Afterwards the server's own checksums of its live parameters must be the same, and other ones
after they were overwritten with noise in between.

    python3 tests/gpu/direct.py                       one CUDA device: trainer and engine share it. With two, an engine
                                                      on the other one as well. Qwen3-30B-A3B shapes, 24 layers, 31 GB
    python3 tests/gpu/direct.py --tp 2                two devices: trainer ranks and engine workers, crosswise
    python3 tests/gpu/direct.py --layers 48 --layout ep2 --memory 0.95
                                                      all of the model: 61 GB twice, on one device of 140 GB
    python3 tests/gpu/direct.py --config FILE         another model, by its config.json: tests/gpu/models has shapes of
                                                      GLM-4.5, DeepSeek-V3 (half of its experts) and Qwen3-Next, few
                                                      layers, for one device of 80 GB
    python3 tests/gpu/direct.py --also FILE           another model after the first, with servers of its own
    python3 tests/gpu/direct.py --device cpu          the same steps with tiny models and shared memory

How many times as fast as SGLang's buckets a copy is depends on the sizes of tensors: `--also
tests/gpu/models/glm-4.5.json` compares few large ones in the same run. A prediction layer that a config names is in the
files of the served checkpoint; the trainer does not hold it and leaves it, unless `--predictions` has it trained and
sent.

Bytes are those that engines take, by the plans of their sidecars: a prediction layer that is sent to a server that does
not speculate is not among them (`version_bytes` has everything).

Prints one JSON object; `--out FOLDER` writes colocated.json, peer.json and crosswise.json there, with the name of the
file behind a dash for other models. Exits with 1 unless everything was equal, and unless every copy took at least as
long as a plain copy of its bytes (rig.MOST_OF_PLAIN). While versions are published a client generates; `pause_gap_s` is
the longest gap between two of its tokens, less the usual one.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import gc
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import client
import rig

LAYOUTS: dict[str, dict[str, int | None]] = {"ep2": {"ep": 2, "etp": 1, "dp": 2}, "tp2": {"tp": 2}}
"""Of a trainer's two ranks: experts apart; or every matrix cut, half of them by columns."""
BUCKET_BYTES = 512 * 1024 * 1024
STEADY = 6
"""Versions that are published one after another while a client generates; the best counts, all are listed."""


# -- the orchestrating process -----------------------------------------------------------------------------------------


def orchestrate(args: argparse.Namespace) -> int:
    """One model after another."""
    results: dict[str, Any] = {}
    for config in (None, *(args.also or ())):
        results |= run(args, config)
    sys.stdout.write(json.dumps(results) + "\n")
    return 0 if results and all(each["equal"] for each in results.values()) else 1


def run(args: argparse.Namespace, config: str | None) -> dict[str, Any]:
    """Start everything for the model of `config` or of the arguments, run the trainer, write what it has measured."""
    from weightbus.trainer_agent.demo.child_processes import Programs

    work = Path(tempfile.mkdtemp(prefix="wb-direct-"))
    hf = rig.model_of(args, config)
    rig.write_model(work / "model", hf)
    with Programs(work) as programs:
        layout = rig.start_coordinator(programs, work)
        for engine in engines(args):
            rig.start_engine(programs, args.device, work, engine, layout)
        rig.write_layout(work, layout)
        arguments = ["--trainer-of", str(work), *rig.arguments()]
        command = [sys.executable, __file__, *arguments]
        if args.tp > 1:
            command = rig.ranks_command(__file__, args.tp, arguments)
        trainer = programs.start("trainer", command, env=rig.ranks_environment(args.device))
        name = Path(config or args.config or "").stem
        news = lambda: write(args, work, hf, "under way", name)  # noqa: E731
        problem = rig.follow(programs, trainer, work, args=args, name=f"direct-{name}".rstrip("-"), news=news)
    found = write(args, work, hf, problem, name)
    return found or {f"none-{name}".rstrip("-"): {"equal": False, "problem": problem or "nothing was measured"}}


def write(args: argparse.Namespace, work: Path, hf: dict[str, Any], problem: str, name: str) -> dict[str, Any]:
    """All that is known by now, by place, and behind a dash by the model's name."""
    result = work / "result.json"
    measured: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
    results = {}
    for place, found in measured.items():
        wrong = problem or found.pop("problem", "")
        equal = found["equal"] and found["complete"] and not wrong
        key = f"{place}-{name}".rstrip("-")
        results[key] = {**rig.describe("direct.py", args.device, hf), **found, "equal": equal, "problem": wrong}
        rig.write_result(args.out, key, results[key])
    return results


def engines(args: argparse.Namespace) -> list[rig.Engine]:
    """One for each place, named after it.

    They take versions that cannot be proven: nobody predicts the checksums that a server makes of experts, and the
    oracle's way is to be compared by the server's own checksums afterwards. Direct transfers prove themselves.
    """
    flags: tuple[str, ...] = (rig.LOADER,)
    if args.device == "cuda":
        flags += (f"--mem-fraction-static={args.memory}", *rig.GRAPHS)
    if args.tp > 1:
        return [rig.Engine("crosswise", 0, args.tp, flags, "available")]
    found = [rig.Engine("colocated", 0, 1, flags, "available")]
    if args.device == "cpu" or gpus() > 1:
        found.append(rig.Engine("peer", 1, 1, flags, "available"))
    return found


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


# -- the trainer -------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """Publish each way, let the servers say what they hold, write down what it took."""
    import torch.distributed as dist

    work = Path(args.trainer_of)
    layout = rig.read_layout(work)
    hf = rig.read_config(work)
    rig.prepare(hf, args.device)
    fleet = rig.Fleet(layout, hf["max_position_embeddings"])
    spread = args.tp > 1
    measured = train_ranks(args, work, layout, fleet) if spread else train_shards(args, work, hf, layout, fleet)
    for place, found in measured.items():
        found.update(plain_copies(args, place, found["layouts"]))
    if not spread or dist.get_rank() == 0:
        tell(work, measured, complete=True)


def tell(work: Path, measured: dict[str, Any], *, complete: bool) -> None:
    """What was measured by now, with its figures on top."""
    for found in measured.values():
        if found["layouts"]:
            found.update(summary(found), complete=complete)
    rig.write_found(work, {place: found for place, found in measured.items() if found["layouts"]})


def train_ranks(args: argparse.Namespace, work: Path, layout: dict[str, Any], fleet: rig.Fleet) -> dict[str, Any]:
    """Real ranks, each on a GPU of its own: not the one of the engine's worker that has the same rank."""
    import torch
    import torch.distributed as dist

    from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource

    if args.device == "cuda":
        torch.cuda.set_device(args.tp - 1 - int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", timeout=dt.timedelta(seconds=args.deadline))
    chunks = rig.build(rig.read_config(work), args.device, predictions=args.predictions, tp=args.tp)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    source: Any = MegatronSource(chunks, hf_config=work / "model", dtype=torch.bfloat16)
    source.refill = lambda seed: rig.refill(parameters, seed)
    if source.root:
        fleet.wait_ready(args.deadline)
    source.agree(b"ready" if source.root else None)  # a barrier of NCCL would keep a GPU busy that others measure
    return {"crosswise": {"layouts": {"tp2": publish(source, layout, fleet, "crosswise")}}}


def train_shards(
    args: argparse.Namespace, work: Path, hf: dict[str, Any], layout: dict[str, Any], fleet: rig.Fleet
) -> dict[str, Any]:
    """Two ranks in this process, in one layout after the other."""
    import torch
    from shards import LayoutShards

    measured: dict[str, Any] = {place: {"layouts": {}} for place in layout["engines"]}
    versions = {place: itertools.count(1) for place in layout["engines"]}
    for name in args.layout or LAYOUTS:
        shape = LAYOUTS[name]
        if name == "ep2" and not hf.get("num_experts") and not hf.get("n_routed_experts"):
            continue
        source = LayoutShards(hf, torch.device(args.device, 0), 2, predictions=args.predictions, **shape)
        rig.log(f"{name}: {sum(each.nbytes for each in source.parameters) / 1e9:.1f} GB of parameters")
        fleet.wait_ready(args.deadline)
        for place, numbers in versions.items():
            measured[place]["layouts"][name] = publish(source, layout, fleet, place, numbers)
            tell(work, measured, complete=False)
        source.close()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    return measured


def publish(  # noqa: PLR0917
    source: Any, layout: dict[str, Any], fleet: rig.Fleet, place: str,
    numbers: Iterator[int] | None = None, more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """All rounds of one layout into one engine, by agents with `more` settings."""
    numbers = numbers or itertools.count(1)
    found: dict[str, Any] = {}
    first, oracle = next(numbers), next(numbers)
    source.refill(first)
    with rounds(source, layout, place, "direct", more) as (publish_one, agent):
        found["version_bytes"] = agent.manifest.nbytes
        found["tensors"] = len(agent.manifest.tensors)
        found["left"] = [each.name for each in agent.manifest.left]
        found["first"] = publish_one(first, fleet)
    found["bytes"] = fleet.takes(place, "direct")
    del publish_one, agent  # and with it the memory that a quantized source was exposed in: the next one takes as much
    gc.collect()
    ours = fleet.checksum(place) if source.root else []
    if source.root:
        fleet.overwrite(place)
    noise = fleet.checksum(place) if source.root else []
    with rounds(source, layout, place, "local", more) as (publish_one, _):
        found["flattened_bucket"] = publish_one(oracle, fleet)
    stock = fleet.checksum(place) if source.root else []
    found["equal"] = ours == stock != noise
    found["parameters_compared"] = sum(map(len, stock))
    steady = []
    with rounds(source, layout, place, "direct", more) as (publish_one, _):
        again, *others = [next(numbers) for _ in range(STEADY + 1)]
        source.refill(again)
        publish_one(again, fleet)  # what the way of the oracle made forgotten is opened again
        for version in others:
            source.refill(version)
            with generating(fleet, place, active=source.root) as request:
                report = publish_one(version, fleet)
            steady.append({**report, **request.gaps()})
    ours = fleet.checksum(place) if source.root else []
    with rounds(source, layout, place, "local", more) as (publish_one, _):
        publish_one(next(numbers), fleet)
    found["equal"] &= ours == (fleet.checksum(place) if source.root else [])
    found["steady"] = steady
    rig.log(f"{place}: {json.dumps(found)}")
    return found


@contextlib.contextmanager
def rounds(
    source: Any, layout: dict[str, Any], place: str, transport: str, more: Mapping[str, Any] | None = None
) -> Iterator[Any]:
    """An agent with `more` settings, and how it publishes one version."""
    import torch

    from weightbus.trainer_agent import TrainerAgent

    with TrainerAgent.connect(
        source, channel=place, name=f"trainer-{place}", coordinator=f"tcp://127.0.0.1:{layout['bus']}",
        transport=(transport,), bucket_bytes=BUCKET_BYTES, insecure_loopback=True, pause="in_place", flush=False,
        **(more or {}),
    ) as agent:  # fmt: skip

        def publish_one(version: int, fleet: rig.Fleet) -> dict[str, Any]:
            if source.device.type == "cuda":
                torch.cuda.synchronize()
            before = fleet.seconds(place)
            began = time.perf_counter()
            report = agent.publish(version)
            took = time.perf_counter() - began
            after = fleet.seconds(place)
            spent = {key: after[key] - before.get(key, 0.0) for key in after if after[key] > before.get(key, 0.0)}
            engine = report.engines[0] if report.engines else None
            return {
                "publish_s": took,
                "trainer_s": report.seconds,
                "engine_s": engine.seconds if engine else {},
                "sidecar_s": {key: value for key, value in spent.items() if not key.endswith("#")},
                "steps": sorted(key[:-1] for key in spent if key.startswith("step:") and key.endswith("#")),
                "http_calls": sum(
                    value for key, value in spent.items() if key.startswith("call:") and key.endswith("#")
                ),
                "verified_by": engine.verified_by if engine else "",
                "outcome": f"{report.outcome}" if not engine else f"{engine.outcome}",
                "reason": engine.reason if engine else report.reason,
            }

        yield publish_one, agent


class _Idle:
    def gaps(self) -> dict[str, Any]:
        return {}


@contextlib.contextmanager
def generating(fleet: rig.Fleet, place: str, *, active: bool) -> Iterator[client.Client | _Idle]:
    """A client at work meanwhile."""
    if not active:
        yield _Idle()
        return
    with contextlib.closing(client.Client(fleet.url(place), fleet.context - 64)) as made:
        made.start()
        yield made
        made.stop()


def plain_copies(args: argparse.Namespace, place: str, layouts: dict[str, Any]) -> dict[str, Any]:
    """How long plain copies of as many bytes take as the engine's worker does: 4 GB at a time, as often as it takes."""
    import torch

    nbytes = max(each["bytes"] for each in layouts.values())
    chunk = min(nbytes, 4 * 10**9)
    cuda = args.device == "cuda"
    here = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    there = here if place == "colocated" or not cuda else torch.device("cuda", 1 - here.index)
    source = torch.ones(chunk, dtype=torch.uint8, device=here)
    target = torch.zeros(chunk, dtype=torch.uint8, device=there)
    times = [copy_seconds(target, source) for _ in range(6)]
    del source, target
    if cuda:
        torch.cuda.empty_cache()
    return {"device_copy_s" if place == "colocated" else "peer_copy_s": min(times[1:]) * nbytes / chunk}


def copy_seconds(target: Any, source: Any) -> float:
    """How long a plain copy takes."""
    import torch

    if not source.is_cuda:
        began = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - began
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """The figures of the slower layout, and whether all were right."""
    worst: dict[str, Any] = {}
    plain = found.get("device_copy_s") or found.get("peer_copy_s")
    for name, each in found["layouts"].items():
        steady = [one["sidecar_s"] for one in each["steady"]]
        step = {key: min(one.get(f"step:transfer_{key}", 0.0) for one in steady) for key in ("copy", "verify")}
        first = each["first"]["sidecar_s"]
        gaps = [one["pause_gap_s"] for one in each["steady"] if "pause_gap_s" in one]
        bucket = sum(
            seconds
            for key, seconds in each["flattened_bucket"]["sidecar_s"].items()
            if key.startswith("call:update_weights")
        )
        figures = {
            "layout": name,
            "bytes": each["bytes"],
            "mean_tensor_bytes": each["version_bytes"] // each["tensors"],
            "replay_s": step["copy"],
            "verify_s": step["verify"],
            "sglang_bucket_s": bucket,
            "record_s": first.get("step:transfer_record", 0.0),
            "plan_s": sum(
                each["first"]["sidecar_s"].get(f"step:transfer_{key}", 0.0) for key in ("plan", "agree", "adopt")
            ),
            "pause_gap_s": min(gaps, default=None),
            "http_calls": max(one["http_calls"] for one in each["steady"]),
            "of_plain_copy": plain / step["copy"] if plain and step["copy"] else None,
            "over_sglang_bucket": bucket / step["copy"] if step["copy"] else None,
        }
        each["figures"] = figures
        if not worst or figures["replay_s"] > worst["replay_s"]:
            worst = figures
    figures = [each["figures"] for each in found["layouts"].values()]
    worst |= {key: max(each[key] for each in figures) for key in ("record_s", "plan_s")}  # the second layout is known
    fastest = max((each["of_plain_copy"] for each in figures if each["of_plain_copy"]), default=None)
    sound = all(
        one["outcome"].endswith("committed")
        for each in found["layouts"].values()
        for one in (each["first"], each["flattened_bucket"], *each["steady"])
    )
    return {
        **worst,
        "equal": sound and all(each["equal"] for each in found["layouts"].values()),
        "problem": rig.too_fast(fastest, "a plain copy"),
    }


def main() -> int:
    parser = rig.parser(__doc__, memory=0.9, deadline=400.0, whose="that any one wait may take")
    parser.add_argument("--layers", type=int, default=24, help="of the model's 48")
    parser.add_argument("--tp", type=int, default=1, help="ranks of trainer and engine, on as many GPUs")
    parser.add_argument("--layout", action="append", choices=tuple(LAYOUTS), help="of a trainer in one process; all")
    parser.add_argument("--config", help="config.json of another model")
    parser.add_argument("--also", action="append", metavar="FILE", help="and of one more, after it; repeatable")
    rig.ask_for_predictions(parser)
    args = parser.parse_args()
    if args.trainer_of:
        train(args)
        return 0
    return orchestrate(args)


if __name__ == "__main__":
    sys.exit(main())
