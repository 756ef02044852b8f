"""What is known of the part of a server's launch checkpoint that versions leave: whether it is still that one (N64)."""

from __future__ import annotations

from typing import Final

from .events import INCOMPLETE

_NOTHING: Final = ("", frozenset[str]())


class LeftRecord:
    """Entries (names, and prefixes that end in a dot) of one server that are as launched, and that were proven to be.

    Both hold of one process generation. A server has its launch checkpoint's tensors from its launch on, until a
    version sends them, its memory is released, or another party changes its weights.
    """

    def __init__(self) -> None:
        self._kept: tuple[str, frozenset[str]] = _NOTHING
        self._proven: tuple[str, frozenset[str]] = _NOTHING

    def known(self, left: frozenset[str], identity: str, label: str, *, undefined: bool) -> bool:
        """Whether `left` is known to be as launched: by what versions left here, or by a label that is no version's.

        `undefined`: memory was released since the launch.
        """
        launched = not label.isdigit() and not label.startswith(INCOMPLETE) and not undefined
        return launched or _covers(self._kept, identity, left)

    def proven(self, left: frozenset[str], identity: str) -> bool:
        """Whether `left` was proven in this process generation, and has not changed since."""
        return _covers(self._proven, identity, left)

    def begin(self, left: frozenset[str], identity: str) -> None:
        """A version that leaves just that is about to change the server."""
        self._kept = identity, left
        if not left:
            self._proven = _NOTHING

    def note_proven(self, left: frozenset[str], identity: str) -> None:
        """`left` is that of the launch checkpoint."""
        self._proven = identity, left

    def doubt(self) -> None:
        """It may have changed: the server loads its launch checkpoint before the next version that leaves something."""
        self._kept = self._proven = _NOTHING


def _covers(recorded: tuple[str, frozenset[str]], identity: str, left: frozenset[str]) -> bool:
    known, names = recorded
    return known == identity and left <= names
