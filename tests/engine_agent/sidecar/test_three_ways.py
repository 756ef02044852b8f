"""One round in which three engines take the version by three transports at once, under one lock and with one commit.

``near`` reads the memory of the trainer's two ranks (direct), to ``far`` each of them sends its shard (sends), and
``wide`` takes buckets from a broadcast group (distributed). Coordinator, trainer agent, sidecars, workers' code and
sockets are what runs in production; servers are light ones, in processes of their own, as sidecars are.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import torch

from weightbus.control.cli.key_commands import AgentKeys, make_deployment_keys
from weightbus.control.protocol.messages import AgentId, Channel, Outcome, Role
from weightbus.control.server.coordinator_process import CoordinatorProcess
from weightbus.control.server.settings import CoordinatorSettings
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shard, Shards, ShardView
from weightbus.dataplane.transports.sends import sender as sends
from weightbus.trainer_agent.machine.errors import LeaseBusy
from weightbus.trainer_agent.machine.publication import PublishReport
from weightbus.trainer_agent.publish.agent import TrainerAgent

from ...kit import tiny_model
from ...kit.ends import Ends
from ...kit.fake_source import FakeGroup, FakeSource
from ...kit.fake_weights import read
from ...kit.ports import free_port
from ...kit.waiting import until

pytestmark = pytest.mark.timeout(300)

CHANNEL = Channel("c")
RANKS = 2
NAMES = ("near", "far", "wide")
WAYS = {"near": "direct", "far": "sends", "wide": "distributed"}
SEEDS = 4
PROMPT_S = 20.0
"""For all that must not wait for a deadline, on a machine that does other things."""

RED_S = 60.0
"""A round ends by its own deadlines before that, however it ends."""


class Point(NamedTuple):
    """Where a process is in the middle of a version."""

    process: str
    name: str
    number: int


POINTS = {
    "near": Point("server-near", "copies", 1),
    "far": Point("server-far", "turn", 2),
    "wide": Point("sidecar-wide", "bucket", 2),
}


class Split(FakeSource):
    """One rank of two: half of every matrix's rows are its own, in memory that stays. Satisfies `Exportable` too."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], group: FakeGroup, rank: int) -> None:
        super().__init__(tensors, group, rank)
        self._mine = [self._half(value).clone() for value in self.weights.values()]

    def step(self, values: Mapping[str, torch.Tensor]) -> None:
        """Other values in the same memory."""
        self.weights = dict(values)
        for mine, value in zip(self._mine, values.values(), strict=True):
            mine.copy_(self._half(value))

    def _half(self, value: torch.Tensor) -> torch.Tensor:
        return value.chunk(RANKS)[self.rank] if value.dim() == 2 else value

    def local_shards(self, tensors: Sequence[TensorSpec]) -> Shards:
        pieces: list[Shard] = []
        for number, (name, mine) in enumerate(zip(self.weights, self._mine, strict=True)):
            first = mine.shape[0] * self.rank if mine.dim() == 2 else 0
            start = (first,) + (0,) * (mine.dim() - 1)
            stop = (first + mine.shape[0], *mine.shape[1:])
            pieces.append(Shard(name, Box(start, stop), "bfloat16", ShardView(number, 0, tuple(mine.stride()))))
        return Shards.of(tensors, pieces, self.rank)

    def memory(self) -> Sequence[torch.Tensor]:
        return self._mine

    def collect(self, blob: bytes) -> Sequence[bytes]:
        return self.group.gather(self.rank, blob)


def bytes_of_file(folder: Path) -> dict[str, str]:
    """The oracle: SHA-256 of each tensor's bytes, cut out of the checkpoint's file by its header alone."""
    raw = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    body = raw[8 + length :]
    return {name: hashlib.sha256(body[slice(*tensor["data_offsets"])]).hexdigest() for name, tensor in header.items()}


class Deployment:
    """A coordinator, three engines and a trainer of two ranks."""

    def __init__(self, folder: Path, ends: Ends, *, hands_on: bool = True) -> None:
        self.folder, self._ends, self._hands_on = folder, ends, hands_on
        self.keys = folder / "keys"
        engines = [AgentKeys(AgentId(name), Role.ENGINE, (CHANNEL,)) for name in NAMES]
        trainers = [AgentKeys(AgentId(name), Role.TRAINER, (CHANNEL,)) for name in ("trainer", "other")]
        make_deployment_keys(self.keys, [*engines, *trainers])
        self.run = tempfile.TemporaryDirectory(prefix="wb-")  # a socket's path must be short
        self._service = CoordinatorProcess(
            CoordinatorSettings(
                keys=self.keys, router_port=0, http_port=0, journal=folder / "journal.sqlite", takeover_s=1.0
            )
        )
        self._thread = threading.Thread(target=self._service.run, daemon=True)
        self._thread.start()
        self._http = httpx.Client(timeout=30.0, trust_env=False)
        self._ports = {name: free_port() for name in NAMES}
        self._status_ports = {name: free_port() for name in NAMES}
        self.processes: dict[str, int] = {}
        for name in NAMES:
            self.start("server", name)
        for name in NAMES:
            self.start("sidecar", name)
        group = FakeGroup(RANKS, 60.0)
        self.sources = [Split(read(self.checkpoint(0)), group, rank) for rank in range(RANKS)]
        self.agents: list[TrainerAgent] = []
        self._pool = ThreadPoolExecutor(RANKS + 1)

    # -- processes

    def start(self, half: str, name: str) -> None:
        """A server, or a sidecar; again with what it wrote down."""
        job: dict[str, Any] = {"half": half, "name": name, "folder": str(self.folder)}
        if half == "server":
            job |= {"checkpoint": str(self.checkpoint(0)), "port": self._ports[name]}
        else:
            job["settings"] = {
                "name": name,
                "channel": CHANNEL,
                "server": self.url(name),
                "coordinator": self.coordinator,
                "keys": str(self.keys),
                "http_port": self._status_ports[name],
                "state_dir": str(self.folder / "state"),
                "runtime_dir": self.run.name,
                "transports": [WAYS[name]],
                "hands_on": self._hands_on,
                "poll_s": 0.1,
            }
        self.processes[f"{half}-{name}"] = self._ends.start(**job)
        if half == "server":
            assert self._ends.answer() == {"listening": name}

    def kill(self, half: str, name: str) -> None:
        os.kill(self.processes[f"{half}-{name}"], signal.SIGKILL)

    @contextlib.contextmanager
    def told(self, point: Point, deed: str) -> Iterator[Path]:
        """Until the end of the block. Yields the file that says that it is held."""
        told = self.folder / point.process
        held = self.folder / f"{point.process}.held"
        told.with_suffix(".new").write_text(f"{point.name} {deed} {point.number}")
        told.with_suffix(".new").replace(told)
        try:
            yield held
        finally:
            told.unlink(missing_ok=True)
            held.unlink(missing_ok=True)

    # -- the trainer

    def connect(self, **settings: object) -> None:
        """Anew."""
        for agent in self.agents:
            agent.close()
        self.agents = self._each(lambda source: self._agent(source, **settings), self.sources)

    def _agent(self, source: FakeSource, **settings: object) -> TrainerAgent:
        plain: dict[str, object] = {
            "keys": self.keys,
            "runtime_dir": Path(self.run.name),
            "bucket_bytes": 60_000,
            "transfer_timeout_s": 30.0,
            "acquire_timeout_s": 20.0,
            "round_timeout_s": 40.0,
            "environ": {},
        }
        return TrainerAgent.connect(source, channel=CHANNEL, coordinator=self.coordinator, **{**plain, **settings})  # type: ignore[arg-type]  # names are checked at run time

    def other_publishes(self, version: int) -> PublishReport:
        """A trainer of its own, that waits for the lock only shortly."""
        source = FakeSource(self.sources[0].weights)
        with self._agent(source, name="other", run="trainer", acquire_timeout_s=0.3) as other:
            return other.publish(version)

    def begin(self, version: int, seed: int) -> Future[PublishReport]:
        """Publish the weights of the checkpoint of `seed`."""
        for source in self.sources:
            source.step(read(self.checkpoint(seed)))
        return self._pool.submit(self._publish, version)

    def publish(self, version: int, seed: int) -> PublishReport:
        return self.begin(version, seed).result(RED_S)

    def _publish(self, version: int) -> PublishReport:
        first, other = self._each(lambda agent: agent.publish(version), self.agents)
        assert first == other
        return first

    @staticmethod
    def _each(call: Any, items: Sequence[Any]) -> list[Any]:
        with ThreadPoolExecutor(len(items)) as pool:
            return [each.result(timeout=RED_S) for each in [pool.submit(call, item) for item in items]]

    # -- what can be seen

    @property
    def coordinator(self) -> str:
        return f"tcp://127.0.0.1:{self._service.router_port}"

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self._service.http.port}"

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name]}"

    def checkpoint(self, seed: int) -> Path:
        return self.folder / f"seed{seed}"

    def channel(self) -> dict[str, Any]:
        return self._http.get(f"{self.http}/status").json()["channels"].get(CHANNEL, {"engines": {}, "ready": []})

    def phases(self, *names: str) -> set[str]:
        """Where these engines are in the round."""
        found = self.channel()["round"]["engines"]
        return {found.get(name, "nowhere") for name in names}

    def plan(self) -> dict[str, Any]:
        return self._http.get(f"{self.http}/plan").json()["channels"][CHANNEL]

    def held(self, name: str) -> dict[str, Any]:
        """What a server has, and how it stands, by its own word."""
        return self._http.get(f"{self.url(name)}/held").json()

    def sidecar(self, name: str) -> dict[str, Any]:
        return self._http.get(f"http://127.0.0.1:{self._status_ports[name]}/status").json()

    def is_there(self, name: str) -> bool:
        """Sidecar and server, and the coordinator knows it."""
        with contextlib.suppress(httpx.HTTPError):
            said = self.sidecar(name)
            return said["connected"] and said["engine"]["up"]
        return False

    def explained(self) -> dict[str, list[str]]:
        """What ``weightbus plan --explain`` prints below a channel's table, by engine."""
        argv = [sys.executable, "-m", "weightbus.control.cli.entry_point", "plan", f"--url={self.http}", "--explain"]
        environment = {**os.environ, "COLUMNS": "300"}
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60, env=environment)
        found: dict[str, list[str]] = {}
        for shown in done.stdout.splitlines():
            line = shown.removeprefix("  ")
            name, colon, why = line.partition(": ")
            if colon and name in NAMES:
                found[name] = [why]
            elif line.startswith("  ") and found:
                found[list(found)[-1]].append(line.strip())
        return found

    def ready(self, *names: str) -> None:
        """Wait until exactly these are on the ready list."""
        urls = sorted(map(self.url, names))
        until(lambda: sorted(self.channel()["ready"]) == urls, f"{names} to be ready")

    def serve(self, version: int, seed: int, *names: str) -> None:
        """They have exactly the bytes of the checkpoint, under the version's label, and generate."""
        wanted = bytes_of_file(self.checkpoint(seed))
        for name in names:
            found = self.held(name)
            assert found["tensors"] == wanted, name
            assert (found["label"], found["paused"]) == (str(version), False), name

    def close(self) -> None:
        self._pool.shutdown()  # what a test that failed has begun
        for agent in self.agents:
            agent.close()
        for pid in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._service.stop()
        self._thread.join(60)
        self._http.close()
        self.run.cleanup()


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    made = Ends("light_engines.py")
    yield made
    made.close()


@pytest.fixture(scope="module", params=["hands-on"])
def deployment(
    tmp_path_factory: pytest.TempPathFactory, ends: Ends, request: pytest.FixtureRequest
) -> Iterator[Deployment]:
    """The engine whose sidecar takes part in the broadcast; ``joined``: the server's own worker does."""
    folder = tmp_path_factory.mktemp("three")
    for seed in range(SEEDS):
        tiny_model.write(folder / f"seed{seed}", seed)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sends, "pair_bytes_for", lambda *_: 20_000)  # several turns
        made = Deployment(folder, ends, hands_on=request.param == "hands-on")
        try:
            made.connect()
            made.ready(*NAMES)
            yield made
        finally:
            made.close()


JOINED = pytest.mark.parametrize("deployment", ["joined"], indirect=True, scope="module")


def next_of(deployment: Deployment) -> tuple[int, int]:
    """A version, and a seed whose weights no engine has."""
    committed = deployment.channel()["committed"]
    version = committed["version"] + 1 if committed else 1
    return version, version % SEEDS


def outcomes(report: PublishReport) -> dict[str, Outcome]:
    return {each.engine: each.outcome for each in report.engines}


def committed_by_all(deployment: Deployment) -> None:
    """One round, by which all three have the version and serve it."""
    version, seed = next_of(deployment)
    report = deployment.publish(version, seed)
    assert {each.engine: (each.outcome, each.transport, each.verified_by) for each in report.engines} == {
        name: (Outcome.COMMITTED, WAYS[name], "live-digest") for name in NAMES
    }
    assert report.attempts == 1
    deployment.ready(*NAMES)
    deployment.serve(version, seed, *NAMES)


def test_one_round_brings_one_version_by_three_transports(deployment: Deployment) -> None:
    """Every engine has the trainer's bytes, and proved it; and the plan says by which transport each of them takes it.

    Twice: the second time nothing is recorded, planned or joined any more.
    """
    for _ in range(2):
        committed_by_all(deployment)
    explained = deployment.explained()
    assert {name: why[0].partition(":")[0] for name, why in explained.items()} == WAYS
    assert "nothing is preferred to it" in explained["near"]
    for name in ("far", "wide"):
        assert any(line.startswith("not direct: ") for line in explained[name])
    ways = {name: each["transport"] for name, each in deployment.plan()["engines"].items()}
    assert ways == WAYS


@pytest.mark.parametrize("slowest", NAMES)
def test_no_engine_goes_on_before_all_three_are_verified(deployment: Deployment, slowest: str) -> None:
    """While one of them is in the middle, two stand still with a version that is proven and not committed.

    The lock is one: another trainer is refused meanwhile. Then one commit, of one epoch, lets all of them go on.
    """
    committed_by_all(deployment)
    version, seed = next_of(deployment)
    others = [name for name in NAMES if name != slowest]
    with deployment.told(POINTS[slowest], "hold") as held:
        publication = deployment.begin(version, seed)
        until(held.exists, f"{slowest} to be in the middle")
        until(lambda: deployment.phases(*others) == {"verified"}, f"{others} to be verified")
        assert deployment.phases(slowest) == {"transferring"}
        channel = deployment.channel()
        epoch = channel["lease"]["epoch"]
        assert (channel["lease"]["holder"], channel["committed"]["version"]) == ("trainer", version - 1)
        assert (channel["round"]["epoch"], channel["ready"]) == (epoch, [])
        assert all(deployment.held(name)["paused"] for name in others)
        with pytest.raises(LeaseBusy):
            deployment.other_publishes(version + 1)
    report = publication.result(RED_S)

    assert set(outcomes(report).values()) == {Outcome.COMMITTED}
    assert report.epoch == epoch
    deployment.ready(*NAMES)
    deployment.serve(version, seed, *NAMES)
    assert [each["epoch"] for each in deployment.channel()["history"] if each["version"] == version] == [epoch]
    assert in_step(deployment)


def in_step(deployment: Deployment) -> bool:
    """All of them were paused for the last version before any of them went on with it."""
    stood = [deployment.held(name)["moments"][-2:] for name in NAMES]
    assert {tuple(what for _, what in moments) for moments in stood} == {("paused", "goes on")}
    return max(at for (at, _), _ in stood) < min(at for _, (at, _) in stood)


def struck(deployment: Deployment, name: str, half: str) -> None:
    """Kill one of an engine's processes in the middle; see that it costs the others nothing, and that it comes back."""
    committed_by_all(deployment)
    version, seed = next_of(deployment)
    others = [each for each in NAMES if each != name]
    with deployment.told(POINTS[name], "hold") as held:
        publication = deployment.begin(version, seed)
        until(held.exists, f"{name} to be in the middle")
        deployment.kill(half, name)
    began = time.monotonic()
    found = outcomes(publication.result(RED_S))

    assert time.monotonic() - began < PROMPT_S
    assert {each: found[each] for each in others} == dict.fromkeys(others, Outcome.COMMITTED)
    assert found[name] in {Outcome.QUARANTINED, Outcome.LOST}
    deployment.ready(*others)
    deployment.serve(version, seed, *others)
    deployment.start(half, name)
    until(lambda: deployment.is_there(name), f"{name} to be there again")
    assert sorted(deployment.channel()["ready"]) == sorted(map(deployment.url, others))
    if half == "server":
        until(lambda: deployment.held(name)["paused"], "the new launch to be paused")
    elif name == "far":  # what was sent was to be taken beside what it serves, which is whole
        deployment.serve(version - 1, (version - 1) % SEEDS, name)
    else:
        assert deployment.held(name)["paused"]
    committed_by_all(deployment)


@pytest.mark.parametrize("half", ["server", "sidecar"])
@pytest.mark.parametrize("name", NAMES)
def test_an_engine_that_is_killed_in_the_middle_is_alone_in_it(deployment: Deployment, name: str, half: str) -> None:
    """The other two commit at once, serve, and are the only ones listed; the next round brings the third one back."""
    struck(deployment, name, half)


@pytest.mark.parametrize("half", ["server", "sidecar"])
@JOINED
def test_so_is_a_server_that_takes_part_in_the_broadcast_itself(deployment: Deployment, half: str) -> None:
    """Its worker waits in a collective then, and cannot be reached there."""
    struck(deployment, "wide", half)


def failing(deployment: Deployment, name: str) -> contextlib.AbstractContextManager[Path]:
    """In its server, what `name` does in the middle of a version goes wrong, once. No process dies."""
    return deployment.told(POINTS[name]._replace(process=f"server-{name}"), "fail")


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_that_fails_in_the_middle_is_left_out_alone(deployment: Deployment, name: str) -> None:
    """Half changed it stands still; beside what it serves it was not changed. The next round brings it back."""
    committed_by_all(deployment)
    version, seed = next_of(deployment)
    others = [each for each in NAMES if each != name]
    deployment.connect(redrives=0)
    try:
        with failing(deployment, name):
            found = outcomes(deployment.publish(version, seed))
    finally:
        deployment.connect()

    beside = name == "far"
    failed = Outcome.ABORTED if beside else Outcome.QUARANTINED
    assert found == {**dict.fromkeys(others, Outcome.COMMITTED), name: failed}
    deployment.ready(*others)
    deployment.serve(version, seed, *others)
    if beside:
        deployment.serve(version - 1, (version - 1) % SEEDS, name)
    else:
        assert deployment.held(name)["paused"]
        assert deployment.sidecar(name)["engine"]["health"] == "dirty"
    committed_by_all(deployment)


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_that_fails_once_is_retried_in_the_same_round(deployment: Deployment, name: str) -> None:
    """By its own transport; no other engine is given anything twice, and all of them are committed together."""
    committed_by_all(deployment)
    version, seed = next_of(deployment)
    before = {each: deployment.held(each)["updates"] for each in NAMES}
    with failing(deployment, name):
        report = deployment.publish(version, seed)
    assert outcomes(report) == dict.fromkeys(NAMES, Outcome.COMMITTED)
    assert report.attempts == 1
    deployment.ready(*NAMES)
    deployment.serve(version, seed, *NAMES)
    updates = {each: deployment.held(each)["updates"] - before[each] for each in NAMES if each != name}
    once = {"near": 1, "far": 1, "wide": report.buckets}
    assert updates == {each: once[each] for each in updates}
    assert in_step(deployment)
