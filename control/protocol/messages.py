"""Every message of the control plane, with its sender, its answer, and the meaning and unit of its fields.

A message is one frame: a header of four bytes, then msgpack, a map tagged by ``type``; a blob (a page of a manifest or
of a digest table) is a second frame. Unknown tags, unknown fields and values out of bounds are refused by the codec.

Within one `PROTOCOL` number fields are only added, each with a default that means "as before", and a default never
changes. A field with its default is not sent. So an older reader understands every message without new fields, and
refuses a message with an unknown field as a whole instead of carrying out a part of it. Any other change raises
`PROTOCOL`.

The structures inside messages are in message_fields.py, the enumerations in enums.py.

The exchange of one round::

    trainer                     coordinator                      engine agents
      Acquire  ----------------->
      <-----------------  Granted(epoch, engines)
      PutBlob (manifest, digests; only what is not cached) ->
      Publish(epoch, version) -->   PREPARING   Prepare  -------->
                                                <-----  Prepared / Failed
      <-------------------  Send    OFFERING    (the receiving engines and their transports)
      Offered  ----------------->   PAUSING     Pause, Transfer(offer) ->
                                                <-----  Paused / Failed
                                    TRANSFERRING
         ... tensors travel on the data plane, never here ...
      <---------------  Withdraw   (only if an engine drops out: do not wait for it)
      Sent     ----------------->               <-----  Transferred / Failed
                                    VERIFYING   <-----  Verified / Failed
                                    COMMITTING  (journal, fsync)
                                    RESUMING    Commit   -------->
                                                <-----  Serving
      <--------------  RoundDone

**Deferred digests.** Where every engine reads the ranks' memory itself (``direct``), a trainer may announce a version
before it has computed its digests: the `table` of `Publish`, `Prepare` and `Transfer` is empty. The digest table
follows: to the engines over the transport, and at the same time to the coordinator (`PutBlob`); `Sent` names it.
Without it no version is verified or committed.
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
    """First message of a connection, repeated after every reconnect. Answered by `Welcome` or `Refused`."""

    request: RequestKey
    agent: AgentName
    role: Role
    channel: ChannelName
    incarnation: IncarnationId
    protocol: Count = PROTOCOL
    engine: EngineInfo | None = None
    trainer: TrainerInfo | None = None


class Heartbeat(Message, frozen=True, tag="Heartbeat"):
    """The agent is alive (ZeroMQ's own heartbeats prove only that its I/O thread is). Answered by `Alive`."""

    seq: Count
    """Sequence number; 0: no answer is requested."""
    epoch: EpochNumber = 0  # type: ignore[assignment]  # a plain default for "no epoch seen"
    health: EngineHealth | None = None
    held: HeldVersion | None = None
    memory_released: bool = msgspec.field(default=False, name="lent")
    """As in `EngineInfo`."""


class Topology(Message, frozen=True, tag="Topology"):
    """Location and reachability of a trainer or an engine. Sent after every `Welcome`, and after a change.

    Answered by `Ack`. A coordinator that does not know this message refuses it, and decides by `Hello` alone; one that
    does not know `supports_deferred_digests` gets the message without it. Unknown facts are left out, never guessed.
    """

    request: RequestKey
    network: Text = ""
    """Identity of the network namespace: processes with the same one share a loopback."""
    files: Text = ""
    """Identity of the mount namespace: processes with the same one find a socket under the same path."""
    folder: Text = ""
    """Identity of the folder of the agent's sockets: other mount namespaces of the host may see it too."""
    address: Text = ""
    """Address at which engines connect (trainers only)."""
    places: tuple[ProcessLocation, ...] = ()
    """Locations by rank; a trainer's first one is rank 0."""
    nics: tuple[NetworkInterface, ...] = ()
    lacking: dict[TransportKind, MissingTransport] = {}  # noqa: RUF012  # msgspec gives each its own
    """Transports that the agent does not offer, with the reason."""
    takes: dict[TransportKind, Count] = {}  # noqa: RUF012  # msgspec gives each its own
    """Bytes of a version that the worker with the most received, by transport used so far (engines only)."""
    supports_deferred_digests: bool = msgspec.field(default=False, name="awaits_tables")
    """True if the agent supports deferred digests."""


class Bye(Message, frozen=True, tag="Bye"):
    """The agent leaves on purpose. No answer."""

    reason: Text = ""


class GetBlob(Message, frozen=True, tag="GetBlob"):
    """Request one page of a blob. Answered by `BlobPage` with a blob frame, or `Refused`."""

    request: RequestKey
    digest: BlobDigest
    page: Count


class GetStatus(Message, frozen=True, tag="GetStatus"):
    """Request the status document. Answered by `Status` with a JSON blob frame."""

    request: RequestKey


# -- trainer -> coordinator ------------------------------------------------------------------------------------------


class Acquire(Message, frozen=True, tag="Acquire"):
    """Take the channel's lease in order to publish `version`. Answered by `Granted` or `Refused`."""

    request: RequestKey
    channel: ChannelName
    version: VersionNumber
    rollback: bool = False
    """True: the channel may go back, to a `version` at or below the committed one. Otherwise that is refused."""


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
    """Start a round. Its blobs must have been put. Answered by `Ack` or `Refused`, later by `RoundDone`."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    version: VersionNumber
    manifest: BlobDigest
    table: TableDigest = Digest("")
    """Empty for deferred digests, which `Granted` must have allowed: `Sent` names the table, and engines get it over
    the transport, before they have verified the version."""
    bytes: Count
    buckets: Count
    policy: Policy = Policy()
    mode: Text = "live"
    """``live``: training is stalled until the round is over; ``snapshot``: it continues. Shown in the status."""
    rollback: bool = False
    """As in the `Acquire` of this lease; refused otherwise."""
    catch_up: bool = False
    """True: a resync of stale engines. `version` and `table` are the committed ones; only engines that do not hold them
    take part, and all others continue undisturbed."""
    stood_s: Seconds = 0.0
    """Seconds for which training was stalled since its last publication because engines were too stale. A metric."""
    publication_signature: PublicationSignature | None = msgspec.field(default=None, name="seal")
    """Null where no keys are used. Copied into `Prepare`."""


class Offered(Message, frozen=True, tag="Offered"):
    """The trainer's half of every transport of `epoch` is open. Answered by `Ack`."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    offers: tuple[Endpoint, ...]
    failed: dict[str, Text] = {}  # noqa: RUF012  # msgspec gives each its own
    """Engines whose transport could not be opened, with the reason."""


class Sent(Message, frozen=True, tag="Sent"):
    """The trainer's half of the transfer of `epoch` has ended. Answered by `Ack`."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    failed: dict[str, Text] = {}  # noqa: RUF012  # msgspec gives each its own
    """Engines that the trainer could not serve, with the reason. All others received every bucket."""
    table: TableDigest = Digest("")
    """Digest table of a version with deferred digests: must have been put, the same in every `Sent` of a round."""
    spared: tuple[AgentName, ...] = ()
    """Engines of `failed` to which nothing was sent only because another engine failed: not at fault."""


class Abandon(Message, frozen=True, tag="Abandon"):
    """The trainer gives its round up. Answered by `Ack`, then `RoundDone`."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    reason: Text


# -- engine agent -> coordinator (each repeated until answered by Ack) -----------------------------------------------


class Prepared(Message, frozen=True, tag="Prepared"):
    """The manifest fits the server: names, shapes, dtypes, alignment, payload count. Weights are unchanged."""

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
    """The server's weights match `table`. The server is still paused and labeled with the old version.

    With deferred digests `table` is the one that the trainer sent over the transport.
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
    """A step failed. `health` is the state of the weights now: CLEAN engines resume, DIRTY ones are quarantined."""

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
    """Seconds without a message after which either side counts as lost."""


class Alive(Message, frozen=True, tag="Alive"):
    """Answer to `Heartbeat`."""

    seq: Count
    boot: Count
    committed: VersionNumber | None = None
    """Committed version of the agent's channel, by which an engine learns that it is stale."""
    max_lag: Count = 0
    """Versions by which an engine may be behind the committed one and still be ready."""


class Ack(Message, frozen=True, tag="Ack"):
    """The request was carried out and, where necessary, made durable before."""

    request: RequestKey


class Refused(Message, frozen=True, tag="Refused"):
    """The request changed nothing."""

    request: RequestKey
    code: RefusalCode
    reason: Text
    """Found, expected, and what to do."""
    retry_after_s: Seconds = 0.0
    leader: Text = ""
    """Endpoint of the leader. An agent goes there only if its own settings name that endpoint too."""


class BlobPage(Message, frozen=True, tag="BlobPage"):
    """One page of a blob, in the blob frame."""

    request: RequestKey
    digest: BlobDigest
    page: Count
    pages: Count


class Status(Message, frozen=True, tag="Status"):
    """The status document, JSON, in the blob frame; the same text as the HTTP port's ``/status``."""

    request: RequestKey


# -- coordinator -> trainer ------------------------------------------------------------------------------------------


class Granted(Message, frozen=True, tag="Granted"):
    """The caller holds the lease until it is silent for `lease_s`, the round ends, or it releases the lease."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    lease_s: Seconds
    committed: HeldVersion | None
    engines: dict[str, EngineInfo]
    routes: dict[str, TransportKind] = {}  # noqa: RUF012  # msgspec gives each its own
    """Transport of each engine for a live version now. Empty for trainers that sent no `Topology`."""
    may_defer_digests: bool = msgspec.field(default=False, name="may_leave_open")
    """True if a live version may have deferred digests: trainer and engines support them, and all engines would take
    the version by `direct`."""


class Send(Message, frozen=True, tag="Send"):
    """Open the transports for these receivers, which still serve, under `epoch`; answer `Offered`; then send.

    A further `Send` of a round has a new epoch, and names the engines of a retry or of the next wave.
    """

    channel: ChannelName
    epoch: EpochNumber
    version: VersionNumber
    receivers: tuple[ReceivingEngine, ...]
    deadline_s: Seconds


class Withdraw(Message, frozen=True, tag="Withdraw"):
    """These receivers of the `Send` of `epoch` have dropped out: do not wait for them. Answered by `Sent`.

    Names all that have dropped out so far, so that a later message replaces an earlier one. A receiver that has
    confirmed every bucket to the trainer counts as served, even if it failed afterwards.
    """

    channel: ChannelName
    epoch: EpochNumber
    engines: dict[str, Text]
    """Engines with the reason."""


class RoundDone(Message, frozen=True, tag="RoundDone"):
    """The round is over and the lease is free. Repeated on every `Publish` of the same request."""

    channel: ChannelName
    epoch: EpochNumber
    version: VersionNumber
    outcome: Outcome
    reason: Text
    engines: tuple[EngineReport, ...]
    seconds: dict[str, Seconds]
    """Seconds by phase: prepare, pause, transfer, verify, commit, resume, total."""


# -- coordinator -> engine agent (each repeated until its answer arrives) --------------------------------------------


class Prepare(Message, frozen=True, kw_only=True, tag="Prepare"):
    """Check the manifest against the server. Answered by `Prepared` or `Failed`."""

    channel: ChannelName
    epoch: EpochNumber
    version: VersionNumber
    manifest: BlobDigest
    table: TableDigest = Digest("")
    """As in `Publish`: empty for deferred digests."""
    transport: TransportKind
    policy: Policy
    deadline_s: Seconds
    rollback: bool = False
    """True: the channel goes back, and this version may be at or below the served one."""
    publication_signature: PublicationSignature | None = msgspec.field(default=None, name="seal")
    """Copied from the `Publish` that began the round: epoch, version, manifest and table are signed."""


class Pause(Message, frozen=True, tag="Pause"):
    """Stop generating. Answered by `Paused` or `Failed`. After `lease_s` without a message a CLEAN engine resumes."""

    channel: ChannelName
    epoch: EpochNumber
    mode: PauseMode
    lease_s: Seconds
    deadline_s: Seconds


class Transfer(Message, frozen=True, kw_only=True, tag="Transfer"):
    """Load the tensors from `offer`, once paused. Answered by `Transferred` and then `Verified`, or by `Failed`."""

    channel: ChannelName
    epoch: EpochNumber
    version: VersionNumber
    manifest: BlobDigest
    table: TableDigest = Digest("")
    """As in `Prepare`. Deferred, it comes over the transport and is verified by the trainer's signature."""
    offer: Endpoint
    rank_offset: Count
    """Rank of this engine's first worker in the collective group (`distributed`)."""
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
    """Stop the work of `epoch`. A CLEAN engine resumes and answers `Serving`; a DIRTY one stays paused: `Failed`."""

    channel: ChannelName
    epoch: EpochNumber
    reason: Text
    deadline_s: Seconds


AnyAgentMessage = Hello | Heartbeat | Topology | Bye | GetBlob | GetStatus
TrainerMessage = Acquire | Release | PutBlob | Publish | Offered | Sent | Abandon
EngineMessage = Prepared | Paused | Transferred | Verified | Serving | Failed
ToCoordinator = AnyAgentMessage | TrainerMessage | EngineMessage
Request = Hello | Topology | GetBlob | GetStatus | TrainerMessage | EngineMessage
"""Messages with a request key, under which they are answered."""

ToAnyAgent = Welcome | Alive | Ack | Refused | BlobPage | Status
ToTrainer = Granted | Send | Withdraw | RoundDone
ToEngine = Prepare | Pause | Transfer | Commit | Abort
ToAgent = ToAnyAgent | ToTrainer | ToEngine
