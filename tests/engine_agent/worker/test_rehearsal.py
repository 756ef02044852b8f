"""A loader that is recorded before any version asks for it, on toy workers: used for its tensors, and for no others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from weightbus.dataplane.errors import DigestMismatch, TransferFailed
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.transports import plan_exchange as rehearsal
from weightbus.dataplane.transports.plan_exchange import Prerecording
from weightbus.dataplane.transports.worker_exchange import Workers
from weightbus.engine_agent.worker import worker_state
from weightbus.engine_agent.worker.worker_state import DigestReport, WorkerState

from ...kit.toy_direct import SPECS, WAIT_S, ToyShard, Trainer, World, holds
from ...kit.waiting import until


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def world(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path / "r", request.param, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that ran their loader."""
    ranks: list[int] = []
    plain = worker_state.trace_load

    def counted(*arguments: Any) -> Any:
        ranks.append(arguments[3])
        return plain(*arguments)

    monkeypatch.setattr(worker_state, "trace_load", counted)
    return ranks


def rehearse(world: World, specs: tuple[TensorSpec, ...] = SPECS) -> int:
    rehearsal = Prerecording(world.runtime, ahead=world.receiver._exchange._ahead)
    return rehearsal.record(specs, "e", world.server, WAIT_S)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [1, -1], ids=["same order", "another order"])
def test_the_first_round_records_nothing(world: World, recorded: list[int], order: int) -> None:
    """Whatever order the checkpoint's files had: nothing is written twice."""
    for model in world.server.models:
        model.norm.data.fill_(3.0)
    assert rehearse(world, SPECS[::order]) == 1
    assert all(bool((model.norm == 3.0).all()) for model in world.server.models)
    assert sorted(recorded) == list(range(world.server.tp))
    world.trainer.step(1)

    world.round()

    assert len(recorded) == world.server.tp
    assert holds(world.server, world.trainer.values)


def test_a_recording_in_another_order_is_the_one_that_would_be_made(world: World, recorded: list[int]) -> None:
    """But for the order of its rows."""
    rehearse(world, SPECS[::-1])
    world.round()
    kept = dict(world.receiver._exchange.traces)
    world.server.models = [ToyShard(rank, world.server.tp) for rank in range(world.server.tp)]
    world.round()

    made = {each.rank: each for each in world.receiver._exchange.traces.values()}
    assert len(recorded) == 2 * world.server.tp
    for each in kept.values():
        other = made[each.rank]
        assert each.copies.encode() == other.copies.encode()
        assert (each.tensors, each.loaded, each.unread) == (other.tensors, other.loaded, other.unread)


@pytest.mark.parametrize(
    "specs",
    [SPECS[:-1], (*SPECS[:5], TensorSpec("wide", "float32", (8,)), SPECS[6])],
    ids=["one less", "another dtype"],
)
def test_a_version_of_other_tensors_is_recorded_in_its_round(
    world: World, recorded: list[int], specs: tuple[TensorSpec, ...]
) -> None:
    """What was recorded says nothing of it."""
    rehearse(world, specs)

    world.round()

    assert len(recorded) == 2 * world.server.tp
    assert holds(world.server, world.trainer.values)


def test_a_model_whose_tensors_moved_meanwhile_is_recorded_in_its_round(world: World, recorded: list[int]) -> None:
    """Between the rehearsal and the round somebody put other memory under a parameter."""
    rehearse(world)
    world.server.models[0].up.data = world.server.models[0].up.data.clone()

    world.round()

    assert recorded.count(0) == 2
    assert holds(world.server, world.trainer.values)


def test_a_sidecar_that_begins_anew_finds_what_was_recorded(world: World, recorded: list[int]) -> None:
    """The workers keep it, whoever asked for it."""
    world.round()
    world.receiver.shutdown()
    world.receiver = type(world.receiver)(world.runtime)
    world.trainer.close()
    world.trainer = Trainer(world.runtime)

    world.round()

    assert len(recorded) == world.server.tp
    assert holds(world.server, world.trainer.values)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[DigestReport]:
    """What was bound for proofs."""
    made: list[DigestReport] = []
    real = DigestReport.__init__

    def counted(self: DigestReport, *arguments: Any) -> None:
        made.append(self)
        real(self, *arguments)

    monkeypatch.setattr(DigestReport, "__init__", counted)
    return made


@pytest.mark.parametrize("order", [1, -1], ids=["same order", "another order"])
def test_what_is_proven_is_bound_ahead_too(world: World, bound: list[DigestReport], order: int) -> None:
    """The first round of these tensors only makes its plan: boxes lie where they lie, whatever is offered first."""
    rehearse(world, SPECS[::order])
    assert len(bound) == world.server.tp
    world.trainer.step(1)
    world.round()
    assert len(bound) == world.server.tp
    assert holds(world.server, world.trainer.values)


@pytest.fixture
def worked_out(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What sidecars worked out, or asked of workers, of what was recorded."""
    found: list[str] = []

    def counted(what: str, real: Any) -> Any:
        return lambda *given: (found.append(what), real(*given))[1]

    monkeypatch.setattr(rehearsal, "make_verification", counted("proof", rehearsal.make_verification))  # type: ignore[attr-defined]
    real = Workers.ask_to_record

    def asked(*given: Any) -> Any:
        numbers = real(*given)
        found.extend("recording" for _ in numbers)
        return numbers

    monkeypatch.setattr(Workers, "ask_to_record", asked)
    return found


def test_the_first_round_works_out_and_asks_for_nothing(world: World, worked_out: list[str]) -> None:
    """Of tensors in the order that was foreseen, as those of the last version are."""
    rehearse(world, world.trainer.session(1).manifest.tensors)
    assert worked_out == ["recording"] * world.server.tp + ["proof"]
    world.trainer.step(1)
    world.round()
    assert len(worked_out) == world.server.tp + 1
    assert holds(world.server, world.trainer.values)


def test_in_another_order_the_proof_is_the_same(world: World, worked_out: list[str]) -> None:
    """Only what speaks of tensors by their number is told anew; and what is wrong is found."""
    rehearse(world, SPECS[::-1])
    session = world.trainer.session(1)
    world.trainer.step(1)
    with pytest.raises(DigestMismatch):
        world.round(session)
    world.round()
    assert worked_out.count("proof") == 1
    assert holds(world.server, world.trainer.values)


def test_a_model_that_has_more_tensors_by_now_begins_anew(
    world: World, recorded: list[int], worked_out: list[str]
) -> None:
    """What was recorded, and the proof of it, number the tensors that there were."""
    rehearse(world)
    for model in world.server.models:
        model.register_buffer("added", torch.zeros(4))

    world.round()

    assert len(recorded) == 2 * world.server.tp
    assert worked_out.count("proof") == 2
    assert all(len(each.targets) == len(SPECS) + 1 for each in world.receiver._exchange.traces.values())


@pytest.mark.parametrize("what", ["moved", "another dtype", "asked otherwise"])
def test_a_proof_of_something_else_is_bound_anew(world: World, bound: list[DigestReport], what: str) -> None:
    """It is told by its tables, and by the memory that they were bound to."""
    if what == "another dtype":
        rehearse(world, (*SPECS[:5], TensorSpec("wide", "float32", (8,)), SPECS[6]))
    else:
        rehearse(world)
        for model in world.server.models:
            if what == "moved":
                model.up.data = model.up.data.clone()
        for each in bound:  # other workers hold other boxes, say
            each.of = each.of if what == "moved" else (b"", *each.of[1:])
    world.round()
    assert len(bound) == 2 * world.server.tp
    world.trainer.step(2)
    world.round()
    assert len(bound) == 2 * world.server.tp
    assert holds(world.server, world.trainer.values)


def test_what_cannot_be_proven_is_the_first_rounds(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recording is there all the same, and the round says what it found."""
    with monkeypatch.context() as patched:
        patched.setattr(WorkerState, "warm", lambda *_: 1 / 0)
        made = Prerecording(world.runtime)
        assert made.record(SPECS, "e", world.server, WAIT_S) == 1  # type: ignore[arg-type]
        assert "ZeroDivisionError" in made.unproven
    world.round()
    assert holds(world.server, world.trainer.values)


class Twice(ToyShard):
    """What was offered last stays."""

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            super().load_weights([(name, tensor)])
            if name in ("up", "down"):
                self.norm.data.copy_(tensor[0, :8] if tensor.shape[1] >= 8 else tensor[:, 0])


def test_where_the_order_matters_it_must_be_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: list[int]
) -> None:
    """A place that is written twice holds what came last."""
    world = World(tmp_path / "r", 1, monkeypatch, shard=Twice)
    try:
        rehearse(world, SPECS[::-1])
        world.round()
        assert len(recorded) == 2
        assert holds(world.server, world.trainer.values)
    finally:
        world.close()


def test_draft_models_are_recorded_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: list[int]) -> None:
    """A server that speculates calls the loader for each of its models."""
    world = World(tmp_path / "r", 1, monkeypatch, drafts=(ToyShard,))
    try:
        assert rehearse(world) == 2
        world.trainer.step(4)
        world.round()
        assert len(recorded) == 2
        assert holds(world.server, world.trainer.values)
    finally:
        world.close()


@pytest.mark.parametrize("drafts", [(), (ToyShard,)], ids=["one model", "and a draft"])
def test_nothing_is_planned_while_the_server_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafts: tuple[type[ToyShard], ...]
) -> None:
    """A plan needs no worker."""
    world = World(tmp_path / "r", 1, monkeypatch, drafts=drafts)
    returned, plain = threading.Event(), world.server.load_direct
    monkeypatch.setattr(world.server, "load_direct", lambda *given: (plain(*given), returned.set())[0])
    seen: list[bool] = []
    monkeypatch.setattr(rehearsal, "_plan_once", lambda _: seen.append(returned.is_set()))
    try:
        rehearse(world)
        assert seen == [True]
    finally:
        world.close()


def test_a_model_that_takes_long_to_record_keeps_no_other_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server was let in when it came with its first one."""
    world = World(tmp_path / "r", 1, monkeypatch, drafts=(ToyShard,))
    plain, came = worker_state.trace_load, threading.Event()

    def slow(*arguments: Any) -> Any:
        came.wait(0.6)
        return plain(*arguments)

    gather = Workers.gather

    def late(workers: Workers, *arguments: Any) -> bool:
        """The server needs a moment for its next model."""
        if not arguments[3]:
            arguments[5]()
        return gather(workers, *arguments)

    monkeypatch.setattr(worker_state, "trace_load", slow)
    monkeypatch.setattr(rehearsal, "_COMING_S", 0.5)
    monkeypatch.setattr(Workers, "gather", late)
    try:
        assert rehearse(world) == 2
    finally:
        world.close()


def test_a_loader_that_fails_says_so_and_the_server_goes_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is held; the next round records as ever."""
    with monkeypatch.context() as patched:
        patched.setattr(worker_state, "trace_load", lambda *_: 1 / 0)
        with pytest.raises(TransferFailed, match="ZeroDivisionError"):
            rehearse(world)

    world.round()

    assert holds(world.server, world.trainer.values)


def test_a_busy_server_is_not_waited_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls no loader before its requests have ended; what calls it then finds nobody, and returns."""
    monkeypatch.setattr(rehearsal, "_COMING_S", 0.3)
    ended = threading.Event()
    world.server.before_load = lambda: (ended.wait(WAIT_S), None)[1]
    began = time.monotonic()
    asked = Prerecording(world.runtime)
    with pytest.raises(TransferFailed, match="it has requests"):
        asked.record(SPECS, "e", world.server, WAIT_S)  # type: ignore[arg-type]
    assert time.monotonic() - began < 5
    assert asked.pending

    ended.set()
    world.server.before_load = lambda: None
    world.round()
    assert holds(world.server, world.trainer.values)


def test_an_agent_that_ends_lets_the_server_go_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that records is told, and returns to its server."""
    held = threading.Event()
    plain = worker_state.trace_load

    def slow(*arguments: Any) -> Any:
        held.wait(WAIT_S)
        return plain(*arguments)

    monkeypatch.setattr(worker_state, "trace_load", slow)
    asked = Prerecording(world.runtime)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            asked.record(SPECS, "e", world.server, WAIT_S)  # type: ignore[arg-type]
        except TransferFailed as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: len(asked._exchange.workers._workers) == world.server.tp, "the workers")
    asked.close()
    held.set()
    thread.join(WAIT_S)

    assert len(failed) == 1
