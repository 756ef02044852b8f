"""Engines of other shapes on GPUs: draft models, expert and attention data parallelism, FP8. Against real SGLang.

Every case has a server with its sidecar, a coordinator and a Megatron-core trainer with random weights of its own, and
a deadline of its own; all servers start at once. One that compiles kernels answers nothing for a while, also after its
sidecar joined: the first publication waits for it (N61). What a round leaves in a server is compared with what the
server loads by itself from a checkpoint that was written in the same pass: the server's own checksums of its live
parameters, those of its draft models too, and the tokens that it generates. In between, the parameters are overwritten
with noise.

    python3 tests/gpu/engines.py draft fp8 fp8-dense saver
                                                       one CUDA device
    python3 tests/gpu/engines.py ep2 dpa               two devices, the trainer's ranks crosswise to the engine's
    python3 tests/gpu/engines.py --device cpu ...      the same steps with tiny models on the CPU

Prints one JSON object; `--out FOLDER` writes engines-CASE.json there, after every step. Exits with 1 unless everything
was equal.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import direct
import rig

STEADY = 2
"""Direct rounds while a client generates."""


@dataclass(frozen=True)
class Case:
    """A server, and who trains its model."""

    hf: dict[str, Any]
    tiny: dict[str, Any]
    """What stands for it on a CPU, where SGLang has no latent attention and no speculation."""
    layout: dict[str, int | None]
    """Of the trainer's two ranks; one process where the engine has one GPU."""
    flags: tuple[str, ...]
    tp: int = 1
    stock: bool = True
    """The stock path can prove what it brings to such a server."""
    refused: str = ""
    """What the sidecar says of it where it cannot."""
    lends: bool = False
    """Its server gives memory back between two rounds."""
    starts: bool = False
    """At the end another server is started from the files of the last version."""


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parent / "models" / f"{name}.json").read_text())
    return found


_TINY = {**rig.TINY_MOE, "moe_intermediate_size": 128}
"""Of which two ranks of SGLang's CPU engine have the same part, without padding."""
_WIDE = {**rig.QWEN3_30B_A3B, "num_hidden_layers": 2, "vocab_size": 32768}
CASES = {
    "draft": Case(
        _read("deepseek"), _TINY, {"ep": 2, "etp": 1, "dp": 2}, ("--speculative-algorithm=EAGLE",),
        stock=False, refused="only direct copies reach and prove its draft models",
    ),
    "ep2": Case(_WIDE, _TINY, {"ep": 2, "etp": 1, "dp": 2}, ("--ep-size=2",), tp=2),
    "dpa": Case(_WIDE, _TINY, {"tp": 2}, ("--dp-size=2", "--enable-dp-attention"), tp=2),
    "fp8": Case(
        {**_WIDE, "quantization_config": rig.FP8}, _TINY, {"ep": 2, "etp": 1, "dp": 2}, rig.FP8_FLAGS, starts=True,
    ),
    "fp8-dense": Case(
        {**rig.QWEN3_8B, "num_hidden_layers": 3, "vocab_size": 32768, "quantization_config": rig.FP8},
        rig.TINY, {"tp": 2}, rig.FP8_FLAGS, starts=True,
    ),
    "saver": Case(_WIDE, _TINY, {"ep": 2, "etp": 1, "dp": 2}, ("--enable-memory-saver",), lends=True),
    "plain": Case(_WIDE, _TINY, {"tp": 2}, (), starts=True),
}  # fmt: skip


# -- the orchestrating process -----------------------------------------------------------------------------------------


@dataclass
class Run:
    """A case under way."""

    name: str
    case: Case
    work: Path
    programs: Any
    began: float = field(default_factory=time.monotonic)
    trainer: Any = None
    problem: str = ""
    done: bool = False

    def look(self, deadline_s: float, out: str | None) -> None:
        """Whether it has ended, and how."""
        from weightbus.trainer_agent.demo.child_processes import ProgramEnded

        try:
            self.programs.check([self.trainer])
            self.done = self.trainer.process.poll() is not None
        except ProgramEnded as error:
            self.problem = f"{error}"
        if not self.done and time.monotonic() > self.began + deadline_s:
            self.problem = f"not done after {deadline_s:.0f} s"
        if self.problem:
            self.done = True
            rig.keep_logs(self.work, out, f"engines-{self.name}")

    def result(self, device: str) -> dict[str, Any]:
        """What it found, as far as it came."""
        with contextlib.suppress(FileNotFoundError):
            found: dict[str, Any] = json.loads((self.work / "result.json").read_text())
            found["equal"] = bool(found.get("equal")) and found.get("complete") is True and not self.problem
            hf = rig.read_config(self.work)
            return {**rig.describe("engines.py", device, hf), **found, "problem": self.problem}
        return {"equal": False, "problem": self.problem}


def orchestrate(args: argparse.Namespace) -> int:
    """Start every case, write down what each found."""
    from weightbus.trainer_agent.demo.child_processes import Programs

    with contextlib.ExitStack() as stack:
        runs = []
        for name in args.case:
            work = Path(tempfile.mkdtemp(prefix=f"wb-{name}-"))
            runs.append(start(args, Run(name, CASES[name], work, stack.enter_context(Programs(work)))))
        waiting = list(runs)
        while waiting:
            for run in waiting:
                run.look(args.deadline, args.out)
                rig.write_result(args.out, f"engines-{run.name}", run.result(args.device))
            waiting = [run for run in waiting if not run.done]
            time.sleep(0.5)
    found = {run.name: run.result(args.device) for run in runs}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if all(each["equal"] for each in found.values()) else 1


def start(args: argparse.Namespace, run: Run) -> Run:
    """Its coordinator, server, sidecar and trainer."""
    case, work = run.case, run.work
    hf = dict(case.hf if args.device == "cuda" else case.tiny)
    rig.write_model(work / "model", hf)
    layout = rig.start_coordinator(run.programs, work)
    flags: tuple[str, ...] = (rig.LOADER,)
    if args.device == "cuda":
        flags += (f"--mem-fraction-static={args.memory}", *case.flags)
        flags += () if args.graphs else ("--disable-cuda-graph",)
    environment = preloading() if case.lends else ()
    sidecar = ("--gives-back",) if case.lends else ()
    engine = rig.Engine(run.name, 0, case.tp, flags, "available", environment=environment, sidecar=sidecar)
    rig.start_engine(run.programs, args.device, work, engine, layout)
    rig.write_layout(work, layout)
    limits = ["--deadline", str(args.deadline), "--memory", str(args.memory)]
    arguments = ["--trainer-of", str(work), "--device", args.device, *limits, run.name]
    command = [sys.executable, __file__, *arguments]
    if case.tp > 1:
        command = rig.ranks_command(__file__, case.tp, arguments)
    run.trainer = run.programs.start("trainer", command, env=rig.ranks_environment(args.device))
    return run


def preloading() -> tuple[tuple[str, str], ...]:
    """The library that SGLang preloads to give memory back wants the CUDA runtime that torch has brought."""
    found = [path.parent for folder in sys.path for path in Path(folder).glob("nvidia/*/lib/libcudart.so*")]
    return (("LD_LIBRARY_PATH", ":".join([*map(str, found), os.environ.get("LD_LIBRARY_PATH", "")])),)


# -- the trainer -------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """Build the model, prove the case."""
    (name,) = args.case
    work, case = Path(args.trainer_of), CASES[name]
    rig.play_cuda(args.device)
    hf = rig.read_config(work)
    fleet = rig.Fleet(rig.read_layout(work), hf["max_position_embeddings"])
    source = ranks_of(args, case, work) if case.tp > 1 else shards_of(args, case, hf)
    if source.root:
        fleet.wait_ready(args.deadline)
    Proof(name, case, source, work, fleet, args).run()


def shards_of(args: argparse.Namespace, case: Case, hf: dict[str, Any]) -> Any:
    """Both ranks in this process: NCCL gives a GPU to one rank only."""
    import torch
    from shards import LayoutShards

    return LayoutShards(hf, torch.device(args.device, 0), 2, **case.layout)


def ranks_of(args: argparse.Namespace, case: Case, work: Path) -> Any:
    """This rank, on the GPU of another rank's worker."""
    import torch
    import torch.distributed as dist

    from weightbus.trainer_agent.sources.megatron.megatron_source import MegatronSource

    if args.device == "cuda":
        torch.cuda.set_device(case.tp - 1 - int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", timeout=dt.timedelta(seconds=args.deadline))
    layout = {key: value for key, value in case.layout.items() if key != "dp"}
    chunks = rig.build(rig.read_config(work), args.device, **layout)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    source: Any = MegatronSource(chunks, hf_config=work / "model", dtype=torch.bfloat16)
    source.refill = lambda seed: rig.refill(parameters, seed)
    return source


class Proof:
    """The steps of one case. Every rank takes them; the root alone asks the server, and writes."""

    def __init__(  # noqa: PLR0917  made in one place
        self, name: str, case: Case, source: Any, work: Path, fleet: rig.Fleet, args: argparse.Namespace
    ) -> None:
        self._name, self._case, self._source, self._work, self._fleet = name, case, source, work, fleet
        self._memory, self._deadline = args.memory, args.deadline
        self._layout = rig.read_layout(work)
        self._found: dict[str, Any] = {"case": name, "equal": True}
        self._speculates = not case.stock and source.device.type == "cuda"

    def run(self) -> None:
        """Direct, stock, and direct again while requests are answered."""
        self._direct()
        if self._case.lends:
            self._lend()
        if self._speculates:
            self._refusal()
        else:
            self._stock()
        self._steady()
        if self._case.starts:
            self._start()
        self._write(complete=True)

    def _direct(self) -> None:
        with self._rounds("direct") as (publish, agent):
            self._found |= {"bytes": agent.manifest.nbytes, "tensors": len(agent.manifest.tensors)}
            report = self._publish(publish, 1)
        self._write(first=report)
        self._compare(1, "direct")

    def _stock(self) -> None:
        with self._rounds("local") as (publish, _):
            report = self._publish(publish, 3)
        self._write(flattened_bucket=report)
        self._compare(3, "stock")

    def _lend(self) -> None:
        """The sidecar has the server give everything back; the next round takes it again, undefined as it is.

        A CPU server has nothing to give: there its own calls are made, around the round.
        """
        fleet, name, device = self._fleet, self._name, self._source.device
        free = free_bytes(device)
        if device.type == "cuda":
            fleet.give_back(name)
        else:
            fleet.memory(name, "release", ["kv_cache", "weights", "cuda_graph"])
            fleet.memory(name, "resume", ["weights"])
        self._write(given_back_bytes=free_bytes(device) - free)
        self._found["equal"] &= device.type == "cpu" or self._found["given_back_bytes"] > self._found["bytes"] // 2
        with self._rounds("direct") as (publish, _):
            report = self._publish(publish, 2)
        if device.type == "cpu":
            fleet.memory(name, "resume", ["kv_cache", "cuda_graph"])
        self._write(into_undefined=report)
        self._compare(2, "lent")

    def _refusal(self) -> None:
        """What such a server's sidecar says of the stock path. Nothing must change by it. One process trains here."""
        before = self._fleet.checksum(self._name)
        with self._rounds("local") as (publish, _):
            try:
                self._source.refill(3)
                reason = publish(3, self._fleet)["reason"]
            except Exception as error:  # noqa: BLE001 - whatever it is, it is what was said
                reason = f"{type(error).__name__}: {error}"
        self._found["equal"] &= self._case.refused in reason and self._fleet.checksum(self._name) == before
        self._write(advice=reason)

    def _steady(self) -> None:
        steady = []
        with self._rounds("direct") as (publish, _):
            self._publish(publish, 4)  # what other ways made forgotten is opened again
            for version in range(5, 5 + STEADY):
                self._source.refill(version)
                with direct.generating(self._fleet, self._name, active=self._source.root) as client:
                    report = publish(version, self._fleet)
                steady.append({**report, **client.gaps()})
        self._found["equal"] &= all(each["outcome"].endswith("committed") for each in steady)
        self._write(steady=steady)
        self._compare(4 + STEADY, "steady")

    def _start(self) -> None:
        """A server that nobody touches, started from the files of the last version. One process trains here."""
        from weightbus.trainer_agent.demo.child_processes import Programs

        fleet, version = self._fleet, 4 + STEADY
        ours, tokens = fleet.checksum(self._name), fleet.tokens(self._name)
        folder = self._work / "saved" / self._name / f"checkpoint-{version}"
        cuda = self._source.device.type == "cuda"
        flags = (f"--mem-fraction-static={self._memory}", "--disable-cuda-graph", *self._case.flags) if cuda else ()
        began = time.perf_counter()
        with Programs(self._work) as programs:
            engine = rig.Engine("started", 0, self._case.tp, flags)
            port, _ = rig.start_server(programs, self._source.device.type, folder, engine, load_format="auto")
            fleet.add("started", port)
            fleet.wait_serving("started", self._deadline, programs.check)
            took = time.perf_counter() - began
            files, again = fleet.checksum("started"), fleet.tokens("started")
            fleet.overwrite("started")
            noise = fleet.checksum("started")
        found = {"weights_equal": ours == files != noise, "tokens_equal": tokens == again, "start_s": took}
        self._found["equal"] &= found["weights_equal"] and found["tokens_equal"]
        self._write(started_from_files=found)

    def _rounds(self, transport: str) -> Any:
        saves = {"save_every": 1, "save_dir": self._work / "saved", "keep_last": 1}
        return direct.rounds(
            self._source, self._layout, self._name, transport, {**saves, "hf_config_dir": self._work / "model"}
        )

    def _publish(self, publish: Any, version: int) -> dict[str, Any]:
        self._source.refill(version)
        report: dict[str, Any] = publish(version, self._fleet)
        self._found["equal"] &= report["outcome"].endswith("committed")
        return report

    def _compare(self, version: int, step: str) -> None:
        """With what the server has when it loads the checkpoint of the same version by itself."""
        if not self._source.root:
            return
        fleet, name = self._fleet, self._name
        ours, tokens = fleet.checksum(name), fleet.tokens(name)
        fleet.overwrite(name)
        noise = fleet.checksum(name)
        began = time.perf_counter()
        fleet.load(name, self._work / "saved" / name / f"checkpoint-{version}")
        took = time.perf_counter() - began
        files, again = fleet.checksum(name), fleet.tokens(name)
        names = [name for rank in files for name in rank]
        drafts = sum(name.startswith("draft.") for name in names)
        compared = {
            "weights_equal": ours == files != noise,
            "tokens_equal": tokens == again,
            "parameters": len(names),
            "changed_by_noise": differing(ours, noise),
            "draft_parameters": drafts,
            "load_from_disk_s": took,
        }
        self._found["equal"] &= compared["weights_equal"] and compared["tokens_equal"]
        self._found["equal"] &= drafts > 0 or not self._speculates
        self._write(**{f"compared_{step}": compared})

    def _write(self, **more: Any) -> None:
        self._found |= more
        if self._source.root:
            rig.write_found(self._work, self._found)


def free_bytes(device: Any) -> int:
    """Of the GPU; nothing is given back of a host's memory."""
    import torch

    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else 0


def differing(one: list[dict[str, str]], other: list[dict[str, str]]) -> int:
    """How many parameters have another checksum."""
    return sum(a[name] != b[name] for a, b in zip(one, other, strict=True) for name in a)


def main() -> int:
    # What other servers take while one loads counts against its share; `--max-total-tokens` bounds what it takes.
    parser = rig.parser(__doc__, memory=0.8, deadline=450.0, whose="for a case, its server's start included")
    parser.add_argument("case", nargs="+", choices=tuple(CASES))
    parser.add_argument("--graphs", action="store_true", help="let servers capture CUDA graphs: a minute more")
    args = parser.parse_args()
    if args.trainer_of:
        train(args)
        return 0
    return orchestrate(args)


if __name__ == "__main__":
    sys.exit(main())
