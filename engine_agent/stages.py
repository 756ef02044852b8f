"""How far an engine is: the stages of its round, what runs on its server, and what others may know of it."""

import enum
from typing import Final

import msgspec

from weightbus.control.ids import Epoch
from weightbus.control.messages import EngineHealth, Held, Step, ToEngine

from .events import Operation, PauseServer, Receive, Release, Validate, Verify


class Stage(enum.Enum):
    """How far the engine is in the round of `epoch`. What runs just now is the operation's affair."""

    IDLE = "idle"
    """No round, or it is over."""
    PREPARED = "prepared"
    """The manifest fits. The server generates as before."""
    PAUSED = "paused"
    """Paused for the round, weights untouched or, after a failure, dirty."""
    LOADED = "loaded"
    """Holds the new version, proven; waits for the commit."""


STEPS: Final[dict[Stage, Step]] = {
    Stage.IDLE: Step.RESUME,
    Stage.PREPARED: Step.PREPARE,
    Stage.PAUSED: Step.PAUSE,
    Stage.LOADED: Step.VERIFY,
}
"""The step that has failed when the server is lost while waiting at a stage."""


STEP_OF: Final[dict[type[Operation], Step]] = {
    Validate: Step.PREPARE,
    PauseServer: Step.PAUSE,
    Receive: Step.TRANSFER,
    Verify: Step.VERIFY,
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


_ARRIVING: Final = frozenset({Receive.__name__.lower(), Verify.__name__.lower()})


class View(msgspec.Struct, frozen=True):
    """What others may know: heartbeats, the HTTP port, the log."""

    up: bool
    health: EngineHealth
    held: Held | None
    paused: bool
    stage: Stage
    epoch: Epoch
    doing: str
    reason: str

    @property
    def on_its_way(self) -> bool:
        """Not clean because a round is taking its course: weights arrive, are proven, or wait for the commit."""
        return self.up and (self.doing in _ARRIVING or self.stage is Stage.LOADED)
