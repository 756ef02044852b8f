"""How far an engine is in its round: what runs on its server, and what others may know of it."""

from typing import Final

import msgspec

from weightbus.control.protocol import (
    Digest,
    EngineHealth,
    Epoch,
    HeldVersion,
    Pause,
    PauseMode,
    Step,
    ToEngine,
    Transfer,
    Version,
)

from .events import (
    Commanded,
    Event,
    Label,
    Operated,
    Operation,
    OperationFailed,
    PauseServer,
    Receive,
    ReceiveBeside,
    Received,
    ReleaseServer,
    ServerFound,
    ServerGone,
    Validate,
    Verify,
    name_of,
)
from .weight_state import GENERATES, Weights, WeightState

HOLD_S: Final = 30.0
"""Deadline for pausing or resuming a server outside of a round, and pause between two tries."""
UNSETTLED_S: Final = 10.0
"""A clean server found in an unknown state resumes after so long, unless the coordinator is heard of and settles it."""

STEP_OF: Final[dict[type[Operation], Step]] = {
    Validate: Step.PREPARE,
    PauseServer: Step.PAUSE,
    ReceiveBeside: Step.TRANSFER,
    Receive: Step.TRANSFER,
    Verify: Step.VERIFY,
    Label: Step.RESUME,
    ReleaseServer: Step.RESUME,
}
"""The step that has failed when an operation breaks."""


class RunningOperation(msgspec.Struct):
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


_ARRIVING: Final = frozenset({name_of(Receive), name_of(Verify)})


class ServerView(msgspec.Struct, frozen=True):
    """What others may know: heartbeats, the HTTP port, the log."""

    up: bool
    health: EngineHealth
    held: HeldVersion | None
    paused: bool
    weights: WeightState
    version: Version | None
    """The one that `weights` speaks of: clean(7), staged(8). Null: none, or those of the launch."""
    reached: Step | None
    """The last step of the round of `epoch` that is done; null when there is none, or it is over."""
    epoch: Epoch
    doing: str
    reason: str
    lent: bool = False
    """The server has given its weights' memory back, or is about to."""

    @property
    def on_its_way(self) -> bool:
        """Not clean because a round is taking its course: weights arrive, are proven, or wait for the commit."""
        return self.up and (self.doing in _ARRIVING or self.reached is Step.VERIFY)


def view_of(
    weights: Weights, running: RunningOperation | None, *, up: bool, reached: Step | None, epoch: Epoch, reason: str
) -> ServerView:
    """What may be said of the engine now. A server that does not answer holds nothing that counts."""
    health, held = weights.health, weights.held
    if not up and health is not EngineHealth.DIRTY:
        health, held = EngineHealth.PENDING, None
    return ServerView(
        up=up,
        health=health,
        held=held,
        paused=weights.paused is True,
        weights=weights.state,
        version=weights.version,
        reached=reached,
        epoch=epoch,
        doing=running.operation.name if running else "",
        reason=reason,
    )


class QueuedCommands:
    """What was told while something runs: the newest command, or a `Pause` and the `Transfer` that follows it."""

    def __init__(self) -> None:
        self._commands: tuple[ToEngine, ...] = ()

    @property
    def next(self) -> ToEngine | None:
        """The one to be carried out first."""
        return self._commands[0] if self._commands else None

    def add(self, command: ToEngine) -> None:
        """It replaces what waited, unless it follows that."""
        first = self.next
        follows = isinstance(first, Pause) and isinstance(command, Transfer) and first.epoch == command.epoch
        self._commands = (first, command) if first is not None and follows else (command,)

    def take(self) -> ToEngine | None:
        """The next one, which waits no longer."""
        command = self.next
        self._commands = self._commands[1:]
        return command

    def forget_transfer(self, epoch: int) -> None:
        """The pause that it waited for failed."""
        self._commands = tuple(each for each in self._commands if each.epoch > epoch or not isinstance(each, Transfer))


class DoubleBuffering:
    """Whether the version that was prepared can be taken beside what is served."""

    def __init__(self) -> None:
        self.able = False
        """There is a plan and room for it."""
        self.mode = PauseMode.RETRACT.value
        """How the server is paused for the flip."""

    def may(self, weights: Weights) -> bool:
        """It can, and the server generates from clean weights: it needs no pause before the flip."""
        return self.able and weights.state in GENERATES and weights.paused is False


def filled_in(command: Transfer, received: Received) -> Transfer:
    """`command` with the digest table that came with what was taken, where it left it open."""
    return command if command.table else msgspec.structs.replace(command, table=Digest(received.table))


def told(event: Event) -> str:
    """A line of the story that errors carry."""
    match event:
        case Commanded(message):
            return f"told {message.kind} of epoch {message.epoch}"
        case Operated(number, result):
            broken = f": {result.reason}" if isinstance(result, OperationFailed) else ""
            return f"operation {number} ended, {type(result).__name__}{broken}"
        case ServerFound(identity, label):
            return f"the server is {identity}, labeled {label!r}"
        case ServerGone(reason):
            return f"the server is gone: {reason}"
        case _:
            return type(event).__name__
