"""A quantized version is offered before it is made: copied part by part, and proven by a table that comes last."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.tensors.manifest import DigestTable, Manifest
from weightbus.dataplane.transports.direct.receiver import DirectReceiver
from weightbus.dataplane.transports.direct.sender import DirectSender
from weightbus.dataplane.transports.interface import Peer, Tabled, TransferSession
from weightbus.engine_agent.worker import loader as worker_loader
from weightbus.engine_agent.worker.load_tracer import NamedTensors
from weightbus.trainer_agent.export.memory_export import MemoryExport
from weightbus.trainer_agent.quantized.quantized_assembly import ArenaReadyFlags, ResidentQuantization
from weightbus.trainer_agent.quantized.quantized_source import ReadableQuantizedSource, quantized
from weightbus.trainer_agent.sources.hf_module import HFModuleSource

from ...kit import quantizing
from ...kit.toy_direct import WAIT_S, Server, ToyShard
from ...kit.waiting import until

LAYERS = 16


class Served(ToyShard):
    """Keeps every tensor as it is served."""

    manifest: Manifest

    def __init__(self, rank: int, tp: int) -> None:
        torch.nn.Module.__init__(self)
        self.rank, self.tp = rank, tp
        for spec in self.manifest.tensors:
            empty = torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype))
            self.register_parameter(spec.name.replace(".", "/"), torch.nn.Parameter(empty, requires_grad=False))

    def load_weights(self, weights: NamedTensors) -> None:
        for name, tensor in weights:
            self.get_parameter(name.replace(".", "/")).data.copy_(tensor)


class Making:
    """Stands for a GPU: `ResidentQuantization.prepare` runs in a thread, which stops at every flag for permission."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may = threading.Semaphore(0)
        self.ends = 0
        self._begun = threading.Event()
        make, mark = ResidentQuantization.prepare, ArenaReadyFlags.set

        def begin(resident: ResidentQuantization) -> None:
            self._begun.clear()
            self.thread = threading.Thread(target=make, args=(resident,))
            self.thread.start()
            assert self._begun.wait(WAIT_S)

        def stop(flags: ArenaReadyFlags, arena: torch.Tensor, part: int, value: int) -> None:
            self._begun.set()
            assert self.may.acquire(timeout=WAIT_S)
            mark(flags, arena, part, value)

        monkeypatch.setattr(ResidentQuantization, "prepare", begin)
        monkeypatch.setattr(ArenaReadyFlags, "set", stop)


@pytest.fixture
def source() -> ReadableQuantizedSource:
    """Linear layers that are quantized, and a norm that is not."""
    torch.manual_seed(1)
    module = torch.nn.Module()
    for layer in range(LAYERS):
        block = torch.nn.Module()
        block.q_proj = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        module.register_module(f"layer{layer}", block)
    module.norm = torch.nn.LayerNorm(64, bias=False, dtype=torch.bfloat16)
    made = quantized(HFModuleSource(module, model="Sequential"), quantizing.config(16))
    assert isinstance(made, ReadableQuantizedSource)
    return made


@pytest.fixture
def memory_export(source: ReadableQuantizedSource, tmp_path: Path) -> Iterator[MemoryExport]:
    made = MemoryExport(source, Manifest.of(source.model, source.tensors()), tmp_path / "r", "c")
    yield made
    made.close()


def test_a_round_over_what_is_being_made(
    source: ReadableQuantizedSource, memory_export: MemoryExport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every part is made only when the engine has the one before, and digested when all are; three times."""
    manifest = Manifest.of(source.model, source.tensors())
    memory_export.export(ready_flags=True)
    layout = memory_export.current.layout
    gpu = Making(monkeypatch)
    monkeypatch.setattr(Served, "manifest", manifest, raising=False)
    server, receiver = Server(1, monkeypatch, Served), DirectReceiver(tmp_path / "r")
    sender = DirectSender(tmp_path / "r", "c", lambda: memory_export.current)
    with ThreadPoolExecutor(2) as pool:
        for epoch in (1, 2, 3):
            with torch.no_grad():
                for tensor in source._readable.memory():
                    tensor.mul_(-0.7)
            before = model_bytes(server)
            memory_export.prepare(digests=False, ready_flags=True)
            memory_export.export(prepared=True, ready_flags=True)
            assert memory_export.current.layout == layout
            session = TransferSession("c", epoch, epoch, manifest, None)
            address = sender.offer(session, [Peer("e", 1)])
            taken = pool.submit(receiver.receive, session, address, "e", 1, server, WAIT_S)  # type: ignore[arg-type]
            served = pool.submit(serve, sender)
            parts = source.ready_parts()
            assert parts is not None
            assert len(parts.ends) > 3
            for _ in parts.ends:
                assert not taken.done()
                gpu.may.release()
                until(lambda before=before: not torch.equal(model_bytes(server), before))  # type: ignore[misc]
                before = model_bytes(server)
            gpu.thread.join(WAIT_S)
            digests = memory_export.digests()
            assert digests is not None
            table = DigestTable(manifest.digest(), epoch, integrity.ALGORITHM, digests)
            sender.tabled(Tabled(table, b"seal"))

            assert taken.result(WAIT_S).tabled == Tabled(table, b"seal")
            served.result(WAIT_S)
            assert sender.failed == {}
    sender.close()
    receiver.shutdown()
    worker_loader.forget()


def serve(sender: DirectSender) -> None:
    sender.ready(WAIT_S)
    sender.finish(WAIT_S)


def model_bytes(server: Server) -> torch.Tensor:
    """Of the only worker."""
    return torch.cat([each.data.reshape(-1).view(torch.uint8) for each in server.models[0].parameters()])


def test_nothing_waits_for_marks_where_nothing_is_made(tmp_path: Path) -> None:
    """Weights as they are trained: no parts, no round, and a layout of the name that it had."""
    source = HFModuleSource(torch.nn.Linear(8, 8))
    memory_export = MemoryExport(source, Manifest.of("toy", source.tensors()), tmp_path / "r", "c")
    memory_export.prepare(digests=True, ready_flags=True)
    memory_export.export(prepared=True, ready_flags=True)

    exported = memory_export.current
    assert [each.round for each in exported.exporters] == [0]
    assert [each.parts for each in exported.exports] == [None]
    memory_export.prepare(digests=True, ready_flags=True)
    assert memory_export.digests() is not None
    memory_export.export(prepared=True, ready_flags=True)
    assert memory_export.current is exported
    memory_export.close()
