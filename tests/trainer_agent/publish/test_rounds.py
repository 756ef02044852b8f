"""Whole rounds: a real coordinator on sockets, real transports, ranks and engines on threads of this process."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from weightbus.control.protocol.messages import Outcome, TransportKind
from weightbus.control.server.coordinator_process import CoordinatorProcess
from weightbus.control.server.settings import CoordinatorSettings
from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.transports.interface import JOIN_S
from weightbus.trainer_agent.machine.errors import ConnectFailed, RoundAborted
from weightbus.trainer_agent.machine.publication import PublishReport
from weightbus.trainer_agent.publish.agent import TrainerAgent
from weightbus.trainer_agent.source import AssemblyFailed

from ...kit.fake_source import FakeSource, group_of, tiny_qwen3
from ...kit.loopback_engine import LoopbackEngine
from ...kit.ports import free_port

RANKS = 2
TIMING = {"heartbeat_s": 0.2, "silence_s": 20.0, "takeover_s": 0.5, "lease_s": 20.0}


class Deployment:
    """Everything of one test. The coordinator may be killed and started again on its journal and its port."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = 0
        self.engines: dict[str, LoopbackEngine] = {}
        self.sources: list[FakeSource] = group_of(tiny_qwen3(), RANKS, timeout_s=20.0)
        self.agents: list[TrainerAgent] = []
        self._service: CoordinatorProcess | None = None
        self._thread: threading.Thread | None = None
        self.start_coordinator()

    @property
    def coordinator(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def start_coordinator(self) -> None:
        settings = CoordinatorSettings(
            insecure_loopback=True,
            router_port=self.port,
            http_port=0,
            journal=self.root / "journal.sqlite",
            **TIMING,
        )
        self._service = service = CoordinatorProcess(settings)
        self.port = service.router_port
        self._thread = threading.Thread(target=service.run, daemon=True)
        self._thread.start()

    def tell_coordinator_to_stop(self) -> None:
        assert self._service is not None
        self._service.stop()

    def stop_coordinator(self) -> None:
        if self._service is not None and self._thread is not None:
            self._service.stop()
            self._thread.join(60)
            assert not self._thread.is_alive()
            self._service = None

    def engine(self, name: str, fail: Callable[[int], None] = lambda _: None, **given: TransportKind) -> LoopbackEngine:
        self.engines[name] = engine = LoopbackEngine(
            name, "c", self.coordinator, self.root / "run", given.get("transport", TransportKind.LOCAL), fail
        )
        engine.start()
        return engine

    def connect(self, **settings: object) -> None:
        plain: dict[str, object] = {
            "insecure_loopback": True,
            "bucket_bytes": 4096,
            "runtime_dir": self.root / "run",
            "checkpoint_dir": self.root / "ckpt",
            "transfer_timeout_s": 60.0,
            "beat_s": 0.5,
            "request_timeout_s": 10.0,
            "acquire_timeout_s": 30.0,
            "round_timeout_s": 60.0,
            "environ": {},
        }

        def one(source: FakeSource) -> TrainerAgent:
            return TrainerAgent.connect(source, channel="c", coordinator=self.coordinator, **{**plain, **settings})  # type: ignore[arg-type]  # names are checked at run time

        self.agents = self._each(one, self.sources)

    def publish(self, version: int) -> PublishReport:
        first, *others = self._each(lambda agent: agent.publish(version), self.agents)
        assert all(other == first for other in others)
        return first

    def holds(self, name: str) -> bool:
        """The engine has exactly the trainer's bits."""
        wanted = {
            name: each.reshape(-1).view(torch.uint8).numpy().tobytes() for name, each in self.sources[0].weights.items()
        }
        return self.engines[name].server.weights == [wanted]

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        for engine in self.engines.values():
            engine.close()
        self.stop_coordinator()

    @staticmethod
    def _each(call: Callable[..., object], items: list[object]) -> list:  # type: ignore[type-arg]  # of what `call` returns
        with ThreadPoolExecutor(len(items)) as pool:
            return [each.result(timeout=120) for each in [pool.submit(call, item) for item in items]]


class KillableDeployment(Deployment):
    """The coordinator runs in a process, so that it can be killed as kernels kill."""

    def start_coordinator(self) -> None:
        self.port = self.port or free_port()
        flags = {"router_port": self.port, "http_port": 0, **TIMING}
        argv = [part for name, value in flags.items() for part in ("--" + name.replace("_", "-"), str(value))]
        command = [sys.executable, "-m", "weightbus.control", "coordinator", "--insecure-loopback"]
        command += ["--journal", str(self.root / "journal")]
        self._process = subprocess.Popen([*command, *argv], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill_coordinator(self) -> None:
        self._process.kill()
        self._process.wait(60)

    def stop_coordinator(self) -> None:
        self.kill_coordinator()


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    """Its coordinator is a thread of this process."""
    made = Deployment(tmp_path)
    yield made
    made.close()


@pytest.fixture
def killable(tmp_path: Path) -> Iterator[Deployment]:
    """Its coordinator is a process of its own."""
    made = KillableDeployment(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("slots", [2, 64])
@pytest.mark.parametrize("transport", [TransportKind.LOCAL, TransportKind.DISK, TransportKind.DISTRIBUTED])
def test_versions_reach_every_engine(deployment: Deployment, transport: TransportKind, slots: int) -> None:
    """Three rounds over each transport, staged whole or not: bit for bit, labeled, the same report on every rank."""
    for name in ("e0", "e1"):
        deployment.engine(name, transport=transport)
    deployment.connect(slots=slots, transport=transport.value)
    for version in (1, 2, 3):
        deployment.sources[0].weights["model.norm.weight"].add_(1.0)
        report = deployment.publish(version)
        assert report.committed
        assert {each.engine: each.outcome for each in report.engines} == dict.fromkeys(("e0", "e1"), Outcome.COMMITTED)
        assert all(deployment.holds(name) for name in deployment.engines)
        assert [engine.label for engine in deployment.engines.values()] == [version] * 2
    assert {"acquire", "assemble", "digest", "prepare", "pause", "transfer", "verify", "total"} <= report.seconds.keys()


def test_an_engine_that_fails_in_the_transfer_is_sent_everything_again(deployment: Deployment) -> None:
    """The re-drive heals it within the round; the other engine is served meanwhile."""
    failures = iter([True])

    def fail(load: int) -> None:
        if load == 2 and next(failures, False):
            raise TransferFailed("the server refused a bucket")

    deployment.engine("e0", fail)
    deployment.engine("e1")
    deployment.connect()
    report = deployment.publish(1)
    assert {each.engine: each.outcome for each in report.engines} == dict.fromkeys(("e0", "e1"), Outcome.COMMITTED)
    assert all(deployment.holds(name) for name in deployment.engines)


@pytest.mark.parametrize("transport", [TransportKind.LOCAL, TransportKind.DISK, TransportKind.DISTRIBUTED])
@pytest.mark.parametrize("how", [Outcome.ABORTED, Outcome.LOST])
def test_an_engine_that_does_not_come_costs_the_others_neither_time_nor_a_redrive(
    deployment: Deployment, transport: TransportKind, how: Outcome
) -> None:
    """It fails, or leaves, after it was paused and before it came to the sender: the trainer is told."""
    victim = deployment.engine("e0", transport=transport)
    deployment.engine("e1", transport=transport)
    deployment.engine("e2", transport=transport)

    def refuse() -> None:
        raise TransferFailed("no space for my record")

    victim.before = refuse if how is Outcome.ABORTED else victim.leave
    deployment.connect(transport=transport.value, redrives=0, transfer_timeout_s=60.0, round_timeout_s=60.0)
    report = deployment.publish(1)
    assert report.seconds["transfer"] < JOIN_S
    assert {each.engine: each.outcome for each in report.engines} == {
        "e0": how,
        "e1": Outcome.COMMITTED,
        "e2": Outcome.COMMITTED,
    }
    assert deployment.holds("e1")
    assert deployment.holds("e2")


@pytest.mark.parametrize("moment", [0, 3])
def test_the_coordinator_is_killed_while_tensors_travel(killable: Deployment, moment: int) -> None:
    """It comes back on its journal: the version is published after all, by the same call of `publish`."""
    died = threading.Event()

    def die(load: int) -> None:
        if load == moment and not died.is_set():
            died.set()
            killable.kill_coordinator()
            killable.start_coordinator()

    killable.engine("e0", die)
    killable.connect()
    report = killable.publish(1)
    assert died.is_set()
    assert report.committed
    assert report.attempts == 2
    assert killable.holds("e0")


def test_a_coordinator_that_stops_aborts_the_round_and_serves_the_next_one(deployment: Deployment) -> None:
    """Told to stop it leaves nobody paused; the training loop learns it and publishes again."""
    stopped = threading.Event()

    def stop(load: int) -> None:
        if load == 1 and not stopped.is_set():
            stopped.set()
            deployment.tell_coordinator_to_stop()

    deployment.engine("e0", stop)
    deployment.connect()
    with pytest.raises(RoundAborted, match="stopping"):
        deployment.publish(1)
    deployment.stop_coordinator()
    deployment.start_coordinator()
    assert deployment.publish(1).committed
    assert deployment.holds("e0")


def test_a_rank_that_fails_aborts_the_round_and_engines_keep_serving(deployment: Deployment) -> None:
    """A new agent on a new source publishes the version a moment later."""
    engine = deployment.engine("e0")
    deployment.connect()

    def fail(done: int) -> None:
        if done == 3:
            raise AssemblyFailed("gone")

    deployment.sources[1].before_assembly = fail
    with pytest.raises(Exception, match=r"gone|did not come"):
        deployment.publish(1)
    assert engine.label is None
    for agent in deployment.agents:
        agent.close()
    deployment.sources = group_of(tiny_qwen3(1), RANKS, timeout_s=20.0)
    deployment.connect()
    assert deployment.publish(1).committed
    assert deployment.holds("e0")


def test_without_enough_engines_the_round_is_aborted(deployment: Deployment) -> None:
    """The trainer's policy is the coordinator's; the error is typed on every rank."""
    deployment.engine("e0")
    deployment.connect(min_engines=2, engines_timeout_s=0.3)
    with pytest.raises(RoundAborted):
        deployment.publish(1)


@pytest.mark.parametrize("given", [{}, {"insecure_loopback": True, "coordinator": "tcp://10.0.0.5:5750"}])
def test_a_trainer_without_keys_does_not_start(
    given: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On every rank, and with what to do: no keys, and off the loopback not even when told (S1)."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    sources = group_of(tiny_qwen3(), RANKS, timeout_s=20.0)

    def one(source: FakeSource) -> None:
        TrainerAgent.connect(source, **{"channel": "c", "environ": {}, "runtime_dir": tmp_path, **given})  # type: ignore[arg-type]  # names are checked at run time

    with ThreadPoolExecutor(RANKS) as pool:
        errors = [call.exception(timeout=60) for call in [pool.submit(one, source) for source in sources]]
    assert [type(each) for each in errors] == [ConnectFailed] * RANKS
    assert all("weightbus keygen" in str(each) for each in errors)


def test_a_trainer_without_a_coordinator_fails_on_every_rank(tmp_path: Path) -> None:
    """Soon, and with the endpoint in the message; nothing is left behind in shared memory."""
    sources = group_of(tiny_qwen3(), RANKS, timeout_s=20.0)
    started = time.monotonic()

    def one(source: FakeSource) -> None:
        TrainerAgent.connect(
            source,
            channel="c",
            coordinator="tcp://127.0.0.1:9",
            environ={},
            insecure_loopback=True,
            connect_timeout_s=0.5,
            runtime_dir=tmp_path,
        )

    with ThreadPoolExecutor(RANKS) as pool:
        calls = [pool.submit(one, source) for source in sources]
        errors = [call.exception(timeout=60) for call in calls]
    assert [type(each) for each in errors] == [ConnectFailed] * RANKS
    assert all("127.0.0.1:9" in str(each) for each in errors)
    assert time.monotonic() - started < 20, "no rank waited for another's timeout"
