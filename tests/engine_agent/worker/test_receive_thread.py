"""What a worker has taken beside its weights is put into place once, if nobody called it off. No group."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from math import isclose
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from weightbus.dataplane.copy.copy_table import AXES, CopyTable
from weightbus.dataplane.errors import ChunkTimeout, DeadlineExceeded, OutOfStagingMemory, TransferFailed
from weightbus.dataplane.processes import threads as binding
from weightbus.dataplane.processes.connections import Deadline, FrameListener
from weightbus.dataplane.processes.threads import INTERVAL_S
from weightbus.dataplane.reshard.send_schedule import SendMessages
from weightbus.dataplane.transports import worker_exchange as wire
from weightbus.dataplane.transports.interface import Group
from weightbus.dataplane.transports.sends.message_queues import ReceiveQueue
from weightbus.engine_agent.worker import receive_thread as taker
from weightbus.engine_agent.worker.receive_thread import ReceiveThread

from ...kit.waiting import until

WAIT_S = 20.0
GROUP = Group(store="tcp://127.0.0.1:9", name="g", size=2, rank=1, form_s=1.0, turn_s=1.0)
SENT = 7
"""What every byte of a version is."""


class Passage:
    """Stands for a group over which everything comes, or nothing."""

    reason = ""
    error: Exception | None = None
    moves = False
    """Receives begin before it fails."""
    waits: threading.Event | None = None
    """It goes on until it is called off; set once it has begun."""
    reasons: ClassVar[list[str]] = []
    """Why it was."""
    seen: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def run(
        self,
        move: Callable[[Any], None],
        called_off: Callable[[], str],
        _beat: object,
        ready: Callable[[], ReceiveQueue],
    ) -> float:
        self.seen()
        if self.error is not None:
            raise self.error
        if self.waits is not None:
            self.waits.set()
            self.reasons.append(until(called_off, "it to be called off", WAIT_S))
        if self.moves:
            ready()
            move(Nobody())
        if self.reason or self.waits is not None:
            raise TransferFailed(self.reason)
        for each in ready().memory:
            each.fill_(SENT)
        return 0.5


class Nobody:
    """An exchange in which all is there at once."""

    def post(self, *_: object) -> Nobody:
        return self

    def wait(self, *_: object) -> None:
        pass

    def lane(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def settle(self) -> None:
        pass


class Sidecar:
    """Speaks with the thread of a worker whose one parameter has 64 bytes."""

    def __init__(self, folder: Path) -> None:
        column = [np.array([value], np.int64) for value in (0, 0, 64, -1, 0, 0, 0)]
        unpack = CopyTable.of_numbers(np.empty((0, 7 + 3 * AXES), np.int64))
        self.parameter = torch.zeros(64, dtype=torch.uint8)
        self._listener = FrameListener(folder / "w.sock")
        expect = wire.Expect(
            schedule="s", messages=SendMessages(*column).encode(), unpack=unpack.encode(), socket=str(folder / "w.sock")
        )
        self.taker = ReceiveThread(expect, 0, [self.parameter], torch.device("cpu"))
        self._frames = self._listener.accept(Deadline(WAIT_S), "the worker's thread")
        assert isinstance(self.hear(), wire.Expecting)

    def hear(self) -> wire.ToSidecar:
        return wire.SIDECAR.hear(self._frames, Deadline(WAIT_S), "the worker's thread")

    def say(self, message: wire.ToWorker) -> None:
        wire.SIDECAR.say(self._frames, message, Deadline(WAIT_S))

    def take(self, *, beside: bool = True) -> wire.ToSidecar:
        """Have it take a version."""
        self.say(wire.Take(group=GROUP, beside=beside))
        return self.hear()

    def close(self) -> None:
        self._frames.close()
        self._listener.close()
        self.taker.close()


@pytest.fixture
def sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sidecar]:
    monkeypatch.setattr(taker, "GroupTransfer", Passage)
    monkeypatch.setattr(taker, "_SOON_S", 0.0)
    made = Sidecar(tmp_path)
    yield made
    made.close()


def test_what_was_taken_is_put_into_place_once(sidecar: Sidecar) -> None:
    """Not before the scheduler is told to, and not again."""
    assert isinstance(sidecar.take(), wire.Taken)
    assert not sidecar.parameter.any()
    sidecar.taker.swap()
    assert (sidecar.parameter == SENT).all()
    with pytest.raises(TransferFailed, match="nothing was taken"):
        sidecar.taker.swap()


def test_a_version_that_was_called_off_is_not_put_into_place(sidecar: Sidecar) -> None:
    """Another worker lost it after this one had all of its own."""
    assert isinstance(sidecar.take(), wire.Taken)
    sidecar.say(wire.Failed(reason="another worker has died"))
    sidecar.say(wire.Weigh())
    assert isinstance(sidecar.hear(), wire.Room)  # so it has heard what was said before
    with pytest.raises(TransferFailed, match="nothing was taken"):
        sidecar.taker.swap()
    assert not sidecar.parameter.any()


def test_a_version_that_was_called_off_leaves_its_memory_to_the_scheduler(sidecar: Sidecar) -> None:
    """When the next version comes is unknown; before it the worker is asked whether there is room."""
    assert isinstance(sidecar.take(), wire.Taken)
    assert sidecar.taker._queue is not None
    assert sidecar.taker._queue.memory
    sidecar.say(wire.Failed(reason="another worker has died"))
    sidecar.say(wire.Weigh())
    assert isinstance(sidecar.hear(), wire.Room)
    assert sidecar.taker._queue.memory == ()
    assert isinstance(sidecar.take(), wire.Taken)
    sidecar.taker.swap()
    assert (sidecar.parameter == SENT).all()


def test_what_is_being_put_into_place_is_not_let_go_of(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer may be gone before the scheduler is through with it."""
    swap = ReceiveQueue.swap

    def called_off(queue: ReceiveQueue) -> None:
        sidecar.say(wire.Failed(reason="the sender is gone"))
        sidecar.say(wire.Weigh())
        assert isinstance(sidecar.hear(), wire.Room)
        swap(queue)

    monkeypatch.setattr(ReceiveQueue, "swap", called_off)
    assert isinstance(sidecar.take(), wire.Taken)
    sidecar.taker.swap()
    assert (sidecar.parameter == SENT).all()


def test_a_version_that_fails_leaves_its_memory_to_the_scheduler(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was taken before it cannot be put into place any more; the next one is taken again."""
    assert isinstance(sidecar.take(), wire.Taken)
    with monkeypatch.context() as patched:
        patched.setattr(Passage, "reason", "a rank has died")
        failed = sidecar.take()
    assert isinstance(failed, wire.Failed)
    assert (failed.reason, failed.touched) == ("TransferFailed: a rank has died", False)
    assert sidecar.taker._queue is not None
    assert sidecar.taker._queue.memory == ()
    with pytest.raises(TransferFailed, match="nothing was taken"):
        sidecar.taker.swap()
    assert isinstance(sidecar.take(), wire.Taken)
    sidecar.taker.swap()
    assert (sidecar.parameter == SENT).all()


@pytest.mark.parametrize(
    ("error", "less"),
    [
        (ChunkTimeout("a peer", 1.0), True),
        (OutOfStagingMemory("none"), True),
        (DeadlineExceeded("the group", 1.0), False),
    ],
    ids=["late", "no room", "not formed"],
)
def test_the_sidecar_hears_whether_less_at_a_time_may_do(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, error: Exception, *, less: bool
) -> None:
    """By what went wrong, and not by how it is worded."""
    monkeypatch.setattr(Passage, "error", error)
    failed = sidecar.take()
    assert isinstance(failed, wire.Failed)
    assert failed.less is less


def test_a_thread_that_is_stuck_in_its_memory_is_left_with_it(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar hears why, the scheduler is not held, and nothing is let go of that may be written yet."""
    assert isinstance(sidecar.take(), wire.Taken)
    sidecar.taker.swap()
    begun, released, queue = threading.Event(), threading.Event(), sidecar.taker._queue
    assert queue is not None
    attach, closed = ReceiveQueue.attach, list[str]()

    def for_ever(of: ReceiveQueue) -> None:
        begun.set()
        attach(of)
        assert released.wait(3 * WAIT_S)

    monkeypatch.setattr(binding, "BOUND_S", 0.5)
    monkeypatch.setattr(ReceiveQueue, "attach", for_ever)
    monkeypatch.setattr(ReceiveQueue, "close", lambda _: closed.append("closed"))
    failed = sidecar.take()
    assert begun.is_set()
    assert isinstance(failed, wire.Failed)
    assert "bound to memory" in failed.reason
    until(lambda: not sidecar.taker.alive, "the thread to end")
    sidecar.taker.close()
    assert queue.memory, "it is the stuck thread's"
    assert not closed
    released.set()


def test_unwritten_parameters_were_not_touched(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this version, whatever became of the one before: an engine that holds what it held goes on serving it."""
    sidecar.taker.in_loader.set()
    monkeypatch.setattr(Passage, "reason", "a rank has died")
    for moves, beside in ((True, False), (False, False), (True, False), (True, True)):
        monkeypatch.setattr(Passage, "moves", moves)
        failed = sidecar.take(beside=beside)
        assert isinstance(failed, wire.Failed)
        assert failed.touched is (moves and not beside)


def test_a_scheduler_that_goes_on_breaks_off_what_is_received(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a reason that all members of the group hear: on a connection that it has closed it hears nothing more."""
    begun, reasons = threading.Event(), list[str]()
    monkeypatch.setattr(Passage, "waits", begun)
    monkeypatch.setattr(Passage, "reasons", reasons)
    sidecar.say(wire.Take(group=GROUP, beside=True))
    assert begun.wait(WAIT_S)
    sidecar.taker.close()
    assert reasons == ["this worker has gone on"]
    assert not sidecar.taker._thread.is_alive()
    assert sidecar.taker._queue is None


def test_a_sidecar_that_goes_away_ends_what_is_received_and_the_thread(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would never be told to put anything into place; the scheduler is told that it is not alive."""
    begun, reasons = threading.Event(), list[str]()
    monkeypatch.setattr(Passage, "waits", begun)
    monkeypatch.setattr(Passage, "reasons", reasons)
    sidecar.say(wire.Take(group=GROUP, beside=True))
    assert begun.wait(WAIT_S)
    assert sidecar.taker.alive
    sidecar._frames.close()
    until(lambda: not sidecar.taker._thread.is_alive(), "the thread to end", WAIT_S)
    (reason,) = reasons
    assert reason.startswith("the sidecar is gone: ")
    assert not sidecar.taker.alive


@pytest.mark.parametrize("ours", [True, False])
def test_a_connection_that_is_closed_under_its_hands_is_no_failure(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, ours: bool
) -> None:
    """A sidecar that goes away leaves no traceback in the log of its server. What is nobody's doing does."""
    made = sidecar.taker

    def gone(_within_s: float = 0.0) -> bool:
        made._closed = ours
        raise ValueError("file descriptor cannot be a negative integer (-1)")

    monkeypatch.setattr(made._frames, "readable", gone)
    sidecar.say(wire.Weigh())
    made._thread.join(WAIT_S)
    assert not made._thread.is_alive()
    assert ("failed unforeseen" in caplog.text) is not ours


@pytest.mark.skipif(sys.platform != "linux", reason="the slack of a thread is Linux's")
def test_it_is_woken_in_time(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 us more for each of its waits is more than a message takes."""
    found: list[Any] = []
    monkeypatch.setattr(Passage, "seen", staticmethod(lambda: found.append(ctypes.CDLL(None).prctl(30, 0, 0, 0, 0))))
    assert isinstance(sidecar.take(), wire.Taken)
    assert found == [1]


def test_it_gets_the_interpreter_from_the_first_word_on(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is asked for room is told next to receive: a scheduler that looks for requests holds up neither."""
    usual, seen = sys.getswitchinterval(), list[float]()
    free = taker.free_bytes
    monkeypatch.setattr(taker, "_SOON_S", WAIT_S)
    monkeypatch.setattr(taker, "free_bytes", lambda device: (seen.append(sys.getswitchinterval()), free(device))[1])
    monkeypatch.setattr(wire.WORKER, "hear", heard(wire.WORKER.hear, seen))
    sidecar.say(wire.Weigh())
    assert isinstance(sidecar.hear(), wire.Room)
    assert isinstance(sidecar.take(), wire.Taken)
    assert seen == [pytest.approx(INTERVAL_S)] * 3
    until(lambda: isclose(sys.getswitchinterval(), usual), "the usual interval")


def heard(hear: Callable[..., wire.ToWorker], seen: list[float]) -> Callable[..., wire.ToWorker]:
    """The same, and the interval at which threads take turns while something is heard."""

    def watched(*arguments: Any) -> wire.ToWorker:
        seen.append(sys.getswitchinterval())
        return hear(*arguments)

    return watched
