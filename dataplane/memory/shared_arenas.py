"""Anonymous shared memory that storages of this process are moved into: many storages to an arena.

A storage moves as torch itself moves it into shared memory (`UntypedStorage._share_fd_cpu_`): its data pointer is
exchanged, so parameters, views, tied weights and optimizer states over it go on as before. torch makes a mapping and a
descriptor for each storage, of which a process has 65,530 and some thousands; an arena has one of each for all of its
storages.

torch has no call that puts a storage over given memory, so `_exchange` swaps the three words of two storages' data
pointers. `movable` first looks whether this torch keeps them where they are expected.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Final

import torch

from ..errors import NotExportable

ARENA_BYTES: Final = 2**30
"""Most bytes of an arena of several storages; a larger storage has its own. So much is needed beside what it replaces.
"""
_ALIGNMENT: Final = 64
"""Of a storage in its arena: that of torch's own allocator."""
_DATA_POINTER: Final = 16
"""Bytes before the data pointer in c10::StorageImpl: a virtual table and reference counts (torch 2.13)."""

_Words = ctypes.c_uint64 * 3
"""c10::DataPtr: the data, what frees them, and what that is given."""


class Arena(mmap.mmap):
    """A region of shared memory. It lives, with its descriptor, as long as any storage lies in it."""

    fd: int
    """Its descriptor."""
    address: int
    """Where it is mapped here."""

    @classmethod
    def create(cls, nbytes: int) -> Arena:
        """Reserve `nbytes`. Raises `NotExportable` where there is no memory or no descriptor left."""
        fd = -1
        try:
            fd = os.memfd_create(f"weightbus_{os.getpid()}", os.MFD_CLOEXEC)
            os.posix_fallocate(fd, 0, nbytes)
            made = cls(fd, nbytes)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise NotExportable(
                f"{nbytes} bytes of shared memory cannot be had ({error.strerror}): leave that much memory free beside"
                " the parameters, or raise the limit of open files (ulimit -n)"
            ) from error
        made.fd = fd
        made.address = ctypes.addressof(ctypes.c_char.from_buffer(made))
        weakref.finalize(made, os.close, fd)
        _ARENAS[made.address] = made
        return made


_ARENAS: Final = weakref.WeakValueDictionary[int, Arena]()
"""All arenas of this process by address: several exporters may export the same storages."""


class ArenaLookup:
    """The arenas of this process as they are now."""

    def __init__(self) -> None:
        self._arenas = sorted(_ARENAS.values(), key=lambda arena: arena.address)
        self._addresses = [arena.address for arena in self._arenas]

    def of(self, address: int) -> Arena | None:
        """The arena in which `address` lies; None for other memory."""
        at = bisect.bisect_right(self._addresses, address) - 1
        if at < 0 or address >= self._addresses[at] + len(self._arenas[at]):
            return None
        return self._arenas[at]


@cache
def movable() -> bool:
    """True if this torch keeps the data pointers of storages where `_exchange` expects them."""
    tensor = torch.arange(16)
    storage, other = tensor.untyped_storage(), torch.frombuffer(bytearray(128), dtype=torch.uint8).untyped_storage()
    before = storage.data_ptr(), other.data_ptr()
    words = _words(storage)
    # torch frees memory of its own by its address, so two of the words are equal.
    if list(words).count(before[0]) != 2 or words[0] != before[0] or _words(other)[0] != before[1]:
        return False
    _exchange(storage, other)
    moved = (other.data_ptr(), storage.data_ptr()) == before and not tensor.any() and storage.nbytes() == 128
    _exchange(storage, other)
    return moved and torch.equal(tensor, torch.arange(16, dtype=tensor.dtype))


def move(storages: Iterable[torch.UntypedStorage]) -> None:
    """Move `storages`, none of them in an arena yet, into arenas. Raises `NotExportable`; those moved before stay."""
    batch: list[torch.UntypedStorage] = []
    filled = 0
    for storage in storages:
        if batch and filled + storage.nbytes() > ARENA_BYTES:
            _fill(batch, filled)
            batch, filled = [], 0
        batch.append(storage)
        filled += _aligned(storage.nbytes())
    if batch:
        _fill(batch, filled)


def _fill(storages: Sequence[torch.UntypedStorage], nbytes: int) -> None:
    """Move `storages` into one arena. What they held before is freed."""
    arena = Arena.create(nbytes)
    at = 0
    for storage in storages:
        size = storage.nbytes()
        piece = torch.frombuffer(arena, dtype=torch.uint8, count=size, offset=at).untyped_storage()
        ctypes.memmove(arena.address + at, storage.data_ptr(), size)
        _exchange(storage, piece)
        at += _aligned(size)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _words(storage: torch.UntypedStorage) -> ctypes.Array[ctypes.c_uint64]:
    return _Words.from_address(int(storage._cdata) + _DATA_POINTER)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _exchange(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Swap the data pointers of two storages of one size, as std::swap would."""
    mine, others = _words(storage), _words(other)
    for word in range(len(mine)):
        mine[word], others[word] = others[word], mine[word]
