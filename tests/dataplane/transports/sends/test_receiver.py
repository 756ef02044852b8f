"""What a sidecar makes of workers that say nothing any more."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weightbus.dataplane.errors import PeerLost
from weightbus.dataplane.processes.connections import Deadline, FrameListener, Frames
from weightbus.dataplane.transports import worker_exchange as worker_wire
from weightbus.dataplane.transports.interface import Group
from weightbus.dataplane.transports.sends import messages as sends_wire, receiver as takers
from weightbus.dataplane.transports.sends.receiver import LeadSession, NotReceived, WorkerReceivers

from ....kit.waiting import until

WAIT_S = 30.0


@pytest.mark.parametrize(("free", "enough"), [(1099, False), (1100, True)])
def test_some_of_the_memory_stays_free(tmp_path: Path, free: int, *, enough: bool) -> None:
    """A server that generates takes some meanwhile: the last tenth is left to it."""
    listener = FrameListener(tmp_path / "t.sock")
    worker = Frames.connect(str(tmp_path / "t.sock"), Deadline(WAIT_S))
    asked = WorkerReceivers(tmp_path)
    asked._threads[0] = listener.accept(Deadline(WAIT_S), "a worker")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(asked.room)
        assert isinstance(worker_wire.WORKER.hear(worker, Deadline(WAIT_S), "the sidecar"), worker_wire.Weigh)
        worker_wire.WORKER.say(worker, worker_wire.Room(needed=1000, free=free), Deadline(WAIT_S))
        objection = found.result(WAIT_S)
    assert objection == (
        "" if enough else f"worker 0 has no room beside its weights: 1000 bytes are needed, {free} free"
    )
    for each in (asked, worker, listener):
        each.close()


class _Scheduled:
    """A schedule, as far as it is compared."""

    @staticmethod
    def digest() -> str:
        return "s"


class _Told:
    """Workers that were told a schedule: the thread of the first is to come."""

    @staticmethod
    def expect(*_: object) -> frozenset[int]:
        return frozenset({0})


@pytest.mark.parametrize("how", ["is closed meanwhile", "says something else", "hangs up"])
def test_no_member_keeps_a_thread_that_is_not_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A connection that is of no use, or comes while the sidecar ends, is closed."""
    asked, hear = WorkerReceivers(tmp_path), worker_wire.SIDECAR.hear

    def heard(frames: Frames, deadline: Deadline, waiting_for: str) -> worker_wire.ToSidecar:
        if how == "is closed meanwhile":
            asked.close()
        came.append(frames)
        return hear(frames, deadline, waiting_for)

    came: list[Frames] = []
    monkeypatch.setattr(worker_wire.SIDECAR, "hear", heard)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(asked.expect, _Told(), [_Scheduled()], Deadline(WAIT_S))  # type: ignore[arg-type]
        until(lambda: list(tmp_path.glob("t-*.sock")), "a socket to connect to")
        worker = Frames.connect(str(next(tmp_path.glob("t-*.sock"))), Deadline(WAIT_S))
        with contextlib.suppress(PeerLost):
            if how == "hangs up":
                worker.close()
            elif how == "says something else":
                worker_wire.WORKER.say(worker, worker_wire.Moving(), Deadline(WAIT_S))
            else:
                worker_wire.WORKER.say(worker, worker_wire.Expecting(rank=0, schedule="s"), Deadline(WAIT_S))
        with pytest.raises(PeerLost):
            found.result(WAIT_S)
    assert [frames.fileno() for frames in came] == [-1]
    asked.close()
    with pytest.raises(PeerLost, match="ends"):
        asked.expect(_Told(), [_Scheduled()], Deadline(WAIT_S))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    worker.close()


def test_only_a_worker_that_was_told_a_schedule_is_taken_in(tmp_path: Path) -> None:
    """One that comes late with another schedule, or of another rank, is hung up on; the rest is waited for."""
    asked = WorkerReceivers(tmp_path)
    with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as ends:
        found = pool.submit(asked.expect, _Told(), [_Scheduled(), _Scheduled()], Deadline(WAIT_S))  # type: ignore[arg-type]
        until(lambda: list(tmp_path.glob("t-*.sock")), "a socket to connect to")

        def come(rank: int, schedule: str) -> Frames:
            made = Frames.connect(str(next(tmp_path.glob("t-*.sock"))), Deadline(WAIT_S))
            ends.callback(made.close)
            worker_wire.WORKER.say(made, worker_wire.Expecting(rank=rank, schedule=schedule), Deadline(WAIT_S))
            return made

        strangers = [come(0, "another"), come(1, "s"), come(7, "s")]
        first = come(0, "s")
        found.result(WAIT_S)
        assert len(asked) == 1
        until(lambda: all(each.readable() for each in strangers), "the others to be hung up on")
        assert not first.readable()
        asked.close()


@pytest.mark.parametrize("beside", [False, True], ids=["in place", "beside"])
def test_a_worker_that_falls_silent_may_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, beside: bool
) -> None:
    """How far it came in its parameters is unknown; what it took beside them changes nothing."""
    monkeypatch.setattr(sends_wire, "SILENT_S", 0.1)
    monkeypatch.setattr(takers, "_END_S", 0.1)
    listener = FrameListener(tmp_path / "t.sock")
    worker = Frames.connect(str(tmp_path / "t.sock"), Deadline(WAIT_S))
    frames = listener.accept(Deadline(WAIT_S), "a worker")
    silent: list[int] = []
    leader = LeadSession(beat=lambda: None, over=lambda: "", failed=lambda *_: None)
    with pytest.raises(NotReceived, match="stands still") as ended:
        takers._Transfer({0: frames}, leader, beside=beside).outcomes(
            Deadline(WAIT_S), lambda rank, _heard_at: silent.append(rank)
        )
    assert ended.value.touched is not beside
    assert silent == [0]
    for each in (frames, worker, listener):
        each.close()


class Threads:
    """A sidecar and the threads of its workers; a test says what these say."""

    def __init__(self, folder: Path, count: int) -> None:
        self._listener = FrameListener(folder / "t.sock")
        self.takers = WorkerReceivers(folder)
        self.workers: list[Frames] = []
        for rank in range(count):
            self.workers.append(Frames.connect(str(folder / "t.sock"), Deadline(WAIT_S)))
            self.takers._threads[rank] = self._listener.accept(Deadline(WAIT_S), "a worker")

    def take(self, keep_s: float) -> None:
        """A transfer in which everything comes, in a group that may be used again for so long."""
        group = Group(store="", name="g", size=2, rank=1, form_s=1.0, turn_s=1.0, keep_s=keep_s)
        for worker in self.workers:
            worker_wire.WORKER.say(worker, worker_wire.Taken(seconds=0.0, nbytes=1), Deadline(WAIT_S))
        leader = LeadSession(beat=lambda: None, over=lambda: "", failed=lambda *_: None)
        assert len(self.takers.take(group, leader, Deadline(WAIT_S), beside=True)) == len(self.workers)

    def close(self) -> None:
        for each in (self.takers, self._listener, *self.workers):
            each.close()


@pytest.fixture
def threads(tmp_path: Path) -> Iterator[Threads]:
    """Of two workers."""
    made = Threads(tmp_path, 2)
    yield made
    made.close()


def test_a_group_is_spoken_of_while_it_is_kept(threads: Threads) -> None:
    """Its members let go of it then: who said that it has it would have everybody wait for it in vain."""
    threads.take(60.0)
    assert threads.takers.group == "g"
    threads.take(0.0)
    assert not threads.takers.group


@pytest.mark.parametrize("beside", [False, True], ids=["in place", "beside"])
@pytest.mark.parametrize("how", ["hangs up", "says that it did not", "says that it did"])
def test_a_worker_that_does_not_take_it_may_have_written(threads: Threads, how: str, *, beside: bool) -> None:
    """In place, unless it says that it has not; the other one is told, and says for itself."""
    wrote = how != "says that it did not"
    worker, other = threads.workers
    if how == "hangs up":
        worker.close()
    else:
        worker_wire.WORKER.say(worker, worker_wire.Failed(reason="odd", touched=wrote and not beside), Deadline(WAIT_S))
    leader = LeadSession(
        beat=lambda: None,
        over=lambda: "",
        failed=lambda *_: worker_wire.WORKER.say(other, worker_wire.Failed(reason="told"), Deadline(WAIT_S)),
    )
    transfer = takers._Transfer(threads.takers._threads, leader, beside=beside)
    with pytest.raises(NotReceived, match="worker 0: ") as ended:
        transfer.outcomes(Deadline(WAIT_S), lambda *_: None)
    assert ended.value.touched is (wrote and not beside)


@pytest.mark.parametrize("beside", [False, True], ids=["in place", "beside"])
def test_a_sidecar_that_ends_in_the_middle_of_a_transfer_says_so(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, *, beside: bool
) -> None:
    """By what a transfer raises that was called off, and with what became of the parameters."""
    monkeypatch.setattr(takers, "_END_S", 0.1)
    group = Group(store="", name="g", size=2, rank=1, form_s=1.0, turn_s=1.0)
    told: list[str] = []
    leader = LeadSession(
        beat=threads.takers.close, over=lambda: "the sender is gone", failed=lambda reason, _: told.append(reason)
    )
    with pytest.raises(NotReceived) as ended:
        threads.takers.take(group, leader, Deadline(WAIT_S), beside=beside)
    assert [str(ended.value)] == told
    assert ended.value.touched is not beside
    assert len(threads.takers) == 0
    assert not threads.takers.stalled


class FewerWorkers:
    """Of a server that was launched anew: the first one knows its schedule."""

    @staticmethod
    def expect(*_: object) -> frozenset[int]:
        return frozenset()


def test_a_worker_that_is_none_of_the_server_s_any_more_takes_nothing(threads: Threads) -> None:
    """Its process is there still, and so is its thread: every version would wait for what it receives."""
    threads.takers.expect(FewerWorkers(), [None], Deadline(WAIT_S))  # type: ignore[arg-type, list-item]
    assert len(threads.takers) == 1
    assert not threads.workers[0].readable()
    assert threads.workers[1].readable(), "it was not hung up on"


@pytest.mark.parametrize("how", ["silent", "silent, and has taken it", "moving"])
def test_a_sidecar_does_not_vouch_for_a_worker_that_says_nothing(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The leader judges by the members that it heard of which are late, and why; the sidecar lives on."""
    monkeypatch.setattr(sends_wire, "BEAT_S", 0.05)
    monkeypatch.setattr(takers, "_VOUCHED_S", 0.5)
    silent, moving = threads.workers
    beats, until_s = list[float](), time.monotonic() + 1.5
    if how.endswith("taken it"):
        worker_wire.WORKER.say(silent, worker_wire.Taken(seconds=0.0, nbytes=1), Deadline(WAIT_S))

    def move() -> str:
        for worker in (silent, moving) if how == "moving" else (moving,):
            worker_wire.WORKER.say(worker, worker_wire.Moving(), Deadline(WAIT_S))
        return "" if time.monotonic() < until_s else "enough"

    told = lambda *_: [  # noqa: E731
        worker_wire.WORKER.say(worker, worker_wire.Failed(reason="told"), Deadline(WAIT_S))
        for worker in threads.workers
    ]
    leader = LeadSession(beat=lambda: beats.append(until_s - time.monotonic()), over=move, failed=told)
    with pytest.raises(NotReceived, match="enough"):
        takers._Transfer(threads.takers._threads, leader, beside=True).outcomes(Deadline(WAIT_S), lambda *_: None)
    assert beats, "it vouched at first"
    assert (min(beats) > 0.5) is (how == "silent")


@pytest.mark.parametrize("less", [False, True])
def test_the_trainer_hears_whether_less_at_a_time_may_do(threads: Threads, *, less: bool) -> None:
    """As the worker said."""
    first, other = threads.workers
    worker_wire.WORKER.say(first, worker_wire.Failed(reason="odd", less=less), Deadline(WAIT_S))
    heard = list[tuple[str, bool]]()

    def failed(reason: str, less: bool) -> None:
        heard.append((reason, less))
        worker_wire.WORKER.say(other, worker_wire.Failed(reason="told"), Deadline(WAIT_S))

    leader = LeadSession(beat=lambda: None, over=lambda: "", failed=failed)
    with pytest.raises(NotReceived):
        takers._Transfer(threads.takers._threads, leader, beside=True).outcomes(Deadline(WAIT_S), lambda *_: None)
    assert heard == [("worker 0: odd", less)]
