"""A machine's files between the kernel and the disk: what is written, renamed and removed is lost or torn until synced.

The rules are POSIX's, at their worst. A file's contents are on disk after its own fsync, until then any part of them
may be: what was there before, nothing, a prefix, or a block of zeros in the middle. A name is on disk after the fsync
of its folder; until then renames are lost from the last one backwards. A process that dies loses nothing; a machine
that loses its power loses all of this.

`SimPath` and `SimOs` stand in for `pathlib.Path` and `os` in the product's own code, which runs unchanged.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

BLOCK: Final = 16
"""Of what is torn; records are small, so blocks are, too."""


class Inode:
    """The contents of one file."""

    def __init__(self) -> None:
        self.content = b""
        self.safe: bytes | None = None
        """As of its last fsync; null before the first."""

    def tear(self, rng: random.Random) -> None:
        """The power fails: what was not synced is there, or not, or in part."""
        content = self.content
        if self.safe == content:
            return
        match rng.randrange(4):
            case 0:
                self.content = self.safe or b""
            case 1:
                self.content = content[: rng.randrange(len(content) + 1)]
            case 2:
                at = rng.randrange(max(1, len(content)))
                self.content = content[:at] + bytes(min(BLOCK, len(content) - at)) + content[at + BLOCK :]
            case _:
                pass
        self.safe = self.content


class Files:
    """One folder of one machine."""

    def __init__(self) -> None:
        self.names: dict[str, Inode] = {}
        self.full = False
        self.step: Callable[[str], None] = lambda _: None
        """Called before each operation that changes something: a process that dies does so here."""
        self._safe: dict[str, Inode] = {}
        self._pending: list[tuple[str, Inode | None]] = []
        """Changed names, in order; null for one that is gone."""

    def name(self, name: str, inode: Inode | None) -> None:
        """`name` stands for `inode` from now on."""
        if inode is None:
            self.names.pop(name, None)
        else:
            self.names[name] = inode
        self._pending.append((name, inode))

    def sync(self) -> None:
        """Fsync of the folder."""
        self._safe, self._pending = dict(self.names), []

    def lose_power(self, rng: random.Random) -> None:
        """What a machine finds when it is switched on again."""
        for name, inode in self._pending[: rng.randrange(len(self._pending) + 1)]:
            if inode is None:
                self._safe.pop(name, None)
            else:
                self._safe[name] = inode
        self.names, self._pending = dict(self._safe), []
        for inode in self.names.values():
            inode.tear(rng)


class SimPath:
    """As much of `pathlib.Path` as the product's small files need."""

    def __init__(self, files: Files, name: str = "") -> None:
        self.files, self.name = files, name

    def __truediv__(self, name: str) -> SimPath:
        return SimPath(self.files, name)

    @property
    def parent(self) -> SimPath:
        """The folder."""
        return SimPath(self.files)

    def with_suffix(self, suffix: str) -> SimPath:
        """A name beside it."""
        return SimPath(self.files, self.name.rpartition(".")[0] + suffix)

    def mkdir(self, *, mode: int, parents: bool, exist_ok: bool) -> None:
        """It is there."""

    def open(self, mode: str) -> SimFile:
        """For writing, from the beginning."""
        assert mode == "wb"
        self.files.step(f"open {self.name}")
        inode = self.files.names.get(self.name)
        if inode is None:
            inode = Inode()
            self.files.name(self.name, inode)
        inode.content = b""
        return SimFile(self.files, inode)

    def write_bytes(self, content: bytes) -> None:
        """In place."""
        with self.open("wb") as file:
            file.write(content)

    def read_bytes(self) -> bytes:
        """All of it."""
        inode = self.files.names.get(self.name)
        if inode is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.name)
        return inode.content

    def replace(self, target: SimPath) -> None:
        """Rename."""
        self.files.step(f"rename {self.name}")
        inode = self.files.names[self.name]
        self.files.name(target.name, inode)
        self.files.name(self.name, None)


class SimFile:
    """A file that is open for writing."""

    def __init__(self, files: Files, inode: Inode) -> None:
        self._files, self._inode = files, inode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return

    def write(self, content: bytes) -> None:
        """Into the kernel's memory."""
        self._files.step("write")
        if self._files.full:
            self._inode.content += content[: len(content) // 2]
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._inode.content += content

    def flush(self) -> None:
        """There is no buffer."""

    def fileno(self) -> SimFile:
        """What `SimOs.fsync` is given."""
        return self

    def sync(self) -> None:
        """Fsync."""
        self._inode.safe = self._inode.content


class SimOs:
    """As much of `os` as the product's small files need."""

    O_RDONLY: Final = os.O_RDONLY

    @staticmethod
    def open(path: SimPath, flags: int) -> SimPath:
        """A folder, to sync it."""
        assert flags == os.O_RDONLY
        return path

    @staticmethod
    def fsync(what: SimPath | SimFile) -> None:
        """Of a file or of a folder."""
        files = what.files if isinstance(what, SimPath) else what._files
        files.step("fsync")
        if isinstance(what, SimPath):
            files.sync()
        else:
            what.sync()

    @staticmethod
    def close(what: SimPath) -> None:
        """Nothing is left open."""
