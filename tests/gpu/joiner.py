"""How long an engine takes that joins: from its `Hello` until it is ready, beside a round of the others.

    python3 tests/gpu/joiner.py                       two CUDA devices. Qwen3-30B-A3B shapes, 24 layers, 31 GB
    python3 tests/gpu/joiner.py --not-ahead           the same where its loader is recorded in its first round
    python3 tests/gpu/joiner.py --one-gpu             on one device of 140 GB, over sockets: what a joiner takes
                                                      beside the wire, which is slower there (joiner-one-gpu.json)
    python3 tests/gpu/joiner.py --device cpu          the same steps with tiny models, over gloo

A Megatron-core trainer on GPU 0 sends versions to a real SGLang server on GPU 1, by `sends`. A second server stands
beside it, full of noise, and its sidecar is started then: the coordinator hears of the engine, the trainer brings it
the committed version, and it is ready. `joiner_s` is from one to the other, as the coordinator's status shows both.
Then the sidecar goes, misses a version, and comes back to the same server (`again`). Rounds of both follow; they are on
one GPU, and NCCL takes a GPU once, so they take turns.

Prints one JSON object; `--out FOLDER` writes joiner.json there. Exits with 1 unless it came to its end and both servers
held the same, by their own checksums.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parent))

import direct
import rig

SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
STEADY = 5
CHANNEL = "joiner"
FIRST, LATE = "first", "late"
WIRE = "step:transfer_wire"
LOOK_S = 0.002
"""Between two looks, each of which takes the coordinator's time."""


class Part:
    """The trainer's model, the fleet, and the results so far."""

    def __init__(self, work: Path, device: str) -> None:
        import torch
        from shards import LayoutShards

        self._work, self._found = work, dict[str, Any]()
        self.layout = rig.read_layout(work)
        hf = rig.read_config(work)
        self.fleet = rig.Fleet(self.layout, hf["max_position_embeddings"])
        self.source = LayoutShards(hf, torch.device(device, 0), 2, tp=2)

    def say(self, **found: Any) -> None:
        """Write it down: a run that is cut short leaves what it had."""
        self._found |= found
        rig.write_found(self._work, self._found)
        rig.log(", ".join(found))

    def state(self, place: str) -> str:
        """The engine's, as the coordinator shows it."""
        url = f"http://127.0.0.1:{self.layout['status']}/status"
        channels = self.fleet._http.get(url).json()["channels"]
        return str(channels.get(CHANNEL, {"engines": {}})["engines"].get(f"{place}0", {}).get("state"))


def committed(report: dict[str, Any], *engines: str) -> bool:
    """The version, and these engines or all of them."""
    found = report["engines"]
    return report["outcome"] == "committed" and all(found[name] == "committed" for name in engines or found)


class rounds:  # noqa: N801  a context manager like direct.rounds
    """An agent of one channel, and how it publishes one version."""

    def __init__(self, part: Part, transport: str) -> None:
        from weightbus.trainer_agent import TrainerAgent

        self._agent = TrainerAgent.connect(
            part.source, channel=CHANNEL, name=f"trainer-{CHANNEL}", coordinator=f"tcp://127.0.0.1:{part.layout['bus']}",
            transport=(transport,), bucket_bytes=direct.BUCKET_BYTES, insecure_loopback=True, pause="in_place",
            flush=False,
        )  # fmt: skip

    def __enter__(self) -> Self:
        self._agent.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._agent.__exit__(*error)

    def __call__(self, version: int) -> dict[str, Any]:
        return self._told(self._agent.publish, version)

    def catch_up(self, version: int) -> dict[str, Any]:
        """To engines that are behind."""
        return self._told(self._agent.catch_up, version)

    @staticmethod
    def _told(bring: Callable[[int], Any], version: int) -> dict[str, Any]:
        began = time.perf_counter()
        report = bring(version)
        return {
            "publish_s": time.perf_counter() - began,
            "outcome": f"{report.outcome}",
            "reason": report.reason,
            "engines": {each.engine: f"{each.outcome}" for each in report.engines},
            "reasons": {each.engine: each.reason for each in report.engines if each.reason},
            "engine_s": {each.engine: each.seconds for each in report.engines},
            "trainer_s": report.seconds,
        }


class Watch:
    """When an engine is there, and when it is ready: as a process beside the trainer sees it in the status."""

    def __init__(self, part: Part, place: str) -> None:
        url = f"http://127.0.0.1:{part.layout['status']}/status"
        program = Path(__file__).with_name("watch.py")
        arguments = [url, CHANNEL, f"{place}0", str(LOOK_S)]
        self._process = subprocess.Popen([sys.executable, str(program), *arguments], stdout=subprocess.PIPE, text=True)
        self._news = threading.Condition()
        self.states: list[tuple[float, str, bool]] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            at, state, ready = json.loads(line)
            with self._news:
                self.states.append((at, state, ready))
                self._news.notify_all()

    def until(self, what: str, *, there: bool = False, ready: bool = False) -> float:
        """When it was seen for the first time, or was ready for the first time since it was there."""

        def seen() -> float | None:
            came = next((at for at, state, _ in self.states if state not in ("unknown", "lost")), None)
            found = next((at for at, state, ok in self.states if ok and state == "serving"), None)
            return came if there else found if ready else None

        with self._news:
            at = self._news.wait_for(seen, 120)
        if at is None:
            raise TimeoutError(f"waited 120 s for {what}; seen: {self.states}")
        return at

    def close(self) -> list[tuple[float, str, bool]]:
        """What was seen, in seconds since it was there."""
        self._process.kill()
        self._process.wait()
        self._thread.join(10)
        came = self.until("the engine", there=True)
        return [(round(at - came, 4), state, ready) for at, state, ready in self.states]


def join(part: Part, publish: rounds, version: int, log: Path) -> dict[str, Any]:
    """Start the late engine's sidecar and bring it `version`; where the time went."""
    late = part.layout["engines"][LATE]
    watch = Watch(part, LATE)
    # What a killed sidecar left in the status is not the engine that comes.
    rig.wait("nobody to be there", lambda: bool(watch.states) and watch.states[-1][1] in ("unknown", "lost"), 60, _nop)
    watch.states.clear()
    began = time.monotonic()
    with log.open("ab") as output:
        late["sidecar_group"] = subprocess.Popen(
            late["start"], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        ).pid
    came = watch.until("its Hello", there=True)
    report = publish.catch_up(version)
    ready = watch.until("it to be ready", ready=True)
    return {
        "joiner_s": ready - came,
        "before_hello_s": came - began,
        "caught_up": report,
        "sidecar_s": part.fleet.seconds(LATE),
        "states": watch.close(),
        "recorded_ahead": "recorded_ahead" in (text := log.read_text()) and "not_recorded_ahead" not in text,
    }


def _nop() -> None:
    pass


def train(work: Path, device: str) -> None:
    """The trainer: a process of its own."""
    rig.play_cuda(device)
    part = Part(work, device)
    part.fleet.wait_ready(400, FIRST)
    part.fleet.wait_serving(LATE, 400, _nop)
    part.fleet.overwrite(LATE)
    noise = part.fleet.checksum(LATE)
    numbers = iter(range(1, 1000))
    with rounds(part, "sends") as publish:
        reports, wires = [], []
        for version in (next(numbers) for _ in range(STEADY + 2)):
            part.source.refill(version)
            reports.append(publish(version))
            wires.append(part.fleet.seconds(FIRST).get(WIRE, 0.0))
        steady = [each["publish_s"] for each in reports[2:]]
        beside = [took - (after - before) for took, before, after in zip(steady, wires[1:], wires[2:], strict=False)]
        normal = statistics.median(steady)
        equal = all(committed(each) for each in reports)
        part.say(rounds=reports, normal_round_s=normal, steady_s=steady, steady_beside_wire_s=beside, equal=False)

        joined = join(part, publish, version, work / "sidecar-late.log")
        sums = part.fleet.checksum(FIRST), part.fleet.checksum(LATE)
        equal = equal and sums[0] == sums[1] != noise
        beside_wire = joined["joiner_s"] - joined["sidecar_s"].get(WIRE, 0.0)
        part.say(**joined, ratio=joined["joiner_s"] / normal, beside_wire_s=beside_wire, equal_joined=equal)

        os.killpg(part.layout["engines"][LATE]["sidecar_group"], signal.SIGTERM)
        rig.wait("it to be gone", lambda: part.state(LATE) == "lost", 30, _nop)
        part.source.refill(version := next(numbers))
        equal = equal and committed(publish(version), f"{FIRST}0")
        again = join(part, publish, version, work / "sidecar-late-again.log")
        sums = part.fleet.checksum(FIRST), part.fleet.checksum(LATE)
        equal = equal and sums[0] == sums[1]
        part.say(again=again, equal=equal)

        both = []
        for version in (next(numbers) for _ in range(3)):
            part.source.refill(version)
            both.append(publish(version))
        sums = part.fleet.checksum(FIRST), part.fleet.checksum(LATE)
        equal = equal and sums[0] == sums[1] and all(committed(each) for each in both)
        part.say(with_both=both, equal=equal)
        os.killpg(part.layout["engines"][LATE]["sidecar_group"], signal.SIGTERM)
    part.source.close()


def apart(args: argparse.Namespace, name: str) -> dict[str, str]:
    """Environment of a process that NCCL takes for a host of its own, as it must where they share a GPU."""
    return {**SOCKETS, "NCCL_HOSTID": name} if args.one_gpu else {}


def orchestrate(args: argparse.Namespace, work: Path, programs: Any) -> dict[str, Any]:
    """Start everything, wait for the trainer, and say what it found."""
    hf = rig.model_of(args)
    rig.write_model(work / "model", hf)
    layout = rig.start_coordinator(programs, work)
    flags: tuple[str, ...] = (rig.LOADER,)
    if args.device == "cuda":
        flags += (f"--mem-fraction-static={args.memory}", *rig.GRAPHS)
    more = ("--no-record-ahead",) if args.not_ahead else ()
    for place in (FIRST, LATE):
        engine = rig.Engine(
            CHANNEL, 0 if args.one_gpu else 1, 1, flags, "available", name=place,
            environment=tuple(apart(args, place).items()), sidecar=more if place == LATE else (), later=place == LATE,
        )  # fmt: skip
        rig.start_engine(programs, args.device, work, engine, layout)
    rig.write_layout(work, layout)
    command = [sys.executable, __file__, f"--trainer-of={work}", f"--device={args.device}"]
    trainer = programs.start("trainer", command, env=rig.ranks_environment(args.device) | apart(args, "trainer"))
    problem = rig.follow(programs, trainer, work, args=args, name="joiner")
    file = work / "result.json"
    measured: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"equal": False}
    head = {key: measured.pop(key, None) for key in ("joiner_s", "normal_round_s", "ratio", "recorded_ahead", "equal")}
    described = rig.describe("joiner.py", args.device, hf)
    head["one_gpu"] = args.one_gpu
    return {**described, **head, **({"problem": problem} if problem else {}), **measured}


def main() -> int:
    parser = rig.parser(__doc__, memory=0.6, deadline=480.0)
    parser.add_argument("--layers", type=int, default=24, help="of the model's 48")
    parser.add_argument("--config", help="config.json of another model")
    parser.add_argument("--one-gpu", action="store_true", help="trainer and servers on one, over sockets")
    parser.add_argument("--not-ahead", action="store_true", help="the late sidecar records in its first round")
    args = parser.parse_args()
    if args.trainer_of:
        train(Path(args.trainer_of), args.device)
        return 0
    from weightbus.trainer_agent.demo.child_processes import Programs

    work = Path(tempfile.mkdtemp(prefix="wb-joiner-"))
    with Programs(work) as programs:
        found = orchestrate(args, work, programs)
    name = "joiner" + "-one-gpu" * args.one_gpu + "-not-ahead" * args.not_ahead
    rig.write_result(args.out, name, found)
    sys.stdout.write(json.dumps(found) + "\n")
    return 0 if found["equal"] and "problem" not in found else 1


if __name__ == "__main__":
    sys.exit(main())
