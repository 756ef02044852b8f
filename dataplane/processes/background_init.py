"""What is made on a thread of its own while its maker waits for others: tables of 30 GB take as long as a group."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final, Generic, TypeVar

from ..errors import DeadlineExceeded
from . import torch_threads
from .deadline import Deadline

BOUND_S: Final = 60.0
"""For memory to be had and tables to be written: seconds where there is much of it, for ever where a driver hangs."""
_LOG: Final = logging.getLogger(__name__)

_T = TypeVar("_T")


class BackgroundInit(Generic[_T]):
    """Begun when it is made."""

    def __init__(self, make: Callable[[], _T], late: Callable[[], None] = lambda: None) -> None:
        """`late` is called, by its thread, when `make` has returned after `settle` had given it up."""
        self._made: Future[_T] = Future()
        self._deadline = Deadline(BOUND_S)
        self._lock = threading.Lock()
        """Held when `make` has ended, and when it is given up: one of the two is first."""
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

        torch_threads.start(run, "weightbus-binding")

    def result(self) -> _T:
        """Wait for it. Raises what `make` raised, and `DeadlineExceeded` when `BOUND_S` are over."""
        if not wait([self._made], self._deadline.left()).done:
            raise DeadlineExceeded("what is sent or received to be bound to memory", self._deadline.seconds)
        return self._made.result()

    def settle(self) -> bool:
        """Wait until nothing is made any more, however it ended.

        False when `BOUND_S` are over: what it is made of belongs to its thread from then on, and to nobody else.
        """
        wait([self._made], self._deadline.left())
        with self._lock:
            self._given_up = not self._made.done()
        if self._given_up:
            _LOG.warning(
                "memory is not bound after %g s: it is left to the thread that does it", self._deadline.seconds
            )
        return not self._given_up
