"""Threads: a program ends while one is inside of torch; work made aside is bounded, and given up in time."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

from weightbus.dataplane.errors import DeadlineExceeded, TransferFailed
from weightbus.dataplane.processes import threads as binding
from weightbus.dataplane.processes.threads import BackgroundInit, SerialCalls

PROGRAM = textwrap.dedent(
    """
    import threading
    from datetime import timedelta
    from torch._C._distributed_c10d import TCPStore
    from weightbus.dataplane.processes import threads

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    begun = threading.Event()

    def wait():
        begun.set()
        try:
            store.wait(["never"], timedelta(seconds=1.0))
        except RuntimeError:
            print("came back", flush=True)

    threads.start_thread(wait, "in torch")
    begun.wait()
    """
)


def test_the_interpreter_waits_for_threads_that_are_in_torch() -> None:
    """A thread that came back too late would end the program with SIGABRT: "terminate called without ..."."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "came back\n"), done.stderr


STUCK = textwrap.dedent(
    """
    import threading
    from weightbus.dataplane.processes import threads

    threads.PATIENCE_S = 0.5
    calls = threads.SerialCalls("stuck")
    calls.submit(lambda: None).result()
    calls.submit(threading.Event().wait)
    print("over", flush=True)
    """
)


def test_a_call_that_does_not_return_keeps_no_program() -> None:
    """Nor does one that has returned: its thread is there only while there are calls."""
    done = subprocess.run([sys.executable, "-c", STUCK], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr


def test_calls_are_made_one_after_the_other() -> None:
    """In the order in which they were asked for; what they raise is raised where the answer is asked for."""
    calls, order = SerialCalls("in order"), []
    answers = [calls.submit(lambda at=at: (time.sleep(0.01), order.append(at), at)[2]) for at in range(5)]
    wrong = calls.submit(lambda: 1 // 0)
    assert [answer.result(10) for answer in answers] == order == list(range(5))
    with pytest.raises(ZeroDivisionError):
        wrong.result(10)
    for _ in range(100):
        assert calls.submit(threading.current_thread).result(10).name == "in order"


def test_a_call_that_was_given_up_holds_no_other() -> None:
    """What waited behind it is not made at all, what comes later is, by another thread."""
    calls, begun, released = SerialCalls("given up"), threading.Event(), threading.Event()
    held, behind = calls.submit(lambda: (begun.set(), released.wait(60))[1]), calls.submit(lambda: 1)
    assert begun.wait(10)
    calls.give_up()
    assert calls.submit(lambda: 2).result(10) == 2
    released.set()
    assert held.result(10)
    assert behind.cancelled(), "its future is cancelled"


# What is made aside is waited for so long and no longer, and belongs to its thread when it is given up.


WAIT_S = 20.0


class Slow:
    """Returns when it is let."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.late = threading.Event()

    def __call__(self) -> int:
        assert self.released.wait(3 * WAIT_S)
        return 7


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    monkeypatch.setattr(binding, "BOUND_S", 0.2)
    made = Slow()
    yield made
    made.released.set()


def test_the_made_object_is_returned_to_every_caller() -> None:
    """And what it raises is raised there; nothing is late."""
    late = threading.Event()
    made = BackgroundInit(lambda: 7, late.set)
    assert made.result() == 7
    assert made.settle()

    def refuse() -> int:
        raise TransferFailed("no room")

    failed = BackgroundInit(refuse, late.set)
    with pytest.raises(TransferFailed, match="no room"):
        failed.result()
    assert failed.settle()
    assert not late.is_set()


def test_one_that_does_not_return_holds_no_peer(slow: Slow) -> None:
    """After it was given up, `late` is called by its thread when it ends."""
    made = BackgroundInit(slow, slow.late.set)
    with pytest.raises(DeadlineExceeded, match="bound to memory"):
        made.result()
    assert not made.settle()
    assert not slow.late.is_set()
    slow.released.set()
    assert slow.late.wait(WAIT_S)
