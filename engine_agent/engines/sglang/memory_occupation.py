"""GPU memory that a server has released, by its tags: remembered where a crash cannot undo it.

SGLang does not report what it has released, and ends when it is asked to resume something twice. So a release is
written to disk before the server is asked, by launch; another launch has all of its memory.

Resumed memory has undefined content, so a server that has released its weights gets another identity: facts about the
one before, its committed version above all, do not hold of it. Then the rule for every server that is launched again
applies: it generates nothing until a version was received, verified and committed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from ...durable_file import write_durably
from ...errors import StateUnreadable

WEIGHTS: Final = "weights"
TAGS: Final = ("kv_cache", WEIGHTS, "cuda_graph")
"""SGLang's names, in the order of release."""


class _Released(msgspec.Struct, frozen=True):
    """The content of the file."""

    launch: str = ""
    """Identity of the launch, without releases."""
    times: int = 0
    """Releases of this launch."""
    tags: tuple[str, ...] = ()
    """Memory that is released now."""


class MemoryOccupation:
    """The released memory of one server. Used by the thread that calls the server."""

    def __init__(self, path: Path | None = None) -> None:
        """Kept in the file `path`; in memory alone without one. Raises `StateUnreadable`."""
        self._path = path
        self._content = _read(path)

    @property
    def released(self) -> tuple[str, ...]:
        """Tags of the memory that is released now."""
        return self._content.tags

    @property
    def undefined(self) -> bool:
        """True if the weights were released since the launch."""
        return self._content.times > 0

    def identity_of(self, launch: str) -> str:
        """Identity of a server of this launch, another one after each release. Forgets other launches."""
        if launch != self._content.launch:
            self._content = _Released(launch)
        return f"{launch}+{self._content.times}" if self._content.times else launch

    def begin_release(self) -> None:
        """The weights are about to be released: from now on `identity_of` gives another identity. Raises OSError."""
        self._keep(msgspec.structs.replace(self._content, times=self._content.times + 1))

    def note_released(self) -> None:
        """All memory is about to be released. Raises OSError."""
        self._keep(msgspec.structs.replace(self._content, tags=TAGS))

    def note_resumed(self, tag: str) -> None:
        """The server has the memory of `tag` again. Raises OSError."""
        self._keep(msgspec.structs.replace(self._content, tags=tuple(each for each in self.released if each != tag)))

    def _keep(self, content: _Released) -> None:
        if self._path is not None:
            write_durably(self._path, msgspec.json.encode(content))
        self._content = content


def _read(path: Path | None) -> _Released:
    if path is None:
        return _Released()
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Released)
    except FileNotFoundError:
        return _Released()
    except (OSError, ValueError) as error:
        raise StateUnreadable(
            f"cannot tell from {path} what memory the server has given back ({error}): restart the server, then delete"
            " the file"
        ) from error
