"""Engines that load the committed version from files by themselves: when, in which steps, and what they believe."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from weightbus.control.protocol.messages import (
    Abort,
    Digest,
    EngineHealth,
    Epoch,
    HeldVersion,
    Pause,
    Prepare,
    Step,
    Transfer,
    TransportKind,
    Version,
)
from weightbus.dataplane.transports.disk.saved_version import PUBLICATION, SavedReceiver, leaving
from weightbus.dataplane.transports.interface import Receipt, TransferSession
from weightbus.engine_agent.machine.engine_machine import ServerView
from weightbus.engine_agent.machine.weight_state import WeightState
from weightbus.engine_agent.sidecar import file_resync as saved_versions
from weightbus.engine_agent.sidecar.file_resync import AGAIN_S, SAVED, STEP_S, Resync, ResyncStage
from weightbus.trainer_agent import TrainerAgent

from ...kit.fake_source import FakeSource
from ...kit.fake_weights import read
from .test_driver import Deployment, coordinator, until

__all__ = ["coordinator"]

SEVEN = HeldVersion(version=Version(7), manifest=Digest("a" * 64), table=Digest("b" * 64))


def view(**changes: Any) -> ServerView:
    plain = ServerView(
        up=True,
        health=EngineHealth.CLEAN,
        held=None,
        paused=False,
        weights=WeightState.CLEAN,
        version=None,
        reached=None,
        epoch=Epoch(4),
        doing="",
        reason="",
    )
    return msgspec.structs.replace(plain, **changes)


def looking(machine: Resync) -> None:
    assert not machine.looks(view(), 7, 100.0)
    assert machine.looks(view(), 7, 110.0)


def test_the_steps_of_a_round_at_the_epoch_it_is_at() -> None:
    """One after another, each when the one before has been reached; then the coordinator is waited for."""
    machine = Resync("c", 10.0)
    looking(machine)
    prepare = machine.found(SEVEN, "/saved", view(), 110.0)
    assert isinstance(prepare, Prepare)
    assert (prepare.epoch, prepare.version, prepare.table, prepare.transport) == (4, 7, SEVEN.table, TransportKind.DISK)
    assert machine.step(view(doing="validate"), 111.0) is None
    assert isinstance(machine.step(view(reached=Step.PREPARE), 112.0), Pause)
    transfer = machine.step(view(reached=Step.PAUSE, paused=True), 113.0)
    assert isinstance(transfer, Transfer)
    assert (transfer.offer.address, transfer.offer.group) == ("/saved", SAVED)
    assert machine.step(view(reached=Step.PAUSE, doing="receive"), 900.0) is None
    assert machine.step(view(reached=Step.VERIFY, held=SEVEN, health=EngineHealth.PENDING), 901.0) is None
    assert machine.stage is ResyncStage.WATCHING


@pytest.mark.parametrize(
    ("seen", "committed"),
    [
        (view(held=SEVEN), 7),
        (view(), None),
        (view(up=False), 7),
        (view(reached=Step.PAUSE), 7),
        (view(doing="receive"), 7),
        (view(epoch=Epoch(0)), 7),
    ],
)
def test_nothing_is_looked_for_without_need(seen: ServerView, committed: int | None) -> None:
    """An engine that holds it, that a round has, or that was never commanded yet."""
    machine = Resync("c", 0.0)
    assert not machine.looks(seen, committed, 0.0)
    assert not machine.looks(seen, committed, 1000.0)


@pytest.mark.parametrize("looked_before", [True, False])
def test_memory_that_was_given_back_is_not_taken_for_what_was_there(looked_before: bool) -> None:
    """The trainer has the memory until another version comes: then that one is loaded, as by any engine."""
    machine = Resync("c", 10.0)
    if looked_before:  # the coordinator's word for 7 may come later than the version itself
        assert not machine.looks(view(held=SEVEN), 6, 0.0)
    lent = view(memory_released=True, health=EngineHealth.PENDING)
    for now in (1.0, 100.0, 1000.0):
        assert not machine.looks(lent, 7, now)
    assert machine.found(SEVEN, "/saved", lent, 1000.0) is None
    assert not machine.looks(lent, 8, 1001.0)
    assert machine.looks(lent, 8, 1011.0)


def test_a_round_is_waited_for_first() -> None:
    """And the wait begins anew when one came."""
    machine = Resync("c", 10.0)
    assert not machine.looks(view(), 7, 0.0)
    assert not machine.looks(view(), 7, 9.9)
    assert not machine.looks(view(reached=Step.PREPARE), 7, 9.9)
    assert not machine.looks(view(), 7, 11.0)
    assert machine.looks(view(), 7, 21.0)


def test_a_round_of_the_coordinator_ends_it() -> None:
    """Its epoch is higher; nothing more is said at the old one."""
    machine = Resync("c", 10.0)
    looking(machine)
    assert machine.found(SEVEN, "/saved", view(), 110.0)
    assert machine.step(view(epoch=Epoch(5), reached=Step.PREPARE), 111.0) is None
    assert machine.stage is ResyncStage.WATCHING


@pytest.mark.parametrize("how", ["failed", "hangs"])
def test_what_comes_to_nothing_is_aborted_and_tried_again_later(how: str) -> None:
    """So that a paused engine goes on."""
    machine = Resync("c", 10.0)
    looking(machine)
    assert machine.found(SEVEN, "/saved", view(), 110.0)
    if how == "failed":
        assert machine.step(view(), 111.0) is None
        given_up_at = 114.0
    else:
        given_up_at = 111.0 + STEP_S
    seen = view() if how == "failed" else view(doing="validate")
    assert isinstance(machine.step(seen, given_up_at), Abort)
    assert not machine.looks(view(), 7, given_up_at + 45.0), "a server that cannot load it would stand still for ever"
    assert not machine.looks(view(), 7, given_up_at + AGAIN_S - 1)
    assert machine.looks(view(), 7, given_up_at + AGAIN_S + 1)


def test_a_server_that_is_gone_ends_it() -> None:
    """Whatever comes back in its place holds nothing of what was begun, and is given nothing of it."""
    machine = Resync("c", 10.0)
    looking(machine)
    assert machine.found(SEVEN, "/saved", view(), 110.0)
    assert isinstance(machine.step(view(reached=Step.PREPARE), 111.0), Pause)
    assert machine.step(view(up=False, reached=Step.PAUSE, paused=True), 112.0) is None
    assert machine.stage is ResyncStage.WATCHING
    assert machine.step(view(reached=Step.PAUSE, paused=True), 113.0) is None


@pytest.fixture
def deployment(coordinator: tuple[int, Path], tmp_path: Path) -> Iterator[Deployment]:
    """A sidecar that knows the trainer's folder, and a version in it."""
    made = Deployment(tmp_path, coordinator)
    made.saved_dir = tmp_path / "saved"
    made.start()
    yield made
    made.close()


def publish(deployment: Deployment, version: int, **more: object) -> None:
    with TrainerAgent.connect(
        FakeSource(read(deployment.second)),
        channel=deployment.channel,
        coordinator=deployment.coordinator,
        keys=deployment.keys,
        transport=("local",),
        bucket_bytes=100_000,
        runtime_dir=Path(deployment.run.name),
        hf_config_dir=deployment.second,
        save_every=1,
        save_dir=deployment.folder / "saved",
        **more,
    ) as trainer:
        assert trainer.publish(version).saved


def test_a_server_that_was_launched_again_loads_what_was_kept(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No trainer is there any more. It is verified, labeled and ready as after a round, and paused until then.

    While it is loaded no trainer takes it away.
    """
    free: list[bool] = []
    load = SavedReceiver._load

    def looked(receiver: SavedReceiver, session: TransferSession, target: Path, *more: Any) -> Receipt:
        with leaving(target) as now:
            free.append(now)
        return load(receiver, session, target, *more)

    monkeypatch.setattr(SavedReceiver, "_load", looked)
    publish(deployment, 7)
    deployment.fake.restart()
    until(lambda: deployment.fake.mode == "retract", "the pause")
    until(lambda: deployment.view.health is EngineHealth.CLEAN and deployment.view.held is not None, "the version")
    assert deployment.view.held.version == 7
    assert deployment.fake.label == "7"
    assert deployment.agent is not None
    until(lambda: deployment.agent is not None and deployment.agent._readiness().ready, "the ready list")
    assert "update_weights_from_disk" in " ".join(deployment.fake.calls)
    assert free
    assert not any(free)


def test_a_server_that_gave_its_memory_back_does_not_load_the_files_of_what_it_held(deployment: Deployment) -> None:
    """The trainer on its GPU has that memory. The next version takes it, and the coordinator says so until then."""
    deployment.stop()
    deployment.gives_back = True
    deployment.start()
    publish(deployment, 7)
    until(lambda: deployment.view.held is not None, "the version")
    assert deployment.agent is not None
    url = f"http://127.0.0.1:{deployment.agent.http_port}"
    assert httpx.post(f"{url}/give-back", trust_env=False, timeout=60).status_code == 200
    machine = deployment.agent._file_resync._machine
    until(lambda: deployment.view.memory_released and machine._known == 7, "the look")
    assert httpx.get(f"{url}/status", trust_env=False).json()["engine"]["lent"] is True
    now = time.monotonic()
    assert not machine.looks(deployment.view, 7, now)
    assert not machine.looks(deployment.view, 7, now + 1000.0)
    publish(deployment, 8)
    until(lambda: deployment.view.held is not None and deployment.view.held.version == 8, "the next version")
    assert not deployment.view.memory_released
    assert (deployment.fake.lent, deployment.fake.label) == (set(), "8")


@pytest.mark.parametrize("how", ["bytes", "forged", "gone"])
def test_files_that_are_not_what_was_committed_are_not_loaded(
    deployment: Deployment, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the bytes, not what a trainer signed, or not there: the server stays paused, and a round mends it."""
    publish(deployment, 7)
    folder = deployment.folder / "saved" / deployment.channel / "checkpoint-7"
    if how == "bytes":
        shard = next(iter(sorted(folder.glob("*.safetensors"))))
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(bytes(data))
    elif how == "forged":
        announced = json.loads((folder / PUBLICATION).read_text())
        announced["epoch"] += 1
        (folder / PUBLICATION).write_text(json.dumps(announced))
    else:
        shutil.rmtree(folder)
    said: list[str] = []

    def noted(event: str, **more: object) -> None:
        if event == "saved_version_not_found":
            said.append(str(more["folder"]))

    monkeypatch.setattr(saved_versions, "_log", SimpleNamespace(info=noted, warning=noted))
    deployment.fake.restart()
    until(lambda: deployment.fake.mode == "retract", "the pause")
    assert deployment.agent is not None
    machine = deployment.agent._file_resync._machine
    until(lambda: machine._not_before > 0, "the attempt")
    assert said == ([str(folder)] if how == "gone" else [])
    assert "update_weights_from_disk" not in " ".join(deployment.fake.calls[-20:])
    assert deployment.fake.mode == "retract"
    publish(deployment, 8)
    until(lambda: deployment.view.held is not None and deployment.view.held.version == 8, "the repair")
