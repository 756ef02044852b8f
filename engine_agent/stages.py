"""How far an engine is in its round: what runs on its server, and what others may know of it."""

from typing import Final

import msgspec

from weightbus.control.ids import Epoch, Version
from weightbus.control.messages import EngineHealth, Held, Step, ToEngine

from .events import (
    Broken,
    Commanded,
    Event,
    Label,
    Operated,
    Operation,
    PauseServer,
    Receive,
    Release,
    ServerFound,
    ServerGone,
    Validate,
    Verify,
)
from .weights import WeightState

HOLD_S: Final = 30.0
"""Deadline for pausing or resuming a server outside of a round, and pause between two tries."""
UNSETTLED_S: Final = 10.0
"""A clean server found in an unknown state resumes after so long, unless the coordinator is heard of and settles it."""

STEP_OF: Final[dict[type[Operation], Step]] = {
    Validate: Step.PREPARE,
    PauseServer: Step.PAUSE,
    Receive: Step.TRANSFER,
    Verify: Step.VERIFY,
    Label: Step.RESUME,
    Release: Step.RESUME,
}
"""The step that has failed when an operation breaks."""


class Running(msgspec.Struct):
    """The one operation that the worker is at."""

    number: int
    operation: Operation
    command: ToEngine | None
    """The command it serves; null for what the agent does by itself."""
    started: float
    identity: str
    """The launch it was started on. Its end says little about any other."""
    ending: bool = False
    """Nobody wants its result any more: it was asked to end soon, and is asked again until it does."""


_ARRIVING: Final = frozenset({Receive.__name__.lower(), Verify.__name__.lower()})


class View(msgspec.Struct, frozen=True):
    """What others may know: heartbeats, the HTTP port, the log."""

    up: bool
    health: EngineHealth
    held: Held | None
    paused: bool
    weights: WeightState
    version: Version | None
    """The one that `weights` speaks of: clean(7), staged(8). Null: none, or those of the launch."""
    reached: Step | None
    """The last step of the round of `epoch` that is done; null when there is none, or it is over."""
    epoch: Epoch
    doing: str
    reason: str

    @property
    def on_its_way(self) -> bool:
        """Not clean because a round is taking its course: weights arrive, are proven, or wait for the commit."""
        return self.up and (self.doing in _ARRIVING or self.reached is Step.VERIFY)


def told(event: Event) -> str:
    """A line of the story that errors carry."""
    match event:
        case Commanded(message):
            return f"told {type(message).__name__} of epoch {message.epoch}"
        case Operated(number, result):
            broken = f": {result.reason}" if isinstance(result, Broken) else ""
            return f"operation {number} ended, {type(result).__name__}{broken}"
        case ServerFound(identity, label):
            return f"the server is {identity}, labelled {label!r}"
        case ServerGone(reason):
            return f"the server is gone: {reason}"
        case _:
            return type(event).__name__
