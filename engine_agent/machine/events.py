"""Events, effects and operations of an engine, as plain values. Times are monotonic seconds, given from outside."""

import enum
from typing import Final

import msgspec

from weightbus.control.protocol import EngineHealth, EngineMessage, HeldVersion, Prepare, ToEngine, Transfer, Welcome

INCOMPLETE: Final = "weightbus-incomplete:"
"""Stands before the launch's label from right before the first change of the weights until the label is a version's.

Such a label ends with the server, and every sidecar sees it: one that lost its record, has another name or another
channel. It survives the coordinator's journal, too."""


class StateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a server that must survive the sidecar. Kept in the state folder."""

    identity: str
    """Process generation it is of; about any other it tells only that there was one."""
    health: EngineHealth
    held: HeldVersion | None = None
    epoch: int = 0
    checkpoint: str = ""
    """Folder that the server was launched with; after a load from disk the server itself names another."""
    orphaned: bool = False
    """True if `held`, whose commit was not heard of, is served by the policy `orphaned = serve_verified`."""
    follows: str = ""
    """Key of the `Hello` that was welcomed last. By it the coordinator knows whether another sidecar had the server
    since."""


class OrphanPolicy(enum.StrEnum):
    """Treatment of a version that is verified on a server, while no coordinator says whether it is committed."""

    WAIT = "wait"
    """The server stays paused until a coordinator is heard: it never generates from an uncommitted version."""
    SERVE_VERIFIED = "serve_verified"
    """After `orphaned_s` the server generates from it, labeled; it is not ready before the version is committed."""


# -- operations: at most one at a time ---------------------------------------------------------------------------------


class Validate(msgspec.Struct, frozen=True, tag="validate"):
    """Compare manifest and table with the server. Changes nothing."""

    command: Prepare
    checkpoint: str
    serving: HeldVersion | None = None
    """The committed version that is served now, which the prepared one must follow."""


class PauseServer(msgspec.Struct, frozen=True, tag="pauseserver"):
    """Stop the server from generating."""

    mode: str
    deadline_s: float


class ReceiveDoubleBuffered(msgspec.Struct, frozen=True, tag="stage"):
    """Receive the version into a second buffer while the server generates. Changes no served weight."""

    command: Transfer
    checkpoint: str


class Receive(msgspec.Struct, frozen=True, tag="receive"):
    """Receive every bucket and load it; or swap in what `ReceiveDoubleBuffered` received."""

    command: Transfer
    checkpoint: str
    unknown: bool = False
    """True for a server of which any weight may be another party's: also those that the version does not send."""


class Verify(msgspec.Struct, frozen=True, tag="verify"):
    """Compare the weights on the server with the digest table."""

    command: Transfer
    checked: bool
    """True if every byte was compared with the table before it reached the server."""


class Recognize(msgspec.Struct, frozen=True, tag="recognize"):
    """Compare the weights on the server with the committed version `held`. Changes nothing."""

    held: HeldVersion


class Label(msgspec.Struct, frozen=True, tag="label"):
    """Label the server, which stays paused, with the verified version."""

    version: int
    deadline_s: float


class ReleaseServer(msgspec.Struct, frozen=True, tag="release"):
    """Label the server with `version` (null: leave its label), flush if asked, and let it generate."""

    version: int | None
    flush: bool
    deadline_s: float
    labeled: bool = False
    """True if it has the label of `version` already."""
    look: bool = False
    """True if the server has to be seen to generate, because an operation failed and the server may be the cause."""


Operation = Validate | PauseServer | ReceiveDoubleBuffered | Receive | Verify | Recognize | Label | ReleaseServer

# -- results ----------------------------------------------------------------------------------------------------------


class OperationDone(msgspec.Struct, frozen=True):
    """The operation succeeded."""

    double_buffered: bool = False
    """Of `Validate`: True if the version can be received into a second buffer."""


class Received(msgspec.Struct, frozen=True):
    """Every bucket was loaded."""

    bytes: int
    buckets: int
    checked: bool
    verified_by: str = ""
    """Method of verification, where that is part of the transfer; empty where `Verify` has to follow."""
    table: str = ""
    """Digest of the table that came with the tensors and is trusted, where the command left it open."""


class VerificationPassed(msgspec.Struct, frozen=True):
    """The weights on the server are those of the digest table."""

    verified_by: str


class OperationFailed(msgspec.Struct, frozen=True):
    """The operation failed. `dirty`: weights may have changed."""

    reason: str
    dirty: bool = False
    doubted: bool = False
    """True if calls may have met another server than was meant, or one that another party let generate meanwhile."""
    by_server: bool = True
    """False if the server was not asked, or answered well: nothing is in doubt about it."""


Result = OperationDone | Received | VerificationPassed | OperationFailed

# -- events -----------------------------------------------------------------------------------------------------------


class Commanded(msgspec.Struct, frozen=True):
    """The coordinator sent a command."""

    message: ToEngine


class Welcomed(msgspec.Struct, frozen=True):
    """The coordinator answered a `Hello`, for the first time or again."""

    welcome: Welcome


class Operated(msgspec.Struct, frozen=True):
    """Operation number `number` ended."""

    number: int
    result: Result


class ServerTaken(msgspec.Struct, frozen=True):
    """The coordinator refused this sidecar: the server is another one's."""

    reason: str


class ServerFound(msgspec.Struct, frozen=True):
    """The server answers; its facts."""

    identity: str
    label: str
    checkpoint: str = ""
    undefined: bool = False
    """True if it has released its weights since it was launched."""

    @property
    def lost(self) -> str:
        """Why facts about the server from before do not hold any more."""
        return "the server has given its memory back" if self.undefined else "the server was restarted"


class ServerGone(msgspec.Struct, frozen=True):
    """The server does not answer, or must not be used."""

    reason: str
    answers: bool = False
    """True if it answers all the same."""


class ServerWatched(msgspec.Struct, frozen=True):
    """What the server revealed while no operation of this sidecar ran."""

    number: int
    """Number of the last operation that had begun when the look began: a later one makes it worthless."""
    generates: bool | None = None
    """False if it is paused; null where it does not tell."""
    changed: str = ""
    """What shows that another party changed its weights or its label; empty where nothing does."""


class TimePassed(msgspec.Struct, frozen=True):
    """Time passed. `heard_at` is when the last message of the coordinator came."""

    heard_at: float


Event = Commanded | Welcomed | ServerTaken | Operated | ServerFound | ServerGone | ServerWatched | TimePassed

# -- effects, carried out in this order -------------------------------------------------------------------------------


class Remember(msgspec.Struct, frozen=True):
    """Make `record` durable before anything that follows."""

    record: StateRecord
    late: bool = False
    """... or at the same time: nothing that follows depends on it."""


class Answer(msgspec.Struct, frozen=True):
    """Send `message` to the coordinator, again until it is acknowledged."""

    message: EngineMessage


class ForgetAnswers(msgspec.Struct, frozen=True):
    """Stop repeating replies to an earlier boot of the coordinator."""


class JoinAgain(msgspec.Struct, frozen=True):
    """Tell the coordinator that the server is another process generation: say Hello again."""


class RunOperation(msgspec.Struct, frozen=True):
    """Give the worker thread an operation."""

    number: int
    operation: Operation
    identity: str = ""
    """Process generation of the server that it is meant for. No other may be changed by it."""


class Cancel(msgspec.Struct, frozen=True):
    """Make operation `number` end soon; its result is still awaited. Repeated until it has ended."""

    number: int


class Note(msgspec.Struct, frozen=True):
    """A line for the log."""

    event: str
    detail: str = ""


class ForeignAct(msgspec.Struct, frozen=True):
    """Another party did something to the server: `what` (weights, pause, resume) is counted, and both are logged."""

    what: str
    detail: str


Effect = Remember | Answer | ForgetAnswers | JoinAgain | RunOperation | Cancel | Note | ForeignAct
