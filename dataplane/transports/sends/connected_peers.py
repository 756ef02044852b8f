"""What rank 0 knows of the members that are connected to it, and of their groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from ...processes import PooledConnection
from ..interface import Group
from . import messages as wire


class Formed(NamedTuple):
    """A group."""

    name: str = ""
    members: object = None
    """The members of a group, and for what it was formed."""
    engines: frozenset[str] = frozenset()


NOBODY: Final = Formed()
MOST_STOOD: Final = 4
"""Groups that a rank of the trainer keeps: each holds memory of its GPU. Further turns form theirs anew."""


class StalledPeers:
    """The groups in which everything has moved: several where engines take turns, each of other engines."""

    def __init__(self) -> None:
        self._groups: dict[str, tuple[Formed, int]] = {}
        """By name, with the version that it was used for last."""
        self._version = self._before = -1

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that may be used again."""
        return tuple(self._groups)

    def turn_to(self, version: int) -> None:
        """It is sent next: what was used neither for it nor for the one before is not used again."""
        if version != self._version:
            self._before, self._version = self._version, version
        recent = (self._before, self._version)
        self._groups = {name: each for name, each in self._groups.items() if each[1] in recent}

    def take(self, members: object, engines: frozenset[str], have: Callable[[str], bool]) -> Formed | None:
        """The group of these members, if all of them `have` the one of that name. No other one of an engine stays."""
        found = [formed for formed, _ in self._groups.values() if formed.members == members and have(formed.name)]
        self._groups = {name: each for name, each in self._groups.items() if not each[0].engines & engines}
        return found[0] if found else None

    @property
    def room(self) -> bool:
        """One more can be kept."""
        return len(self._groups) < MOST_STOOD

    def keep(self, formed: Formed) -> None:
        """Everything has moved in it."""
        self._groups[formed.name] = formed, self._version


class ConnectedPeer(PooledConnection):
    """An engine's sidecar, or a rank of the trainer."""

    def __init__(self, name: str, workers: int = 0) -> None:
        super().__init__(name)
        self.workers = workers
        """Of an engine. A rank of the trainer has none."""
        self.prepared: wire.Prepared | None = None
        self.known: frozenset[str] = frozenset()
        """The parts of schedules that a rank has, by name."""
        self.groups: frozenset[str] = frozenset()
        """Groups that it has from earlier rounds."""
        self.forming = False
        """It joins the group that forms early."""
        self.seats: tuple[str, ...] = ()
        """On which its ranks or workers are members of a group."""
        self.through = self.finished = False


def seen_by(rank: int, group: Group) -> Group:
    """The group, as its member of that rank is told of it."""
    return msgspec.structs.replace(group, rank=rank)
