"""Progress of an engine in its round: the running operation, queued commands, and the view that is published."""

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
    Received,
    ReceiveDoubleBuffered,
    ReleaseServer,
    ServerFound,
    ServerGone,
    Validate,
    Verify,
    name_of,
)
from .weight_state import GENERATES, Weights, WeightState

HOLD_S: Final = 30.0
"""Deadline for pausing or resuming a server outside of a round, and time between two tries."""
UNSETTLED_S: Final = 10.0
"""A clean server found in an unknown state resumes after so many seconds without word from the coordinator."""

STEP_OF: Final[dict[type[Operation], Step]] = {
    Validate: Step.PREPARE,
    PauseServer: Step.PAUSE,
    ReceiveDoubleBuffered: Step.TRANSFER,
    Receive: Step.TRANSFER,
    Verify: Step.VERIFY,
    Label: Step.RESUME,
    ReleaseServer: Step.RESUME,
}
"""The step of the round that has failed when an operation fails."""


class RunningOperation(msgspec.Struct):
    """The one operation that the worker thread carries out."""

    number: int
    operation: Operation
    command: ToEngine | None
    """The command it serves; null for an operation that no command asked for."""
    started: float
    identity: str
    """Process generation it was started on. Its result tells little about any other."""
    ending: bool = False
    """True once its result is not needed: it was asked to end soon, and is asked again until it does."""


_ARRIVING: Final = frozenset({name_of(Receive), name_of(Verify)})


class ServerView(msgspec.Struct, frozen=True):
    """State of the engine as heartbeats, the HTTP port and the log show it."""

    up: bool
    health: EngineHealth
    held: HeldVersion | None
    paused: bool
    weights: WeightState
    version: Version | None
    """The version that `weights` refers to: clean(7), staged(8). Null: none, or the weights of the launch."""
    reached: Step | None
    """The last completed step of the round of `epoch`; null without a round."""
    epoch: Epoch
    doing: str
    reason: str
    memory_released: bool = msgspec.field(default=False, name="lent")
    """True if the server has released the memory of its weights, or is about to."""

    @property
    def on_its_way(self) -> bool:
        """Not clean because of a round under way: weights arrive, are verified, or wait for the commit."""
        return self.up and (self.doing in _ARRIVING or self.reached is Step.VERIFY)


def view_of(
    weights: Weights, running: RunningOperation | None, *, up: bool, reached: Step | None, epoch: Epoch, reason: str
) -> ServerView:
    """The view of the engine now. A server that does not answer counts as holding no version."""
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
    """Commands that came while an operation runs: the newest, or a `Pause` and the `Transfer` that follows it."""

    def __init__(self) -> None:
        self._commands: tuple[ToEngine, ...] = ()

    @property
    def next(self) -> ToEngine | None:
        """The command to be carried out first."""
        return self._commands[0] if self._commands else None

    def add(self, command: ToEngine) -> None:
        """Queue `command`; it replaces the queued one, unless it is the transfer that follows that pause."""
        first = self.next
        follows = isinstance(first, Pause) and isinstance(command, Transfer) and first.epoch == command.epoch
        self._commands = (first, command) if first is not None and follows else (command,)

    def take(self) -> ToEngine | None:
        """Remove and return the next command."""
        command = self.next
        self._commands = self._commands[1:]
        return command

    def forget_transfer(self, epoch: int) -> None:
        """Drop a transfer up to `epoch`: the pause that it follows has failed."""
        self._commands = tuple(each for each in self._commands if each.epoch > epoch or not isinstance(each, Transfer))


class DoubleBuffering:
    """Whether the prepared version can be received into a second buffer while the server generates."""

    def __init__(self) -> None:
        self.able = False
        """True if there is a plan and memory for it."""
        self.mode = PauseMode.RETRACT.value
        """Mode in which the server is paused for the swap."""

    def applies(self, weights: Weights) -> bool:
        """Whether it can, and the server generates from clean weights: then it needs no pause before the swap."""
        return self.able and weights.state in GENERATES and weights.paused is False


def with_digest_table(command: Transfer, received: Received) -> Transfer:
    """`command` with the digest table that came with the tensors, where the command left it open."""
    return command if command.table else msgspec.structs.replace(command, table=Digest(received.table))


def trace_line(event: Event) -> str:
    """A line of the event trace that errors carry."""
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
