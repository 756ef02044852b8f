"""A transport is one folder and one line: one of the tests' own keeps the contract, and carries whole rounds."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from weightbus.control.protocol.messages import Outcome, TransportKind
from weightbus.control.server.coordinator_process import CoordinatorProcess
from weightbus.control.server.settings import CoordinatorSettings
from weightbus.dataplane.errors import Unsupported
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shard, Shards, ShardView
from weightbus.dataplane.transports import registry
from weightbus.dataplane.transports.interface import LoadedBy
from weightbus.engine_agent.engines.sglang.pickle_payload import LOADER
from weightbus.engine_agent.sidecar.driver import EngineAgent
from weightbus.engine_agent.sidecar.settings import EngineAgentSettings
from weightbus.trainer_agent.machine.errors import PublishFailed
from weightbus.trainer_agent.machine.events import EndReason
from weightbus.trainer_agent.publish.agent import TrainerAgent

from ...kit import tiny_model
from ...kit.fake_sglang import FakeSGLang
from ...kit.fake_source import FakeSource
from ...kit.fake_weights import read
from ...kit.toy_transport import TOY
from ...kit.waiting import until
from ..transport_contract import Halves, TransportContract

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def halves() -> Iterator[Halves]:
    """The process that forks halves of transfers."""
    yield from Halves.serve()


class TestToy(TransportContract):
    """The contract over a transport that no registry knows: it is given by its place."""

    kind = "toy"
    transport = "tests.kit.toy_transport:TOY"


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(registry, "_known", dict(registry._known))
    for cached in (registry._installed, registry.by_name):
        cached.cache_clear()
    yield
    for cached in (registry._installed, registry.by_name):
        cached.cache_clear()


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """The path of a socket must be short."""
    with tempfile.TemporaryDirectory(prefix="wb-") as folder:
        yield Path(folder)


class Exposed(FakeSource):
    """Its memory may be given in place. Satisfies `Exportable` too."""

    def local_shards(self, tensors: Sequence[TensorSpec]) -> Shards:
        whole = [
            Shard(name, Box((0,) * held.dim(), tuple(held.shape)), "bfloat16", ShardView(at, 0, tuple(held.stride())))
            for at, (name, held) in enumerate(self.weights.items())
        ]
        return Shards.of(tensors, whole, self.rank)

    def memory(self) -> Sequence[torch.Tensor]:
        return tuple(self.weights.values())

    def collect(self, blob: bytes) -> Sequence[bytes]:
        return [blob]


class Loading(FakeSGLang):
    """Launched with our loader: memory may be given to its workers in place."""

    def server_info(self, body: dict[str, Any]) -> dict[str, Any]:
        return {**super().server_info(body), "custom_weight_loader": [LOADER]}


@contextlib.contextmanager
def fleet(
    tmp_path: Path, short_dir: Path, source_kind: type[FakeSource] = FakeSource, kind: type[FakeSGLang] = FakeSGLang
) -> Iterator[tuple[FakeSource, FakeSGLang, TrainerAgent]]:
    """Coordinator, trainer and sidecar are the product's."""
    coordinator = CoordinatorProcess(
        CoordinatorSettings(insecure_loopback=True, router_port=0, http_port=0, journal=tmp_path / "j.sqlite")
    )
    endpoint = f"tcp://127.0.0.1:{coordinator.router_port}"
    first, second = tiny_model.write(tmp_path / "a", 1), tiny_model.write(tmp_path / "b", 2)
    server, source = kind(first).start(), source_kind(read(second))
    sidecar = EngineAgent(
        EngineAgentSettings(
            name="e0",
            channel="c",
            server=server.url,
            coordinator=endpoint,
            insecure_loopback=True,
            http_port=0,
            state_dir=tmp_path / "state",
            runtime_dir=short_dir,
            transports=(TransportKind("disk"), TransportKind("toy")),
            poll_s=0.05,
        )
    )
    threads = [threading.Thread(target=each.run, daemon=True) for each in (coordinator, sidecar)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: sidecar._bus is not None, "the sidecar")
        with TrainerAgent.connect(
            source,
            channel="c",
            coordinator=endpoint,
            insecure_loopback=True,
            transport=("local", "toy", "disk"),
            bucket_bytes=50_000,
            runtime_dir=short_dir,
            checkpoint_dir=tmp_path / "checkpoints",
            environ={},
        ) as trainer:
            yield source, server, trainer
    finally:
        sidecar.stop()
        coordinator.stop()
        for thread in threads:
            thread.join(60)
        server.stop()


@pytest.mark.usefixtures("apart")
def test_whole_rounds_over_a_transport_of_the_tests(tmp_path: Path, short_dir: Path) -> None:
    """Both versions are committed, and the server holds the bits.

    The coordinator never hears more of the transport than its name.
    """
    registry.register(TOY)
    with fleet(tmp_path, short_dir) as (source, server, trainer):
        for version in (1, 2):
            source.weights["model.norm.weight"].add_(1.0)
            report = trainer.publish(version)
            (engine,) = report.engines
            assert (report.committed, engine.outcome, engine.transport) == (True, Outcome.COMMITTED, "toy")
            assert engine.verified_by == "live-digest"
            assert server.label == str(version)
            assert all(torch.equal(server.weights.tensors[name], held) for name, held in source.weights.items())
        assert len(trainer.manifest.buckets) > 2


@pytest.mark.usefixtures("apart")
def test_no_snapshot_travels_by_a_transport_that_gives_memory_in_place(tmp_path: Path, short_dir: Path) -> None:
    """The coordinator cannot know that it does: the engine fails with the reason, and what would change it."""
    registry.register(msgspec.structs.replace(TOY, loaded_by=LoadedBy.LOADER))
    with fleet(tmp_path, short_dir, Exposed, Loading) as (_, _, trainer):
        handle = trainer.publish(1, mode="snapshot")
        with pytest.raises(PublishFailed) as failed:
            handle.wait()
        assert failed.value.result.ending is not EndReason.INTERNAL
        assert "transport toy gives the weights that are being trained" in str(failed.value)


@pytest.mark.usefixtures("apart")
def test_an_installed_transport_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another distribution names it in ``weightbus.transports``, and it is known without a call."""
    with pytest.raises(Unsupported):
        registry.by_name("toy")
    registry._installed.cache_clear()
    installed = tmp_path / "toy_transport-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: toy-transport\nVersion: 1\n")
    entries = "[weightbus.transports]\ntoy = tests.kit.toy_transport:TOY\nbroken = tests.kit.toy_transport:GONE\n"
    (installed / "entry_points.txt").write_text(entries)
    monkeypatch.syspath_prepend(tmp_path)
    assert {"toy", "broken"} <= set(registry.names())
    assert registry.by_name("toy") is TOY
    with pytest.raises(Unsupported, match="cannot be imported"):
        registry.by_name("broken")


@pytest.mark.usefixtures("apart")
def test_a_name_belongs_to_one_transport() -> None:
    """Registering the same one twice changes nothing; another one of its name is refused."""
    registry.register(TOY)
    registry.register(TOY)
    with pytest.raises(ValueError, match="'local'"):
        registry.register(type(TOY)(name="local", sender=TOY.sender, receiver=TOY.receiver, loaded_by=TOY.loaded_by))
