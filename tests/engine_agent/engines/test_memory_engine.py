"""The contract on an engine in this process; and a whole round with it, in which nothing needs SGLang."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from weightbus.control.protocol.errors import ConfigurationError
from weightbus.control.protocol.messages import Outcome, TransportKind
from weightbus.control.server.coordinator_process import CoordinatorProcess
from weightbus.control.server.settings import CoordinatorSettings
from weightbus.engine_agent.engines import registry
from weightbus.engine_agent.engines.interface import Engine
from weightbus.engine_agent.engines.registry import EngineConnection
from weightbus.engine_agent.sidecar.driver import EngineAgent
from weightbus.engine_agent.sidecar.settings import EngineAgentSettings
from weightbus.trainer_agent import TrainerAgent

from ...kit import tiny_model
from ...kit.fake_source import FakeSource
from ...kit.fake_weights import read
from ...kit.memory_engine import MemoryEngine
from ...kit.waiting import until
from .engine_contract import Bench, EngineContract, Generated

KIND = "memory"


class InMemory:
    """The engine as its clients see it."""

    def __init__(self, engine: MemoryEngine) -> None:
        self._engine = engine

    def generate(self, count: int) -> Generated:
        tokens, labels = self._engine.generate(count)
        return Generated(tokens, labels[-1])

    def restart(self) -> None:
        self._engine.restart()


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """An engine with one rank, and with two."""
    folder = tmp_path_factory.mktemp("engine")
    first, second = tiny_model.write(folder / "a", 1), tiny_model.write(folder / "b", 2)
    engine = MemoryEngine(first, request.param)
    implements: Engine = engine
    made = Bench(implements, InMemory(engine), first, second, folder)
    yield made
    made.close()


class TestMemoryEngine(EngineContract):
    """The light engine keeps the contract."""


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The light engine has a name, for one test."""
    monkeypatch.setattr(registry, "KINDS", dict(registry.KINDS))
    registry.register(KIND, "tests.kit.memory_engine:open_engine")


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("transport", ["local", "distributed", "disk"])
def test_whole_rounds_with_an_engine_of_the_tests(tmp_path: Path, transport: str) -> None:
    """Coordinator, trainer and sidecar are the product's: both versions are committed, and the engine has the bits."""
    coordinator = CoordinatorProcess(
        CoordinatorSettings(insecure_loopback=True, router_port=0, http_port=0, journal=tmp_path / "j.sqlite")
    )
    endpoint = f"tcp://127.0.0.1:{coordinator.router_port}"
    first, second = tiny_model.write(tmp_path / "a", 1), tiny_model.write(tmp_path / "b", 2)
    engine, source = MemoryEngine(first, 2), FakeSource(read(second))
    with tempfile.TemporaryDirectory(prefix="wb-") as short:  # a socket's path must be short
        sidecar = EngineAgent(
            EngineAgentSettings(
                name="e0",
                channel="c",
                engine=KIND,
                server=engine.url,
                coordinator=endpoint,
                insecure_loopback=True,
                http_port=0,
                state_dir=tmp_path / "state",
                runtime_dir=Path(short),
                transports=(TransportKind(transport),),
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
                transport=(transport,),
                bucket_bytes=100_000,
                runtime_dir=Path(short),
                checkpoint_dir=tmp_path / "checkpoints",
                hf_config_dir=second,
                environ={},
            ) as trainer:
                for version in (1, 2):
                    source.weights["model.norm.weight"].add_(1.0)
                    report = trainer.publish(version)
                    (told,) = report.engines
                    assert (report.committed, told.outcome, told.transport) == (True, Outcome.COMMITTED, transport)
                    assert told.verified_by == "bucket-digest"
                    assert (engine.label(), engine.mode) == (str(version), "")
                    sent = {
                        name: tensor.contiguous().view(torch.uint8).numpy().tobytes()
                        for name, tensor in source.weights.items()
                    }
                    assert engine.weights == [sent, sent]
                    assert len(engine.generate()[0]) == 8
        finally:
            sidecar.stop()
            coordinator.stop()
            for thread in threads:
                thread.join(60)


def test_an_engine_that_is_not_known_is_refused() -> None:
    """With the kinds that there are."""
    with pytest.raises(ConfigurationError, match="choose one of sglang"):
        registry.open_engine("abacus", EngineConnection("http://127.0.0.1:1"))


def test_a_sidecar_imports_no_implementation_before_it_is_asked_for() -> None:
    """Another engine's environment need not have what SGLang's client imports."""
    code = "import sys, weightbus.engine_agent.sidecar.driver; print([n for n in sys.modules if 'engines.sglang' in n])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.strip() == "[]"
