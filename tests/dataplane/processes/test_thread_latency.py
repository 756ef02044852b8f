"""Low thread latency lasts as long as a context asks for it, and is restored afterwards."""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Generator

import pytest

from weightbus.dataplane.processes import start_thread
from weightbus.dataplane.processes.threads import INTERVAL_S, low_latency_threads


@pytest.fixture(autouse=True)
def usual() -> Generator[float]:
    """What this process had is put back, whatever a test does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    yield 0.004
    sys.setswitchinterval(before)


def test_the_interval_is_short_for_as_long_as_it_is_asked_for(usual: float) -> None:
    """Two transfers of one process may overlap, in any order."""
    one, other = low_latency_threads(), low_latency_threads()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(INTERVAL_S)
    other.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_it_ends_with_an_error_too(usual: float) -> None:
    with pytest.raises(KeyError), low_latency_threads():
        raise KeyError
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_a_peer_that_sets_another_one_meanwhile_keeps_it() -> None:
    """The process is its program's."""
    with low_latency_threads():
        sys.setswitchinterval(0.02)
    assert sys.getswitchinterval() == pytest.approx(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="the slack of a thread is Linux's")
def test_a_thread_of_torchs_is_woken_in_time() -> None:
    """It alone: the program's threads keep their slack."""
    found: list[int] = []
    slack = functools.partial(ctypes.CDLL(None).prctl, 30, 0, 0, 0, 0)
    before = slack()
    start_thread(lambda: found.append(slack()), "test").join(10)
    assert found == [1]
    assert slack() == before > 1


def test_many_at_a_time(usual: float) -> None:
    def often() -> None:
        for _ in range(200):
            with low_latency_threads():
                assert sys.getswitchinterval() == pytest.approx(INTERVAL_S)

    threads = [threading.Thread(target=often) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    assert sys.getswitchinterval() == pytest.approx(usual)
