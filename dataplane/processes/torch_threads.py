"""Daemon threads that block inside torch, and are waited for a little when the interpreter ends.

A daemon thread that returns from C++ into an interpreter that is finalizing is ended in the middle of pybind11's
frames, which the C++ runtime takes for an error: "terminate called without an active exception", and a program that did
everything right ends with SIGABRT. Threads that are not daemons would keep a program for as long as a dead peer keeps
torch.
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
"""Seconds for all of them together; NCCL's abort and a broken wait of gloo's take less."""

_T = TypeVar("_T")

_started: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()


def start(target: Callable[[], None], name: str) -> threading.Thread:
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
            queue.waiting.append((future, partial(_call, function, future)))
            idle, queue.served = not queue.served, True
        if idle:
            start(partial(_serve, queue), self._name)
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


class _Cancellable(Protocol):
    def cancel(self) -> bool: ...


class _CallQueue:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: deque[tuple[_Cancellable, Callable[[], None]]] = deque()
        self.served = False
        """True while a thread works on the queue."""


def _serve(queue: _CallQueue) -> None:
    while True:
        with queue.lock:
            if not queue.waiting:
                queue.served = False
                return
            _, call = queue.waiting.popleft()
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
