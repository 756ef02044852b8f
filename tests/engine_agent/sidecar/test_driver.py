"""A whole sidecar against a fake server, a real coordinator and a real local transport: what clients could see."""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import torch
from structlog.testing import capture_logs

from weightbus.control import protocol as m
from weightbus.control.bus import BusClient
from weightbus.control.cli.key_commands import AgentKeys, make_deployment_keys
from weightbus.control.protocol.errors import ConfigurationError, NotTrusted, RequestRefused
from weightbus.control.protocol.messages import (
    AgentId,
    Channel,
    Digest,
    EngineHealth,
    Epoch,
    HeldVersion,
    RefusalCode,
    Role,
    Version,
)
from weightbus.control.security.trust import ALLOW_LIST_FILE, edit_allow_list
from weightbus.dataplane.transports.interface import JOIN_S
from weightbus.engine_agent.engines.local_process import ProcessesUnread
from weightbus.engine_agent.engines.sglang.pickle_payload import LOADER
from weightbus.engine_agent.errors import ServerInUse
from weightbus.engine_agent.machine.engine_machine import ServerView
from weightbus.engine_agent.machine.events import INCOMPLETE, Commanded, ReleaseServer
from weightbus.engine_agent.machine.weight_state import WeightState
from weightbus.engine_agent.sidecar import driver
from weightbus.engine_agent.sidecar.driver import EngineAgent
from weightbus.engine_agent.sidecar.settings import EngineAgentSettings
from weightbus.engine_agent.state_file import StateFile
from weightbus.engine_agent.worker import loader as worker_loader
from weightbus.engine_agent.worker_loader import load
from weightbus.trainer_agent import TrainerAgent
from weightbus.trainer_agent.machine.errors import PublishFailed, RoundAborted
from weightbus.trainer_agent.source import Source
from weightbus.trainer_agent.sources.hf_module import HFModuleSource

from ...kit import tiny_model
from ...kit.fake_sglang import FakeSGLang
from ...kit.fake_source import FakeSource
from ...kit.fake_weights import read
from ...kit.flat_module import FlatModule
from ...kit.ports import free_port
from ...kit.waiting import until
from ..world import World

pytestmark = pytest.mark.timeout(300)


NUMBERS = itertools.count(1)


class Deployment:
    """One coordinator, one fake server, one sidecar that can be stopped and started."""

    def __init__(self, folder: Path, coordinator: tuple[int, Path], name: str = "e0") -> None:
        port, self.keys = coordinator
        self.name = name
        self.engine_keys = self.keys
        self.folder, self.coordinator = folder, f"tcp://127.0.0.1:{port}"
        self.channel = f"c{next(NUMBERS)}"
        self.run = tempfile.TemporaryDirectory(prefix="wb-")  # a socket's path must be short
        self.first, self.second = tiny_model.write(folder / "a", 1), tiny_model.write(folder / "b", 2)
        self.fake = FakeSGLang(self.first).start()
        self.gives_back = False
        self.saved_dir: Path | None = None
        self.agent: EngineAgent | None = None
        self.thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the sidecar and wait until it knows its server."""
        settings = EngineAgentSettings(
            name=self.name,
            channel=self.channel,
            server=self.fake.url,
            coordinator=self.coordinator,
            keys=self.engine_keys,
            http_port=0,
            state_dir=self.folder / "state",
            runtime_dir=Path(self.run.name),
            poll_s=0.05,
            gives_back=self.gives_back,
            saved_dir=self.saved_dir,
            saved_after_s=0.5,
        )
        agent = self.agent = EngineAgent(settings)
        self.thread = threading.Thread(target=agent.run, daemon=True)
        self.thread.start()
        until(lambda: agent._bus is not None, "the sidecar")

    def stop(self) -> None:
        """Stop the sidecar; the server stays as it is."""
        if self.agent and self.thread:
            self.agent.stop()
            self.thread.join(60)
            assert not self.thread.is_alive()

    @property
    def view(self) -> Any:
        """What the sidecar says of its engine."""
        assert self.agent is not None
        return self.agent._view

    def publish(
        self,
        version: int,
        folder: Path | None = None,
        *,
        source: Source | None = None,
        transport: str = "local",
        **more: object,
    ) -> Any:
        """One round from a trainer that holds the weights of `folder`, or from `source`."""
        source = source or FakeSource(read(folder or self.second))
        with TrainerAgent.connect(
            source,
            channel=self.channel,
            coordinator=self.coordinator,
            keys=self.keys,
            transport=tuple(transport.split()),
            bucket_bytes=100_000,
            runtime_dir=Path(self.run.name),
            redrives=0,
            acquire_timeout_s=30.0,
            **more,
        ) as trainer:
            return trainer.publish(version)

    def close(self) -> None:
        self.stop()
        self.fake.stop()
        self.run.cleanup()


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """A real one, with ports that were free; its port, and the folder of all keys."""
    folder, port, http = tmp_path_factory.mktemp("coordinator"), free_port(), free_port()
    everywhere = (Channel("*"),)
    make_deployment_keys(
        folder / "keys",
        [
            AgentKeys(AgentId("e0"), Role.ENGINE, everywhere),
            AgentKeys(AgentId("e1"), Role.ENGINE, everywhere),
            AgentKeys(AgentId("trainer"), Role.TRAINER, everywhere),
        ],
    )
    argv = [sys.executable, "-m", "weightbus.control.cli.entry_point", "coordinator", f"--router-port={port}"]
    argv += [f"--keys={folder / 'keys'}"]
    argv += [f"--http-port={http}", f"--journal={folder / 'j.sqlite'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def up() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://127.0.0.1:{http}/healthz", trust_env=False).status_code == 200
        return False

    until(up, "the coordinator")
    yield port, folder / "keys"
    process.terminate()
    process.wait(60)


@pytest.fixture
def deployment(tmp_path: Path, coordinator: tuple[int, Path]) -> Iterator[Deployment]:
    made = Deployment(tmp_path, coordinator)
    made.start()
    yield made
    made.close()


def test_what_a_server_will_not_take_is_said_when_its_sidecar_joins(
    tmp_path: Path, coordinator: tuple[int, Path]
) -> None:
    """Loudly and with what to launch instead, and not in the first round only."""
    made = Deployment(tmp_path, coordinator)
    config = json.loads((made.first / "config.json").read_text())
    quantized = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (made.first / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    with capture_logs() as logs:
        made.start()
        made.close()
    told = [line for line in logs if line["event"] == "every_version_will_be_refused"]
    assert [line["log_level"] for line in told] == ["warning"]
    assert "serve the plain checkpoint" in told[0]["reason"]


def test_a_server_that_loaded_from_files_is_judged_by_the_checkpoint_of_its_launch(deployment: Deployment) -> None:
    """After a round over `disk` the server names the folder of that version, which later rounds remove: no alarm."""
    checkpoints = deployment.folder / "checkpoints"
    deployment.publish(7, transport="disk", checkpoint_dir=checkpoints, hf_config_dir=deployment.first)
    assert str(checkpoints) in deployment.fake.model_path
    deployment.stop()
    shutil.rmtree(checkpoints)
    with capture_logs() as logs:
        deployment.start()
    assert not [line for line in logs if line["event"] == "every_version_will_be_refused"]
    assert deployment.publish(8).committed


def test_a_round_in_the_right_order(deployment: Deployment) -> None:
    """Pause, mark, session, buckets, session closed, label, flush, go on; the label never moves before."""
    report = deployment.publish(7)
    assert report.engines[0].verified_by == "live-digest"
    fake = deployment.fake
    assert (fake.label, fake.mode, fake.session) == ("7", "", False)
    known = {"/pause_generation": "P", "/begin_weight_update": "b", "/update_weights_from_tensor": "t"}
    known |= {
        "/end_weight_update": "e",
        "/update_weight_version": "L",
        "/flush_cache": "f",
        "/continue_generation": "C",
    }
    order = "".join(known.get(call, "") for call in fake.calls)
    assert order.lstrip("C") == "PLbtttteLfC"  # the first label marks launch weights that are being changed
    assert deployment.view.held.version == 7


def test_requests_are_admitted_by_the_version_that_the_server_holds(deployment: Deployment) -> None:
    """`/admit` of the sidecar's port follows each round, also one that leaves mixed weights."""
    assert deployment.agent is not None
    url = f"http://127.0.0.1:{deployment.agent.http_port}/admit"

    def ask(bounds: str = "") -> tuple[int, str | None]:
        answer = httpx.get(f"{url}?{bounds}", trust_env=False)
        return answer.status_code, answer.headers.get("Weightbus-Version")

    assert (ask(), ask("min=0")) == ((200, "launch"), (409, "launch"))
    deployment.publish(7)
    assert (ask("exact=7"), ask("min=8"), ask("max=6")) == ((200, "7"), (409, "7"), (409, "7"))
    deployment.fake.inject("/update_weights_from_tensor", "refuse", after=1)
    with pytest.raises(PublishFailed):
        deployment.publish(8)
    assert (ask(), ask("min=7")) == ((503, None), (503, None))
    deployment.publish(9)
    assert (ask("min=8"), ask("exact=7")) == ((200, "9"), (409, "9"))


def test_replicas_take_files_beside_a_plain_server(tmp_path: Path, coordinator: tuple[int, Path]) -> None:
    """One round, one table: what is predicted for the plain server says nothing of the ranks of several replicas."""
    plain, replicas = Deployment(tmp_path / "x", coordinator), Deployment(tmp_path / "y", coordinator, "e1")
    replicas.channel = plain.channel
    replicas.fake.stop()
    replicas.fake = FakeSGLang(replicas.first, dp=2).start()
    try:
        for each in (plain, replicas):
            each.start()
        files = {"checkpoint_dir": tmp_path / "files", "hf_config_dir": plain.second}
        report = plain.publish(7, transport="local disk", **files)
        assert {each.engine: each.verified_by for each in report.engines} == {
            "e0": "live-digest",
            "e1": "bucket-digest",
        }
        assert (plain.fake.label, replicas.fake.label) == ("7", "7")
    finally:
        plain.close()
        replicas.close()


def test_the_log_tells_a_round_shortly_and_a_failure_loudly(deployment: Deployment) -> None:
    """Dirty is every server on the way to a new version, which is no news; a server that stays dirty is."""

    def said(lines: list[Any], **fields: object) -> bool:
        """The view changes a moment before the line is written."""
        return any({"event": "health", **fields}.items() <= line.items() for line in list(lines))

    with capture_logs() as good:
        deployment.publish(7)
        until(lambda: said(good, held=7, health="clean") and not deployment.view.doing, "the end")
    told = [line for line in good if line["log_level"] != "debug"]
    assert len(told) < 10, told
    assert [line["held"] for line in told if line["event"] == "health"] == [7]
    deployment.fake.inject("/update_weights_from_tensor", "refuse", after=2)
    with capture_logs() as bad:
        with contextlib.suppress(Exception):
            deployment.publish(8)
        until(lambda: said(bad, log_level="warning") and not deployment.view.doing, "the failure")
    loud = [line for line in bad if line["event"] == "health" and line["log_level"] == "warning"]
    assert [line["health"] for line in loud] == ["dirty"]
    assert "version 8 was not taken completely" in loud[0]["reason"]


@pytest.mark.parametrize("fault", ["swallow", "corrupt", "refuse"])
def test_bad_loads_never_serve(deployment: Deployment, fault: Any) -> None:
    """Success that loaded nothing, wrong bits, a refusal half-way: paused and dirty until a good round.

    (G1, F16, S18)
    """
    deployment.fake.inject("/update_weights_from_tensor", fault, after=2)
    with contextlib.suppress(Exception):
        deployment.publish(7)
    until(lambda: deployment.view.health.value == "dirty" and not deployment.view.doing, "the failure")
    assert deployment.fake.mode == "retract"
    assert deployment.fake.label == f"{INCOMPLETE}default"
    deployment.stop()
    deployment.start()
    until(lambda: deployment.view.health.value == "dirty", "the record")
    deployment.publish(8)
    until(lambda: deployment.view.health.value == "clean", "the repair")
    assert (deployment.fake.label, deployment.fake.mode) == ("8", "")


def test_a_server_that_dies_half_way_comes_back_paused(deployment: Deployment) -> None:
    """Killed at the third bucket, launched again: paused at once, pending, mended by the next round (G1, F3)."""
    deployment.fake.inject("/update_weights_from_tensor", "die", after=2)
    with contextlib.suppress(Exception):
        deployment.publish(7)
    until(lambda: not deployment.view.up, "the loss")
    record = StateFile(deployment.folder / "state", "e0").read()
    assert record is not None
    assert record.health.value == "dirty"
    deployment.fake.restart()
    until(lambda: deployment.fake.mode == "retract", "the pause")
    until(lambda: deployment.view.health.value in {"pending", "dirty"}, "the account")
    deployment.publish(8)
    until(lambda: deployment.view.health.value == "clean", "the repair")
    assert deployment.fake.mode == ""


@pytest.mark.parametrize(
    ("held", "committed", "max_lag", "heard_s_ago", "why_not"),
    [
        (7, 7, 0, 1.0, ""),
        (7, 8, 0, 1.0, "holds version 7, committed is 8"),
        (7, 8, 1, 1.0, ""),
        (7, 9, 1, 1.0, "holds version 7, committed is 9"),
        (7, 6, 3, 1.0, "holds version 7, committed is 6"),
        (None, 8, 9, 1.0, "holds the weights of its launch, committed is 8"),
        (None, None, 0, 1.0, ""),
        (7, 7, 0, 11.0, "the coordinator is silent since"),
    ],
)
def test_ready_means_the_committed_version(  # noqa: PLR0917  the parameters of its cases
    tmp_path: Path, held: int | None, committed: int | None, max_lag: int, heard_s_ago: float, why_not: str
) -> None:
    """An engine that rounds have left behind is not ready, nor one that may have been, by the newest word heard."""
    agent = EngineAgent(EngineAgentSettings(name="e0", channel="c", state_dir=tmp_path))
    weights = (
        None if held is None else HeldVersion(version=Version(held), manifest=Digest("a" * 64), table=Digest("b" * 64))
    )
    agent._view = ServerView(
        up=True,
        health=EngineHealth.CLEAN,
        held=weights,
        paused=False,
        weights=WeightState.SERVING,
        version=weights and weights.version,
        reached=None,
        epoch=Epoch(1),
        doing="",
        reason="",
    )
    bus = SimpleNamespace(
        committed=committed,
        max_lag=max_lag,
        heard_at=time.monotonic() - heard_s_ago,
        welcome=SimpleNamespace(silence_s=10.0),
        untrusted=None,
        refusal=None,
    )
    agent._bus = cast("Any", bus)
    verdict = agent._readiness()
    assert verdict.ready is (not why_not)
    assert why_not in verdict.reason
    if verdict.ready:
        passing = RequestRefused(RefusalCode.NAME_TAKEN, "another process has it", 1.0)
        bus.refusal = (passing, time.monotonic())
        assert agent._readiness().ready, "a refusal that passes counts by the silence that it brings"
        bus.refusal = (NotTrusted("key 12ab is not trusted here", "run `weightbus trust add e0`"), time.monotonic() - 5)
        refused = agent._readiness()
        assert not refused.ready, "nothing is known of what is committed by now (N55)"
        assert re.search(r"refused since \d\d:\d\d:\d\d UTC, for 5 s .*12ab.*weightbus trust add e0", refused.reason)
        assert not agent._connected()
        assert _connected_gauge(agent) == 0.0
        bus.untrusted = bus.refusal[0]
        assert math.isnan(_connected_gauge(agent)), "no alert is for an engine whose trust was removed"


def _connected_gauge(agent: EngineAgent) -> float:
    value = agent.metrics.registry.get_sample_value("weightbus_sidecar_connected")
    assert value is not None
    return value


def test_an_engine_takes_only_what_a_trainer_it_trusts_has_signed(deployment: Deployment) -> None:
    """Its own list decides, not the coordinator's: nothing is paused or loaded, and the refusal is counted (S9)."""
    deployment.publish(1, deployment.first)
    deployment.stop()
    deployment.engine_keys = deployment.folder / "engine-keys"
    shutil.copytree(deployment.keys, deployment.engine_keys)
    with edit_allow_list(deployment.engine_keys / ALLOW_LIST_FILE) as agents:
        trainer = agents.pop("trainer")
    deployment.start()
    until(lambda: deployment.view.health is EngineHealth.CLEAN, "the engine")
    calls = len(deployment.fake.calls)
    with pytest.raises(RoundAborted, match="unknown_signer"):
        deployment.publish(2)
    assert not [call for call in deployment.fake.calls[calls:] if "pause" in call or "weights_from" in call]
    assert deployment.view.held.version == 1
    assert deployment.agent is not None
    counted = deployment.agent.metrics.registry.get_sample_value(
        "weightbus_sidecar_publications_refused_total", {"cause": "unknown_signer"}
    )
    assert counted == 1
    with edit_allow_list(deployment.engine_keys / ALLOW_LIST_FILE) as agents:
        agents["trainer"] = trainer
    deployment.publish(2)
    until(lambda: deployment.view.held is not None and deployment.view.held.version == 2, "the engine")


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({}, "weightbus keygen"),
        ({"insecure_loopback": True, "coordinator": "tcp://10.0.0.5:5750"}, "weightbus keygen"),
    ],
)
def test_a_sidecar_without_keys_does_not_start(
    given: dict[str, Any], advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it looks for its server, and with what to do: no keys, and off the loopback not even when told (S1)."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    agent = EngineAgent(EngineAgentSettings(name="e0", channel="c", state_dir=tmp_path, **given))
    with pytest.raises(ConfigurationError, match=advice):
        agent.run()


def test_a_record_that_cannot_be_kept_fails_the_transfer_not_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk in mid-round: the server is sent nothing and stays clean, the abort resumes it."""
    agent, world = EngineAgent(EngineAgentSettings(name="e0", channel="c", state_dir=tmp_path)), World(up=False)
    world.machine = agent._machine
    world.found()
    world.to_paused()

    def full(_record: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(agent._writer, "_write", full)
    offer = m.Endpoint(transport=m.TransportKind.LOCAL, address="/run/x")
    order: dict[str, Any] = {"channel": Channel("c"), "epoch": Epoch(1), "deadline_s": 30.0}
    weights: dict[str, Any] = {"version": Version(7), "manifest": Digest("a" * 64), "table": Digest("b" * 64)}
    agent._dispatch(Commanded(m.Transfer(**order, **weights, offer=offer, rank_offset=1)))
    assert agent._operations.empty()
    agent._step(agent._next())
    _, answer = agent._reply_sender._answers.get_nowait() or (0, None)
    assert isinstance(answer, m.Failed)
    assert (answer.step, answer.health) == (m.Step.TRANSFER, EngineHealth.CLEAN)
    assert "No space left on device" in answer.reason
    agent._dispatch(Commanded(m.Abort(**order, reason="the test says so")))
    run = agent._operations.get_nowait()
    assert run is not None
    assert isinstance(run.operation, ReleaseServer)
    monkeypatch.undo()
    agent._step(None)
    kept = agent._records.read()
    assert kept is not None
    assert kept.health is EngineHealth.CLEAN


def test_a_full_disk_beside_one_server_stops_no_engine(
    deployment: Deployment, tmp_path: Path, coordinator: tuple[int, Path]
) -> None:
    """Its agent fails before it comes to the trainer, which is told: the other engine has its version in seconds.

    The trainer once waited for it as long as for the whole transfer, and then gave up the other one as well (F18).
    """
    full = Deployment(tmp_path / "full", coordinator, "e1")
    full.run.cleanup()
    full.channel, full.run = deployment.channel, deployment.run
    with contextlib.closing(full):
        full.start()
        until((full.folder / "state" / "e1.json").exists, "the record of its welcome")
        obstacle = full.folder / "state" / "e1.json.new"  # where the next record would be written
        obstacle.mkdir()
        report = deployment.publish(7)
        assert report.seconds["transfer"] < JOIN_S
        assert {each.engine: each.outcome.value for each in report.engines} == {"e0": "committed", "e1": "aborted"}
        assert "the record cannot be written" in next(each.reason for each in report.engines if each.engine == "e1")
        assert (full.fake.label, full.fake.mode, full.view.health.value) == ("default", "", "clean")
        obstacle.rmdir()
        again = deployment.publish(8)
        assert {each.engine: each.outcome.value for each in again.engines} == {"e0": "committed", "e1": "committed"}
        assert full.fake.label == "8"


def test_one_agent_beside_a_server(deployment: Deployment, tmp_path: Path) -> None:
    """A second one of this host does not start, whatever its name; the first is not disturbed, and may come back."""
    beside = EngineAgentSettings(
        name="e1",
        channel=deployment.channel,
        server=deployment.fake.url,
        coordinator=deployment.coordinator,
        keys=deployment.keys,
        http_port=0,
        state_dir=tmp_path / "other",
        runtime_dir=Path(deployment.run.name),
    )
    calls = len(deployment.fake.calls)
    with pytest.raises(ServerInUse, match=r"the agent e0 \(process \d+\) stands beside the server"):
        EngineAgent(beside).run()
    assert "/pause_generation" not in deployment.fake.calls[calls:]
    deployment.stop()
    deployment.start()
    assert deployment.publish(7).engines[0].engine == "e0"


def test_a_second_agent_of_another_host_is_kept_out(deployment: Deployment, tmp_path: Path) -> None:
    """Where no lock is shared the coordinator refuses it until the first is gone; then it is let in by itself."""
    other = EngineAgentSettings(
        name="e1",
        channel=deployment.channel,
        server=deployment.fake.url,
        coordinator=deployment.coordinator,
        keys=deployment.keys,
        http_port=0,
        state_dir=tmp_path / "other",
        runtime_dir=tmp_path / "run",
        poll_s=0.05,
    )
    with capture_logs() as logs:
        second = EngineAgent(other)
        thread = threading.Thread(target=second.run, daemon=True)
        thread.start()
        until(lambda: [line for line in logs if line["event"] == "hello_refused"], "the refusal")
        assert "server_taken" in next(line["reason"] for line in logs if line["event"] == "hello_refused")
        assert [each.engine for each in deployment.publish(7).engines] == ["e0"]
        deployment.stop()
        until(lambda: second._bus is not None, "the second agent")
    second.stop()
    thread.join(60)
    assert not thread.is_alive()


def test_a_server_that_comes_after_its_sidecar_joined_takes_versions(
    tmp_path: Path, coordinator: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent joins without it, so that its trouble is seen; it is waited for until its transports are told, too."""
    examine = EngineAgent._prerecord

    def examine_slowly(agent: EngineAgent) -> None:
        time.sleep(1.5)
        examine(agent)

    monkeypatch.setattr(driver, "_ALONE_S", 0.2)
    monkeypatch.setattr(EngineAgent, "_prerecord", examine_slowly)
    late = Deployment(tmp_path, coordinator)
    late.fake.stop()
    try:
        late.start()
        assert not late.view.up
        late.fake.start()
        until(lambda: late.view.up, "the server")
        assert [(each.engine, each.version) for each in late.publish(1).engines] == [("e0", 1)]
    finally:
        late.close()


def test_what_another_party_did_to_a_server_is_in_the_status_until_it_is_mended(deployment: Deployment) -> None:
    """The agent's own words: a pause until it ends, another label until the next version (N57)."""

    def shown() -> str:
        assert deployment.agent is not None
        assert deployment.agent._bus is not None
        status = json.loads(deployment.agent._bus.status())
        return str(status["channels"][deployment.channel]["engines"]["e0"]["reason"])

    def stranger(page: str, **body: object) -> None:
        assert httpx.post(deployment.fake.url + page, json=body, trust_env=False, timeout=30).status_code == 200

    deployment.publish(7)
    stranger("/pause_generation", mode="retract")
    until(lambda: "pending: another party has paused the server" in shown(), "the pause in the status")
    stranger("/continue_generation")
    until(lambda: not shown(), "its end")
    stranger("/update_weight_version", new_version="77", abort_all_requests=False)
    until(lambda: "pending: labeled '77' by another party, expected '7'" in shown(), "the label in the status")
    deployment.publish(8)
    until(lambda: not shown(), "the next version")


def test_workers_that_cannot_be_located_now_are_located_later(
    tmp_path: Path, coordinator: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors may have run out: the agent says so, joins all the same, and looks again; nothing is guessed."""
    look, failures = driver.places_of, [OSError(errno.EMFILE, "Too many open files")] * 2

    def places_of(facts: Any) -> Any:
        if failures:
            raise ProcessesUnread(failures.pop())
        return look(facts)

    monkeypatch.setattr(driver, "places_of", places_of)
    monkeypatch.setattr(driver, "_LOCATE_S", 0.2)
    made = Deployment(tmp_path, coordinator)
    try:
        with capture_logs() as logs:
            made.start()
            until(lambda: made.agent and made.agent._locations[0], "the workers")
        told = [line for line in logs if line["event"] == "workers_not_located"]
        assert len(told) == 2
        assert "Too many open files" in told[0]["reason"]
        assert made.publish(7).committed
    finally:
        made.close()


def test_an_unfit_manifest_never_reaches_the_server(
    deployment: Deployment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of another shape is refused before the server hears of it; ``/readyz`` names what does not fit."""
    other = tiny_model.write(tmp_path / "wide", hidden=128)
    calls = len(deployment.fake.calls)
    with contextlib.suppress(Exception):
        deployment.publish(7, other)
    assert not {"/begin_weight_update", "/update_weights_from_tensor"} & set(deployment.fake.calls[calls:])
    assert deployment.view.health.value == "clean"
    monkeypatch.setattr(BusClient, "committed", property(lambda _: Version(7)))  # other engines took it
    assert deployment.agent is not None
    reason = deployment.agent._readiness().reason
    assert "committed is 7: version 7 was refused: " in reason
    assert "model.embed_tokens.weight" in reason


class Threading(torch.nn.Module):
    """Its loader begins a thread."""

    def load_weights(self, weights: Any) -> None:
        threading.Thread(target=dict, args=(weights,)).start()


class Unfollowed(FakeSGLang):
    """Launched with our loader, and such a model."""

    model = Threading()

    def server_info(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**super().server_info(body), "custom_weight_loader": [LOADER]}

    def update_weights_from_tensor(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["load_format"] != LOADER:
            return super().update_weights_from_tensor(body)
        (payload,) = body["serialized_named_tensors"]
        found = re.search(rb"weightbus:[\x20-\x7e]+?\.sock", base64.b64decode(payload))
        assert found
        load(self.model, [(found[0].decode(), torch.empty(0))])
        return {"success": True, "message": "Success."}


def test_a_server_whose_loader_cannot_be_followed_takes_buckets(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves what it had until then, says why, and takes the next version by another transport of the trainer's.

    A new launch is tried again.
    """
    monkeypatch.setattr(worker_loader, "_rank", lambda: 0)
    deployment.stop()
    deployment.fake.stop()
    deployment.fake = Unfollowed(deployment.first).start()
    deployment.start()
    source = HFModuleSource(FlatModule(read(deployment.second)), model="Qwen3ForCausalLM")
    publish = functools.partial(deployment.publish, source=source, transport="direct local")
    with pytest.raises(PublishFailed, match="starts a thread"):
        publish(7)
    assert "starts a thread" in deployment.agent._server.facts.unrecordable  # type: ignore[union-attr]
    until(lambda: not deployment.fake.mode, "it to go on")
    assert deployment.view.health.value == "clean"
    report = publish(8)
    assert (report.engines[0].verified_by, deployment.fake.label) == ("live-digest", "8")
    deployment.fake.restart()
    until(lambda: not deployment.agent._server.facts.unrecordable, "the new launch")  # type: ignore[union-attr]
    worker_loader.forget()


@pytest.fixture
def lending(tmp_path: Path, coordinator: tuple[int, Path]) -> Iterator[Deployment]:
    """A sidecar that has its server give memory back when it is asked to."""
    made = Deployment(tmp_path, coordinator)
    made.gives_back = True
    made.start()
    yield made
    made.close()


def give_back(deployment: Deployment) -> httpx.Response:
    assert deployment.agent is not None
    port = deployment.agent.http_port
    return httpx.post(f"http://127.0.0.1:{port}/give-back", trust_env=False, timeout=30)


@pytest.mark.parametrize("restart", [False, True])
def test_memory_that_was_given_back_returns_with_a_version(lending: Deployment, *, restart: bool) -> None:
    """Nothing is served meanwhile, with any restart; then weights, version, proof, label, the rest, and on it goes."""
    lending.publish(7)
    answer = give_back(lending)
    assert answer.status_code == 200, answer.text
    fake = lending.fake
    assert fake.lent == {"weights", "kv_cache", "cuda_graph"}
    assert give_back(lending).status_code == 409
    if restart:
        lending.stop()
        lending.start()
    until(lambda: lending.view.health is EngineHealth.PENDING and lending.view.paused, "a server that is held back")
    assert lending.view.held is None
    fake.calls.clear()

    report = lending.publish(8, lending.first)

    assert report.engines[0].verified_by == "live-digest"
    known = {"/resume_memory_occupation": "m", "/update_weights_from_tensor": "t", "/weights_checker": "v"}
    known |= {"/update_weight_version": "L", "/continue_generation": "C"}
    order = "".join(known.get(call, "") for call in fake.calls)
    assert order.partition("C")[:2] == ("mttttvLmm", "C")  # what follows are looks at a listed server
    assert (fake.lent, fake.mode, fake.label) == (set(), "", "8")
    assert all(torch.equal(fake.weights.tensors[name], tensor) for name, tensor in read(lending.first).items())


def test_memory_is_given_back_before_the_first_version(lending: Deployment) -> None:
    """Trainers start with the GPU to themselves: launch weights are no weights any more, and never served."""
    assert give_back(lending).status_code == 200
    until(lambda: lending.view.health is EngineHealth.PENDING and lending.view.paused, "a server that is held back")

    assert lending.publish(1).engines[0].verified_by == "live-digest"
    assert lending.fake.label == "1"
