"""The trainers of nccl.py: one process for each part. Started by it, not by people.

    python3 nccl_parts.py PART FOLDER DEVICE

Each builds its model, waits for its call and for the engines, and writes down what it found after every step.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parent))

import direct
import rig

STEADY = 3
CHUNK_BYTES = 512 * 1024 * 1024
"""Of the bare send: what is one message."""
BARE_ROUNDS = 5
FORM_S = 60.0
STRIKE_AT = 3
"""The turn before which somebody is killed."""
SMALL_TURNS = 1 << 14
"""Bytes for a pair of ranks in a turn, with the tiny model: so that there are several turns."""
WATCH_S = 40.0
"""How long survivors are watched."""


class Part:
    """What every part has."""

    def __init__(self, name: str, work: Path, device: str, model: str, places: tuple[str, ...]) -> None:
        import torch
        from shards import LayoutShards

        self.name, self.work, self.device, self.places = name, work, device, places
        self.layout = rig.read_layout(work)
        hf = rig.read_config(work, model)
        self.fleet = rig.Fleet(self.layout, hf["max_position_embeddings"])
        self.source = LayoutShards(hf, torch.device(device, 0), 2, tp=2)
        self._found: dict[str, Any] = {}

    def called(self) -> None:
        """Wait for the call, and for the engines."""
        rig.wait("the call", (self.work / f"go-{self.name}").exists, 600, lambda: None)
        self.fleet.wait_ready(400, *self.places)
        (self.work / f"ready-{self.name}").touch()

    def say(self, **found: Any) -> None:
        """Write it down: whoever kills us later cannot take it back."""
        self._found |= found
        file = self.work / f"result-{self.name}.json"
        file.with_suffix(".new").write_text(json.dumps(self._found))
        file.with_suffix(".new").rename(file)
        rig.log(f"{self.name}: {', '.join(found)}")

    def sums(self) -> list[Any]:
        """What the servers of all places say that they hold."""
        return [self.fleet.checksum(place) for place in self.places]

    def engine(self, place: str) -> dict[str, Any]:
        """As the coordinator shows it."""
        channel = self.layout["engines"][place]["channel"]
        url = f"http://127.0.0.1:{self.layout['status']}/status"
        channels = self.fleet._http.get(url).json()["channels"]
        found: dict[str, Any] = channels.get(channel, {"engines": {}})["engines"].get(f"{place}0", {})
        return found


def strike(at: int, blow: Callable[[], None]) -> None:
    """Have `blow` fall right before this process sends its turn number `at`."""
    from weightbus.dataplane.transports.sends.p2p_group import P2PGroup

    plain = P2PGroup.post
    turns = itertools.count(1)

    def post(self: Any, sends: Any, receives: Any) -> Any:
        if any(each.memory.numel() > 1 for each in sends) and next(turns) == at:  # others only connect
            blow()
        return plain(self, sends, receives)

    P2PGroup.post = post  # type: ignore[method-assign]


# -- speed -------------------------------------------------------------------------------------------------------------


def speed(part: Part) -> None:
    """Every way of getting weights there, and whether all ended in the same."""
    from stock_paths import StockPath

    source, fleet, (place,) = part.source, part.fleet, part.places
    numbers = itertools.count(1)
    part.called()
    part.say(equal=False)
    first = next(numbers)
    source.refill(first)
    with direct.rounds(source, part.layout, place, "sends") as (publish_one, agent):
        manifest = agent.manifest
        reports = [publish_one(first, fleet)]
    ours = fleet.checksum(place)
    part.say(bytes=manifest.nbytes, first=reports[0])
    fleet.overwrite(place)
    noise = fleet.checksum(place)
    with direct.rounds(source, part.layout, place, "distributed") as (publish_one, _):
        stock_report = publish_one(next(numbers), fleet)
    equal = ours == fleet.checksum(place) != noise and stock_report["outcome"].endswith("committed")
    part.say(distributed=stock_report, equal_distributed=equal)
    with direct.rounds(source, part.layout, place, "sends") as (publish_one, _):
        for version in itertools.islice(numbers, STEADY + 1):
            source.refill(version)
            with direct.generating(fleet, place, active=True) as client:
                report = publish_one(version, fleet)
            reports.append({**report, **client.gaps()})
            part.say(sends=reports)
    ours = fleet.checksum(place)
    sent = [each["sidecar_s"].get("step:transfer_wire", 0.0) for each in reports[2:]]
    equal = equal and all(each["outcome"].endswith("committed") for each in reports)
    part.say(
        shard_to_shard_s=min(sent),
        normal_round_s=min(each["publish_s"] for each in reports[2:]),
        pause_gap_s=min((each["pause_gap_s"] for each in reports if "pause_gap_s" in each), default=None),
        taken=fleet._http.get(fleet.url(place, "sidecar") + "/status").json().get("taken"),
    )
    part.say(**bare(part.device, manifest.nbytes))
    with StockPath(fleet.url(place), source.device) as stock:
        for flattened, key in ((True, "flattened_distributed_s"), (False, "slime_distributed_s")):
            fleet.overwrite(place)
            part.say(**{key: min(stock.update(source, manifest, flattened=flattened) for _ in range(2))})
            equal = equal and ours == fleet.checksum(place)
            part.say(**{f"equal_{key.removesuffix('_distributed_s')}": equal})
    part.say(equal=equal)


def bare(device: str, nbytes: int) -> dict[str, Any]:
    """Seconds for a plain send of as many bytes to another process, and memory that an idle group of the two keeps."""
    from weightbus.dataplane.processes.rendezvous_store import serve_store

    store = serve_store("127.0.0.1")
    given = json.dumps({"device": device, "nbytes": nbytes, "port": store.port})
    other = subprocess.Popen([sys.executable, __file__, "bare", given], env=dict(os.environ))
    try:
        return bare_end(device, nbytes, store.port, 0)
    finally:
        other.kill()
        other.wait(FORM_S)


def bare_end(device: str, nbytes: int, port: int, rank: int) -> dict[str, Any]:
    """One end of it: messages are put into the queue one after another, and waited for once. The best of several."""
    import torch
    from torch._C._distributed_c10d import TCPStore

    from weightbus.dataplane.processes.deadline import Deadline
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


# -- the trainer's death -----------------------------------------------------------------------------------------------


def death(part: Part) -> None:
    """The first trainer kills itself in the middle of a version; the next one publishes again."""
    killed = part.work / "killed"
    (place,) = part.places
    numbers = itertools.count(2000 if killed.exists() else 1000)
    part.called()
    with direct.rounds(part.source, part.layout, place, "sends") as (publish_one, _):
        for version in itertools.islice(numbers, 2):
            part.source.refill(version)
            report = publish_one(version, part.fleet)
            if not report["outcome"].endswith("committed"):
                part.say(problem_of_round=report, equal=False)
                return
        ours = part.fleet.checksum(place)
        if killed.exists():
            part.say(again=report, **_watched(part.work))
            part.fleet.overwrite(place)
            publish_one(next(numbers), part.fleet)
            part.say(equal=ours == part.fleet.checksum(place))
            return
        part.say(before=report, sums=ours)
        with direct.generating(part.fleet, place, active=True):
            observer = [sys.executable, __file__, "observe", str(part.work), part.device]
            subprocess.Popen(observer, start_new_session=True)
            rig.wait("the observer", (part.work / "observing").exists, 60, lambda: None)
            version = next(numbers)
            part.source.refill(version)

            def blow() -> None:
                killed.write_text(json.dumps({"at": time.monotonic()}))
                signal.pthread_kill(threading.get_ident(), signal.SIGKILL)

            strike(STRIKE_AT, blow)
            publish_one(version, part.fleet)


def _watched(work: Path) -> dict[str, Any]:
    file = work / "watched.json"
    rig.wait("the observer's account", file.exists, WATCH_S, lambda: None)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def observe(work: Path, device: str) -> None:
    """From outside: when does the engine answer, when is it listed as ready, and what does it hold?"""
    del device
    layout = rig.read_layout(work)
    fleet = rig.Fleet(layout)
    seen = Seen(fleet, layout, "remote", "remote0", "remote")
    (work / "observing").touch()
    killed = work / "killed"
    rig.wait("the blow", killed.exists, WATCH_S, seen.look)
    at = json.loads(killed.read_text())["at"]
    until = time.monotonic() + WATCH_S / 2
    while time.monotonic() < until and not (seen.ready and seen.last_ask - at > 1.0):
        seen.look()
    (work / "watched.new").write_text(json.dumps(seen.since(at)))
    (work / "watched.new").rename(work / "watched.json")


class Seen:
    """Asks a server for a token, and the coordinator whether it is ready, again and again."""

    def __init__(self, fleet: rig.Fleet, layout: dict[str, Any], place: str, engine: str, channel: str) -> None:
        self._fleet, self._layout, self._place, self._engine, self._channel = fleet, layout, place, engine, channel
        self._answered: list[float] = []
        self._was: list[tuple[float, bool, int | None, str]] = []
        self.last_ask = 0.0

    @property
    def ready(self) -> bool:
        """It was, when last looked at."""
        return bool(self._was) and self._was[-1][1]

    def look(self) -> None:
        """Once."""
        status = self._fleet._http.get(f"http://127.0.0.1:{self._layout['status']}/status").json()
        found = status["channels"][self._channel]["engines"][self._engine]
        self._was.append((time.monotonic(), found["ready"], found["version"], found["state"]))
        body = {"input_ids": [5, 17], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        answer = self._fleet._http.post(self._fleet.url(self._place) + "/generate", json=body, timeout=30)
        self.last_ask = time.monotonic()
        if answer.status_code == 200:
            self._answered.append(self.last_ask)

    def since(self, at: float) -> dict[str, Any]:
        """What was seen after `at`."""
        answers = [each for each in self._answered if each >= at]
        steps = [after - before for before, after in itertools.pairwise([at, *answers])]
        unready = [moment for moment, ready, _, _ in self._was if not ready and moment >= at]
        routable = next((t for t, ready, _, _ in self._was if ready and t > max(unready, default=at)), None)
        states = [(round(moment - at, 2), ready, version, state) for moment, ready, version, state in self._was]
        changes = [one for before, one in itertools.pairwise([(0, None, None, ""), *states]) if before[1:] != one[1:]]
        first_answer_s, routable_s = answers[0] - at if answers else None, routable - at if routable else None
        return {
            "first_answer_s": first_answer_s,
            "longest_silence_s": max(steps, default=None),
            "routable_s": routable_s,
            "survivors_serving_s": max(first_answer_s, routable_s) if first_answer_s and routable_s else None,
            "states": changes,
        }


# -- several hosts -----------------------------------------------------------------------------------------------------


def hosts(part: Part) -> None:
    """Two engines over sockets: proof, a joiner, and the death of a worker."""
    from weightbus.dataplane.transports.sends import sender as sends

    if part.device == "cpu":
        sends.pair_bytes_for = lambda *_: SMALL_TURNS
    part.called()
    part.say(equal=False)
    numbers = itertools.count(1)
    first = next(numbers)
    part.source.refill(first)
    with rounds(part, "sends") as publish:
        reports = [publish(first)]
    ours = part.sums()
    for place in part.places:
        part.fleet.overwrite(place)
    noise = part.sums()
    with rounds(part, "local") as publish:
        oracle = publish(next(numbers))
    equal = ours == part.sums() and ours[0] == ours[1] != noise[0] and committed(oracle)
    part.say(first=reports[0], oracle=oracle, equal_first=equal)
    with rounds(part, "sends") as publish:
        for version in itertools.islice(numbers, STEADY):
            part.source.refill(version)
            reports.append(publish(version))
        part.say(sends=reports, normal_round_s=min(each["publish_s"] for each in reports[2:]))
        equal = equal and all(committed(each) for each in reports)
        joined = join(part, publish, numbers)
        after = part.sums()
        equal = equal and after[0] == after[1] != ours[0]
        part.say(**joined, equal_joined=equal)

        report, seen = kill(part, publish, next(numbers))
    ours = part.fleet.checksum("near")
    with rounds(part, "local") as publish:
        publish(next(numbers))
    equal = equal and ours == part.fleet.checksum("near") and committed(report, "near0")
    part.say(killed=report, survivor=seen, equal=equal, survivors_serving_s=seen.get("survivors_serving_s"))


def kill(part: Part, publish: Callable[[int], dict[str, Any]], version: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The far engine's worker dies in the middle of a version. Its report, and what was seen of the near engine."""
    part.source.refill(version)
    near = Seen(part.fleet, part.layout, "near", "near0", "hosts")
    struck: list[float] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            near.look()

    def blow() -> None:
        struck.append(time.monotonic())
        os.kill(worker_of(part.layout["engines"]["far"]["server_group"]), signal.SIGKILL)

    strike(STRIKE_AT, blow)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    report = publish(version)
    rig.wait("the survivor", lambda: bool(part.engine("near")["ready"]), WATCH_S, lambda: None)
    time.sleep(0.5)
    over.set()
    watcher.join(10)
    return report, near.since(struck[0]) if struck else {}


def join(part: Part, publish: rounds, numbers: Any) -> dict[str, Any]:
    """The far engine's sidecar goes, misses a version, and comes back: from its `Hello` until it is ready.

    It is brought the version that was committed without it; the near engine takes no part in that.
    """
    far = part.layout["engines"]["far"]
    os.killpg(far["sidecar_group"], signal.SIGTERM)
    rig.wait("it to be gone", lambda: part.engine("far")["state"] == "lost", 30, lambda: None)
    part.source.refill(version := next(numbers))
    alone = publish(version)
    subprocess.Popen(far["start"], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    rig.wait("it to come back", lambda: part.engine("far")["state"] != "lost", 60, lambda: None)
    came = time.monotonic()
    report = publish.catch_up(version)
    rig.wait("it to be ready", lambda: part.engine("far")["ready"], 60, lambda: None)
    return {"joiner_s": time.monotonic() - came, "alone": alone, "joined": report}


def committed(report: dict[str, Any], *engines: str) -> bool:
    """The version, and these engines or all of them."""
    found = report["engines"]
    return report["outcome"] == "committed" and all(found[name] == "committed" for name in engines or found)


class rounds:  # noqa: N801  a context manager like direct.rounds
    """An agent of one channel, and how it publishes one version."""

    def __init__(self, part: Part, transport: str, channel: str = "hosts") -> None:
        from weightbus.trainer_agent import TrainerAgent

        self._agent = TrainerAgent.connect(
            part.source, channel=channel, name=f"trainer-{channel}", coordinator=f"tcp://127.0.0.1:{part.layout['bus']}",
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


def worker_of(group: int) -> int:
    """The process that holds the weights, of a server that is a process group; the server where it cannot be told."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            name = (stat.parent / "cmdline").read_bytes()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[2]) == group and name.startswith(b"sglang::scheduler"):
            return int(stat.parent.name)
    return group


def main() -> None:
    part, folder, *rest = sys.argv[1:]
    if part == "bare":
        given = json.loads(folder)
        bare_end(given["device"], given["nbytes"], given["port"], 1)
        return
    if part == "observe":
        observe(Path(folder), rest[0])
        return
    if rest[0] == "cpu":
        from weightbus.dataplane.transports.sends import sender as sends
        from weightbus.trainer_agent.sources.megatron import cpu_emulation as megatron_cpu

        megatron_cpu.install()
        if part == "death":
            sends.pair_bytes_for = lambda *_: SMALL_TURNS
    run, model, places = {
        "speed": (speed, "model", ("remote",)),
        "death": (death, "model", ("remote",)),
        "hosts": (hosts, "small", ("near", "far")),
    }[part]
    made = Part(part, Path(folder), rest[0], model, places)
    run(made)
    made.source.close()


if __name__ == "__main__":
    main()
