"""What may happen to an engine (events), what is done about it (effects), and the operations a worker carries out.

Plain values. Times are monotonic seconds, given from outside.
"""

import msgspec

from weightbus.control.protocol import EngineHealth, EngineMessage, HeldVersion, Prepare, ToEngine, Transfer, Welcome


class StateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What must be known of a server after the agent was killed. Kept in the state folder."""

    identity: str
    """Of the launch it speaks of; for any other launch it says only that there was one."""
    health: EngineHealth
    held: HeldVersion | None = None
    epoch: int = 0
    checkpoint: str = ""
    """Folder the server was launched with; after a load from disk the server itself names another."""


# -- operations: at most one at a time ---------------------------------------------------------------------------------


class _Operation(msgspec.Struct, frozen=True):
    @property
    def name(self) -> str:
        """Label of metrics and of ``/status``: independent of the class name."""
        return name_of(type(self))


def name_of(operation: type[_Operation]) -> str:
    """`_Operation.name` of one kind of operation."""
    return str(operation.__struct_config__.tag)


class Validate(_Operation, frozen=True, tag="validate"):
    """Compare manifest and table with the server. Changes nothing."""

    command: Prepare
    checkpoint: str
    serving: HeldVersion | None = None
    """The committed version that the server holds now: what is offered must follow it."""


class PauseServer(_Operation, frozen=True, tag="pauseserver"):
    """Stop the server generating."""

    mode: str
    deadline_s: float


class ReceiveBeside(_Operation, frozen=True, tag="stage"):
    """Take the version beside the weights that are served, while the server generates. Changes nothing."""

    command: Transfer
    checkpoint: str


class Receive(_Operation, frozen=True, tag="receive"):
    """Take every bucket and load it; or put into place what `ReceiveBeside` took."""

    command: Transfer
    checkpoint: str


class Verify(_Operation, frozen=True, tag="verify"):
    """Compare what the server holds with the digest table."""

    command: Transfer
    checked: bool
    """Every byte was compared with the table before the server saw it."""


class Label(_Operation, frozen=True, tag="label"):
    """Label the server, which stays paused, with the version that it was proven to hold."""

    version: int
    deadline_s: float


class ReleaseServer(_Operation, frozen=True, tag="release"):
    """Label the server with `version` (null: leave its label), flush if asked, and let it generate."""

    version: int | None
    flush: bool
    deadline_s: float
    labeled: bool = False
    """It has the label of `version` already."""
    look: bool = False
    """Something failed, and the server may be why: see it generate before it is said to."""


Operation = Validate | PauseServer | ReceiveBeside | Receive | Verify | Label | ReleaseServer

# -- results ----------------------------------------------------------------------------------------------------------


class OperationDone(msgspec.Struct, frozen=True):
    """It worked."""

    beside: bool = False
    """Of `Validate`: the version can be taken beside the weights that are served."""


class Received(msgspec.Struct, frozen=True):
    """Every bucket was loaded."""

    bytes: int
    buckets: int
    checked: bool
    verified_by: str = ""
    """How the server was found to hold what the table says, where that is a part of taking it. Empty: `Verify` asks."""
    table: str = ""
    """The digest table that came with it and is believed, where the command left it open."""


class Proven(msgspec.Struct, frozen=True):
    """The server holds what the table says."""

    verified_by: str


class OperationFailed(msgspec.Struct, frozen=True):
    """It did not work. `touched`: weights may have changed."""

    reason: str
    touched: bool = False


Result = OperationDone | Received | Proven | OperationFailed

# -- events -----------------------------------------------------------------------------------------------------------


class Commanded(msgspec.Struct, frozen=True):
    """The coordinator said so."""

    message: ToEngine


class Welcomed(msgspec.Struct, frozen=True):
    """The coordinator answered a `Hello`, for the first time or again."""

    welcome: Welcome


class Operated(msgspec.Struct, frozen=True):
    """Operation number `number` ended."""

    number: int
    result: Result


class ServerFound(msgspec.Struct, frozen=True):
    """The server answers, and this is who it is."""

    identity: str
    label: str
    checkpoint: str = ""
    undefined: bool = False
    """It has given its weights back since it was launched."""

    @property
    def lost(self) -> str:
        """Why nothing that was known of the server before holds of this one."""
        return "the server has given its memory back" if self.undefined else "the server was restarted"


class ServerGone(msgspec.Struct, frozen=True):
    """The server does not answer."""

    reason: str


class TimePassed(msgspec.Struct, frozen=True):
    """Time passed. `heard_at` is when the coordinator was last heard of, in whatever words."""

    heard_at: float


Event = Commanded | Welcomed | Operated | ServerFound | ServerGone | TimePassed

# -- effects, carried out in this order -------------------------------------------------------------------------------


class Remember(msgspec.Struct, frozen=True):
    """Make `record` durable before anything that follows."""

    record: StateRecord
    late: bool = False
    """... or at the same time: nothing that follows depends on it."""


class Answer(msgspec.Struct, frozen=True):
    """Tell the coordinator, again and again until it has acknowledged."""

    message: EngineMessage


class ForgetAnswers(msgspec.Struct, frozen=True):
    """Another boot of the coordinator: stop repeating what was said to the one before."""


class RunOperation(msgspec.Struct, frozen=True):
    """Give the worker an operation."""

    number: int
    operation: Operation
    identity: str = ""
    """The launch of the server that it is meant for. No other may be changed by it."""


class Cancel(msgspec.Struct, frozen=True):
    """Make operation `number` end soon; its result is still awaited. Said again until it has ended."""

    number: int


class Note(msgspec.Struct, frozen=True):
    """Something worth a line in the log."""

    event: str
    detail: str = ""


Effect = Remember | Answer | ForgetAnswers | RunOperation | Cancel | Note
