"""Which of a server's GPU memory is given back, to whom it belongs meanwhile: remembered where a crash cannot undo it.

SGLang does not say what it has given back, and ends when it is asked to take something twice. So it is written down
before the server is asked, by launch; another launch has all of its memory.

What comes back is undefined, so a server that has given its weights back is named anew: whatever was known of the one
before, a version that it held above all, does not hold of this one. Then the rule for every server that is launched
again applies: it generates nothing until a version was taken, proven and committed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from ...durable_file import write_durably
from ...errors import StateUnreadable

WEIGHTS: Final = "weights"
TAGS: Final = ("kv_cache", WEIGHTS, "cuda_graph")
"""SGLang's names, in the order in which they are given back."""


class _Lent(msgspec.Struct, frozen=True):
    launch: str = ""
    times: int = 0
    tags: tuple[str, ...] = ()


class MemoryOccupation:
    """Of one server. Used by the thread that calls it."""

    def __init__(self, path: Path | None = None) -> None:
        """Keeps it in the file `path`; in memory alone without one. Raises `StateUnreadable`."""
        self._path = path
        self._lent = _read(path)

    @property
    def tags(self) -> tuple[str, ...]:
        """What is given back now."""
        return self._lent.tags

    @property
    def undefined(self) -> bool:
        """Its weights are not those of its launch: they were given back since."""
        return self._lent.times > 0

    def named(self, launch: str) -> str:
        """The name of a server of this launch, with what has become of it. Forgets other launches."""
        if launch != self._lent.launch:
            self._lent = _Lent(launch)
        return f"{launch}+{self._lent.times}" if self._lent.times else launch

    def begin(self) -> None:
        """The weights are about to be given up: from now on `named` gives another name. Raises OSError."""
        self._keep(msgspec.structs.replace(self._lent, times=self._lent.times + 1))

    def give(self) -> None:
        """Everything is about to be given back. Raises OSError."""
        self._keep(msgspec.structs.replace(self._lent, tags=TAGS))

    def took(self, tag: str) -> None:
        """The server has it again. Raises OSError."""
        self._keep(msgspec.structs.replace(self._lent, tags=tuple(each for each in self.tags if each != tag)))

    def _keep(self, lent: _Lent) -> None:
        if self._path is not None:
            write_durably(self._path, msgspec.json.encode(lent))
        self._lent = lent


def _read(path: Path | None) -> _Lent:
    if path is None:
        return _Lent()
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Lent)
    except FileNotFoundError:
        return _Lent()
    except (OSError, ValueError) as error:
        raise StateUnreadable(
            f"cannot tell from {path} what memory the server has given back ({error}): restart the server, then delete"
            " the file"
        ) from error
