"""A trainer's live tensors into the parameters of toy workers: both halves, real sockets and memory, no server.

The workers are threads of this process; everything else is what runs in production.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from weightbus.dataplane.copy.copy_cuda import DEFAULT_COPY_STREAMS
from weightbus.dataplane.errors import DeadlineExceeded, DigestMismatch, StaleSession, TransferFailed, Unsupported
from weightbus.dataplane.memory.exports import RegionExporter, RegionImporter
from weightbus.dataplane.processes.connections import Deadline, FrameListener, Frames
from weightbus.dataplane.reshard.reshard_plan import ReshardPlan
from weightbus.dataplane.reshard.verification import Verification
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.transports import plan_exchange, worker_exchange as worker_wire
from weightbus.dataplane.transports.direct import sender as direct
from weightbus.dataplane.transports.direct.receiver import DirectReceiver
from weightbus.dataplane.transports.interface import ExportedWeights, Exporting, Peer, Receipt
from weightbus.dataplane.transports.worker_exchange import Workers
from weightbus.engine_agent.worker import loader as worker_loader, worker_state
from weightbus.engine_agent.worker.load_tracer import NamedTensors
from weightbus.engine_agent.worker.model_tensors import ModelTensors
from weightbus.engine_agent.worker.worker_state import WorkerState
from weightbus.engine_agent.worker_loader import load

from ...kit.toy_direct import SPECS, WAIT_S, Server, ToyShard, Trainer, World, holds


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def world(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path / "r", request.param, monkeypatch)
    yield made
    made.close()


def test_a_round_brings_the_live_weights(world: World) -> None:
    """From two ranks' memories, into one worker or two: as the engine's own loader would have done it."""
    receipt = world.round()

    assert holds(world.server, world.trainer.values)
    assert receipt.checked
    assert world.trainer.sender.failed == {}


def test_a_round_brings_the_padding_too(world: World) -> None:
    """A server that was launched with random weights has none: what its loader fills is filled in every round."""
    for seed in (1, 2):
        for model in world.server.models:
            model.embed.data.fill_(7.0)
        world.trainer.step(seed)
        world.round()

        assert holds(world.server, world.trainer.values)


def test_no_worker_waits_where_nothing_is_made(world: World) -> None:
    """And nobody is told of seconds that there is nothing to say of: a step of a round is in its figures or is none."""
    world.round()
    assert "copy" in world.receiver.seconds
    assert "wait" not in world.receiver.seconds


def test_a_sidecar_that_began_anew_has_its_workers_record_and_plan(world: World) -> None:
    """It knows nothing of what they recorded; who records lets go of its plan, though it will be the same again."""
    world.round()
    for _ in range(2):
        world.receiver.shutdown()
        world.receiver = DirectReceiver(world.runtime)
        world.trainer.step(5)
        world.round()
        assert holds(world.server, world.trainer.values)


class InPlace(ToyShard):
    """Its loader changes what it is given, as Gemma's does, and keeps some of it."""

    def load_weights(self, weights: NamedTensors) -> None:
        for name, tensor in weights:
            if name == "norm":
                tensor.add_(1.0)
            if name == "wide":
                tensor.mul_(3)
            if name == "scaled":
                tensor.mul_(0.5)
            super().load_weights([(name, tensor)])
            if name == "scaled":
                self.kept = tensor


def test_a_loader_that_changes_what_it_is_given_gets_tensors_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every round the same: what was staged is proven as it came, and what the loader kept stays as it was."""
    world = World(tmp_path / "r", 2, monkeypatch, shard=InPlace)
    try:
        for seed in (1, 2, 3):
            world.trainer.step(seed)
            world.round()
            oracle = InPlace(0, 2)
            oracle.load_weights([(name, value.clone()) for name, value in world.trainer.values.items()])
            for name in ("norm", "wide", "scaled", "kept"):
                assert torch.equal(getattr(world.server.models[0], name), getattr(oracle, name)), (seed, name)
    finally:
        world.close()


PREDICTION = TensorSpec("prediction", "bfloat16", (64, 8))


class Unserved(ToyShard):
    """Its loader skips a part of the version, as SGLang skips prediction layers."""

    def load_weights(self, weights: NamedTensors) -> None:
        super().load_weights((name, tensor) for name, tensor in weights if name != PREDICTION.name)


@pytest.mark.parametrize("tp", [1, 2])
def test_bytes_are_counted_where_they_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int) -> None:
    """A part of the version that no worker loads is not among them, and a share is that of one worker."""
    taken = []
    for specs, shard in ((SPECS, ToyShard), ((*SPECS, PREDICTION), Unserved)):
        world = World(tmp_path / shard.__name__, tp, monkeypatch, specs, shard=shard)
        try:
            assert world.receiver.most_bytes == 0
            assert world.round().bytes == world.trainer.manifest.nbytes
            assert holds(world.server, world.trainer.values)
            taken.append(world.receiver.most_bytes)
        finally:
            world.close()
    whole = sum(tensor.nbytes for tensor in ModelTensors(ToyShard(0, tp)).tensors)
    padding = sum(spec.nbytes for spec in SPECS if spec.name == "embed") // 2 // tp
    assert taken[0] == taken[1]
    assert taken[0] == whole - padding


class Router(torch.nn.Module):
    """As SGLang's Glm4MoeGate: its first forward pass keeps the weight in float32, and later ones use that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("_weight_fp32", None, persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._weight_fp32 is None:
            self._weight_fp32 = self.weight.data.to(torch.float32)
        return torch.nn.functional.linear(hidden, self._weight_fp32)


class Routed(ToyShard):
    """With a router."""

    def __init__(self, rank: int, tp: int) -> None:
        super().__init__(rank, tp)
        self.gate = Router()

    def load_weights(self, weights: NamedTensors) -> None:
        for name, tensor in weights:
            if name == "gate":
                self.gate.weight.data.copy_(tensor)
            else:
                super().load_weights([(name, tensor)])


@pytest.mark.parametrize("generated", ["before", "between", "never"])
def test_a_router_computes_with_the_weights_that_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generated: str
) -> None:
    """Also where the engine has kept a copy of earlier ones, and in the memory that captured graphs read."""
    specs = (*SPECS, TensorSpec("gate", "bfloat16", (8, 8)))
    world, hidden = World(tmp_path / "r", 2, monkeypatch, specs, shard=Routed), torch.eye(8)
    gates = [model.gate for model in world.server.models if isinstance(model, Routed)]
    try:
        for seed in (1, 2, 3):
            if generated == ("before" if seed == 1 else "between" if seed == 2 else ""):
                for gate in gates:
                    gate(hidden)
            memory = [gate._weight_fp32 for gate in gates]
            world.trainer.step(seed)
            world.round()
            assert all(one is gate._weight_fp32 for one, gate in zip(memory, gates, strict=True))
        expected = world.trainer.values["gate"].float().T
        assert all(torch.equal(gate(hidden), expected) for gate in gates)
    finally:
        world.close()


NARROW = TensorSpec("narrow", "float32", (8,))


class Narrow(ToyShard):
    """Keeps a tensor with fewer bits than it is served with."""

    def __init__(self, rank: int, tp: int) -> None:
        super().__init__(rank, tp)
        self.narrow = torch.nn.Parameter(torch.zeros(8, dtype=torch.bfloat16), requires_grad=False)


def test_a_cast_that_loses_bits_goes_through_the_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored could not be compared with the version; what the loader is given can."""
    world = World(tmp_path / "r", 2, monkeypatch, (*SPECS, NARROW), shard=Narrow)
    try:
        world.trainer.step(1)
        assert world.round().checked
        served = world.trainer.values["narrow"]
        assert not torch.equal(served, served.bfloat16().float())
        assert all(torch.equal(model.narrow, served.bfloat16()) for model in world.server.models)
    finally:
        world.close()


def test_a_steady_round_only_copies(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second round neither records nor plans nor opens anything; and it brings the new values.

    Nor does the sidecar go through what a plan reads: that is of as many regions as a trainer has allocations.
    """
    world.round()
    monkeypatch.setattr(plan_exchange, "regions_read", lambda _plan: pytest.fail("a plan was gone through"))
    world.trainer.step(1)
    seen: list[str] = []
    obey = worker_loader._obey

    def note(state: object, message: object, called_off: object) -> object:
        seen.append(message.kind)
        return obey(state, message, called_off)  # type: ignore[arg-type]

    monkeypatch.setattr(worker_loader, "_obey", note)

    world.round()

    assert seen == ["Replay"] * world.server.tp
    assert holds(world.server, world.trainer.values)


def test_a_loader_that_is_older_than_marks_understands_a_round_in_which_nothing_is_made(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server outlives its sidecar's upgrade: it is told nothing of marks where there are none to wait for."""
    heard: list[bytes] = []
    hear = worker_wire.WORKER.hear

    def older(frames: Frames, deadline: Deadline, waiting_for: str) -> worker_wire.ToWorker:
        message = hear(frames, deadline, waiting_for)
        if isinstance(message, worker_wire.ExecutePlan):
            heard.append(msgspec.msgpack.encode(message))
        return message

    monkeypatch.setattr(worker_wire.WORKER, "hear", older)
    world.round()
    assert heard
    for each in heard:
        assert set(msgspec.msgpack.decode(each)) == {"type", "epoch", "version", "exports"}


def test_memory_that_was_replaced_is_opened_anew(world: World) -> None:
    """A trainer whose storages move has a new generation, and the same plan."""
    world.round()
    world.trainer.shards = [{name: tensor.clone() for name, tensor in shard.items()} for shard in world.trainer.shards]
    world.trainer.step(2)

    world.round()

    assert [exporter.generation for exporter in world.trainer.exporters] == [2, 2]
    assert holds(world.server, world.trainer.values)


def test_tensors_that_lie_otherwise_are_planned_anew(world: World) -> None:
    """Where the trainer has them now, and not where the first layout had them."""
    world.round()
    for shard in world.trainer.shards:
        shard["up"] = torch.empty_like(shard["up"].t().contiguous()).t()
    world.trainer.step(2)

    world.round()

    assert holds(world.server, world.trainer.values)


def test_a_trainer_that_began_anew_is_opened_anew(world: World) -> None:
    """Same process number, address and generation, as containers have them: only the connection tells them apart."""
    world.round()
    runtime = world.trainer.exporters[0].address().rsplit("/", 1)[0]
    world.trainer.close()
    world.trainer = Trainer(Path(runtime))
    world.trainer.step(9)

    world.round()

    assert holds(world.server, world.trainer.values)


def test_a_version_of_other_tensors_is_recorded_anew(world: World) -> None:
    """The next trainer serves them in another order, and one in another dtype: what was recorded says nothing of it."""
    world.round()
    world.trainer.close()
    others = (*reversed(SPECS[:5]), TensorSpec("wide", "float32", (8,)), SPECS[6])
    world.trainer = Trainer(world.runtime, others)
    world.trainer.step(6)

    world.round()

    assert holds(world.server, world.trainer.values)


@pytest.mark.parametrize("tp", [1, 4])
def test_a_server_that_was_launched_with_other_workers_takes_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    """One sidecar, one trainer: of what was worked out for two workers nothing is left in the way, there and back."""
    world = World(tmp_path / "r", 2, monkeypatch)
    try:
        for seed, workers in enumerate((2, tp, 2)):
            world.server = Server(workers, monkeypatch)
            world.trainer.step(seed)
            world.round()
            assert holds(world.server, world.trainer.values)
    finally:
        world.close()


def test_memory_of_a_trainer_that_is_gone_is_let_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between rounds, by itself: a GPU's memory is not free before its last reader has closed it."""
    released = threading.Event()
    close = RegionImporter.close

    def note(importer: RegionImporter) -> None:
        close(importer)
        released.set()

    world.round()
    monkeypatch.setattr(RegionImporter, "close", note)

    world.trainer.close()

    assert released.wait(WAIT_S)


def test_the_end_of_a_rank_that_is_read_no_more_is_nobodys(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer begins anew with fewer ranks: those that it had are gone, and no round fails for them."""
    monkeypatch.setattr(WorkerState, "release", lambda _: None)  # what does it between rounds comes too late
    world.round()
    former = RegionExporter(world.runtime, "c", 7)
    former.export([torch.zeros(8)])
    for model in world.server.models:
        worker_loader._states[model]._importer.open(former.address(), 7, 1, [0], WAIT_S)
    former.close()
    world.trainer.step(5)

    world.round()

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
    assert state._report is not None
    proof = state._report.proof

    class Spoiled:
        def run(self) -> object:
            model.norm.data[3] = 9.0
            return proof.run()

        def close(self) -> None: ...

    monkeypatch.setattr(state._report, "proof", Spoiled())

    with pytest.raises(DigestMismatch, match="norm"):
        world.round()


def test_a_trainer_that_plans_otherwise_is_not_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions of the planner, say: the digests differ, and nothing is copied."""
    planned = direct.make_plan

    def otherwise(*arguments: Any) -> ReshardPlan:
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
    world.trainer.sender._expose = lambda: ExportedWeights(exposed.shards, exposed.exports, broken)

    with pytest.raises(TransferFailed, match="does not answer"):
        world.round()
    assert all(not tensor.any() for model in world.server.models for tensor in ModelTensors(model).tensors)


def test_a_server_that_answers_without_its_workers_is_a_failure(world: World) -> None:
    """No worker is waited for when the call has come back."""
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
        model = ToyShard(0, 1)
        listener = FrameListener(tmp_path / f"w{heard}.sock")
        worker = threading.Thread(target=worker_loader.serve_sidecar, args=(model, str(listener.path)))
        worker.start()
        sidecar = listener.accept(Deadline(WAIT_S), "the worker")
        if heard:
            assert isinstance(worker_wire.SIDECAR.hear(sidecar, Deadline(WAIT_S), "hello"), worker_wire.Hello)
            worker_wire.SIDECAR.say(sidecar, worker_wire.RecordTrace(layout="x", tensors=SPECS), Deadline(WAIT_S))

        sidecar.close()
        listener.close()
        worker.join(WAIT_S)

        assert not worker.is_alive()
        assert not any(bool(tensor.any()) for tensor in ModelTensors(model).tensors)
    worker_loader.forget()


def test_what_is_no_message_ends_the_exchange(tmp_path: Path) -> None:
    """Bytes that nobody of ours sends, or a plan before a recording: refused, and the worker says why."""
    listener = FrameListener(tmp_path / "w.sock")
    model = ToyShard(0, 1)
    worker = threading.Thread(target=worker_loader.serve_sidecar, args=(model, str(listener.path)))
    worker.start()
    sidecar = listener.accept(Deadline(WAIT_S), "the worker")
    worker_wire.SIDECAR.hear(sidecar, Deadline(WAIT_S), "hello")

    worker_wire.SIDECAR.say(sidecar, worker_wire.ExecutePlan(epoch=1, version=1, exports=()), Deadline(WAIT_S))
    answer = worker_wire.SIDECAR.hear(sidecar, Deadline(WAIT_S), "an answer")
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
    model = ToyShard(0, 1)

    load(model, [("lm_head.weight", torch.ones(2))])
    load(model, [("weightbus:/nowhere/socket", torch.ones(2))])

    assert not np.any([bool(tensor.any()) for tensor in ModelTensors(model).tensors])


class Larger(ToyShard):
    """The same, with a hundred tensors more."""

    def __init__(self, rank: int, tp: int) -> None:
        super().__init__(rank, tp)
        for number in range(100):
            more = torch.nn.Parameter(torch.zeros(8, 4, dtype=torch.bfloat16), requires_grad=False)
            self.register_parameter(f"more{number}", more)


def test_messages_do_not_grow_with_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A steady round is one call of the server, and the same few messages with a hundred tensors more."""
    more = tuple(TensorSpec(f"more{number}", "bfloat16", (8, 4)) for number in range(100))
    counts: dict[int, tuple[int, int]] = {}
    sent: list[int] = []
    send, push = Frames.send, Frames.push

    def counted(frames: Frames, message: bytes, deadline: Deadline, fds: Sequence[int] = ()) -> None:
        sent.append(len(message))
        send(frames, message, deadline, fds)

    def pushed(frames: Frames, framed: memoryview, fds: Sequence[int] = ()) -> memoryview:
        sent.append(len(framed))
        return push(frames, framed, fds)

    monkeypatch.setattr(Frames, "send", counted)
    monkeypatch.setattr(Frames, "push", pushed)
    for specs, shard in ((SPECS, ToyShard), (SPECS + more, Larger)):
        world = World(tmp_path / f"{len(specs)}", 2, monkeypatch, specs, shard)
        world.round()
        world.trainer.step(1)
        sent.clear()
        calls = world.server.calls
        world.round()
        counts[len(specs)] = len(sent), world.server.calls - calls
        assert holds(world.server, world.trainer.values)
        world.close()

    assert set(counts.values()) == {(3 + 4 * 2, 1)}


def test_a_round_says_where_its_time_went(world: World) -> None:
    """Every step that holds the server, none of them counted twice."""
    world.round()
    first = dict(world.receiver.seconds)
    world.trainer.step(1)
    world.round()
    steady = world.receiver.seconds

    assert {
        "gather",
        "layout",
        "record",
        "plan",
        "agree",
        "adopt",
        "replay",
        "copy",
        "verify",
        "compare",
    } <= first.keys()
    assert steady.keys() == first.keys() - {"layout", "plan", "agree"}
    steps = ("gather", "record", "adopt", "replay", "compare")
    assert sum(steady[step] for step in steps) <= steady["held"] + 1e-6


def test_the_layout_is_asked_for_when_it_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server may let its workers in late, and a sender that nobody reads from gives up, or keeps others waiting."""
    done: list[str] = []
    say, gather = plan_exchange.RECEIVER.say, Workers.gather

    def said(frames: Any, message: Any, deadline: Any) -> None:
        done.append(message.kind)
        say(frames, message, deadline)

    def gathered(*arguments: Any) -> bool:
        found = gather(*arguments)
        done.append("workers came")
        return found

    monkeypatch.setattr(plan_exchange.RECEIVER, "say", said)
    monkeypatch.setattr(Workers, "gather", gathered)
    world.round()
    assert done.index("workers came") < done.index("GiveLayout") < done.index("Propose")


def test_the_server_returns_while_it_is_proven(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers go when they have said what they hold; what is wrong is found all the same."""
    returned, load, check = threading.Event(), world.server.load_direct, Verification.verify

    def loading(socket: str, deadline_s: float) -> None:
        load(socket, deadline_s)
        returned.set()

    def late(proof: Verification, *found: Any) -> None:
        assert returned.wait(WAIT_S), "the server is held until the proof is there"
        check(proof, *found)

    monkeypatch.setattr(world.server, "load_direct", loading)
    monkeypatch.setattr(Verification, "verify", late)
    assert world.round().checked
    returned.clear()
    session = world.trainer.session(2)
    world.trainer.step(2)  # other weights than were announced

    with pytest.raises(DigestMismatch):
        world.round(session)
    assert returned.is_set()
    assert world.receiver.touched


def test_a_version_is_taken_when_it_is_proven(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may still have to return, which is waited for by whoever asks it for something that comes after."""
    go_on, load = threading.Event(), world.server.load_direct

    def slow(socket: str, deadline_s: float) -> None:
        load(socket, deadline_s)
        assert go_on.wait(WAIT_S)

    monkeypatch.setattr(world.server, "load_direct", slow)
    assert world.round().checked
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match="to return from our loader"):
            world.receiver.returned(0.01)
    go_on.set()
    world.receiver.returned(WAIT_S)
    world.receiver.returned(WAIT_S)


def test_a_server_that_returns_badly_does_so_until_another_version_is_taken(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds is proven; that nothing is wrong with it is not."""
    load = world.server.load_direct

    def bad(socket: str, deadline_s: float) -> None:
        load(socket, deadline_s)
        raise TransferFailed("the server says no")

    monkeypatch.setattr(world.server, "load_direct", bad)
    assert world.round().checked
    for _ in range(2):
        with pytest.raises(TransferFailed, match="says no"):
            world.receiver.returned(WAIT_S)
    monkeypatch.setattr(world.server, "load_direct", load)
    world.trainer.step(2)
    assert world.round().checked
    world.receiver.returned(WAIT_S)


def test_copies_that_could_be_faster_are_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the worker to whoever leads it, for as long as it is so."""
    world.round()
    assert world.receiver.remark == ""
    with monkeypatch.context() as patch:
        patch.setattr(worker_state._Bound, "remark", property(lambda _: "no engines"))
        world.round()
        assert world.receiver.remark == "no engines"
    world.round()
    assert world.receiver.remark == ""


def test_what_lies_on_another_gpu_is_told_to_the_engine(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The regions that a plan reads: those of rank 1, here, and no other."""
    asked: list[tuple[int, int]] = []
    engine = worker_state.copy_engine_for

    def bound(device: torch.device, branches: int = 0, remote: Sequence[int] = ()) -> Any:
        if branches:
            asked.append((branches, len(remote)))
        return engine(device)

    monkeypatch.setattr(worker_state, "copy_engine_for", bound)
    monkeypatch.setattr(RegionImporter, "remote", lambda _self, holder, _region: holder == 1)

    world.round()

    assert {branches for branches, _ in asked} == {DEFAULT_COPY_STREAMS}
    read = [sum(source.rank == 1 for source in plan.sources) for plan in world.receiver._exchange.agreements[0].plans]
    assert sorted(count for _, count in asked) == sorted(read)
    assert all(read)


def test_what_was_recorded_is_told_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """In the server's log, by each worker: which tensors are no copies, and which parts no round writes."""
    with caplog.at_level("INFO", logger=worker_state.__name__):
        world.round()
        world.round()

    told = [each.getMessage() for each in caplog.records if "recorded" in each.getMessage()]
    assert len(told) == world.server.tp
    assert all(each.startswith(f"weightbus: recorded {len(SPECS)} tensors") for each in told)


@pytest.mark.parametrize("told", [4, 6])
def test_another_epoch_is_refused(world: World, told: int) -> None:
    """A receiver of an older or newer epoch gets nothing, and its server is not called."""
    world.trainer.sender.offer(world.trainer.session(5), [Peer("e", world.server.tp)])

    taken = world.receive(world.trainer.session(told), "e", world.trainer.sender.address)
    with ThreadPoolExecutor(1) as waiting:
        ready = waiting.submit(world.trainer.sender.ready, WAIT_S)  # for the one that it expects
        assert isinstance(taken.exception(WAIT_S), StaleSession)
        world.trainer.sender.withdraw("e", "it is of another epoch")
        assert isinstance(ready.exception(WAIT_S), TransferFailed)

    assert world.server.calls == 0
    assert not world.receiver.touched
    assert set(world.trainer.sender.failed) == {"e"}


@pytest.mark.parametrize("known", [False, True], ids=["absent", "withdrawn"])
def test_a_receiver_that_does_not_come_is_named_and_the_others_are_served(world: World, *, known: bool) -> None:
    """It costs `join_s`, or nothing where somebody knows that it will not come."""
    sender, session = world.trainer.sender, world.trainer.session(1)
    sender.offer(session, [Peer("e", world.server.tp), Peer("absent", 1)])
    taken = world.receive(session, "e", sender.address)
    if known:
        sender.withdraw("absent", "its agent died")

    sender.ready(WAIT_S, join_s=WAIT_S if known else 4.0)
    sender.finish(WAIT_S)

    assert sender.failed == {"absent": "its agent died" if known else "did not come within 4.0 s"}
    assert isinstance(taken.result(WAIT_S), Receipt)
    assert holds(world.server, world.trainer.values)


def test_a_trainer_that_stands_still_costs_the_deadline(world: World) -> None:
    """It has offered and says nothing more: the receiver gives up in time, and nothing was touched since then."""
    world.round()
    assert world.receiver.touched
    session = world.trainer.session(2)
    world.trainer.sender.offer(session, [Peer("e", world.server.tp)])

    taken = world.receive(session, "e", world.trainer.sender.address, deadline_s=1.0)

    assert isinstance(taken.exception(WAIT_S), DeadlineExceeded)
    assert not world.receiver.touched


def test_an_engine_that_stands_still_is_dropped_at_the_deadline(world: World) -> None:
    """The trainer goes on with its work; what the engine does later is of no concern."""
    sender, session = world.trainer.sender, world.trainer.session(1)
    stuck = threading.Event()
    world.server.before_load = lambda: stuck.wait(WAIT_S) and None
    sender.offer(session, [Peer("e", world.server.tp)])
    taken = world.receive(session, "e", sender.address)
    sender.ready(WAIT_S)

    sender.finish(1.0)
    sender.close()
    stuck.set()

    assert sender.failed == {"e": "had not finished within 1.0 s"}
    assert isinstance(taken.exception(WAIT_S), TransferFailed)
    assert not world.receiver.touched
