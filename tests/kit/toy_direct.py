"""A trainer of two ranks and an engine of toy workers: both halves of direct rounds without a server.

The workers are threads of this process; sockets, memory and everything else are what runs in production.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.memory.export_map import ArenaParts
from weightbus.dataplane.memory.exports import RegionExporter
from weightbus.dataplane.tensors.manifest import DigestTable, Manifest, TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shard, Shards, ShardView
from weightbus.dataplane.transports.direct.receiver import DirectReceiver
from weightbus.dataplane.transports.direct.sender import DirectSender
from weightbus.dataplane.transports.interface import Address, ExportedWeights, Exporting, Peer, Receipt, TransferSession
from weightbus.engine_agent.worker import loader as worker_loader
from weightbus.engine_agent.worker.load_tracer import NamedTensors
from weightbus.engine_agent.worker.model_tensors import ModelTensors

WAIT_S = 120.0
"""The first recording of a process imports parts of torch, for seconds, and minutes on a busy machine."""
CPU = torch.device("cpu")
SPECS = (
    TensorSpec("embed", "bfloat16", (16, 8)),
    TensorSpec("up", "bfloat16", (8, 8)),
    TensorSpec("down", "bfloat16", (8, 8)),
    TensorSpec("norm", "bfloat16", (8,)),
    TensorSpec("odd", "bfloat16", (6,)),
    TensorSpec("wide", "bfloat16", (8,)),
    TensorSpec("scaled", "float32", (4,)),
)


class ToyShard(torch.nn.Module):
    """One of `tp` ranks: rows, columns, a whole tensor, an odd one, a cast, and a calculation."""

    def __init__(self, rank: int, tp: int) -> None:
        super().__init__()
        self.rank, self.tp = rank, tp

        def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)

        self.embed = parameter(24 // tp, 8)
        self.up = parameter(8 // tp, 8)
        self.down = parameter(8, 8 // tp)
        self.norm = parameter(8)
        self.odd = parameter(6)
        self.wide = parameter(8, dtype=torch.float32)
        self.scaled = parameter(4, dtype=torch.float32)

    def load_weights(self, weights: NamedTensors) -> None:
        """As SGLang's layers do it."""
        for name, tensor in weights:
            target = getattr(self, name).data
            if name == "scaled":
                target.copy_(tensor * 2)
                continue
            cut = tensor
            if name in ("embed", "up"):
                rows = tensor.shape[0] // self.tp
                cut = tensor.narrow(0, rows * self.rank, rows)
            if name == "down":
                cut = tensor.narrow(1, 8 // self.tp * self.rank, 8 // self.tp)
            if name == "embed":
                target[cut.shape[0] :].zero_()
                target = target[: cut.shape[0]]
            target.copy_(cut)


_HERE = threading.local()
"""Of the thread that is a worker: its rank."""


class Server:
    """Stands for SGLang: calls the loader in every worker, and returns when all have."""

    def __init__(
        self,
        tp: int,
        monkeypatch: pytest.MonkeyPatch,
        shard: type[ToyShard] = ToyShard,
        drafts: Sequence[type[ToyShard]] = (),
    ) -> None:
        self.tp = tp
        self.models = [shard(rank, tp) for rank in range(tp)]
        self.draft_models = [[draft(rank, tp) for draft in drafts] for rank in range(tp)]
        self.drafts = bool(drafts)
        self.calls = 0
        self.before_load: Callable[[], None] = lambda: None
        monkeypatch.setattr(worker_loader, "_rank", lambda: _HERE.rank)

    def load_direct(self, socket: str, deadline_s: float) -> None:
        self.calls += 1
        self.before_load()
        workers = [threading.Thread(target=self._work, args=(rank, socket)) for rank in range(self.tp)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(deadline_s)

    def _work(self, rank: int, socket: str) -> None:
        _HERE.rank = rank
        for model in (*self.draft_models[rank], self.models[rank]):  # the order of SGLang 0.5.17
            worker_loader.serve_sidecar(model, socket)


class Offering(DirectSender):
    """Remembers where it said that it is."""

    address = Address("")

    def offer(self, session: TransferSession, peers: Sequence[Peer]) -> Address:
        self.address = super().offer(session, peers)
        return self.address


class Trainer:
    """Two ranks, each with half of every tensor's rows; the odd ones are whole on both."""

    def __init__(self, runtime: Path, specs: tuple[TensorSpec, ...] = SPECS, device: torch.device = CPU) -> None:
        self.specs, self.device = specs, device
        self.values: dict[str, torch.Tensor] = {}
        self.exporters = [RegionExporter(runtime, "c", rank) for rank in range(2)]
        self.shards: list[dict[str, torch.Tensor]] = [{}, {}]
        self.step(0)
        self.sender = Offering(runtime, "c", self.expose)

    def step(self, seed: int) -> None:
        """New values, in the memory that is there."""
        torch.manual_seed(seed)
        for spec in self.specs:
            value = torch.randn(spec.shape).to(getattr(torch, spec.dtype))
            self.values[spec.name] = value
            for rank, shard in enumerate(self.shards):
                mine = self._rows(value, rank)
                shard.setdefault(spec.name, torch.empty_like(mine, device=self.device)).copy_(mine)

    @staticmethod
    def _rows(value: torch.Tensor, rank: int) -> torch.Tensor:
        half = value.shape[0] // 2
        return value[half * rank : half * (rank + 1)].clone() if value.dim() == 2 else value.clone()

    def expose(self) -> ExportedWeights:
        parts, maps, addresses = [], [], []
        for rank, (exporter, shard) in enumerate(zip(self.exporters, self.shards, strict=True)):
            maps.append(exporter.export(list(shard.values())))
            parts.append(self.pieces(rank))
            addresses.append(Exporting(holder=rank, address=exporter.address(), generation=exporter.generation))
        return ExportedWeights(Shards.join(parts), tuple(maps), tuple(addresses))

    def pieces(self, rank: int) -> Shards:
        """What a rank holds."""
        pieces: list[Shard] = []
        for number, (name, tensor) in enumerate(self.shards[rank].items()):
            first = tensor.shape[0] * rank if tensor.dim() == 2 else 0
            start = (first,) + (0,) * (tensor.dim() - 1)
            stop = (first + tensor.shape[0], *tensor.shape[1:])
            dtype = str(tensor.dtype).removeprefix("torch.")
            pieces.append(Shard(name, Box(start, stop), dtype, ShardView(number, 0, tuple(tensor.stride()))))
        return Shards.of(self.manifest.tensors, pieces, rank)

    @property
    def manifest(self) -> Manifest:
        return Manifest.of("toy", self.specs)

    def session(self, epoch: int) -> TransferSession:
        digests = []
        for spec in self.manifest.tensors:
            packed = self.values[spec.name].contiguous().view(torch.uint8).reshape(-1)
            digests.append(integrity.digest_tensors(packed, (0, spec.nbytes)))
        table = DigestTable(self.manifest.digest(), epoch, integrity.ALGORITHM, b"".join(digests))
        return TransferSession("c", epoch, epoch, self.manifest, table)

    def close(self) -> None:
        self.sender.close()
        for exporter in self.exporters:
            exporter.close()
        self.shards.clear()  # shared storages, each an open file: not kept until the next collection of cycles


class Maker(Trainer):
    """Makes all that it offers anew for each version, in an arena on each rank and in three parts."""

    ENDS = (2, 5, 7)
    """The tensor behind which each part ends."""

    def __init__(self, runtime: Path, specs: tuple[TensorSpec, ...] = SPECS) -> None:
        self.round = 0
        self.parts: list[ArenaParts] = []
        self.marks: list[torch.Tensor] = []
        super().__init__(runtime, specs)
        for rank, shard in enumerate(self.shards):
            sizes = [-(-tensor.nbytes // 16) * 16 for tensor in shard.values()]
            begins = [sum(sizes[:at]) for at in range(len(sizes) + 1)]
            arena = torch.zeros(begins[-1] + 8 * len(self.ENDS), dtype=torch.uint8)
            self.parts.append(ArenaParts(0, tuple(begins[each] for each in self.ENDS), begins[-1]))
            self.marks.append(arena[begins[-1] :].view(torch.int64))
            for begin, (name, tensor) in zip(begins, tuple(shard.items()), strict=False):
                self.shards[rank][name] = arena[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def begin(self, seed: int) -> None:
        """A version of which nothing is made yet."""
        torch.manual_seed(seed)
        self.values = {spec.name: torch.randn(spec.shape).to(getattr(torch, spec.dtype)) for spec in self.specs}
        self.round += 1
        for marks in self.marks:
            marks.zero_()

    def make(self, part: int) -> None:
        """One part of it on both ranks."""
        names = list(self.shards[0])[self.ENDS[part - 1] if part else 0 : self.ENDS[part]]
        for rank, shard in enumerate(self.shards):
            for name in names:
                shard[name].copy_(self._rows(self.values[name], rank))
            self.marks[rank][part] = self.round

    def expose(self) -> ExportedWeights:
        maps, addresses = [], []
        for rank, (exporter, shard) in enumerate(zip(self.exporters, self.shards, strict=True)):
            maps.append(exporter.export(list(shard.values()), settled=False, parts=self.parts[rank]))
            address, generation = exporter.address(), exporter.generation
            addresses.append(Exporting(holder=rank, address=address, generation=generation, round=self.round))
        return ExportedWeights(Shards.join([self.pieces(rank) for rank in range(2)]), tuple(maps), tuple(addresses))


class World:
    """A trainer and an engine, and a round between them."""

    def __init__(  # noqa: PLR0917
        self,
        runtime: Path,
        tp: int,
        monkeypatch: pytest.MonkeyPatch,
        specs: tuple[TensorSpec, ...] = SPECS,
        shard: type[ToyShard] = ToyShard,
        drafts: Sequence[type[ToyShard]] = (),
        trainer: type[Trainer] = Trainer,
    ) -> None:
        self.runtime = runtime
        self.trainer = trainer(runtime, specs)
        self.server = Server(tp, monkeypatch, shard, drafts)
        self.receiver = DirectReceiver(runtime)
        self.epoch = 0
        self._pool = ThreadPoolExecutor(1)

    def round(self, session: TransferSession | None = None) -> Receipt:
        """One transfer; raises what the receiver raises."""
        self.epoch += 1
        sent = session or self.trainer.session(self.epoch)
        self.trainer.sender.offer(sent, [Peer("e", self.server.tp)])
        received = self.receive(sent, "e", self.trainer.sender.address)
        self.trainer.sender.ready(WAIT_S)
        self.trainer.sender.finish(WAIT_S)
        return received.result(WAIT_S)

    def receive(
        self, session: TransferSession, engine: str, address: Address, deadline_s: float = WAIT_S
    ) -> Future[Receipt]:
        """The engine's half, in a thread of its own."""
        return self._pool.submit(self.receiver.receive, session, address, engine, 1, self.server, deadline_s)  # type: ignore[arg-type]

    def close(self) -> None:
        self.receiver.shutdown()
        worker_loader.forget()
        self._pool.shutdown()
        self.trainer.close()


def state(server: Server) -> list[torch.Tensor]:
    """A copy of everything that the workers hold."""
    return [tensor.clone() for model in server.models for tensor in ModelTensors(model).tensors]


def unchanged(server: Server, before: list[torch.Tensor]) -> bool:
    """Whether the workers hold what `state` found."""
    return all(torch.equal(a, b) for a, b in zip(state(server), before, strict=True))


def holds(server: Server, values: Mapping[str, torch.Tensor]) -> bool:
    """Every model of every worker holds what its own loader makes of `values`."""
    for model in (*server.models, *(draft for drafts in server.draft_models for draft in drafts)):
        oracle = type(model)(model.rank, model.tp)
        oracle.load_weights(iter(values.items()))
        pairs = zip(ModelTensors(model).tensors, ModelTensors(oracle).tensors, strict=True)
        if not all(torch.equal(a, b) for a, b in pairs):
            return False
    return True
