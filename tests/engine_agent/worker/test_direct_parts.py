"""Direct rounds of a version that is made while it is read: copied part by part, and never before its part is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from weightbus.dataplane.copy.copy_engine import ReadyFlags
from weightbus.dataplane.errors import DataplaneError, TransferFailed
from weightbus.dataplane.transports import worker_exchange as worker_wire
from weightbus.dataplane.transports.interface import Address, Peer, Receipt
from weightbus.engine_agent.worker import loader as worker_loader

from ...kit.ends import Ends
from ...kit.toy_direct import WAIT_S, Maker, Server, Trainer, World, holds
from ...kit.waiting import until
from .test_direct_failures import PROMPT_S, kill, state, unchanged


class Making(World):
    """A world whose trainer makes what it offers."""

    def __init__(self, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(runtime, 2, monkeypatch, trainer=Maker)

    @property
    def maker(self) -> Maker:
        assert isinstance(self.trainer, Maker)
        return self.trainer

    def start(self, deadline_s: float = WAIT_S) -> tuple[Future[Receipt], threading.Thread]:
        """Offer what is not made yet, and have the engine come."""
        self.epoch += 1
        session = self.trainer.session(self.epoch)
        address = self.trainer.sender.offer(session, [Peer("e", self.server.tp)])

        def serve() -> None:
            self.trainer.sender.ready(WAIT_S)
            self.trainer.sender.finish(WAIT_S)

        serving = threading.Thread(target=serve)
        serving.start()
        return self.receive(session, "e", address, deadline_s), serving

    def has(self, name: str) -> bool:
        """Every worker holds this tensor of the version that is made."""
        return has(self.server, self.trainer, name)


def has(server: Server, trainer: Trainer, name: str) -> bool:
    for model in server.models:
        oracle = type(model)(model.rank, model.tp)
        oracle.load_weights([(name, trainer.values[name])])
        if not torch.equal(getattr(model, name), getattr(oracle, name)):
            return False
    return True


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Making]:
    made = Making(tmp_path / "r", monkeypatch)
    yield made
    made.close()


def test_what_is_made_is_copied_while_the_rest_is_made(world: Making) -> None:
    """Each part is made only when the one before has arrived in every worker: who waited for all would wait for ever.

    In two rounds: in the second one, marks of the first are there.
    """
    for seed in (1, 2):
        world.maker.begin(seed)
        taken, serving = world.start()
        world.maker.make(0)
        until(lambda: world.has("up"))
        assert not taken.done()
        assert not world.has("down")
        world.maker.make(1)
        until(lambda: world.has("down"))
        assert not world.has("scaled")
        world.maker.make(2)

        assert taken.result(WAIT_S).checked
        serving.join(WAIT_S)
        assert holds(world.server, world.trainer.values)
        assert world.receiver.seconds["wait"] > 0
        assert world.receiver.seconds["wait"] + world.receiver.seconds["copy"] <= world.receiver.seconds["replay"]


def test_marks_of_an_earlier_round_do_not_count(world: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should they be there still: what they speak of is being replaced."""
    world.maker.begin(1)
    for part in range(3):
        world.maker.make(part)
    taken, serving = world.start()
    taken.result(WAIT_S)
    serving.join(WAIT_S)
    assert world.receiver.seconds["wait"] < PROMPT_S
    before = state(world.server)
    kept = [marks.clone() for marks in world.maker.marks]
    world.maker.begin(2)
    for marks, old in zip(world.maker.marks, kept, strict=True):
        marks.copy_(old)
    looked = counted(monkeypatch)

    taken, serving = world.start()
    until(lambda: looked() > 20)

    assert unchanged(world.server, before)
    for part in range(3):
        world.maker.make(part)
    assert taken.result(WAIT_S).checked
    serving.join(WAIT_S)
    assert holds(world.server, world.trainer.values)


def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often marks were looked at."""
    found = [0]
    missing = ReadyFlags._missing

    def watched(marks: ReadyFlags, needs: object) -> int | None:
        found[0] += 1
        return missing(marks, needs)  # type: ignore[arg-type]

    monkeypatch.setattr(ReadyFlags, "_missing", watched)
    return lambda: found[0]


@pytest.mark.parametrize("made", [0, 1])
def test_a_part_that_is_never_made_fails_the_round(world: Making, made: int) -> None:
    """Within its deadline, and it is said which part; an engine that has copied nothing holds what it held."""
    before = state(world.server)
    world.maker.begin(1)
    for part in range(made):
        world.maker.make(part)
    began = time.monotonic()

    taken, serving = world.start(4.0)

    with pytest.raises(TransferFailed, match=f"part {made + 1} of 3 that trainer rank 0 makes"):
        taken.result(WAIT_S)
    assert time.monotonic() - began < PROMPT_S
    assert world.receiver.touched is bool(made)
    assert made or unchanged(world.server, before)
    serving.join(WAIT_S)
    assert "part" in world.trainer.sender.failed["e"]
    world.maker.begin(2)
    for part in range(3):
        world.maker.make(part)
    taken, serving = world.start()
    taken.result(WAIT_S)
    serving.join(WAIT_S)
    assert holds(world.server, world.trainer.values)


@pytest.mark.parametrize("copied", [0, 1])
@pytest.mark.parametrize("why", ["the sidecar hangs up", "a newer round is made"])
def test_a_receiver_that_waits_in_vain_lets_the_server_go_at_once(
    world: Making, monkeypatch: pytest.MonkeyPatch, copied: int, why: str
) -> None:
    """Long before the round's deadline; whether anything was written is known as ever."""
    before, answers = state(world.server), list[worker_wire.ToSidecar]()
    obey = worker_loader._obey

    def watched(*arguments: Any) -> worker_wire.ToSidecar:
        answer = obey(*arguments)
        answers.append(answer)
        return answer

    monkeypatch.setattr(worker_loader, "_obey", watched)
    looked = counted(monkeypatch)
    world.maker.begin(1)
    for part in range(copied):
        world.maker.make(part)
    taken, serving = world.start()
    until(lambda: looked() > 20)
    began = time.monotonic()

    if why == "the sidecar hangs up":
        world.receiver.close()
    else:
        world.maker.begin(2)
        world.maker.make(0)

    with pytest.raises(DataplaneError):
        taken.result(WAIT_S)
    until(lambda: sum(isinstance(each, worker_wire.Failed) for each in answers) == world.server.tp)
    assert time.monotonic() - began < PROMPT_S / 10
    assert {each.touched for each in answers if isinstance(each, worker_wire.Failed)} == {bool(copied)}
    assert copied or unchanged(world.server, before)
    serving.join(WAIT_S)


def test_a_trainer_that_dies_between_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one part copied, and the next one never made: noticed at once, and the engine is known to be changed."""
    ends, root = Ends("direct_ends.py"), tmp_path / "r"
    world, versions = World(root, 2, monkeypatch), Maker(tmp_path / "values")
    try:
        versions.begin(1)
        pid = ends.start(half="trainer", root=str(root), epoch=1, seed=1, tp=2, parts=True)
        address = Address(ends.answer()["address"])
        taken = world.receive(versions.session(1), "e", address)
        until(lambda: has(world.server, versions, "up"))
        assert not taken.done()
        began = time.monotonic()
        kill(pid)

        with pytest.raises(DataplaneError, match="is gone"):
            taken.result(WAIT_S)
        assert time.monotonic() - began < PROMPT_S
        assert world.receiver.touched
        assert not has(world.server, versions, "down")
    finally:
        world.close()
        versions.close()
        ends.close()
        worker_loader.forget()
