"""A set that a process may add to for months."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

MOST: Final = 256


class BoundedSet(Generic[K]):
    """The last that were added. Whatever is not in it any more only costs what it would have saved."""

    def __init__(self, most: int = MOST) -> None:
        """Keeps `most` of them."""
        self._most = most
        self._known: dict[K, None] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._known

    def __len__(self) -> int:
        return len(self._known)

    def add(self, key: K) -> None:
        """It is the last one now."""
        self._known.pop(key, None)
        self._known[key] = None
        if len(self._known) > self._most:
            for old in list(self._known)[: -self._most]:  # another thread may `clear` meanwhile
                self._known.pop(old, None)

    def update(self, keys: Iterable[K]) -> None:
        """Add all of them, in this order."""
        for key in keys:
            self.add(key)

    def clear(self) -> None:
        """Nothing is in it."""
        self._known.clear()
