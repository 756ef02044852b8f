"""Proof and figures for sends over NCCL: out of a Megatron-core trainer on one GPU into real SGLang on another one.

    python3 tests/gpu/nccl.py                       two CUDA devices. Qwen3-30B-A3B shapes, 24 layers, 31 GB
    python3 tests/gpu/nccl.py --config FILE         another model, by its config.json
    python3 tests/gpu/nccl.py --parts speed,death   some of the parts
    python3 tests/gpu/nccl.py --device cpu          the same steps with tiny models, over gloo

Three parts, each a trainer of its own (nccl_parts.py, stock_paths.py), each with a deadline:

``speed``  Versions by `sends`, by SGLang's flattened buckets, and by a broadcast for each tensor as slime drives it,
           all into the same server. Its own checksums of its live parameters must be the same every way, and other ones
           after they were overwritten with noise. A bare send of as many bytes is the floor.
``death``  The trainer is killed in the middle of a transfer, and another one comes: how long until the engine serves.
``hosts``  Two engines on one GPU that NCCL takes for three hosts with the trainer: sockets over the loopback, P2P and
           shared memory off. An engine joins; then a worker is killed in the middle of a transfer: how long until the
           other engine serves the version.

Prints one JSON object; `--out FOLDER` writes nccl.json there after every step, so that a run that is cut short leaves
what it had. Exits with 1 unless every part came to its end and everything was equal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import rig

ENGINES = {"speed": ("remote",), "death": ("remote",), "hosts": ("near", "far")}
LIMITS_S = {"speed": 240.0, "death": 120.0, "hosts": 200.0}
"""Of a part, once its engines are there."""
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
FIGURES = (
    "bytes", "shard_to_shard_s", "bare_sendrecv_s", "slime_distributed_s", "flattened_distributed_s",
    "survivors_serving_s", "joiner_s", "normal_round_s", "equal",
)  # fmt: skip


class Run:
    """What runs, and what was measured so far."""

    def __init__(self, args: argparse.Namespace, work: Path, programs: Any) -> None:
        self.args = args
        self.work = work
        self.parts: list[str] = args.parts.split(",")
        self.found: dict[str, Any] = {}
        self._programs = programs
        self._until = time.monotonic() + args.budget
        self._trainers: dict[str, Any] = {}
        self._described: dict[str, Any] = {}

    def start(self) -> None:
        """Coordinator, engines, and on GPUs at once every trainer: each waits until it is called."""
        args, work = self.args, self.work
        hf = rig.model_of(args)
        small = dict(rig.TINY_MOE) if args.device == "cpu" else {**rig.QWEN3_30B_A3B, "num_hidden_layers": 2}
        rig.write_model(work / "model", hf)
        rig.write_model(work / "small", small)
        self._described = rig.describe("nccl.py", args.device, hf)
        layout = rig.start_coordinator(self._programs, work)
        for place in dict.fromkeys(place for part in self.parts for place in ENGINES[part]):
            rig.start_engine(self._programs, args.device, work, self._engine(place), layout)
        rig.write_layout(work, layout)
        if args.device == "cuda":
            for part in self.parts:
                self._start_trainer(part)

    def carry_out(self, part: str) -> None:
        """One part, to its end or its deadline. What it has written until then counts."""
        if part not in self._trainers:
            self._start_trainer(part)
        trainer = self._trainers[part]
        (self.work / f"go-{part}").touch()
        ready, began = self.work / f"ready-{part}", time.monotonic()
        until, called, problem = self._until, False, ""
        while trainer.process.poll() is None and time.monotonic() < until and not problem:
            if ready.exists() and not called:
                called = True
                rig.log(f"{part}: its engines are there after {time.monotonic() - began:.0f} s")
                until = min(until, time.monotonic() + LIMITS_S[part])
            problem = "" if called else self._gone()
            if part == "death" and trainer.process.poll() is None and (self.work / "killed").exists():
                break
            time.sleep(0.1)
        if part == "death" and not problem:
            self._another_trainer(until)
            trainer = self._trainers["death"]
        ended = trainer.process.poll()
        if ended is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(trainer.process.pid, signal.SIGKILL)
        found = self._read(part)
        found["seconds"] = time.monotonic() - began
        if ended != 0:
            found["problem"] = problem or ("it ran out of time" if ended is None else f"it ended with status {ended}")
            rig.keep_logs(self.work, self.args.out, f"nccl-{part}")
        self.found[part] = found
        self.write()

    def write(self) -> dict[str, Any]:
        """Everything so far, with the figures that the issue names on top."""
        parts = self.found
        # Of two parts the first one's: `hosts` has another model, over sockets. A joiner is its alone.
        told: dict[str, Any] = {}
        for each in parts.values():
            told = {**{key: each[key] for key in FIGURES if key in each}, **told}
        if "hosts" in parts and len(parts) > 1:
            told["joiner_s"] = None  # of other rounds than `normal_round_s`: `parts` has both
        told["equal"] = bool(parts) and all(part in parts and parts[part].get("equal") for part in self.parts)
        survivors = [each["survivors_serving_s"] for each in parts.values() if each.get("survivors_serving_s")]
        told["survivors_serving_s"] = max(survivors, default=None)
        found = {**self._described, **{key: told.get(key) for key in FIGURES}, "parts": parts}
        rig.write_result(self.args.out, "nccl", found)
        return found

    def _engine(self, place: str) -> rig.Engine:
        flags: tuple[str, ...] = (rig.LOADER,)
        sidecar = rig.takes_part(self.args)
        if place == "remote":
            if self.args.device == "cuda":
                flags += (f"--mem-fraction-static={self.args.memory}", *rig.GRAPHS)
            return rig.Engine(place, 1, 1, flags, "available", sidecar=sidecar)
        if self.args.device == "cuda":
            flags += (f"--mem-fraction-static={self.args.memory}", "--disable-cuda-graph")
        environment = tuple({**SOCKETS, "NCCL_HOSTID": place}.items())
        return rig.Engine("hosts", 1, 1, flags, "available", place, environment, "small", sidecar)

    def _start_trainer(self, part: str) -> None:
        program = str(Path(__file__).with_name("nccl_parts.py"))
        command = [sys.executable, program, part, str(self.work), self.args.device]
        environment = rig.ranks_environment(self.args.device)
        if part == "hosts":
            environment = {**environment, **SOCKETS, "NCCL_HOSTID": "trainer"}
        self._trainers[part] = self._programs.start(f"trainer-{part}", command, env=environment)
        self._programs.dismiss([self._trainers[part]])  # it is looked after here

    def _gone(self) -> str:
        """Which program has ended, while engines start: nobody waits for one that never comes."""
        from weightbus.trainer_agent.demo.child_processes import ProgramEnded

        try:
            self._programs.check()
        except ProgramEnded as error:
            return f"{error}"
        return ""

    def _another_trainer(self, until: float) -> None:
        """The first one has killed itself; the next one publishes again."""
        self._start_trainer("death")
        process = self._trainers["death"].process
        while process.poll() is None and time.monotonic() < until:
            time.sleep(0.1)

    def _read(self, part: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for file in sorted(self.work.glob(f"result-{part}*.json")):
            with contextlib.suppress(ValueError):
                found |= json.loads(file.read_text())
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", default="speed,death,hosts", help="some of them")
    parser.add_argument("--layers", type=int, default=24, help="of the model's 48")
    parser.add_argument("--config", help="config.json of another model")
    parser.add_argument("--memory", type=float, default=0.6, help="the servers' --mem-fraction-static")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for everything")
    parser.add_argument("--out", help="folder for the JSON file")
    rig.ask_who_takes_part(parser)
    args = parser.parse_args()
    if set(args.parts.split(",")) - set(ENGINES):
        parser.error(f"--parts: expected some of {', '.join(ENGINES)}")
    from weightbus.trainer_agent.demo.child_processes import Programs

    work = Path(tempfile.mkdtemp(prefix="wb-nccl-"))
    with Programs(work) as programs:
        run = Run(args, work, programs)
        run.start()
        for part in run.parts:
            run.carry_out(part)
        found = run.write()
    sys.stdout.write(json.dumps(found) + "\n")
    whole = all("problem" not in each for each in run.found.values())
    return 0 if found["equal"] and whole else 1


if __name__ == "__main__":
    sys.exit(main())
