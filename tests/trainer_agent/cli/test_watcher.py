"""A folder of checkpoints, a real coordinator and an engine: what is finished arrives, and nothing else does."""

from __future__ import annotations

import errno
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file

from weightbus.control.protocol.messages import Transfer
from weightbus.trainer_agent.checkpoints import checkpoint_folder as folders
from weightbus.trainer_agent.checkpoints.checkpoint_folder import (
    LATEST,
    Checkpoint,
    CorruptCheckpoint,
    SafetensorsFiles,
    open_checkpoint,
)
from weightbus.trainer_agent.cli import watcher as watcher_module
from weightbus.trainer_agent.cli.commands import WatchSettings
from weightbus.trainer_agent.cli.watcher import Watcher
from weightbus.trainer_agent.publish.agent import TrainerAgent
from weightbus.trainer_agent.source import AssemblyFailed

from ...kit.fake_source import tiny_qwen3
from ...kit.ports import free_port
from ..publish.test_rounds import Deployment

PATIENCE_S = 60.0
CONFIG = {"architectures": ["Qwen3ForCausalLM"], "head_dim": 8}


def write(folder: Path, seed: int, *, layers: int = 2, half: bool = False) -> dict[str, torch.Tensor]:
    """A checkpoint in two shards; half of one lacks the second."""
    weights = tiny_qwen3(seed, layers)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = list(weights)
    shards = {"model-1.safetensors": names[: len(names) // 2], "model-2.safetensors": names[len(names) // 2 :]}
    index = {"weight_map": {name: file for file, each in shards.items() for name in each}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for file, each in list(shards.items())[: 1 if half else 2]:
        save_file({name: weights[name] for name in each}, folder / file)
    return weights


class Scene:
    """A watched folder, and what the engine holds."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "out"
        self.folder.mkdir()
        self.deployment = Deployment(root)
        self.engine = self.deployment.engine("e0")
        self.watchers: list[Watcher] = []
        self.watcher = self.start()

    def start(self, **given: object) -> Watcher:
        """A watcher, as a restarted one would be."""
        plain = {
            "channel": "c",
            "watch": self.folder,
            "coordinator": self.deployment.coordinator,
            "runtime_dir": self.deployment.root / "run",
            "bucket_bytes": 4096,
            "settle_s": 0.05,
            "transport": ("local",),
            "http_port": 0,
            "insecure_loopback": True,
            "connect_timeout_s": 30.0,
        }
        self.watcher = Watcher(WatchSettings(**{**plain, **given}))
        self.watchers.append(self.watcher)
        return self.watcher

    def until(self, done: Callable[[], bool]) -> None:
        """Look until it is so."""
        give_up_at = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < give_up_at, "it never happened"
            self.watcher.look()
            time.sleep(0.01)

    def settle(self) -> None:
        """Look for long enough that anything finished would have been published."""
        give_up_at = time.monotonic() + 0.3
        self.until(lambda: time.monotonic() >= give_up_at)

    def holds(self, weights: dict[str, torch.Tensor]) -> bool:
        """The engine has exactly these bits, whatever else an earlier layout left behind."""
        wanted = {name: each.reshape(-1).view(torch.uint8).numpy().tobytes() for name, each in weights.items()}
        (held,) = self.engine.server.weights
        return wanted.items() <= held.items()

    def transfers(self) -> int:
        """How often the engine was sent anything."""
        return sum(kind is Transfer for kind, _ in self.engine._heard)

    def count(self, outcome: str) -> float:
        labels = {"outcome": outcome}
        return self.watcher.metrics.registry.get_sample_value("weightbus_watch_checkpoints_total", labels) or 0.0

    def close(self) -> None:
        for watcher in self.watchers:
            watcher._disconnect()
        self.deployment.close()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """Its coordinator and engine are threads of this process."""
    made = Scene(tmp_path)
    yield made
    made.close()


def test_finished_checkpoints_arrive_bit_for_bit_and_half_ones_do_not(scene: Scene) -> None:
    """Through the same rounds as any trainer's: verified, committed, labeled with the step of the folder's name."""
    first = write(scene.folder / "checkpoint-10", 1)
    scene.until(lambda: scene.engine.label == 10)
    assert scene.holds(first)
    second = write(scene.folder / "checkpoint-20", 2, half=True)
    scene.settle()
    assert scene.engine.label == 10
    names = list(second)
    save_file(
        {name: second[name] for name in names[len(names) // 2 :]}, scene.folder / "checkpoint-20/model-2.safetensors"
    )
    scene.until(lambda: scene.engine.label == 20)
    assert scene.holds(second)
    assert (scene.count("published"), scene.count("bad")) == (2, 0)


def test_older_ones_are_skipped_and_a_restart_repeats_nothing(scene: Scene) -> None:
    """The coordinator knows how far the channel is; nobody is paused for what is there already."""
    write(scene.folder / "step-1", 1)
    write(scene.folder / "step-2", 2)
    third = write(scene.folder / "step-3", 3)
    scene.until(lambda: scene.engine.label == 3)
    assert scene.count("skipped") == 2
    scene.watcher._disconnect()
    transfers = scene.transfers()
    scene.start()
    scene.until(lambda: scene.count("skipped") == 3)
    assert scene.count("published") == 0
    assert (scene.engine.label, scene.transfers()) == (3, transfers)
    assert scene.holds(third)
    write(scene.folder / "step-4", 4)
    scene.until(lambda: scene.engine.label == 4)


def test_a_bad_checkpoint_is_told_and_the_next_one_published(scene: Scene) -> None:
    """One of another model included: its layout is new, and so is the agent that publishes it."""
    write(scene.folder / "step-1", 1)
    scene.until(lambda: scene.engine.label == 1)
    write(scene.folder / "step-2", 2)
    (scene.folder / "step-2" / "config.json").unlink()
    scene.until(lambda: scene.count("bad") == 1)
    assert "no config.json" in json.loads(scene.watcher._status())["reason"]
    other = write(scene.folder / "step-3", 3, layers=1)
    scene.until(lambda: scene.engine.label == 3)
    assert scene.holds(other)


@pytest.mark.parametrize("what", ["no tensors", "index", "nested", "unforeseen"])
def test_no_single_folder_ends_the_watch(scene: Scene, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is counted once, with its reason, and the next one is published."""
    folder = scene.folder / "step-1"
    write(folder, 1)
    match what:
        case "no tensors":
            (folder / "model.safetensors.index.json").unlink()
            (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        case "index":
            (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1, "b": "c"}}')
        case "nested":
            (folder / "config.json").write_text("[" * 100_000)
        case _:
            monkeypatch.setattr(folders, "read_config", lambda *_: 1 // 0)
    scene.until(lambda: scene.count("bad") == 1)
    reason = json.loads(scene.watcher._status())["reason"]
    assert "step-1" in reason
    scene.settle()
    assert (scene.count("bad"), json.loads(scene.watcher._status())["reason"]) == (1, reason)
    monkeypatch.undo()
    write(scene.folder / "step-2", 2)
    scene.until(lambda: scene.engine.label == 2)


@pytest.mark.parametrize("error", [CorruptCheckpoint("nonsense"), AssemblyFailed("gone"), MemoryError("no room")])
def test_a_checkpoint_that_cannot_be_read_is_bad_or_tried_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Bad where reading it again cannot help, in the middle of a round too."""
    write(scene.folder / "step-1", 1)

    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(SafetensorsFiles, "read", broken)
    outcome, other = ("bad", "failed") if isinstance(error, CorruptCheckpoint) else ("failed", "bad")
    scene.until(lambda: scene.count(outcome) == 1)
    scene.settle()
    assert (scene.count(outcome), scene.count(other)) == (1, 0)
    assert str(error) in json.loads(scene.watcher._status())["reason"]
    monkeypatch.undo()
    write(scene.folder / "step-2", 2)
    scene.until(lambda: scene.engine.label == 2)


def test_an_unforeseen_error_while_publishing_is_tried_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing about the checkpoint. An interrupt still ends the watch."""
    write(scene.folder / "step-1", 1)
    monkeypatch.setattr(TrainerAgent, "publish", lambda *_: 1 // 0)
    scene.until(lambda: scene.count("failed") == 1)
    assert "division" in json.loads(scene.watcher._status())["reason"]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(TrainerAgent, "publish", interrupted)
    write(scene.folder / "step-2", 2)
    with pytest.raises(KeyboardInterrupt):
        scene.until(lambda: scene.engine.label == 2)


def test_a_checkpoint_that_could_not_be_read_is_read_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in its folder changes any more: waiting for a change would be to skip it, without a word."""
    weights = write(scene.folder / "step-1", 1)
    scene.watcher._machine.limits = scene.watcher._machine.limits.__class__(settle_s=0.1, retry_s=0.1)
    failures = [OSError(errno.EMFILE, "Too many open files")] * 2

    def opened(*given: Any, **named: Any) -> Checkpoint:
        if failures:
            raise failures.pop()
        return open_checkpoint(*given, **named)

    said: list[str] = []
    monkeypatch.setattr(scene.watcher._log, "log", lambda _level, event, **_: said.append(event))
    monkeypatch.setattr(watcher_module, "open_checkpoint", opened)
    scene.until(lambda: scene.engine.label == 1)
    assert scene.holds(weights)
    assert "checkpoint_not_read" in said


def test_a_coordinator_that_is_away_is_waited_for(scene: Scene) -> None:
    """The checkpoint is published when it is back."""
    scene.deployment.stop_coordinator()
    scene.start(connect_timeout_s=0.2)
    write(scene.folder / "step-1", 1)
    scene.until(lambda: scene.count("failed") == 1)
    scene.deployment.start_coordinator()
    scene.watcher._machine.limits = scene.watcher._machine.limits.__class__(retry_s=0.1)
    scene.until(lambda: scene.engine.label == 1)


def test_the_trainers_own_marker_is_obeyed(scene: Scene) -> None:
    """A whole checkpoint that the trainer has not declared finished stays where it is."""
    (scene.folder / LATEST).write_text("5")
    write(scene.folder / "iter_0000005", 1)
    write(scene.folder / "iter_0000010", 2)
    scene.until(lambda: scene.engine.label == 5)
    scene.settle()
    assert scene.engine.label == 5
    (scene.folder / LATEST).write_text("10")
    scene.until(lambda: scene.engine.label == 10)


def test_a_marker_that_says_nothing_pauses_the_watch_which_is_counted_and_said_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How far the trainer is, is not known; when the marker is mended, the watch goes on."""
    said: list[str] = []
    monkeypatch.setattr(
        scene.watcher._log, "log", lambda level, event, **_: said.append(event) if level >= logging.WARNING else None
    )
    (scene.folder / LATEST).write_text("soon")
    weights = write(scene.folder / "iter_0000005", 1)

    def paused() -> float:
        labels = {"cause": "marker"}
        return scene.watcher.metrics.registry.get_sample_value("weightbus_watch_looks_failed_total", labels) or 0.0

    scene.until(lambda: paused() >= 3)
    assert said == ["watch_paused"]
    assert "a step number up to" in json.loads(scene.watcher._status())["reason"]
    assert scene.engine.label != 5
    (scene.folder / LATEST).write_text("5")
    scene.until(lambda: scene.engine.label == 5)
    assert scene.holds(weights)


def test_a_dcp_folder_is_read_only_when_that_is_allowed(scene: Scene) -> None:
    """Its metadata is a pickle: without the setting it is bad, and is not opened."""
    folder = scene.folder / "step-1"
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(b"x")
    (folder / ".metadata").write_bytes(b"not even a pickle")
    scene.until(lambda: scene.count("bad") == 1)
    assert "--dcp" in json.loads(scene.watcher._status())["reason"]


def test_the_command_publishes_until_it_is_told_to_stop(scene: Scene) -> None:
    """With its metrics, its readiness and a clean end."""
    port = free_port()
    flags = {
        "channel": "c",
        "watch": str(scene.folder),
        "coordinator": scene.deployment.coordinator,
        "runtime-dir": str(scene.deployment.root / "run"),
        "settle-s": "0.1",
        "poll-s": "0.05",
        "http-port": str(port),
    }
    argv = ["--insecure-loopback", *(f"--{name}={value}" for name, value in flags.items())]
    program = "import sys; from weightbus.trainer_agent.cli.commands import trainer_agent as c; import argparse\n"
    program += "p = argparse.ArgumentParser(); c.configure(p); sys.exit(c.run(p.parse_args()))"
    process = subprocess.Popen([sys.executable, "-c", program, *argv], stderr=subprocess.PIPE, text=True)
    try:
        weights = write(scene.folder / "step-7", 7)
        give_up_at = time.monotonic() + 120
        while scene.engine.label != 7:
            assert time.monotonic() < give_up_at
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        assert scene.holds(weights)

        def ready() -> bool:
            return httpx.get(f"http://127.0.0.1:{port}/readyz", trust_env=False).status_code == 200

        while not ready():
            assert time.monotonic() < give_up_at
            time.sleep(0.05)

        def metrics() -> str:
            return httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text

        while "weightbus_watch_published_version 7.0" not in metrics():  # the engine has it before the trainer hears so
            assert time.monotonic() < give_up_at
            time.sleep(0.05)
    finally:
        process.terminate()
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
