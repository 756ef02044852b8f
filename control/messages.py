"""Every message of the control plane, in one file: who sends it, what its fields mean, in which units.

A message is one frame of msgpack, a map tagged by ``type``; a blob (a page of a manifest or of a digest table) is a
second frame. Unknown tags, unknown fields and values out of bounds are refused by the codec. Fields added later get a
default, and a change that an older reader would misread raises `PROTOCOL`.

The exchange of one round::

    trainer                     coordinator                      engine agents
      Acquire  ----------------->
      <-----------------  Granted(epoch, engines)
      PutBlob (manifest, digests; only what is not cached) ->
      Publish(epoch, version) -->   PREPARING   Prepare  -------->
                                                <-----  Prepared / Failed
                                    PAUSING     Pause    -------->
                                                <-----  Paused / Failed
      <-------------------  Send    (who takes part, by which transport)
      Offered  ----------------->   TRANSFERRING Transfer(offer) ->
         ... tensors travel on the data plane, never here ...
      <---------------  Withdraw   (only if an engine drops out: who is not to be waited for)
      Sent     ----------------->               <-----  Transferred / Failed
                                    VERIFYING   <-----  Verified / Failed
                                    COMMITTING  (journal, fsync)
                                    RESUMING    Commit   -------->
                                                <-----  Serving
      <--------------  RoundDone
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from .ids import (
    AgentName,
    BlobDigest,
    ChannelName,
    Count,
    EpochNumber,
    IncarnationId,
    RequestKey,
    Seconds,
    Text,
    VersionNumber,
)
from .signing import Signature

PROTOCOL: Final = 2
"""Raised when an older reader would misread a message. Travels in the first frame and in `Hello`."""

MAX_PAGE_BYTES: Final = 512 * 1024
"""The largest blob frame. A manifest of 20,000 tensors takes a handful; a round of an unchanged layout none."""

MAX_PAGES: Final = 4096


class Role(enum.StrEnum):
    """What an agent may do."""

    TRAINER = "trainer"
    """Takes leases, publishes versions, sends tensors."""
    ENGINE = "engine"
    """Stands beside one SGLang server and answers for it."""
    OBSERVER = "observer"
    """Reads status, changes nothing."""


class TransportKind(enum.StrEnum):
    """How the tensors of one engine travel in a round."""

    LOCAL = "local"
    """Same host: POSIX shared memory, or CUDA IPC where the weights are on a GPU."""
    DIRECT = "direct"
    """Same host: the engine's workers copy out of the trainer's own memory into their parameters, along a plan."""
    DISTRIBUTED = "distributed"
    """One collective group of the source rank and the engine's ranks: gloo or NCCL."""
    DISK = "disk"
    """A safetensors checkpoint on a file system that both see."""


class PauseMode(enum.StrEnum):
    """What happens to requests that are generating when an engine pauses (SGLang's own words)."""

    ABORT = "abort"
    """They end at once and return what they have."""
    RETRACT = "retract"
    """They go back to the queue and are recomputed under the new weights."""
    IN_PLACE = "in_place"
    """They freeze, keep their KV cache, and go on under the new weights."""


class EngineHealth(enum.StrEnum):
    """What an engine agent says of the weights its server holds."""

    CLEAN = "clean"
    """All weights are one version, or the ones it was launched with."""
    PENDING = "pending"
    """Restarted or unknown: holds complete weights, but not a version that was verified here."""
    DIRTY = "dirty"
    """Some weights may be new and some old. Paused, and must not serve before a complete verified load."""


class Code(enum.StrEnum):
    """Why a request was refused. Each names what the caller can do about it."""

    STALE_EPOCH = "stale_epoch"
    """Somebody else has been granted the channel since. Acquire again."""
    LEASE_HELD = "lease_held"
    """Another trainer holds the channel. Retry after `retry_after_s`."""
    VERSION_NOT_NEWER = "version_not_newer"
    """The version is not above the committed one. Publish a higher version."""
    UNKNOWN_BLOB = "unknown_blob"
    """Put the blob, then ask again."""
    BAD_BLOB = "bad_blob"
    """The pages do not hash to the digest they were sent under."""
    NOT_ALLOWED = "not_allowed"
    """The role, or the state of the round, does not allow this message."""
    UNKNOWN_AGENT = "unknown_agent"
    """Say `Hello` first; the coordinator does not know this connection."""
    NAME_TAKEN = "name_taken"
    """Another live incarnation uses this agent's name."""
    SERVER_TAKEN = "server_taken"
    """Another live engine agent stands beside the server at this URL. One server, one agent: end one of them."""
    PROTOCOL_MISMATCH = "protocol_mismatch"
    """The two sides speak different protocol numbers. Upgrade the older one."""
    READ_ONLY = "read_only"
    """The journal cannot be written (disk full?). Nothing is granted until it can."""
    SHUTTING_DOWN = "shutting_down"
    """The coordinator is stopping. Retry after `retry_after_s`."""
    NOT_LEADER = "not_leader"
    """This coordinator stands by. `Refused.leader` says who leads, if that is known."""


class Step(enum.StrEnum):
    """The step of a round at which an engine failed."""

    PREPARE = "prepare"
    PAUSE = "pause"
    TRANSFER = "transfer"
    VERIFY = "verify"
    COMMIT = "commit"
    RESUME = "resume"


class Outcome(enum.StrEnum):
    """How a round ended, for the round and for each engine in it."""

    COMMITTED = "committed"
    """The version is durable; the engine serves it, verified."""
    ABORTED = "aborted"
    """Nothing changed: old weights, old version, serving."""
    QUARANTINED = "quarantined"
    """The engine does not serve until it has been loaded completely and verified."""
    LOST = "lost"
    """The engine stopped answering; it is out of the ready list."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Root of every message. Subclasses are tagged with their class name."""


class Fragment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Root of structures that travel inside messages."""


# -- fragments -------------------------------------------------------------------------------------------------------


class Held(Fragment, frozen=True):
    """A version an engine holds, complete and verified."""

    version: VersionNumber
    manifest: BlobDigest
    table: BlobDigest
    """Digest table of that version: two engines that hold the same table hold the same bits."""


class EngineInfo(Fragment, frozen=True):
    """What an engine agent read from its server. Fixed for an incarnation, but for `health` and `held`."""

    url: Text
    """Where clients reach the server. Readers of the ready list send their requests there."""
    server_version: Text
    tp: Count
    pp: Count
    dp: Count
    device: Text
    """``cpu`` or ``cuda``."""
    host: Text
    """Identity of the machine (boot id), so that two agents can tell whether they share memory."""
    transports: tuple[TransportKind, ...]
    live_digest: Text = ""
    """Algorithm by which the server reports the digest of its live parameters; empty when it cannot."""
    health: EngineHealth = EngineHealth.CLEAN
    held: Held | None = None


class TrainerInfo(Fragment, frozen=True):
    """What a trainer's leader says of its group."""

    host: Text
    device: Text
    ranks: Count
    transports: tuple[TransportKind, ...]
    """In order of preference."""


class Seal(Fragment, frozen=True):
    """Who says that a version is to be published, and after which. seals.py says what exactly is signed."""

    signer: AgentName
    previous: Held | None
    """What was committed when the lease was granted: the link before this one in the channel's chain."""
    signature: Signature
    """Ed25519, in hexadecimal."""


class Policy(Fragment, frozen=True):
    """How one round treats its engines. The trainer states it; the coordinator carries it out."""

    pause: PauseMode = PauseMode.RETRACT
    flush: bool = True
    """Drop the KV and prefix caches before resuming. Must be off with `PauseMode.IN_PLACE`."""
    min_engines: Count = 0
    """Abort unless at least this many engines reach the verified state; 0 means at least one if any joined."""
    redrives: Count = 1
    """How often each engine that failed in the transfer is sent everything again within the round.

    An attempt over a collective transport that another engine's failure ended before anything was sent does not count.
    """
    transfer_timeout_s: Seconds = 600.0


class Receiver(Fragment, frozen=True):
    """One engine that takes part in a transfer, and how its tensors travel."""

    engine: AgentName
    transport: TransportKind
    tp: Count
    url: Text = ""


class Offer(Fragment, frozen=True):
    """Where one transport's tensors can be had in one epoch. Only the data plane reads `address`."""

    transport: TransportKind
    address: Text
    """Local, direct: path of a Unix socket. Distributed: ``tcp://host:port``. Disk: path of the checkpoint folder."""
    group: Text = ""
    """Distributed: name of the collective group; unchanged while its members are."""
    backend: Text = ""
    """Distributed: ``gloo`` or ``nccl``."""
    world_size: Count = 0
    """Distributed: the source rank and all engine ranks."""
    token: Text = ""
    """Distributed: a secret of this epoch, by which the two sides know each other. Never logged."""
    signature: Signature | None = None
    """By whoever signed the publication, where keys are used: that nobody sends engines elsewhere for their bytes."""


class EngineReport(Fragment, frozen=True):
    """What became of one engine in a round."""

    engine: AgentName
    outcome: Outcome
    transport: TransportKind | None = None
    version: VersionNumber | None = None
    bytes: Count = 0
    buckets: Count = 0
    seconds: dict[str, Seconds] = {}
    """By phase: prepare, pause, transfer, verify, resume; and ``paused``, from pause to resume."""
    verified_by: Text = ""
    """``live-digest``: read back from the server's parameters. ``bucket-digest``: checked before the load. Or empty."""
    reason: Text = ""


class LeaseStatus(Fragment, frozen=True):
    """Who may change a channel."""

    holder: AgentName
    epoch: EpochNumber
    remaining_s: Seconds


# -- any agent -> coordinator ----------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of every connection, sent again after every reconnect. Answered by `Welcome` or `Refused`."""

    request: RequestKey
    agent: AgentName
    role: Role
    channel: ChannelName
    incarnation: IncarnationId
    protocol: Count = PROTOCOL
    engine: EngineInfo | None = None
    trainer: TrainerInfo | None = None


class Heartbeat(Message, frozen=True):
    """The application is alive (ZeroMQ's own heartbeats only prove that its I/O thread is). Answered by `Alive`."""

    seq: Count
    epoch: EpochNumber = 0  # type: ignore[assignment]  # a plain default for "no epoch seen"
    health: EngineHealth | None = None
    held: Held | None = None


class Bye(Message, frozen=True):
    """The agent leaves on purpose. Not answered."""

    reason: Text = ""


class GetBlob(Message, frozen=True):
    """Ask for one page of a blob. Answered by `BlobPage` with a blob frame, or `Refused`."""

    request: RequestKey
    digest: BlobDigest
    page: Count


class GetStatus(Message, frozen=True):
    """Ask for the status document. Answered by `Status` with a JSON blob frame."""

    request: RequestKey


# -- trainer -> coordinator ------------------------------------------------------------------------------------------


class Acquire(Message, frozen=True):
    """Take the channel's lease in order to publish `version`. Answered by `Granted` or `Refused`."""

    request: RequestKey
    channel: ChannelName
    version: VersionNumber


class Release(Message, frozen=True):
    """Give the lease back without publishing. Answered by `Ack`."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber


class PutBlob(Message, frozen=True):
    """One page of a blob, with a blob frame. Answered by `Ack`; `Refused` when the whole does not hash to `digest`."""

    request: RequestKey
    digest: BlobDigest
    page: Count
    pages: Count


class Publish(Message, frozen=True):
    """Start the round. Manifest and table must be known. Answered by `Ack` or `Refused`, later by `RoundDone`."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    version: VersionNumber
    manifest: BlobDigest
    table: BlobDigest
    bytes: Count
    buckets: Count
    policy: Policy = Policy()
    mode: Text = "live"
    """``live``: the trainer stands still until the round is over; ``snapshot``: it trains on. Shown in the status."""
    seal: Seal | None = None
    """Null where no keys are used. Carried on in `Prepare`, as it is."""


class Offered(Message, frozen=True):
    """The tensors of `epoch` can be had: the trainer's half of every transport stands. Answered by `Ack`."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    offers: tuple[Offer, ...]
    failed: dict[str, Text] = {}
    """Engines whose transport could not be opened, with the reason: nothing is offered to them."""


class Sent(Message, frozen=True):
    """The trainer's half of the transfer of `epoch` is over. Answered by `Ack`."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    failed: dict[str, Text] = {}
    """Engines the trainer could not serve, with the reason. All others took every bucket."""
    spared: tuple[AgentName, ...] = ()
    """Those of `failed` to which nothing was sent, only because another one failed: they are not at fault."""


class Abandon(Message, frozen=True):
    """The trainer cannot go on with its round. Answered by `Ack`, then `RoundDone`."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    reason: Text


# -- engine agent -> coordinator (each repeated until answered by Ack) -----------------------------------------------


class Prepared(Message, frozen=True):
    """The manifest fits the server: names, shapes, dtypes, alignment, payload count. Nothing was changed yet."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    seconds: Seconds


class Paused(Message, frozen=True):
    """The server generates nothing until this agent resumes it."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    seconds: Seconds


class Transferred(Message, frozen=True):
    """Every bucket of the manifest has been loaded; not verified yet."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    bytes: Count
    buckets: Count
    seconds: Seconds


class Verified(Message, frozen=True):
    """The server's weights are those of `table`. Still paused, still labelled with the old version."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    version: VersionNumber
    table: BlobDigest
    verified_by: Text
    seconds: Seconds


class Serving(Message, frozen=True):
    """The server is labelled with `version` (null: the weights of its launch) and generates again."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    version: VersionNumber | None
    seconds: Seconds
    paused_s: Seconds


class Failed(Message, frozen=True):
    """A step went wrong. `health` says what the server holds now: CLEAN engines resume, DIRTY ones are quarantined."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    step: Step
    health: EngineHealth
    reason: Text


# -- coordinator -> any agent ----------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """Answer to `Hello`."""

    request: RequestKey
    boot: Count
    """Grows by one with every start of the coordinator."""
    epoch: EpochNumber
    """Highest epoch granted so far in the channel."""
    committed: Held | None
    heartbeat_s: Seconds
    silence_s: Seconds
    """After this long without a message the other side is taken for dead."""


class Alive(Message, frozen=True):
    """Answer to `Heartbeat`."""

    seq: Count
    boot: Count
    committed: VersionNumber | None = None
    """Of the agent's channel, now: an engine that a round has left behind learns it from here."""


class Ack(Message, frozen=True):
    """The request was carried out and, where it had to be, made durable first."""

    request: RequestKey


class Refused(Message, frozen=True):
    """The request changed nothing."""

    request: RequestKey
    code: Code
    reason: Text
    """What was found, what was expected, what to do."""
    retry_after_s: Seconds = 0.0
    leader: Text = ""
    """Endpoint of the coordinator that leads. An agent goes there only if it was told of it by its own settings too."""


class BlobPage(Message, frozen=True):
    """One page, in the blob frame."""

    request: RequestKey
    digest: BlobDigest
    page: Count
    pages: Count


class Status(Message, frozen=True):
    """The status document, JSON, in the blob frame; the same text as the HTTP port's ``/status``."""

    request: RequestKey


# -- coordinator -> trainer ------------------------------------------------------------------------------------------


class Granted(Message, frozen=True):
    """The lease is the caller's until it is silent for `lease_s`, the round ends or it releases."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    lease_s: Seconds
    committed: Held | None
    engines: dict[str, EngineInfo]


class Send(Message, frozen=True):
    """Every receiver is paused: open the transports for them under `epoch` and answer `Offered`, then send.

    A second `Send` of a round carries a new epoch and the engines that need everything again.
    """

    channel: ChannelName
    epoch: EpochNumber
    version: VersionNumber
    receivers: tuple[Receiver, ...]
    deadline_s: Seconds


class Withdraw(Message, frozen=True):
    """These receivers of the `Send` of `epoch` are out of it: wait for them no longer. Answered by `Sent`.

    Names all that are out so far, so that a later one replaces an earlier one. Those that have confirmed every bucket
    to the trainer are served, whatever became of them afterwards.
    """

    channel: ChannelName
    epoch: EpochNumber
    engines: dict[str, Text]
    """With the reason."""


class RoundDone(Message, frozen=True):
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


class Prepare(Message, frozen=True):
    """Check the manifest against the server. Answered by `Prepared` or `Failed`."""

    channel: ChannelName
    epoch: EpochNumber
    version: VersionNumber
    manifest: BlobDigest
    table: BlobDigest
    transport: TransportKind
    policy: Policy
    deadline_s: Seconds
    seal: Seal | None = None
    """The trainer's, of the `Publish` that began the round: its epoch, version, manifest and table are signed."""


class Pause(Message, frozen=True):
    """Stop generating. Answered by `Paused` or `Failed`. Without news for `lease_s` a CLEAN engine resumes."""

    channel: ChannelName
    epoch: EpochNumber
    mode: PauseMode
    lease_s: Seconds
    deadline_s: Seconds


class Transfer(Message, frozen=True):
    """Take the tensors from `offer`. Answered by `Transferred` then `Verified`, or `Failed`."""

    channel: ChannelName
    epoch: EpochNumber
    version: VersionNumber
    manifest: BlobDigest
    table: BlobDigest
    offer: Offer
    rank_offset: Count
    """Distributed: the collective rank of this engine's first worker."""
    deadline_s: Seconds


class Commit(Message, frozen=True):
    """The version is durable. Label the server with it, flush as the policy says, resume. Answered by `Serving`."""

    channel: ChannelName
    epoch: EpochNumber
    version: VersionNumber
    table: BlobDigest
    flush: bool
    deadline_s: Seconds


class Abort(Message, frozen=True):
    """Stop what `epoch` began. A CLEAN engine resumes and says `Serving`; a DIRTY one stays paused, says `Failed`."""

    channel: ChannelName
    epoch: EpochNumber
    reason: Text
    deadline_s: Seconds


# -- coordinator -> whoever listens on the PUB socket ----------------------------------------------------------------


class Hint(Message, frozen=True):
    """Something changed; lossy by nature. Readers pull the status to learn what."""

    seq: Count
    boot: Count
    channel: ChannelName
    event: Text
    version: VersionNumber | None
    epoch: EpochNumber


AnyAgentMessage = Hello | Heartbeat | Bye | GetBlob | GetStatus
TrainerMessage = Acquire | Release | PutBlob | Publish | Offered | Sent | Abandon
EngineMessage = Prepared | Paused | Transferred | Verified | Serving | Failed
ToCoordinator = AnyAgentMessage | TrainerMessage | EngineMessage

ToAnyAgent = Welcome | Alive | Ack | Refused | BlobPage | Status
ToTrainer = Granted | Send | Withdraw | RoundDone
ToEngine = Prepare | Pause | Transfer | Commit | Abort
ToAgent = ToAnyAgent | ToTrainer | ToEngine
