"""Every message of the control plane: who sends it, what its fields mean, in which units.

A message is one frame: a header of four bytes, then msgpack, a map tagged by ``type``; a blob (a page of a manifest or
of a digest table) is a second frame. Unknown tags, unknown fields and values out of bounds are refused by the codec.

Within one `PROTOCOL` fields are only added, each with a default that means "as before", and a default never changes. A
field that has its default is not sent. So an older reader understands everything that it could be asked before, and
refuses what it is asked in a field that it does not know, rather than do the rest of it. Anything else raises
`PROTOCOL`.

This is the door: they stand in messages.py and messages.py, the structures inside them in message_fields.py, the
words in enums.py, and are imported from here.

The exchange of one round::

    trainer                     coordinator                      engine agents
      Acquire  ----------------->
      <-----------------  Granted(epoch, engines)
      PutBlob (manifest, digests; only what is not cached) ->
      Publish(epoch, version) -->   PREPARING   Prepare  -------->
                                                <-----  Prepared / Failed
      <-------------------  Send    OFFERING    (who takes part, by which transport)
      Offered  ----------------->   PAUSING     Pause, Transfer(offer) ->
                                                <-----  Paused / Failed
                                    TRANSFERRING
         ... tensors travel on the data plane, never here ...
      <---------------  Withdraw   (only if an engine drops out: who is not to be waited for)
      Sent     ----------------->               <-----  Transferred / Failed
                                    VERIFYING   <-----  Verified / Failed
                                    COMMITTING  (journal, fsync)
                                    RESUMING    Commit   -------->
                                                <-----  Serving
      <--------------  RoundDone

**Open tables.** Where every engine takes the ranks' memory by itself (``direct``), a trainer may announce a version
before it has digested it: `Publish`, `Prepare` and `Transfer` leave their table open (empty), and the table follows, to
the engines over the transport, to the coordinator (`PutBlob`) at the same time, and `Sent` names it. Nothing is proven
and nothing committed without it.
"""

from __future__ import annotations

import msgspec

from .enums import (
    PROTOCOL,
    EngineHealth,
    Outcome,
    PauseMode,
    RefusalCode,
    Role,
    Step,
    TransportKind,
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
from .message_fields import (
    Endpoint,
    EngineInfo,
    EngineReport,
    HeldVersion,
    Message,
    MissingTransport,
    NetworkInterface,
    Policy,
    ProcessLocation,
    PublicationSignature,
    ReceivingEngine,
    TrainerInfo,
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
    held: HeldVersion | None = None
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
    places: tuple[ProcessLocation, ...] = ()
    """By rank; the first one is the root of a trainer."""
    nics: tuple[NetworkInterface, ...] = ()
    lacking: dict[TransportKind, MissingTransport] = {}  # noqa: RUF012  # msgspec gives each its own
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
    publication_signature: PublicationSignature | None = msgspec.field(default=None, name="seal")
    """Null where no keys are used. Carried on in `Prepare`, as it is."""


class Offered(Message, frozen=True, tag="Offered"):
    """The tensors of `epoch` can be had: the trainer's half of every transport stands. Answered by `Ack`."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    offers: tuple[Endpoint, ...]
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
    """The server's weights are those of `table`. Still paused, still labeled with the old version.

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
    """The server is labeled with `version` (null: the weights of its launch) and generates again."""

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


# -- coordinator -> any agent ----------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, tag="Welcome"):
    """Answer to `Hello`."""

    request: RequestKey
    boot: Count
    """Grows by one with every start of the coordinator."""
    epoch: EpochNumber
    """Highest epoch granted so far in the channel."""
    committed: HeldVersion | None
    heartbeat_s: Seconds
    silence_s: Seconds
    """After this long without a message the other side is taken for dead."""


class Alive(Message, frozen=True, tag="Alive"):
    """Answer to `Heartbeat`."""

    seq: Count
    boot: Count
    committed: VersionNumber | None = None
    """Of the agent's channel, now: an engine that a round has left behind learns it from here."""
    max_lag: Count = 0
    """Versions that an engine may be behind that and still be ready."""


class Ack(Message, frozen=True, tag="Ack"):
    """The request was carried out and, where it had to be, made durable first."""

    request: RequestKey


class Refused(Message, frozen=True, tag="Refused"):
    """The request changed nothing."""

    request: RequestKey
    code: RefusalCode
    reason: Text
    """What was found, what was expected, what to do."""
    retry_after_s: Seconds = 0.0
    leader: Text = ""
    """Endpoint of the coordinator that leads. An agent goes there only if it was told of it by its own settings too."""


class BlobPage(Message, frozen=True, tag="BlobPage"):
    """One page, in the blob frame."""

    request: RequestKey
    digest: BlobDigest
    page: Count
    pages: Count


class Status(Message, frozen=True, tag="Status"):
    """The status document, JSON, in the blob frame; the same text as the HTTP port's ``/status``."""

    request: RequestKey


# -- coordinator -> trainer ------------------------------------------------------------------------------------------


class Granted(Message, frozen=True, tag="Granted"):
    """The lease is the caller's until it is silent for `lease_s`, the round ends or it releases."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    lease_s: Seconds
    committed: HeldVersion | None
    engines: dict[str, EngineInfo]
    routes: dict[str, TransportKind] = {}  # noqa: RUF012  # msgspec gives each its own
    """By which transport each engine would take a live version now. Only for trainers that told their `Topology`."""
    may_leave_open: bool = False
    """The digest table of a live version may follow: trainer and engines said that they know how (`awaits_tables`),
    and all of them would take it by `direct`."""


class Send(Message, frozen=True, tag="Send"):
    """Open the transports for these receivers, which still serve, under `epoch` and answer `Offered`; then send.

    A second `Send` of a round carries a new epoch and the engines that need everything again.
    """

    channel: ChannelName
    epoch: EpochNumber
    version: VersionNumber
    receivers: tuple[ReceivingEngine, ...]
    deadline_s: Seconds


class Withdraw(Message, frozen=True, tag="Withdraw"):
    """These receivers of the `Send` of `epoch` are out of it: wait for them no longer. Answered by `Sent`.

    Names all that are out so far, so that a later one replaces an earlier one. Those that have confirmed every bucket
    to the trainer are served, whatever became of them afterwards.
    """

    channel: ChannelName
    epoch: EpochNumber
    engines: dict[str, Text]
    """With the reason."""


class RoundDone(Message, frozen=True, tag="RoundDone"):
    """The round is over and the lease is free. Repeated on every `Publish` of the same request."""

    channel: ChannelName
    epoch: EpochNumber
    version: VersionNumber
    outcome: Outcome
    reason: Text
    engines: tuple[EngineReport, ...]
    seconds: dict[str, Seconds]
    """By phase: prepare, pause, transfer, verify, commit, resume, total."""


# -- coordinator -> engine agent (each repeated until its answer arrives) --------------------------------------------


class Prepare(Message, frozen=True, kw_only=True, tag="Prepare"):
    """Check the manifest against the server. Answered by `Prepared` or `Failed`."""

    channel: ChannelName
    epoch: EpochNumber
    version: VersionNumber
    manifest: BlobDigest
    table: TableDigest = Digest("")
    """As in the `Publish`: left open where it follows."""
    transport: TransportKind
    policy: Policy
    deadline_s: Seconds
    rollback: bool = False
    """The channel goes back: this version may be at or below the one that is served."""
    publication_signature: PublicationSignature | None = msgspec.field(default=None, name="seal")
    """The trainer's, of the `Publish` that began the round: its epoch, version, manifest and table are signed."""


class Pause(Message, frozen=True, tag="Pause"):
    """Stop generating. Answered by `Paused` or `Failed`. Without news for `lease_s` a CLEAN engine resumes."""

    channel: ChannelName
    epoch: EpochNumber
    mode: PauseMode
    lease_s: Seconds
    deadline_s: Seconds


class Transfer(Message, frozen=True, kw_only=True, tag="Transfer"):
    """Take the tensors from `offer`, once paused. Answered by `Transferred` then `Verified`, or `Failed`."""

    channel: ChannelName
    epoch: EpochNumber
    version: VersionNumber
    manifest: BlobDigest
    table: TableDigest = Digest("")
    """As in the `Prepare`. Left open, the sender gives it, with the trainer's signature, and it is believed by that."""
    offer: Endpoint
    rank_offset: Count
    """Distributed: the collective rank of this engine's first worker."""
    deadline_s: Seconds


class Commit(Message, frozen=True, tag="Commit"):
    """The version is durable. Label the server with it, flush as the policy says, resume. Answered by `Serving`."""

    channel: ChannelName
    epoch: EpochNumber
    version: VersionNumber
    table: BlobDigest
    flush: bool
    deadline_s: Seconds


class Abort(Message, frozen=True, tag="Abort"):
    """Stop what `epoch` began. A CLEAN engine resumes and says `Serving`; a DIRTY one stays paused, says `Failed`."""

    channel: ChannelName
    epoch: EpochNumber
    reason: Text
    deadline_s: Seconds


AnyAgentMessage = Hello | Heartbeat | Topology | Bye | GetBlob | GetStatus
TrainerMessage = Acquire | Release | PutBlob | Publish | Offered | Sent | Abandon
EngineMessage = Prepared | Paused | Transferred | Verified | Serving | Failed
ToCoordinator = AnyAgentMessage | TrainerMessage | EngineMessage
Request = Hello | Topology | GetBlob | GetStatus | TrainerMessage | EngineMessage
"""What is answered, or acknowledged, under its key."""

ToAnyAgent = Welcome | Alive | Ack | Refused | BlobPage | Status
ToTrainer = Granted | Send | Withdraw | RoundDone
ToEngine = Prepare | Pause | Transfer | Commit | Abort
ToAgent = ToAnyAgent | ToTrainer | ToEngine
