"""What the leader of sends knows of whoever is connected to it, and of the group that they are in."""

from __future__ import annotations

from typing import Final, NamedTuple

from . import sends_wire as wire
from .frames import Frames


class Formed(NamedTuple):
    """A group."""

    name: str = ""
    members: object = None
    """Who is in it, for what."""
    engines: frozenset[str] = frozenset()


NOBODY: Final = Formed()


class End:
    """Somebody that is connected: an engine's sidecar, or a rank of the trainer."""

    def __init__(self, name: str, workers: int = 0) -> None:
        self.name = name
        self.workers = workers
        """Of an engine. A rank of the trainer has none."""
        self.frames: Frames | None = None
        self.prepared: wire.Prepared | None = None
        self.known: frozenset[str] = frozenset()
        """Schedules whose part a rank has."""
        self.group = ""
        """The one that it has from the last round."""
        self.forming = False
        """It joins the group that forms early."""
        self.seats: tuple[str, ...] = ()
        """On which its ranks or workers are members of a group."""
        self.through = self.finished = False
        self.heard_at = 0.0
        """While the group forms and moves."""
