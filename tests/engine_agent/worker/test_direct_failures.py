"""Direct rounds whose ends are killed at every point: nobody hangs, nothing half-made is believed, the next one works.

Trainers and workers are processes; what is believed is what `receive` returns, and what is known to be changed is
`touched`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from weightbus.dataplane.errors import DataplaneError, DeadlineExceeded, StaleSession, TransferFailed
from weightbus.dataplane.processes.connections import Deadline, FrameListener
from weightbus.dataplane.transports import plan_exchange, worker_exchange as worker_wire
from weightbus.dataplane.transports.direct import receiver as direct_receiver
from weightbus.dataplane.transports.direct.receiver import DirectReceiver
from weightbus.dataplane.transports.interface import Address, Peer
from weightbus.engine_agent.worker import loader as worker_loader

from ...kit.ends import Ends
from ...kit.toy_direct import WAIT_S, Server, Trainer, World, holds, state, unchanged
from ...kit.waiting import readable

PROMPT_S = 60.0
"""Half of any deadline here: whoever took longer waited for one."""
POINTS = ("Record", "after Record", "Adopt", "after Adopt", "Replay", "copied", "after Replay")


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    made = Ends("direct_ends.py")
    yield made
    made.close()


def at(point: str, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the first worker that comes to `point` act there, once."""
    obey, done = worker_loader._obey, threading.Event()

    def once() -> None:
        if not done.is_set():
            done.set()
            act()

    def watched(worker: Any, message: Any, called_off: Any) -> Any:
        name = message.kind
        if name == point:
            once()
        if name == "Replay" and point == "copied":
            check = worker._importer.check

            def late() -> None:
                if worker.touched:
                    once()
                check()

            monkeypatch.setattr(worker._importer, "check", late)
        answer = obey(worker, message, called_off)
        if point == f"after {name}":
            once()
        return answer

    monkeypatch.setattr(worker_loader, "_obey", watched)


def kill(pid: int) -> None:
    """End a process, and wait until the kernel has closed what it had open."""
    handle = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    readable(handle, PROMPT_S)
    os.close(handle)


@pytest.mark.parametrize("point", POINTS)
def test_a_trainer_that_dies(tmp_path: Path, ends: Ends, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """At any point: no receipt without proof, untouched means unchanged, and the next trainer's round is taken."""
    root = tmp_path / "r"
    server, receiver = Server(2, monkeypatch), DirectReceiver(root)
    versions = Trainer(tmp_path / "values")
    before = state(server)
    versions.step(1)
    pid = ends.start(half="trainer", root=str(root), epoch=1, seed=1, tp=2)
    address = Address(ends.answer()["address"])
    with monkeypatch.context() as watching:
        at(point, lambda: kill(pid), watching)
        began = time.monotonic()
        proven = False
        with contextlib.suppress(DataplaneError):
            receiver.receive(versions.session(1), address, "e", 1, server, WAIT_S)  # type: ignore[arg-type]
            proven = True
        assert time.monotonic() - began < PROMPT_S

    assert receiver.touched is (point in ("copied", "after Replay"))
    assert receiver.touched or unchanged(server, before)
    assert not proven or holds(server, versions.values)
    versions.step(2)
    ends.start(half="trainer", root=str(root), epoch=2, seed=2, tp=2)
    address = Address(ends.answer()["address"])
    receiver.receive(versions.session(2), address, "e", 1, server, WAIT_S)  # type: ignore[arg-type]
    assert holds(server, versions.values)
    receiver.shutdown()
    worker_loader.forget()
    versions.close()


class Remote(Server):
    """A server whose workers are a process; when it dies, the call of the loader fails, as HTTP would."""

    def __init__(self, ends: Ends, monkeypatch: pytest.MonkeyPatch, tp: int, die: str) -> None:
        super().__init__(tp, monkeypatch)
        self._ends, self._die = ends, die

    def load_direct(self, socket: str, deadline_s: float) -> None:
        pid = self._ends.start(half="workers", socket=socket, tp=self.tp, die=self._die)
        handle = os.pidfd_open(pid)
        ended = readable(handle, deadline_s)
        os.close(handle)
        if not ended or self._die:
            raise TransferFailed("the server is gone")
        assert self._ends.answer() == {"returned": True}


@pytest.mark.parametrize("point", POINTS)
def test_a_server_that_dies(tmp_path: Path, ends: Ends, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """At any point, with its workers: both others know at once, no lease is left, and a new launch takes a round."""
    trainer, receiver = Trainer(tmp_path / "r"), DirectReceiver(tmp_path / "r")
    for epoch, die in ((1, point), (2, "")):
        trainer.step(epoch)
        session = trainer.session(epoch)
        server = Remote(ends, monkeypatch, 2, die)
        address = trainer.sender.offer(session, [Peer("e", 2)])
        began = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(receiver.receive, session, address, "e", 1, server, WAIT_S)  # type: ignore[arg-type]
            trainer.sender.ready(WAIT_S)
            trainer.sender.finish(WAIT_S)
            failure = taken.exception(WAIT_S)
        assert time.monotonic() - began < PROMPT_S
        assert isinstance(failure, DataplaneError) if die else failure is None
        assert set(trainer.sender.failed) == ({"e"} if die else set())
        until = time.monotonic() + PROMPT_S
        while any(exporter.readers for exporter in trainer.exporters) and time.monotonic() < until:
            time.sleep(0.01)
        assert [exporter.readers for exporter in trainer.exporters] == [0, 0]
    receiver.shutdown()
    trainer.close()


class Stopped(Remote):
    """One whose workers are stopped in place: its call does not return."""

    def load_direct(self, socket: str, deadline_s: float) -> None:
        pid = self._ends.start(half="workers", socket=socket, tp=self.tp, die=self._die, stop=True)
        handle = os.pidfd_open(pid)
        readable(handle, min(deadline_s, PROMPT_S))
        os.close(handle)


@pytest.mark.parametrize("point", ["Replay", "copied"])
def test_a_server_that_is_stopped(tmp_path: Path, ends: Ends, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    """It is given up long before the version: everybody else of the round stands still meanwhile."""
    monkeypatch.setattr(direct_receiver, "copied_s", lambda _nbytes: 2.0)
    monkeypatch.setattr(plan_exchange, "RETURN_S", 0.5)
    trainer, receiver = Trainer(tmp_path / "r"), DirectReceiver(tmp_path / "r")
    trainer.step(1)
    session, server = trainer.session(1), Stopped(ends, monkeypatch, 2, point)
    address = trainer.sender.offer(session, [Peer("e", 2)])
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        taken = pool.submit(receiver.receive, session, address, "e", 1, server, WAIT_S)  # type: ignore[arg-type]
        trainer.sender.ready(WAIT_S)
        trainer.sender.finish(WAIT_S)
        failure = taken.exception(WAIT_S)
    assert isinstance(failure, DeadlineExceeded)
    assert time.monotonic() - began < PROMPT_S / 2
    assert receiver.touched
    assert set(trainer.sender.failed) == {"e"}
    receiver.shutdown()
    trainer.close()


def test_workers_that_do_not_come_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is called while nobody generates calls our loader at once, or stands still."""
    monkeypatch.setattr(worker_wire, "_COME_S", 0.5)
    listener = FrameListener(tmp_path / "w.sock")
    with pytest.raises(DeadlineExceeded, match="the server's workers"):
        worker_wire.Workers().gather(listener, Future(), 1, True, Deadline(PROMPT_S), lambda: None)
    listener.close()


class Killed(BaseException):
    """Stands for the end of the sidecar's process: its connections close, and it does nothing more."""


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path / "r", 2, monkeypatch)
    yield made
    made.close()


@pytest.mark.parametrize("heard", range(8))
def test_a_sidecar_that_dies(world: World, monkeypatch: pytest.MonkeyPatch, heard: int) -> None:
    """At any answer of its workers: the workers return, the trainer knows, and another sidecar's round is taken."""
    hear, left = worker_wire.SIDECAR.hear, [heard]

    def hear_or_die(*arguments: Any) -> Any:
        if not left[0]:
            monkeypatch.setattr(worker_wire.SIDECAR, "hear", hear)
            world.receiver.close()
            raise Killed
        left[0] -= 1
        return hear(*arguments)

    monkeypatch.setattr(worker_wire.SIDECAR, "hear", hear_or_die)
    with pytest.raises(Killed):
        world.round()

    assert set(world.trainer.sender.failed) == {"e"}
    world.receiver.shutdown()
    world.receiver = DirectReceiver(world.runtime)
    world.trainer.step(3)
    world.round()
    assert holds(world.server, world.trainer.values)


def test_a_stale_generation_is_not_read(world: World) -> None:
    """Addresses of memory that was replaced since: refused by the exporter, whoever asks."""
    world.round()
    before = state(world.server)
    stale = world.trainer.expose()
    world.trainer.shards = [{name: tensor.clone() for name, tensor in shard.items()} for shard in world.trainer.shards]
    world.trainer.step(1)
    world.trainer.expose()
    world.trainer.sender._expose = lambda: stale
    worker_loader.forget()

    with pytest.raises(TransferFailed, match=StaleSession.__name__):
        world.round()
    assert unchanged(world.server, before)


@pytest.mark.parametrize(
    ("where", "harm"),
    [
        ("embed", "flip"),
        ("odd", "flip"),
        ("down", "swap"),
        ("embed", "shift"),
        ("norm", "shift"),
        ("down", "omission"),
        ("odd", "omission"),
    ],
)
def test_what_a_copy_spoils_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch, where: str, harm: str) -> None:
    """In one worker's live parameters, between the copy and the proof: named, with both digests, and never believed."""
    world.round()
    world.trainer.step(4)
    model = world.server.models[1]
    evidence = worker_loader._states[model]._report
    assert evidence is not None
    proof = evidence.proof
    live = getattr(model, where).data.view(-1)
    old = live.clone()

    def spoil() -> None:
        if harm == "flip":
            live.view(torch.uint8)[5] ^= 16
        elif harm == "swap":
            live[[0, 3]] = live[[3, 0]]
        elif harm == "shift":
            live[:4] = live[1:5].clone()
        else:
            live[:4] = old[:4]

    class Spoiled:
        def run(self) -> object:
            spoil()
            return proof.run()

        def close(self) -> None: ...

    monkeypatch.setattr(evidence, "proof", Spoiled())

    with pytest.raises(TransferFailed, match=where) as raised:
        world.round()
    assert "digest" in str(raised.value)
    assert world.receiver.touched
    assert where in world.trainer.sender.failed["e"]


def test_a_bit_that_the_version_has_not_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what is stored wider than it is served: read back as it is served, it would be lost."""
    world.round()
    model = world.server.models[1]
    finish = worker_loader.WorkerState._finish

    def spoil(state: worker_loader.WorkerState, plan: Any) -> None:
        finish(state, plan)
        if state is worker_loader._states[model]:
            model.wide.data.view(torch.uint8)[5] ^= 16

    monkeypatch.setattr(worker_loader.WorkerState, "_finish", spoil)

    with pytest.raises(TransferFailed, match=r"worker 1 .*'wide' is stored in a wider dtype"):
        world.round()
    assert world.receiver.touched
