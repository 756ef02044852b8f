"""What is made on a thread of its own while its maker waits for others: tables of 30 GB take as long as a group."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from . import torch_threads

_T = TypeVar("_T")


class Binding(Generic[_T]):
    """Begun when it is made."""

    def __init__(self, make: Callable[[], _T]) -> None:
        self._made: Future[_T] = Future()

        def run() -> None:
            try:
                self._made.set_result(make())
            except BaseException as error:  # noqa: BLE001  it is raised where the result is asked for
                self._made.set_exception(error)

        torch_threads.start(run, "weightbus-binding")

    def result(self) -> _T:
        """Wait for it. Raises what `make` raised."""
        return self._made.result()

    def settle(self) -> None:
        """Wait until nothing is made any more, however it ended."""
        self._made.exception()
