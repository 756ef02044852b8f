"""Threads that wait inside of torch. The interpreter waits for them a little when it ends.

A daemon thread that comes back from C++ into an interpreter that is ending is ended on the spot, in the middle of
pybind11's frames, which the C++ runtime takes for an error: "terminate called without an active exception", and a
program that did everything right ends with SIGABRT. Threads that are not daemons would keep a program for as long as a
peer that died keeps torch.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Final, Protocol, TypeVar

from .thread_latency import without_timer_slack

PATIENCE_S: Final = 10.0
"""For all of them together; NCCL's abort and a wait of gloo's that was broken off take less."""

_T = TypeVar("_T")

_started: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()


def start(target: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread that runs `target`."""

    def run() -> None:
        without_timer_slack()
        target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    _started.add(thread)
    thread.start()
    return thread


class SerialCalls:
    """Calls that cannot be broken off: one after the other, on a thread that is there while there are any."""

    def __init__(self, name: str) -> None:
        """`name` is the thread's."""
        self._name = name
        self._line = _Line()

    def submit(self, function: Callable[[], _T]) -> Future[_T]:
        """Have it called, after those before it."""
        future: Future[_T] = Future()
        line = self._line
        with line.lock:
            line.waiting.append((future, partial(_call, function, future)))
            idle, line.served = not line.served, True
        if idle:
            start(partial(_serve, line), self._name)
        return future

    def give_up(self) -> None:
        """What has not begun is cancelled. What does not return keeps its thread; the next call gets another one."""
        line, self._line = self._line, _Line()
        with line.lock:
            waiting, line.waiting = tuple(line.waiting), deque()
        for future, _ in waiting:
            future.cancel()


def run_all_within(seconds: float, calls: Sequence[Callable[[], None]], name: str) -> None:
    """Have `calls` made beside one another, on threads called `name`, and wait for all of them together so long.

    What does not return by then keeps its thread. Raises what the first one raised that failed, after the others.
    """
    futures = [SerialCalls(name).submit(call) for call in calls]
    done = wait(futures, seconds).done
    for ended in [each for each in futures if each in done]:
        ended.result()


class _Cancellable(Protocol):
    def cancel(self) -> bool: ...


class _Line:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: deque[tuple[_Cancellable, Callable[[], None]]] = deque()
        self.served = False
        """A thread looks at it."""


def _serve(line: _Line) -> None:
    while True:
        with line.lock:
            if not line.waiting:
                line.served = False
                return
            _, call = line.waiting.popleft()
        call()


def _call(function: Callable[[], _T], future: Future[_T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001  it is raised where the answer is asked for
        future.set_exception(error)


def _wait_for_all() -> None:
    until = time.monotonic() + PATIENCE_S
    for thread in tuple(_started):
        thread.join(max(0.0, until - time.monotonic()))


atexit.register(_wait_for_all)
