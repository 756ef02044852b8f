"""Proof and figures for broadcasts by pipeline stage: two stages of a trainer, one group each, into a stock SGLang.

    python3 tests/gpu/stages.py                       two CUDA devices. Qwen3-30B-A3B shapes, 24 layers, 31 GB
    python3 tests/gpu/stages.py --config FILE         another model, by its config.json
    python3 tests/gpu/stages.py --device cpu          the same steps with a tiny model, over gloo
    python3 tests/gpu/stages.py --hands-on            sidecars take part in the place of servers: not measured

Servers take versions as every stock server does, by `update_weights_from_distributed`: their sidecars are started with
`--no-hands-on`. Versions come in two ways:

``stages``    The first rank of each stage broadcasts what it holds.
``gathered``  The first rank gathers everything and broadcasts alone, as the product does where somebody of the round
              needs all of it there. Here it is given a source that says nothing of stages.

Each way has real Megatron-core ranks of its own, with the same weights, and a server; all servers are on one GPU. They
take turns. Every turn begins with noise in its server and the last weights of the turn before, and the server's own
checksums must become those of the other one; those of the last turn must come again by SGLang's buckets over CUDA IPC.
Then the stages bring the same as slime does, a bucket at a time: by a broadcast for each tensor, and for comparison by
one for each bucket; there only the calls count.

NCCL takes a GPU into a communicator once. So with two GPUs both stages are on the first one, with only gloo between
them and each in one group with the server's worker; kernels of the two, also one that waits for its turn, share the
GPU by time slices. The ranks that gather are one on each GPU, the second beside the workers. With three GPUs or more
every rank has one. `gpus` in the result says it.

Prints one JSON object; `--out FOLDER` writes stages.json there, after every turn. Exits with 1 unless it came to its
end and everything was equal.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import direct
import rig

WAYS = ("stages", "gathered")
TURNS = 2
"""Of each way."""
STEADY = 4
"""Versions of a turn after its first one. Groups form in the very first one of a way."""
SMALL_BUCKETS = 1 << 16
"""Bytes, with the tiny model: so that a stage has more buckets than slots."""
LOOK_S = 0.02
PATIENCE_S = 1800.0
"""Of ranks, between orders: others have their turns, and other programs theirs."""


def seats(devices: int) -> dict[str, Any]:
    """The servers' GPU, and by way those of the trainer's ranks."""
    if devices < 2:
        raise ValueError(f"{devices} GPUs: workers and a rank of the trainer take one each")
    if devices == 2:
        return {"engine": 1, "stages": [0, 0], "gathered": [0, 1]}
    return {"engine": 2, "stages": [0, 1], "gathered": [0, 1]}


def put(file: Path, found: Mapping[str, Any]) -> None:
    """Write a file that is whole from the moment that it is there."""
    file.with_suffix(".new").write_text(json.dumps(found))
    file.with_suffix(".new").rename(file)


# -- the orchestrating process -----------------------------------------------------------------------------------------


class Run:
    """What runs, and what was measured so far."""

    def __init__(self, args: argparse.Namespace, work: Path, programs: Any) -> None:
        self.found: dict[str, Any] = {"equal": False, "turns": [], "equals": {}}
        self._args, self._work, self._programs = args, work, programs
        self._hf = rig.model_of(args)
        self._until = time.monotonic() + args.deadline
        self._versions = itertools.count(1)
        self._orders = {way: itertools.count(1) for way in WAYS}

    def start(self) -> None:
        """Coordinator, and of both ways a server and the ranks, all at once."""
        args, work = self._args, self._work
        rig.write_model(work / "model", self._hf)
        layout = rig.start_coordinator(self._programs, work)
        layout["gpus"] = gpus = seats(len(rig.devices().split(", ")) if args.device == "cuda" else 2)
        flags = (f"--mem-fraction-static={args.memory}", "--disable-cuda-graph") if args.device == "cuda" else ()
        for way in WAYS:
            engine = rig.Engine(way, gpus["engine"], 1, flags, "available", sidecar=rig.takes_part(args))
            rig.start_engine(self._programs, args.device, work, engine, layout)
        rig.write_layout(work, layout)
        self.found["gpus"] = gpus
        for way in WAYS:
            arguments = [f"--trainer-of={work}", f"--way={way}", *rig.arguments()]
            command = rig.ranks_command(__file__, len(gpus[way]), arguments)
            self._programs.start(f"ranks-{way}", command, env=rig.ranks_environment(args.device))

    def carry_out(self) -> None:
        """All turns, the oracle, and the loops."""
        for way in WAYS:
            self._ask(way, do="ready")
        began = time.monotonic()
        self._until = began + self._args.deadline
        seeds = itertools.count(1)
        last, sums = next(seeds), None
        for way in WAYS * TURNS:
            these = [last, *itertools.islice(seeds, STEADY)]
            told = self._rounds(way, these, "distributed", sums)
            self.found["turns"].append({"way": way, "rounds": told["reports"]})
            self.found |= {key: told[key] for key in ("bytes", "buckets")}
            last, sums = these[-1], told["sums"]
            self.write()
        self.found["oracle"] = self._rounds("gathered", [last], "local", sums)["reports"]
        for key, told in self._ask("stages", do="loops", seed=last).items():
            self._judge(key, told, sums)
            self.found[f"{key}_s"] = told["took_s"]
        self.found |= {"seconds": time.monotonic() - began, "equal": all(self.found["equals"].values())}

    def write(self, problem: str = "") -> dict[str, Any]:
        """Everything so far, figures on top."""
        found = {**rig.describe("stages.py", self._args.device, self._hf), **figures(self.found), **self.found}
        if problem:
            found |= {"problem": problem, "equal": False}
        rig.write_result(self._args.out, "stages", found)
        return found

    def _rounds(self, way: str, seeds: Sequence[int], transport: str, sums: Any) -> dict[str, Any]:
        """Versions with the weights of these seeds, after noise; the first must end in `sums`, if they are known."""
        versions = [next(self._versions) for _ in seeds]
        told = self._ask(way, do="rounds", seeds=seeds, versions=versions, transport=transport)
        self._judge(f"{way} by {transport}, version {versions[0]}", {**told, "sums": told["first_sums"]}, sums)
        return told

    def _judge(self, what: str, told: Mapping[str, Any], sums: Any) -> None:
        """Every version was committed, and the server holds what it did before the noise."""
        committed = all(each["outcome"].endswith("committed") for each in told.get("reports", ()))
        self.found["equals"][what] = committed and sums in (None, told["sums"]) and told["sums"] != told["noise"]
        rig.log(f"{what}: equal: {self.found['equals'][what]}")

    def _ask(self, way: str, **order: Any) -> dict[str, Any]:
        """Have the ranks of one way do something; what their first one answers."""
        number = next(self._orders[way])
        put(self._work / f"order-{way}-{number}.json", order)
        answer = self._work / f"answer-{way}-{number}.json"
        while not answer.exists():
            self._programs.check()
            if time.monotonic() > self._until:
                raise TimeoutError(f"{way}: {order['do']} had not ended within {self._args.deadline:.0f} s")
            time.sleep(LOOK_S)
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """By way, in seconds: the first version, the others' median and best, and medians of their steps."""
    told: dict[str, Any] = {}
    for way, name in (("stages", "stage_wise"), ("gathered", "gathered")):
        rounds = [one for each in found["turns"] if each["way"] == way for one in each["rounds"]]
        if steady := rounds[1:]:
            told |= {
                f"{name}_s": statistics.median(each["publish_s"] for each in steady),
                f"{name}_best_s": min(each["publish_s"] for each in steady),
                f"{name}_first_s": rounds[0]["publish_s"],
                f"{name}_steps": {side: medians([each[side] for each in steady]) for side in ("trainer_s", "engine_s")},
            }
    return told


def medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of every step that all have."""
    return {
        key: statistics.median(each[key] for each in steps) for key in steps[0] if all(key in each for each in steps)
    }


# -- the trainer's ranks -----------------------------------------------------------------------------------------------


class Gathered:
    """A source that says nothing of its stages: everything is assembled on the first rank."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.model, self.root, self.device = source.model, source.root, source.device
        self.head_dim, self.rank = source.head_dim, source.rank
        self.tensors, self.assemble, self.agree = source.tensors, source.assemble, source.agree


class Ranks:
    """One rank of a way. Every call is collective."""

    def __init__(self, args: argparse.Namespace, work: Path) -> None:
        import torch
        import torch.distributed as dist

        self._way, self._work, self._deadline = args.way, work, args.deadline
        self._layout = rig.read_layout(work)
        hf = rig.read_config(work)
        self._fleet = rig.Fleet(self._layout, hf["max_position_embeddings"])
        gpus = self._layout["gpus"][args.way]
        shared = len(set(gpus)) < len(gpus)
        if args.device == "cuda":
            torch.cuda.set_device(gpus[int(os.environ["LOCAL_RANK"])])
        backend = "gloo" if shared or args.device == "cpu" else "nccl"
        dist.init_process_group(backend, timeout=dt.timedelta(seconds=args.deadline))
        chunks = rig.build(hf, args.device, pp=len(gpus))
        self._parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self.source = source_of(chunks, work / "model", linked=not shared)
        self._agent, self._transport = contextlib.ExitStack(), ""
        self._publish: Any = None
        self.manifest: Any = None

    def obey(self) -> None:
        """Do what is asked until the run ends, which ends this process."""
        for number in itertools.count(1):
            order = json.loads(self.source.agree(self._next(number) if self.source.root else None))
            found = {"ready": self.ready, "rounds": self.rounds, "loops": self.loops}[order.pop("do")](**order)
            if self.source.root:
                put(self._work / f"answer-{self._way}-{number}.json", found)

    def ready(self) -> dict[str, Any]:
        """The engine is there, and nothing is compiled any more while others are measured."""
        import torch

        from weightbus.dataplane.digest import tensor_digest as integrity

        if self.source.root:
            self._fleet.wait_ready(self._deadline, self._way)
        integrity.digest_tensors(torch.ones(64, dtype=torch.uint8, device=self.source.device), [0, 32, 64])
        self.source.collect(b"")
        return {}

    def rounds(self, seeds: Sequence[int], versions: Sequence[int], transport: str) -> dict[str, Any]:
        """Publish versions with the weights of these seeds, the first over noise; what the server held when."""
        source = self.source if self._way == "stages" else Gathered(self.source)
        if transport != self._transport:  # groups stay from turn to turn, with the agent that has them
            self._agent.close()
            opened = self._agent.enter_context(direct.rounds(source, self._layout, self._way, transport))
            self._transport, (self._publish, self.manifest) = transport, (opened[0], opened[1].manifest)
        noise, first, reports = self._noise(), None, list[dict[str, Any]]()
        for seed, version in zip(seeds, versions, strict=True):
            self._refill(seed)
            reports.append(self._publish(version, self._fleet))
            rig.log(f"{self._way} by {transport}: version {version} in {reports[-1]['publish_s']:.2f} s")
            first = first or self._sums()
        sizes = {"bytes": self.manifest.nbytes, "buckets": len(self.manifest.buckets)}
        return {"noise": noise, "first_sums": first, "sums": self._sums(), "reports": reports, **sizes}

    def loops(self, seed: int) -> dict[str, Any]:
        """Every stage by SGLang's own calls, a bucket at a time, as trainers do it whose stages share a lock."""
        from stock_paths import StockPath

        self._agent.close()
        self._refill(seed)
        told: dict[str, Any] = {}
        with contextlib.ExitStack() as undo:
            for rank in sorted(set(self.source.roots())):  # a server joins one group at a time
                if rank == self.source.rank:
                    path = undo.enter_context(StockPath(self._fleet.url(self._way), self.source.device))
                self.source.collect(b"")
            for flattened, key in ((True, "flattened"), (False, "slime")):
                noise = self._noise()
                took = [self._loop(path, flattened=flattened) for _ in range(2)]
                told[key] = {"noise": noise, "sums": self._sums(), "took_s": min(took)}
        return told

    def _loop(self, path: Any, *, flattened: bool) -> float:
        """One version. Seconds that the calls of all stages took."""
        import torch

        from weightbus.dataplane.tensors.manifest import cut

        source, roots = self.source, self.source.roots()
        ranks = sorted(set(roots))
        owners = [ranks.index(root) for root in roots]
        manifest, sources = cut(source.model, source.tensors(), owners, direct.BUCKET_BYTES)
        memory = torch.empty(manifest.largest_bucket, dtype=torch.uint8, device=source.device)
        took, places = 0.0, [ranks[number] for number in sources.of]
        with path.standing() if source.root else contextlib.nullcontext():
            source.collect(b"")
            for index, place in enumerate(places):
                mine = place == source.rank
                source.assemble(manifest, index, memory if mine else None, places)
                took += path.bring(manifest, index, memory, flattened=flattened) if mine else 0.0
                source.collect(b"")
        return sum(map(float, source.collect(str(took).encode())))

    def _next(self, number: int) -> bytes:
        """The order of that number of this way."""
        file = self._work / f"order-{self._way}-{number}.json"
        rig.wait("an order", file.exists, PATIENCE_S, lambda: None)
        return file.read_bytes()

    def _refill(self, seed: int) -> None:
        """Weights of this seed; the same in both ways, and others on every rank."""
        import torch

        generator = torch.Generator(self.source.device).manual_seed(1000 * seed + self.source.rank)
        with torch.no_grad():
            for parameter in self._parameters:
                parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.02, generator=generator)

    def _noise(self) -> list[dict[str, str]]:
        """Into the server. What it holds then."""
        if self.source.root:
            self._fleet.overwrite(self._way)
        return self._sums()

    def _sums(self) -> list[dict[str, str]]:
        """What the server says that it holds; nothing where the rank does not lead."""
        return self._fleet.checksum(self._way) if self.source.root else []


def source_of(chunks: Sequence[Any], model: Path, *, linked: bool) -> Any:
    """Of real ranks. Where they are not linked, there is no group in which one could assemble what another holds."""
    import torch

    from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource

    class Unlinked(MegatronSource):
        def _open_exchange(self) -> None:
            return None

    kind = MegatronSource if linked else Unlinked
    return kind(chunks, hf_config=model, dtype=torch.bfloat16)


def main() -> int:
    parser = rig.parser(__doc__, memory=0.8, deadline=300.0, whose="for everybody to start, and for all that follows")
    parser.add_argument("--layers", type=int, default=24, help="of the model's 48")
    parser.add_argument("--config", help="config.json of another model")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    rig.ask_who_takes_part(parser)
    args = parser.parse_args()
    if args.device == "cpu":
        direct.BUCKET_BYTES = SMALL_BUCKETS
    if args.trainer_of:
        rig.play_cuda(args.device)
        Ranks(args, Path(args.trainer_of)).obey()
    from weightbus.trainer_agent.demo.child_processes import ProgramEnded, Programs

    work, problem = Path(tempfile.mkdtemp(prefix="wb-stages-")), ""
    with Programs(work) as programs:
        run = Run(args, work, programs)
        try:
            run.start()
            run.carry_out()
        except (ProgramEnded, TimeoutError) as error:
            problem = f"{error}"
            rig.keep_logs(work, args.out, "stages")
        found = run.write(problem)
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if found["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
