"""What agents say: any agent, trainers, engine agents. messages.py shows when."""

from __future__ import annotations

from .fragments import (
    EngineInfo,
    Held,
    Lack,
    Message,
    Nic,
    Offer,
    Place,
    Policy,
    Seal,
    TrainerInfo,
)
from .ids import (
    AgentName,
    BlobDigest,
    ChannelName,
    Count,
    Digest,
    EpochNumber,
    IncarnationId,
    JoinedChannel,
    RequestKey,
    Seconds,
    TableDigest,
    Text,
    VersionNumber,
)
from .terms import (
    PROTOCOL,
    EngineHealth,
    Role,
    Step,
    TransportKind,
)

# -- any agent -> coordinator ----------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="Hello"):
    """First message of every connection, sent again after every reconnect. Answered by `Welcome` or `Refused`."""

    request: RequestKey
    agent: AgentName
    role: Role
    channel: ChannelName
    incarnation: IncarnationId
    protocol: Count = PROTOCOL
    engine: EngineInfo | None = None
    trainer: TrainerInfo | None = None


class Heartbeat(Message, frozen=True, tag="Heartbeat"):
    """The application is alive (ZeroMQ's own heartbeats only prove that its I/O thread is). Answered by `Alive`."""

    seq: Count
    """0: no answer is wanted."""
    epoch: EpochNumber = 0  # type: ignore[assignment]  # a plain default for "no epoch seen"
    health: EngineHealth | None = None
    held: Held | None = None
    lent: bool = False
    """The server has given its weights' memory back."""


class Topology(Message, frozen=True, tag="Topology"):
    """Where a trainer or an engine is, and what reaches it there. Said after every `Welcome`, and when it changed.

    Answered by `Ack`. A coordinator that does not know this message refuses it, and decides by `Hello` alone; one that
    does not know `awaits_tables` is told the rest. What is not known is left out, never guessed.
    """

    request: RequestKey
    network: Text = ""
    """Identity of its network namespace: whoever has the same one shares its loopback."""
    files: Text = ""
    """Identity of its mount namespace: whoever has the same one finds a socket under the same path."""
    folder: Text = ""
    """Identity of the folder in which its sockets lie: other mount namespaces of the host may see it too."""
    address: Text = ""
    """Where engines are told to come to (trainers)."""
    places: tuple[Place, ...] = ()
    """By rank; the first one is the root of a trainer."""
    nics: tuple[Nic, ...] = ()
    lacking: dict[TransportKind, Lack] = {}  # noqa: RUF012  # msgspec gives each its own
    """Transports that it does not offer."""
    takes: dict[TransportKind, Count] = {}  # noqa: RUF012  # msgspec gives each its own
    """Bytes of a version that the worker with most of them takes, of transports by which one came (engines)."""
    awaits_tables: bool = False
    """It knows versions whose digest table follows: it may announce one (trainers), or be told of one (engines)."""


class Bye(Message, frozen=True, tag="Bye"):
    """The agent leaves on purpose. Not answered."""

    reason: Text = ""


class GetBlob(Message, frozen=True, tag="GetBlob"):
    """Ask for one page of a blob. Answered by `BlobPage` with a blob frame, or `Refused`."""

    request: RequestKey
    digest: BlobDigest
    page: Count


class GetStatus(Message, frozen=True, tag="GetStatus"):
    """Ask for the status document. Answered by `Status` with a JSON blob frame."""

    request: RequestKey


# -- trainer -> coordinator ------------------------------------------------------------------------------------------


class Acquire(Message, frozen=True, tag="Acquire"):
    """Take the channel's lease in order to publish `version`. Answered by `Granted` or `Refused`."""

    request: RequestKey
    channel: ChannelName
    version: VersionNumber
    rollback: bool = False
    """The channel is to go back: `version` may be the committed one or below. Without it that is refused."""


class Release(Message, frozen=True, tag="Release"):
    """Give the lease back without publishing. Answered by `Ack`."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber


class PutBlob(Message, frozen=True, tag="PutBlob"):
    """One page of a blob, with a blob frame. Answered by `Ack`; `Refused` when the whole does not hash to `digest`."""

    request: RequestKey
    digest: BlobDigest
    page: Count
    pages: Count


class Publish(Message, frozen=True, kw_only=True, tag="Publish"):
    """Start the round. What it names must have been put. Answered by `Ack` or `Refused`, later by `RoundDone`."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    version: VersionNumber
    manifest: BlobDigest
    table: TableDigest = Digest("")
    """Left open where the table follows, as `Granted` must allow: the trainer still digests, and says it in `Sent`.
    Engines get it over the transport, before they have proven anything."""
    bytes: Count
    buckets: Count
    policy: Policy = Policy()
    mode: Text = "live"
    """``live``: the trainer stands still until the round is over; ``snapshot``: it trains on. Shown in the status."""
    rollback: bool = False
    """As in the `Acquire` of this lease; without that it is refused."""
    catch_up: bool = False
    """For engines that are behind: `version` and `table` are the committed ones, and only those take part that do not
    hold them. Everybody else goes on as if nothing was."""
    stood_s: Seconds = 0.0
    """How long training stood still since its last publication, because engines were too far behind. A metric."""
    seal: Seal | None = None
    """Null where no keys are used. Carried on in `Prepare`, as it is."""


class Offered(Message, frozen=True, tag="Offered"):
    """The tensors of `epoch` can be had: the trainer's half of every transport stands. Answered by `Ack`."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    offers: tuple[Offer, ...]
    failed: dict[str, Text] = {}  # noqa: RUF012  # msgspec gives each its own
    """Engines whose transport could not be opened, with the reason: nothing is offered to them."""


class Sent(Message, frozen=True, tag="Sent"):
    """The trainer's half of the transfer of `epoch` is over. Answered by `Ack`."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    failed: dict[str, Text] = {}  # noqa: RUF012  # msgspec gives each its own
    """Engines the trainer could not serve, with the reason. All others took every bucket."""
    table: TableDigest = Digest("")
    """Of a version whose `Publish` left it open: must have been put, and is the same in every `Sent` of a round."""
    spared: tuple[AgentName, ...] = ()
    """Those of `failed` to which nothing was sent, only because another one failed: they are not at fault."""


class Abandon(Message, frozen=True, tag="Abandon"):
    """The trainer cannot go on with its round. Answered by `Ack`, then `RoundDone`."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    reason: Text


# -- engine agent -> coordinator (each repeated until answered by Ack) -----------------------------------------------


class Prepared(Message, frozen=True, tag="Prepared"):
    """The manifest fits the server: names, shapes, dtypes, alignment, payload count. Nothing was changed yet."""

    request: RequestKey
    channel: JoinedChannel
    epoch: EpochNumber
    seconds: Seconds


class Paused(Message, frozen=True, tag="Paused"):
    """The server generates nothing until this agent resumes it."""

    request: RequestKey
    channel: JoinedChannel
    epoch: EpochNumber
    seconds: Seconds


class Transferred(Message, frozen=True, tag="Transferred"):
    """Every bucket of the manifest has been loaded; not verified yet."""

    request: RequestKey
    channel: JoinedChannel
    epoch: EpochNumber
    bytes: Count
    buckets: Count
    seconds: Seconds


class Verified(Message, frozen=True, tag="Verified"):
    """The server's weights are those of `table`. Still paused, still labelled with the old version.

    Where the command left the table open, it is the one that the trainer gave over the transport.
    """

    request: RequestKey
    channel: JoinedChannel
    epoch: EpochNumber
    version: VersionNumber
    table: BlobDigest
    verified_by: Text
    seconds: Seconds


class Serving(Message, frozen=True, tag="Serving"):
    """The server is labelled with `version` (null: the weights of its launch) and generates again."""

    request: RequestKey
    channel: JoinedChannel
    epoch: EpochNumber
    version: VersionNumber | None
    seconds: Seconds
    paused_s: Seconds


class Failed(Message, frozen=True, tag="Failed"):
    """A step went wrong. `health` says what the server holds now: CLEAN engines resume, DIRTY ones are quarantined."""

    request: RequestKey
    channel: JoinedChannel
    epoch: EpochNumber
    step: Step
    health: EngineHealth
    reason: Text
