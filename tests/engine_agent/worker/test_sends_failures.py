"""Sent rounds of which a member is killed or stands still, at every point: the others know within a deadline.

Two ranks send to two engines. The victim is a process: the trainer's second rank, or a server of one worker; sidecars
are killed and stopped as their sockets see it. Whoever survives serves what it served, bit for bit, and takes the next
epoch, which has no room for the victim.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from weightbus.dataplane.errors import DataplaneError, TransferFailed, WorkerDied
from weightbus.dataplane.processes.connections import Deadline, MacFrames
from weightbus.dataplane.transports import worker_exchange as worker_wire
from weightbus.dataplane.transports.interface import Peer, Receipt
from weightbus.dataplane.transports.plan_exchange import PlanExchange
from weightbus.dataplane.transports.sends import (
    messages as sends_wire,
    receiver as takers,
    sender as sends,
)
from weightbus.dataplane.transports.sends.receiver import SendsReceiver, WorkerStalled

from ...kit.ends import Ends, was_struck
from ...kit.sends_ends import OF_WORKERS, POINTS
from ...kit.toy_direct import WAIT_S, holds, state, unchanged
from ...kit.toy_sends import Remote, SendsWorld

ALL = bool(os.environ.get("WEIGHTBUS_ALL_POINTS"))
"""Every point; otherwise those that differ."""
RANKS_AT = POINTS if ALL else ("formed", "moving", "through")
WORKERS_AT = OF_WORKERS if ALL else ("formed", "moving", "flip")
STILL_S = 3.0
"""Deadline of a turn and of forming here. By default they are 10 and 15 s."""
PROMPT_S = 30.0
"""For all that must not wait for a deadline of minutes, on a machine that does other things."""
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    made = Ends("sends_ends.py")
    yield made
    made.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SendsWorld]:
    """Ranks and engine ``e`` are here; versions travel in several turns."""
    monkeypatch.setattr(sends, "pair_bytes_for", lambda *_: 256)
    monkeypatch.setattr(sends_wire, "SILENT_S", 2 * STILL_S)
    monkeypatch.setattr(takers, "_END_S", STILL_S)
    made = SendsWorld(tmp_path / "r", 1, monkeypatch)
    made.trainer.sends._chunk_s = made.trainer.sends._form_s = STILL_S
    yield made
    made.close()


def served(world: SendsWorld) -> None:
    """Deliver the epoch that is on offer, and give up when nobody is left."""
    began = time.monotonic()
    with contextlib.suppress(TransferFailed):
        world.trainer.sends.ready(WAIT_S, PROMPT_S / 3)
        world.trainer.sends.finish(WAIT_S)
    world.trainer.sends.close()
    assert time.monotonic() - began < PROMPT_S


@pytest.mark.parametrize("number", SIGNALS, ids=["killed", "stopped"])
@pytest.mark.parametrize("point", RANKS_AT)
def test_a_rank_of_the_trainer(world: SendsWorld, ends: Ends, point: str, number: int) -> None:
    """Its engine goes on serving the version before, untouched; the next trainer's epoch is taken.

    When everything has moved the engine may have all of the new one instead.
    """
    world.round(stage=True)
    before, old = state(world.server), dict(world.trainer.values)
    if point == "through":
        world.trainer.sends._chunk_s = world.trainer.sends._form_s = WAIT_S  # all must move, however busy the machine
    elif point in ("formed", "moving"):
        world.trainer.sends._form_s = PROMPT_S / 2  # the group must form, or the rank never comes to its point
    world.trainer.step(5)
    session = world.trainer.session(2)
    world.trainer.describe()
    address = world.trainer.sends.offer(session, [Peer("e", 1)])
    world.trainer.summon(address, 2, ranks=(0,))
    pid = ends.start(
        half="rank", root=str(world.runtime), seed=5, address=address.address, token=address.token, epoch=2,
        point=point, signal=int(number), at=2 if point == "moving" else 1,
    )  # fmt: skip
    taken = world.receive(session, "e", address, stage=True)
    served(world)

    failure = taken.exception(PROMPT_S)
    assert was_struck(pid, number)
    if failure is None:
        assert point == "through"
        assert holds(world.server, world.trainer.values)
        assert not world.trainer.sends.failed
    else:
        assert isinstance(failure, DataplaneError)
        assert not world.receiver.touched
        assert unchanged(world.server, before)
        assert holds(world.server, old)
        assert set(world.trainer.sends.failed) == {"e"}
        assert point != "through" or number == signal.SIGKILL
    os.kill(pid, signal.SIGKILL)
    world.epoch = 2
    world.trainer.step(6)
    world.round(stage=True)
    assert holds(world.server, world.trainer.values)


@pytest.mark.parametrize("number", SIGNALS, ids=["killed", "stopped"])
@pytest.mark.parametrize("point", WORKERS_AT)
def test_a_worker_of_an_engine(  # noqa: PLR0917 - fixtures
    world: SendsWorld, ends: Ends, tmp_path: Path, request: pytest.FixtureRequest, point: str, number: int
) -> None:
    """The other engine goes on serving, and takes the next epoch; the victim is known to be one.

    In the second epoch, in the group of the first one unless it is to happen while a group forms.
    """
    if point in ("forming", "formed"):
        world.trainer.sends._keep_s = 0.0
    at = {"moving": 6, "flip": 2, "flipped": 2, "begun": 2, "forming": 2, "formed": 2, "through": 2}[point]
    sidecar = SendsReceiver(world.runtime)
    request.addfinalizer(sidecar.shutdown)
    victim = Remote(ends, tmp_path, point=point, signal=int(number), at=at)

    def victims_half(session: Any, address: Any) -> Future[Receipt]:
        def both() -> Receipt:
            sidecar.stage(session, address, "v", WAIT_S)
            patience_s = PROMPT_S if session.epoch == 1 else PROMPT_S / 3
            return sidecar.receive(session, address, "v", 0, victim, patience_s)  # type: ignore[arg-type]

        return world.pool.submit(both)

    for epoch in (1, 2):
        # Nobody is struck in the first one, however busy the machine.
        patient = epoch == 1 and point != "moving"
        world.trainer.sends._chunk_s = world.trainer.sends._form_s = WAIT_S if patient else STILL_S
        before, old = state(world.server), dict(world.trainer.values)
        world.trainer.step(epoch)
        session = world.trainer.session(epoch)
        world.trainer.describe()
        address = world.offer(session, [Peer("e", 1), Peer("v", 1)])
        halves = world.receive(session, "e", address, stage=True), victims_half(session, address)
        served(world)
        ours, theirs = (half.exception(WAIT_S) for half in halves)
        if patient:
            assert ours is None
            assert theirs is None
    assert isinstance(theirs, DataplaneError)
    assert was_struck(victim.pid, number)
    if ours is None:
        assert holds(world.server, world.trainer.values)
    else:
        assert not world.receiver.touched
        assert unchanged(world.server, before)
        assert holds(world.server, old)
        assert point not in ("through", "flip", "flipped") or number == signal.SIGSTOP
    os.kill(victim.pid, signal.SIGKILL)
    world.epoch = 2
    world.trainer.step(6)
    world.round(stage=True)
    assert holds(world.server, world.trainer.values)


@pytest.mark.parametrize("point", ["moving", "flip"])
def test_a_stopped_worker_costs_the_others_one_attempt(
    world: SendsWorld, ends: Ends, tmp_path: Path, request: pytest.FixtureRequest, point: str
) -> None:
    """Its engine refuses every attempt at once until the worker goes on, and then takes what there is, verified."""
    sidecar = SendsReceiver(world.runtime)
    request.addfinalizer(sidecar.shutdown)
    victim = Remote(ends, tmp_path, point=point, signal=int(signal.SIGSTOP), at=6 if point == "moving" else 2)

    def victims_half(session: Any, address: Any) -> Receipt:
        sidecar.stage(session, address, "v", WAIT_S)
        return sidecar.receive(session, address, "v", 0, victim, WAIT_S)  # type: ignore[arg-type]

    for epoch in range(1, 6):
        world.trainer.step(epoch)
        session = world.trainer.session(epoch)
        world.trainer.describe()
        address = world.offer(session, [Peer("e", 1), Peer("v", 1)])
        theirs = world.pool.submit(victims_half, session, address)
        if epoch in (3, 4):  # what the coordinator hears of the engine, and tells the trainer
            began = time.monotonic()
            with pytest.raises(WorkerStalled, match="worker 0 of the server stands still"):
                theirs.result(WAIT_S)
            assert time.monotonic() - began < PROMPT_S / 3, "no attempt waits for its worker"
            world.trainer.sends.withdraw("v", "its server stands still")
        ours = world.receive(session, "e", address, stage=True)
        served(world)
        if epoch == 2:
            assert isinstance(theirs.exception(WAIT_S), DataplaneError)
            assert was_struck(victim.pid, signal.SIGSTOP)
            assert point == "moving" or ours.exception(WAIT_S) is None
            continue
        ours.result(WAIT_S)
        assert holds(world.server, world.trainer.values)
        if epoch == 4:
            os.kill(victim.pid, signal.SIGCONT)
            (still, _), = sidecar._threads._still.values()  # fmt: skip
            assert still.readable(WAIT_S), "it goes on, and says so when the machine lets it"
    assert theirs.result(WAIT_S).checked


class Dying(Remote):
    """Its process of HTTP outlives its worker, and answers nothing, as SGLang's does for seconds."""

    def __init__(self, *arguments: Any, **job: Any) -> None:
        super().__init__(*arguments, **job)
        self.ended = threading.Event()

    def load_direct(self, path: str, deadline_s: float) -> None:
        try:
            super().load_direct(path, deadline_s)
        except TransferFailed:
            self.ended.wait(WAIT_S)
            raise


@pytest.mark.parametrize("point", ["moving", "flip"])
def test_a_worker_that_died_is_known_before_its_server_has_ended(
    world: SendsWorld, ends: Ends, tmp_path: Path, request: pytest.FixtureRequest, point: str
) -> None:
    """The server's answer is not waited for: the other engines would wait with it."""
    sidecar = SendsReceiver(world.runtime)
    request.addfinalizer(sidecar.shutdown)
    victim = Dying(ends, tmp_path, point=point, signal=int(signal.SIGKILL), at=1)
    request.addfinalizer(victim.ended.set)
    world.trainer.step(1)
    session = world.trainer.session(1)
    world.trainer.describe()
    address = world.offer(session, [Peer("e", 1), Peer("v", 1)])
    ours = world.receive(session, "e", address)
    theirs = world.pool.submit(sidecar.receive, session, address, "v", 0, victim, WAIT_S)  # type: ignore[arg-type]
    served(world)
    with pytest.raises(WorkerDied, match="worker 0 of the server has died"):
        theirs.result(PROMPT_S / 3)
    assert ours.exception(WAIT_S) is None or point == "moving"


def test_a_member_that_exchanges_nothing_with_the_dead_hears_of_it_too(world: SendsWorld) -> None:
    """At once, from the leader: such a member's own messages would go on, and its next wait be for a deadline."""
    sender = world.trainer.sends
    address = sender.offer(world.trainer.session(1), [Peer("e", 1), Peer("v", 1)])

    def come(engine: str) -> MacFrames:
        frames = MacFrames.reach(address.address, address.token, Deadline(WAIT_S))
        sends_wire.RECEIVER.say(frames, sends_wire.Hello(channel="c", epoch=1, engine=engine), Deadline(WAIT_S))
        assert isinstance(sends_wire.RECEIVER.hear(frames, Deadline(WAIT_S), "who it is"), sends_wire.Invited)
        return frames

    coming = [world.pool.submit(come, name) for name in ("e", "v")]
    sender._wait(Deadline(WAIT_S), lambda end: bool(end.workers) and end.frames is None, "did not come")
    lives, dies = (each.result(WAIT_S) for each in coming)
    sender._began, began = True, time.monotonic()
    for end in sender._members():
        end.received_at = began
    dies.close()
    sender.finish(PROMPT_S)
    assert time.monotonic() - began < STILL_S
    told = sends_wire.RECEIVER.hear(lives, Deadline(WAIT_S), "how it ended")
    assert isinstance(told, sends_wire.Failed)
    assert told.reason.startswith("the group broke: v: ")
    assert set(sender.failed) == {"e", "v"}
    lives.close()


@pytest.mark.parametrize("stage", [False, True], ids=["in place", "beside"])
def test_a_trainer_that_is_gone_when_all_is_proven_takes_nothing_back(
    world: SendsWorld, monkeypatch: pytest.MonkeyPatch, *, stage: bool
) -> None:
    """The engine has the version and says so, though it cannot tell the trainer."""
    world.round(stage=True)
    prove = PlanExchange.prove

    def and_then_the_trainer_dies(exchange: PlanExchange, *rest: Any) -> None:
        prove(exchange, *rest)
        assert world.receiver._attempt is not None
        world.receiver._attempt.connection.close()

    monkeypatch.setattr(PlanExchange, "prove", and_then_the_trainer_dies)
    world.trainer.step(4)
    session = world.trainer.session(2)
    world.trainer.describe()
    taken = world.receive(session, "e", world.offer(session), stage=stage)
    served(world)
    assert taken.result(PROMPT_S).checked
    assert holds(world.server, world.trainer.values)


class Killed(BaseException):
    """Stands for the end of the sidecar's process: its connections close, and it does nothing more."""


@pytest.mark.parametrize("stands", [False, True], ids=["killed", "stopped"])
@pytest.mark.parametrize("heard", range(4))
def test_a_sidecar(world: SendsWorld, monkeypatch: pytest.MonkeyPatch, heard: int, *, stands: bool) -> None:
    """At any answer of its workers, in a round that is taken beside: its server serves what it served, or all of it."""
    world.round(stage=True)
    before = state(world.server)
    world.trainer.step(3)
    hear, left, waiting = worker_wire.SIDECAR.hear, [heard], threading.Event()

    def hear_or_die(*arguments: Any) -> Any:
        if not left[0]:
            monkeypatch.setattr(worker_wire.SIDECAR, "hear", hear)
            if stands:
                waiting.wait(WAIT_S)
            world.receiver.shutdown()
            raise Killed
        left[0] -= 1
        return hear(*arguments)

    monkeypatch.setattr(worker_wire.SIDECAR, "hear", hear_or_die)
    session = world.trainer.session(2)
    world.trainer.describe()
    taken = world.receive(session, "e", world.offer(session), stage=True)
    if stands or not heard:
        threading.Timer(STILL_S, lambda: world.trainer.sends.withdraw("e", "its agent is silent")).start()
    served(world)
    waiting.set()

    assert isinstance(taken.exception(WAIT_S), Killed)
    assert set(world.trainer.sends.failed) == {"e"}
    if heard < 3:
        assert unchanged(world.server, before)
    world.receiver = SendsReceiver(world.runtime)
    world.epoch = 2
    world.trainer.step(4)
    world.round()
    assert holds(world.server, world.trainer.values)
