"""A trainer's live tensors into the parameters of toy workers: both halves, real sockets and memory, no server.

The workers are threads of this process; everything else is what runs in production.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weightbus.dataplane import direct, integrity, worker_wire
from weightbus.dataplane.deadline import Deadline
from weightbus.dataplane.direct import DirectSender, Exposed
from weightbus.dataplane.direct_receiver import DirectReceiver
from weightbus.dataplane.direct_wire import Exporting
from weightbus.dataplane.errors import DigestMismatch, TransferFailed, Unsupported
from weightbus.dataplane.exporter import RegionExporter
from weightbus.dataplane.frames import FrameListener
from weightbus.dataplane.manifest import DigestTable, Manifest, TensorSpec
from weightbus.dataplane.pieces import Box, Piece, Pieces, View
from weightbus.dataplane.plan import Plan
from weightbus.dataplane.transport import Peer, Receipt, Session
from weightbus.engine_agent import worker_loader
from weightbus.engine_agent.model_tensors import ModelTensors
from weightbus.engine_agent.recorder import NamedTensors

WAIT_S = 120.0
"""The first recording of a process imports parts of torch, for seconds, and minutes on a busy machine."""
SPECS = (
    TensorSpec("embed", "bfloat16", (16, 8)),
    TensorSpec("up", "bfloat16", (8, 8)),
    TensorSpec("down", "bfloat16", (8, 8)),
    TensorSpec("norm", "bfloat16", (8,)),
    TensorSpec("odd", "bfloat16", (6,)),
    TensorSpec("wide", "bfloat16", (8,)),
    TensorSpec("scaled", "float32", (4,)),
)


class Shard(torch.nn.Module):
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


class Server:
    """Stands for SGLang: calls the loader in every worker, and returns when all have."""

    def __init__(self, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tp = tp
        self.models = [Shard(rank, tp) for rank in range(tp)]
        self.before_load: Callable[[], None] = lambda: None
        self._rank = threading.local()
        monkeypatch.setattr(worker_loader, "_rank", lambda: self._rank.value)

    def load_direct(self, socket: str, deadline_s: float) -> None:
        self.before_load()
        workers = [threading.Thread(target=self._work, args=(rank, socket)) for rank in range(self.tp)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(deadline_s)

    def _work(self, rank: int, socket: str) -> None:
        self._rank.value = rank
        worker_loader.load(self.models[rank], [(f"weightbus:{socket}", torch.empty(0))])


class Trainer:
    """Two ranks, each with half of every tensor's rows; the odd ones are whole on both."""

    def __init__(self, runtime: Path) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.exporters = [RegionExporter(runtime, "c", rank) for rank in range(2)]
        self.shards: list[dict[str, torch.Tensor]] = [{}, {}]
        self.step(0)
        self.sender = DirectSender(runtime, "c", self.expose)

    def step(self, seed: int) -> None:
        """New values, in the memory that is there."""
        torch.manual_seed(seed)
        for spec in SPECS:
            value = torch.randn(spec.shape).to(getattr(torch, spec.dtype))
            self.values[spec.name] = value
            for rank, shard in enumerate(self.shards):
                mine = self._rows(value, rank)
                shard.setdefault(spec.name, torch.empty_like(mine)).copy_(mine)

    @staticmethod
    def _rows(value: torch.Tensor, rank: int) -> torch.Tensor:
        half = value.shape[0] // 2
        return value[half * rank : half * (rank + 1)].clone() if value.dim() == 2 else value.clone()

    def expose(self) -> Exposed:
        parts, maps, addresses = [], [], []
        for rank, (exporter, shard) in enumerate(zip(self.exporters, self.shards, strict=True)):
            maps.append(exporter.export(list(shard.values())))
            pieces: list[Piece] = []
            for number, (name, tensor) in enumerate(shard.items()):
                first = tensor.shape[0] * rank if tensor.dim() == 2 else 0
                start = (first,) + (0,) * (tensor.dim() - 1)
                stop = (first + tensor.shape[0], *tensor.shape[1:])
                dtype = str(tensor.dtype).removeprefix("torch.")
                pieces.append(Piece(name, Box(start, stop), dtype, View(number, 0, tuple(tensor.stride()))))
            parts.append(Pieces.of(self.manifest.tensors, pieces, rank))
            addresses.append(Exporting(holder=rank, address=exporter.address().address, generation=exporter.generation))
        return Exposed(Pieces.join(parts), tuple(maps), tuple(addresses))

    @property
    def manifest(self) -> Manifest:
        return Manifest.of("toy", SPECS)

    def session(self, epoch: int) -> Session:
        digests = []
        for spec in self.manifest.tensors:
            packed = self.values[spec.name].contiguous().view(torch.uint8).reshape(-1)
            digests.append(integrity.digest_tensors(packed, (0, spec.nbytes)))
        table = DigestTable(self.manifest.digest(), epoch, integrity.ALGORITHM, b"".join(digests))
        return Session("c", epoch, epoch, self.manifest, table)

    def close(self) -> None:
        self.sender.close()
        for exporter in self.exporters:
            exporter.close()


class World:
    """A trainer and an engine, and a round between them."""

    def __init__(self, runtime: Path, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trainer = Trainer(runtime)
        self.server = Server(tp, monkeypatch)
        self.receiver = DirectReceiver(runtime)
        self.epoch = 0
        self._pool = ThreadPoolExecutor(1)

    def round(self, session: Session | None = None) -> Receipt:
        """One transfer; raises what the receiver raises."""
        self.epoch += 1
        sent = session or self.trainer.session(self.epoch)
        address = self.trainer.sender.offer(sent, [Peer("e", self.server.tp)])
        received: Future[Receipt] = self._pool.submit(
            self.receiver.receive,
            sent,
            address,
            "e",
            1,
            self.server,
            WAIT_S,  # type: ignore[arg-type]
        )
        self.trainer.sender.ready(WAIT_S)
        self.trainer.sender.finish(WAIT_S)
        return received.result(WAIT_S)

    def close(self) -> None:
        self.receiver.shutdown()
        worker_loader.forget()
        self._pool.shutdown()
        self.trainer.close()


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def world(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path / "r", request.param, monkeypatch)
    yield made
    made.close()


def holds(server: Server, values: Mapping[str, torch.Tensor]) -> bool:
    """Every worker holds what its own loader makes of `values`."""
    for model in server.models:
        oracle = Shard(model.rank, model.tp)
        oracle.load_weights(iter(values.items()))
        pairs = zip(ModelTensors(model).tensors, ModelTensors(oracle).tensors, strict=True)
        if not all(torch.equal(a, b) for a, b in pairs):
            return False
    return True


def test_a_round_brings_the_live_weights(world: World) -> None:
    """From two ranks' memories, into one worker or two: as the engine's own loader would have done it."""
    receipt = world.round()

    assert holds(world.server, world.trainer.values)
    assert receipt.checked
    assert world.trainer.sender.failed == {}


def test_a_steady_round_only_copies(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second round neither records nor plans nor opens anything; and it brings the new values."""
    world.round()
    world.trainer.step(1)
    seen: list[str] = []
    obey = worker_loader._obey

    def note(state: object, message: object) -> object:
        seen.append(type(message).__name__)
        return obey(state, message)  # type: ignore[arg-type]

    monkeypatch.setattr(worker_loader, "_obey", note)

    world.round()

    assert seen == ["Replay"] * world.server.tp
    assert holds(world.server, world.trainer.values)


def test_memory_that_was_replaced_is_opened_anew(world: World) -> None:
    """A trainer whose storages move has a new generation, and the same plan."""
    world.round()
    world.trainer.shards = [{name: tensor.clone() for name, tensor in shard.items()} for shard in world.trainer.shards]
    world.trainer.step(2)

    world.round()

    assert [exporter.generation for exporter in world.trainer.exporters] == [2, 2]
    assert holds(world.server, world.trainer.values)


def test_a_model_whose_tensors_moved_is_recorded_again(world: World) -> None:
    """A post-load step that swaps a parameter's memory makes the old plan worthless."""
    world.round()
    world.server.models[0].up.data = world.server.models[0].up.data.clone()
    world.trainer.step(3)

    world.round()

    assert holds(world.server, world.trainer.values)


@pytest.mark.parametrize(
    ("corrupt", "tensor"),
    [
        (lambda shard: shard["up"].view(torch.uint8)[1, 3].bitwise_xor_(4), "up"),
        (lambda shard: shard["embed"].copy_(shard["embed"].flip(0)), "embed"),
        (lambda shard: shard["norm"].copy_(shard["norm"].roll(1)), "norm"),
        (lambda shard: shard["odd"].copy_(shard["odd"].roll(1)), "odd"),
        (lambda shard: shard["wide"].zero_(), "wide"),
        (lambda shard: shard["scaled"].neg_(), "scaled"),
    ],
)
def test_what_is_not_the_version_is_noticed(
    world: World, corrupt: Callable[[dict[str, torch.Tensor]], object], tensor: str
) -> None:
    """A flipped bit, exchanged rows, a shift, zeros: the digest table says another thing, and names the tensor."""
    session = world.trainer.session(1)
    for shard in world.trainer.shards:
        corrupt(shard)

    with pytest.raises(DigestMismatch, match=tensor):
        world.round(session)
    assert world.receiver.touched
    assert "DigestMismatch" in world.trainer.sender.failed["e"]


def test_what_one_worker_loses_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that one worker leaves out, when everybody else's are right."""
    world.round()
    world.trainer.step(4)
    model = world.server.models[0]
    state = worker_loader._states[model]
    proof = state._proof
    assert proof is not None

    class Spoiled:
        def run(self) -> object:
            model.norm.data[3] = 9.0
            return proof.run()

        def close(self) -> None: ...

    monkeypatch.setattr(state, "_proof", Spoiled())

    with pytest.raises(DigestMismatch, match="norm"):
        world.round()


def test_a_trainer_that_plans_otherwise_is_not_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions of the planner, say: the digests differ, and nothing is copied."""
    planned = direct.make_plan

    def otherwise(*arguments: Any) -> Plan:
        return replace(planned(*arguments), staging_bytes=1, staged=())

    monkeypatch.setattr(direct, "make_plan", otherwise)

    with pytest.raises(TransferFailed, match="one version of weightbus"):
        world.round()
    assert not world.receiver.touched


def test_an_exporter_that_is_gone_fails_the_round_before_a_byte_moves(world: World) -> None:
    """The workers say so, the engine is untouched in memory, and the server goes on."""
    exposed = world.trainer.expose()
    broken = tuple(
        Exporting(holder=each.holder, address=each.address + "-gone", generation=each.generation)
        for each in exposed.exporters
    )
    world.trainer.sender._expose = lambda: Exposed(exposed.pieces, exposed.exports, broken)

    with pytest.raises(TransferFailed, match="does not answer"):
        world.round()
    assert all(not tensor.any() for model in world.server.models for tensor in ModelTensors(model).tensors)


def test_a_server_that_answers_without_its_workers_is_a_failure(world: World) -> None:
    """Nobody is waited for when the call has come back."""
    world.server.tp += 1

    def give_up() -> None:
        raise TransferFailed("the server said no")

    world.server.before_load = give_up

    with pytest.raises(TransferFailed, match="said no"):
        world.round()
    assert not world.receiver.touched


def test_a_part_of_a_tensor_cannot_be_proven(world: World) -> None:
    """An engine that drops rows is refused: the digest is of the whole tensor."""
    for model in world.server.models:
        model.norm = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)
        whole = model.load_weights

        def partly(weights: NamedTensors, whole: Callable[[NamedTensors], None] = whole) -> None:
            whole((name, tensor[:4] if name == "norm" else tensor) for name, tensor in weights)

        model.load_weights = partly  # type: ignore[method-assign]

    with pytest.raises(Unsupported, match="'norm'"):
        world.round()
    assert not world.receiver.touched


def test_a_sidecar_that_hangs_up_sets_the_worker_free(tmp_path: Path) -> None:
    """At whatever point: the loader returns, and the server lives; nobody told it to copy, so it did not."""
    for heard in range(2):
        model = Shard(0, 1)
        listener = FrameListener(tmp_path / f"w{heard}.sock")
        worker = threading.Thread(target=worker_loader.load, args=(model, [(f"weightbus:{listener.path}", None)]))
        worker.start()
        sidecar = listener.accept(Deadline(WAIT_S), "the worker")
        if heard:
            assert isinstance(worker_wire.hear_worker(sidecar, Deadline(WAIT_S), "hello"), worker_wire.Hello)
            worker_wire.say(sidecar, worker_wire.Record(layout="x", tensors=SPECS), Deadline(WAIT_S))

        sidecar.close()
        listener.close()
        worker.join(WAIT_S)

        assert not worker.is_alive()
        assert not any(bool(tensor.any()) for tensor in ModelTensors(model).tensors)
    worker_loader.forget()


def test_what_is_no_message_ends_the_exchange(tmp_path: Path) -> None:
    """Bytes that nobody of ours sends, or a plan before a recording: refused, and the worker says why."""
    listener = FrameListener(tmp_path / "w.sock")
    model = Shard(0, 1)
    worker = threading.Thread(target=worker_loader.load, args=(model, [(f"weightbus:{listener.path}", None)]))
    worker.start()
    sidecar = listener.accept(Deadline(WAIT_S), "the worker")
    worker_wire.hear_worker(sidecar, Deadline(WAIT_S), "hello")

    worker_wire.say(sidecar, worker_wire.Replay(epoch=1, version=1, exports=()), Deadline(WAIT_S))
    answer = worker_wire.hear_worker(sidecar, Deadline(WAIT_S), "an answer")
    sidecar.send(b"\xc1", Deadline(WAIT_S))
    worker.join(WAIT_S)

    assert isinstance(answer, worker_wire.Failed)
    assert "no plan" in answer.reason
    assert not answer.touched
    assert not worker.is_alive()
    sidecar.close()
    listener.close()
    worker_loader.forget()


def test_loaders_are_called_with_what_they_know() -> None:
    """A call that is none of ours changes nothing and raises nothing: SGLang would end the server."""
    model = Shard(0, 1)

    worker_loader.load(model, [("lm_head.weight", torch.ones(2))])
    worker_loader.load(model, [("weightbus:/nowhere/socket", torch.ones(2))])

    assert not np.any([bool(tensor.any()) for tensor in ModelTensors(model).tensors])
