"""Threads of ours: daemon threads that block inside torch, and low latency beside a busy main thread.

A daemon thread that returns from C++ into an interpreter that is finalizing is ended in the middle of pybind11's
frames, which the C++ runtime takes for an error: "terminate called without an active exception", and a program that did
everything right ends with SIGABRT. Threads that are not daemons would keep a program for as long as a dead peer keeps
torch. So daemon threads are waited for a little when the interpreter ends.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from math import isclose
from typing import Any, Final, Generic, TypeVar

from ..errors import DeadlineExceeded
from .connections import Deadline

BOUND_S: Final = 60.0
"""Seconds to allocate memory and write tables; a driver may hang for ever there."""
_LOG: Final = logging.getLogger(__name__)
INTERVAL_S: Final = 1e-5
"""Seconds.

Of 1 to 100 µs, 5 to 20 were best: SGLang 0.5.17, two H200s, 31 GB in 0.2 to 0.3 s; 2 to 4 s with Python's 5 ms.
"""
_PR_SET_TIMERSLACK: Final = 29
_lock = threading.Lock()
_usual: list[float] = []
"""The interval before the first user of `low_latency_threads`, once for each current user."""
_collected: list[bool] = []
"""Whether the collector was on before the first user of `gc_paused`, once for each current user."""


def without_timer_slack() -> None:
    """Set this thread's timer slack to 1 ns, for good. Without effect where the kernel does not allow it.

    Linux adds up to 50 µs of slack to every timed wait of a thread, which is longer than such a loop.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


@contextmanager
def low_latency_threads() -> Generator[None]:
    """Meanwhile any thread of this process gets the interpreter within `INTERVAL_S` of Python code of another one.

    An idle scheduler polls for requests, and releases the GIL for a microsecond in each loop. A waiting thread is woken
    each time and comes too late each time; its wait for the switch interval, after which Python forces a release,
    begins anew with every loop. On an idle server that took up to 0.5 s for each call of a thread of ours, and seconds
    for a version. An interval shorter than one loop serves the waiting thread.

    Running threads lose the time of the woken ones, which mostly wait for devices and sockets. The last context to end
    restores the interval, unless other code has set another one.
    """
    with _lock:
        _usual.append(_usual[0] if _usual else sys.getswitchinterval())
        sys.setswitchinterval(INTERVAL_S)
    try:
        yield
    finally:
        with _lock:
            usual = _usual.pop()
            if not _usual and isclose(sys.getswitchinterval(), INTERVAL_S):  # it is kept in whole µs
                sys.setswitchinterval(usual)


@contextmanager
def gc_paused() -> Generator[None]:
    """Pause the cyclic collector; reference counting goes on. Contexts may overlap: the last one ends the pause.

    A process that serves a model has millions of objects, and a garbage collection takes it half a second or more, in
    which every thread waits. The objects of one exchange, such as the names of ten thousand tensors, are enough to
    start one. So the collector is paused while a server takes a version, in the server and in its sidecar.
    """
    with _lock:
        _collected.append(_collected[0] if _collected else gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            if _collected.pop() and not _collected:
                gc.enable()


PATIENCE_S: Final = 10.0
"""Seconds for all of them together; NCCL's abort and a broken wait of gloo's take less."""

_T = TypeVar("_T")

_started: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread that runs `target`, without timer slack."""

    def run() -> None:
        without_timer_slack()
        target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    _started.add(thread)
    thread.start()
    return thread


class SerialCalls:
    """Calls that cannot be cancelled once begun, one after another, on a thread that exists while there are any."""

    def __init__(self, name: str) -> None:
        """`name` is the thread's."""
        self._name = name
        self._queue = _CallQueue()

    def submit(self, function: Callable[[], _T]) -> Future[_T]:
        """Queue `function`; its result is the future's."""
        future: Future[_T] = Future()
        queue = self._queue
        with queue.lock:
            queue.waiting.append((future, function))
            idle, queue.served = not queue.served, True
        if idle:
            start_thread(queue.serve, self._name)
        return future

    def give_up(self) -> None:
        """Cancel calls that have not begun.

        A call that does not return keeps its thread; the next call gets another one.
        """
        queue, self._queue = self._queue, _CallQueue()
        with queue.lock:
            waiting, queue.waiting = tuple(queue.waiting), deque()
        for future, _ in waiting:
            future.cancel()


def run_all_within(seconds: float, calls: Sequence[Callable[[], None]], name: str) -> None:
    """Run `calls` in parallel, on threads called `name`, and wait up to `seconds` for all of them together.

    A call that does not return by then keeps its thread. Raises the exception of the first that failed, after the
    others.
    """
    futures = [SerialCalls(name).submit(call) for call in calls]
    done = wait(futures, seconds).done
    for ended in [each for each in futures if each in done]:
        ended.result()


class _CallQueue:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self.served = False
        """True while a thread works on the queue."""

    def serve(self) -> None:
        while True:
            with self.lock:
                if not self.waiting:
                    self.served = False
                    return
                future, function = self.waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001  it is raised where the answer is asked for
                    future.set_exception(error)


def _wait_for_all() -> None:
    until = time.monotonic() + PATIENCE_S
    for thread in tuple(_started):
        thread.join(max(0.0, until - time.monotonic()))


atexit.register(_wait_for_all)


class BackgroundInit(Generic[_T]):
    """The result of a function that starts, on a thread of its own, when this is constructed.

    Its user waits for other processes meanwhile: tables of 30 GB take as long to build as a process group to form.
    """

    def __init__(self, make: Callable[[], _T], late: Callable[[], None] = lambda: None) -> None:
        """`late` is called on the thread when `make` returns after `settle` has given it up."""
        self._made: Future[_T] = Future()
        self._deadline = Deadline(BOUND_S)
        self._lock = threading.Lock()
        """Orders the end of `make` and giving it up."""
        self._given_up = False

        def run() -> None:
            try:
                made = make()
            except BaseException as error:  # noqa: BLE001  it is raised where the result is asked for
                with self._lock:
                    self._made.set_exception(error)
            else:
                with self._lock:
                    self._made.set_result(made)
            if self._given_up:
                late()

        start_thread(run, "weightbus-binding")

    def result(self) -> _T:
        """The value; blocks. Raises the exception of `make`, and `DeadlineExceeded` after `BOUND_S`."""
        if not wait([self._made], self._deadline.left()).done:
            raise DeadlineExceeded("what is sent or received to be bound to memory", self._deadline.seconds)
        return self._made.result()

    def settle(self) -> bool:
        """Block until `make` has ended, with or without success.

        False after `BOUND_S`: from then on the thread alone owns the objects that `make` uses.
        """
        wait([self._made], self._deadline.left())
        with self._lock:
            self._given_up = not self._made.done()
        if self._given_up:
            _LOG.warning(
                "memory is not bound after %g s: it is left to the thread that does it", self._deadline.seconds
            )
        return not self._given_up
