"""A value that is built on a thread of its own while its user waits for other processes.

Tables of 30 GB take as long to build as a process group to form.
"""

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
"""Seconds to allocate memory and write tables; a driver may hang for ever there."""
_LOG: Final = logging.getLogger(__name__)

_T = TypeVar("_T")


class BackgroundInit(Generic[_T]):
    """The result of a function that starts when this is constructed."""

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

        torch_threads.start(run, "weightbus-binding")

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
