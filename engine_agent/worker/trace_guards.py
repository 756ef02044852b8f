"""What a loader must not do unseen while it is recorded: work in threads of its own, take addresses, decide by values.

torch's modes belong to one thread and see operations. These ways past them are closed for the time, for the thread
that records and no other.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, cast
from unittest import mock

import torch

from .memory_origins import Number, ReadsValues, WrittenMemory

_ALONE: Final = threading.Lock()
_ADDRESSES: Final = ("data_ptr", "numpy", "tolist", "__array__", "__dlpack__")
"""Ways out of torch: through them code reads or writes memory unseen."""
_CONVERSIONS: Final = ("__bool__", "__complex__", "__float__", "__index__", "__int__")
"""Numbers of Python's own, of which nothing is known any more. Torch asks for none of them by these names."""
_INTERFACE: Final = "__cuda_array_interface__"
"""One more, which is a property."""


@contextlib.contextmanager
def without_addresses(memory_of: Callable[[torch.Tensor], WrittenMemory | None]) -> Generator[None]:
    """Refuse to this thread the ways out of torch for traced memory.

    The methods are exchanged for the time. A function mode would see them too, and also every other call, which made
    tracing half as slow again.
    """
    mine = threading.get_ident()

    def look(tensor: torch.Tensor, name: str) -> None:
        memory = memory_of(tensor) if threading.get_ident() == mine else None
        if memory is not None:
            raise ReadsValues(memory.sources(), name)

    def guarded(name: str) -> Callable[..., object]:
        method = getattr(torch.Tensor, name)

        def refusing(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
            look(tensor, name)
            return method(tensor, *args, **kwargs)

        return refusing

    interface = getattr(torch.Tensor, _INTERFACE)

    def shown(tensor: torch.Tensor) -> object:
        look(tensor, _INTERFACE)
        return interface.__get__(tensor)

    with contextlib.ExitStack() as exchanged:
        for name in _ADDRESSES:
            exchanged.enter_context(mock.patch.object(torch.Tensor, name, guarded(name)))
        exchanged.enter_context(mock.patch.object(torch.Tensor, _INTERFACE, property(shown)))
        yield


@contextlib.contextmanager
def noting_numbers(memory_of: Callable[[torch.Tensor], WrittenMemory | None], read: set[int]) -> Generator[None]:
    """Add to `read` the sources whose only element this thread decides or calculates by."""
    mine = threading.get_ident()
    number_of = torch.Tensor.item

    def followed(tensor: torch.Tensor) -> WrittenMemory | None:
        return memory_of(tensor) if threading.get_ident() == mine else None

    def item(tensor: torch.Tensor) -> object:
        memory, value = followed(tensor), cast("object", number_of(tensor))
        return Number.of(value, memory.sources(), read) if memory is not None and isinstance(value, float) else value

    def noting(name: str) -> Callable[[torch.Tensor], object]:
        method = getattr(torch.Tensor, name)

        def convert(tensor: torch.Tensor) -> object:
            memory = followed(tensor)
            read.update(memory.sources() if memory is not None else ())
            return method(tensor)

        return convert

    with contextlib.ExitStack() as exchanged:
        exchanged.enter_context(mock.patch.object(torch.Tensor, "item", item))
        for name in _CONVERSIONS:
            exchanged.enter_context(mock.patch.object(torch.Tensor, name, noting(name)))
        yield


@contextlib.contextmanager
def in_one_thread() -> Generator[None]:
    """Work that this thread gives to a pool is done at once, by itself: torch's modes belong to a thread.

    One thread at a time: the classes that are changed belong to the process.
    """
    with _ALONE, _here():
        yield


@contextlib.contextmanager
def _here() -> Generator[None]:
    mine = threading.get_ident()
    submit, start = ThreadPoolExecutor.submit, threading.Thread.start

    def run(pool: ThreadPoolExecutor, function: Callable[..., object], /, *args: object, **kwargs: object) -> object:
        if threading.get_ident() != mine:
            return submit(pool, function, *args, **kwargs)
        future: Future[object] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - a future carries whatever was raised
            future.set_exception(error)
        return future

    def refuse(thread: threading.Thread) -> None:
        if threading.get_ident() == mine:
            raise RuntimeError(f"the loader starts a thread {thread.name!r}, in which nothing could be followed")
        start(thread)

    with mock.patch.object(ThreadPoolExecutor, "submit", run), mock.patch.object(threading.Thread, "start", refuse):
        yield
