"""Every message of the control plane, with its sender, its answer, and the meaning and unit of its fields.

A message is one frame: a header of four bytes, then msgpack, a map tagged by ``type``; a blob (a page of a manifest or
of a digest table) is a second frame. Unknown tags, unknown fields and values out of bounds are refused by the codec.

Within one `PROTOCOL` number fields are only added, each with a default that means "as before", and a default never
changes. A field with its default is not sent. So an older reader understands every message without new fields, and
refuses a message with an unknown field as a whole instead of carrying out a part of it. Any other change raises
`PROTOCOL`.

Identifiers are `NewType`s, so that a `Version` is never passed where an `Epoch` is meant; msgspec encodes the value
below. Bounds are declared once, and hold for every message that carries the field.

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

import enum
import re
from typing import Annotated, Final, NewType, Self

import msgspec
from msgspec import Meta

Signature = Annotated[str, Meta(pattern=r"^[0-9a-f]{128}\Z")]


PROTOCOL: Final = 3
"""Protocol number, raised when an older reader would misread a message. Sent in every header and in `Hello`."""

MAX_PAGE_BYTES: Final = 512 * 1024
"""Largest page of a blob. A manifest of 20,000 tensors takes a handful; a round of an unchanged layout none."""

MAX_PAGES: Final = 4096


class Role(enum.StrEnum):
    """Role of an agent."""

    __hash__ = str.__hash__  # that of enums is written in Python, and asked for with every message

    TRAINER = "trainer"
    """Takes leases, publishes versions, sends tensors."""
    ENGINE = "engine"
    """Sidecar of one SGLang server: loads versions into it and reports its state."""
    OBSERVER = "observer"
    """Reads status, changes nothing."""


_TRANSPORT_NAME: Final = re.compile(r"[a-z][a-z0-9_.-]{0,63}")


class TransportKind(enum.StrEnum):
    """Name of a transport: how the tensors of one engine travel in a round.

    The members are the built-in transports. Any other name that matches the pattern is a value too, equal to its
    string: a trainer and its engines may have a transport that the coordinator does not know.
    """

    __hash__ = str.__hash__  # that of enums is written in Python, and asked for with every message

    LOCAL = "local"
    """Same host: POSIX shared memory, or CUDA IPC where the weights are on a GPU."""
    DIRECT = "direct"
    """Same host: the engine's workers copy out of the trainer's own memory into their parameters, along a plan."""
    SENDS = "sends"
    """Any host: every rank of the trainer sends each worker of the engine its part of the weights: gloo or NCCL."""
    DISTRIBUTED = "distributed"
    """One collective group of the source rank and the engine's ranks: gloo or NCCL."""
    DISK = "disk"
    """A safetensors checkpoint on a file system that both see."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        """A member for a transport that is not built in. Not cached, so that no peer can fill memory with names."""
        if not isinstance(value, str) or _TRANSPORT_NAME.fullmatch(value) is None:
            return None
        other = str.__new__(cls, value)
        other._name_ = other._value_ = value
        return other


class PeerAccess(enum.StrEnum):
    """Access of one GPU to the memory of another, as reported by the driver."""

    NVLINK = "nvlink"
    """Direct reads over NVLink."""
    P2P = "p2p"
    """Direct reads over an unknown link."""
    NONE = "none"
    """No direct reads, though both GPUs are visible."""


class PauseMode(enum.StrEnum):
    """Treatment of running requests when an engine pauses (SGLang's own words)."""

    ABORT = "abort"
    """Requests end at once and return the tokens they have."""
    RETRACT = "retract"
    """Requests go back to the queue and are recomputed under the new weights."""
    IN_PLACE = "in_place"
    """Requests freeze, keep their KV cache, and go on under the new weights."""


class StragglerPolicy(enum.StrEnum):
    """Treatment of engines that are slower than others in a round (machine/round.py)."""

    WAIT_ALL = "wait-all"
    """The round waits for every engine, up to the deadline of each step."""
    QUORUM = "quorum"
    """Once `Policy.quorum` engines have finished a step, the others have `Policy.slow_s` left."""
    EVICT_AFTER = "evict-after"
    """An engine that takes longer than `Policy.slow_s` over a step is left out."""


class EngineHealth(enum.StrEnum):
    """State of the weights in an engine's server, as its agent reports it."""

    CLEAN = "clean"
    """All weights are of one committed version, or of the server's launch."""
    PENDING = "pending"
    """Complete weights of no committed version: verified but not committed, or unknown after a relaunch."""
    DIRTY = "dirty"
    """Some weights may be new and some old. Paused, and must not serve before a complete verified load."""


class RefusalCode(enum.StrEnum):
    """Reason for a refusal, with the caller's remedy."""

    STALE_EPOCH = "stale_epoch"
    """A later epoch was granted in the channel. Acquire again."""
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
    """Another live engine agent serves this URL. One server, one agent: end one of them."""
    PROTOCOL_MISMATCH = "protocol_mismatch"
    """The two sides speak different protocol numbers. Upgrade the older one."""
    READ_ONLY = "read_only"
    """The journal cannot be written (disk full?). Nothing is granted until it can."""
    SHUTTING_DOWN = "shutting_down"
    """The coordinator is stopping. Retry after `retry_after_s`."""
    CHANNEL_TAKEN = "channel_taken"
    """The channel belongs to another run, which published last. Said only to trainers that name their run."""
    NOT_LEADER = "not_leader"
    """This coordinator stands by. `Refused.leader` is the endpoint of the leader, if known."""


class Step(enum.StrEnum):
    """The step of a round at which an engine failed."""

    PREPARE = "prepare"
    PAUSE = "pause"
    TRANSFER = "transfer"
    VERIFY = "verify"
    COMMIT = "commit"
    RESUME = "resume"


class Outcome(enum.StrEnum):
    """Result of a round, for the round and for each engine in it."""

    COMMITTED = "committed"
    """The version is durable; the engine serves it, verified."""
    ABORTED = "aborted"
    """Nothing changed: old weights, old version, serving."""
    QUARANTINED = "quarantined"
    """The engine does not serve, or its last command was not answered: PROTOCOL.md lists the causes (Quarantine)."""
    LOST = "lost"
    """The engine stopped answering; it is out of the ready list."""


AgentId = NewType("AgentId", str)
"""Name of a trainer or engine agent, unique in a deployment and stable across restarts."""

Channel = NewType("Channel", str)
"""Name of one synchronized model, with its own lease, versions and engines."""

Version = NewType("Version", int)
"""The trainer's number of a state of the weights. Grows with every commit of a channel, except for a rollback."""

Epoch = NewType("Epoch", int)
"""Fencing token of a channel. Every grant and every retry takes a new one; receivers refuse a lower one."""

Incarnation = NewType("Incarnation", str)
"""Process generation of an agent. A message of an earlier one changes nothing."""

RequestId = NewType("RequestId", str)
"""Idempotency key of a request: the same key always gets the same answer."""

Digest = NewType("Digest", str)
"""Lower-case hexadecimal SHA-256 of a blob (a manifest, a digest table)."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
"""Names of agents and channels: safe in file names, metric labels and log lines."""

MAX_VERSION: Final = 2**53
"""Integers up to here are exact in every language that reads the JSON documents."""

AgentName = Annotated[AgentId, msgspec.Meta(pattern=NAME_PATTERN)]
ChannelName = Annotated[Channel, msgspec.Meta(pattern=NAME_PATTERN)]
JoinedChannel = Annotated[Channel, msgspec.Meta(min_length=1, max_length=64)]
"""Channel of an engine's answer. Compared with the channel that the agent joined, whose name matched the pattern, so
that thousands of answers need not pass through the pattern again."""
VersionNumber = Annotated[Version, msgspec.Meta(ge=0, le=MAX_VERSION)]
EpochNumber = Annotated[Epoch, msgspec.Meta(ge=0, le=2**53)]
IncarnationId = Annotated[Incarnation, msgspec.Meta(min_length=1, max_length=64)]
RequestKey = Annotated[RequestId, msgspec.Meta(min_length=1, max_length=96)]
BlobDigest = Annotated[Digest, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
TableDigest = Annotated[Digest, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]
"""Digest of a version's digest table. Empty while the digests are deferred (PROTOCOL.md)."""
Text = Annotated[str, msgspec.Meta(max_length=2048)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
ParallelSize = Annotated[int, msgspec.Meta(ge=1, le=4096)]
"""Parallel size of a server, bounded so that the rank numbers of a group of all engines fit into a message."""


class Message(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="type"
):
    """Base of every message. Each subclass names its tag, so that renaming a class changes nothing on the wire."""

    @property
    def kind(self) -> str:
        """Tag of the message on the wire, used in logs and errors."""
        return str(self.__struct_config__.tag)


class Fragment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Base of structures inside messages."""


class HeldVersion(Fragment, frozen=True):
    """A version that an engine holds, complete and verified."""

    version: VersionNumber
    manifest: BlobDigest
    table: BlobDigest
    """Digest of the version's digest table: engines with the same table hold the same bits."""


class EngineInfo(Fragment, frozen=True):
    """Facts of an engine's server. Fixed for a process generation, except `health`, `held` and `memory_released`."""

    url: Text
    """URL at which clients reach the server; readers of the ready list send requests there."""
    server_version: Text
    tp: ParallelSize
    pp: ParallelSize
    dp: ParallelSize
    device: Text
    """``cpu`` or ``cuda``."""
    host: Text
    """Identity of the host (boot id): equal for agents that can share memory."""
    transports: tuple[TransportKind, ...]
    live_digest: Text = ""
    """Algorithm of the server's digest of its live parameters; empty if the server has none."""
    health: EngineHealth = EngineHealth.CLEAN
    held: HeldVersion | None = None
    memory_released: bool = msgspec.field(default=False, name="lent")
    """True while the server's weight memory is released (SGLang's ``release_memory_occupation``)."""
    generation: Text = ""
    """Process generation of the server by its own account, whichever address it was reached at; empty: not known."""
    follows: Text = ""
    """Key of the `Hello` whose `Welcome` came last before the agent wrote down what it knows of that generation; empty:
    it knows nothing of it."""
    socket: Text = ""
    """The socket on which the server listens, as its agent's kernel shows it: host, network namespace, address, port.
    One launch follows another on it. Empty: not seen by the agent."""


class TrainerInfo(Fragment, frozen=True):
    """Facts of a trainer, reported by its rank 0."""

    host: Text
    device: Text
    ranks: Count
    transports: tuple[TransportKind, ...]
    """Transports in order of preference."""


class ProcessLocation(Fragment, frozen=True):
    """Location of one process with weights: a rank of a trainer, or a worker of a server."""

    rank: Count
    host: Text
    device: Text
    """UUID of the process's GPU; ``cpu`` without one."""
    reach: dict[str, PeerAccess] | None = None
    """Access to the other visible GPUs, by UUID. Null: the driver could not be queried."""
    nccl_gpu_id: Text = msgspec.field(default="", name="seat")
    """Identity of the GPU within an NCCL group; empty: its UUID."""


class NetworkInterface(Fragment, frozen=True):
    """Network interface of an agent's host."""

    name: Text
    addresses: tuple[Text, ...]
    mbps: Count = 0
    """Speed in megabits a second, as the driver reports it; 0: not known."""


class MissingTransport(Fragment, frozen=True):
    """Reason why an agent does not offer a transport."""

    found: Text
    needed: Text = ""
    """Change that would make the transport possible; empty if there is none."""


class PublicationSignature(Fragment, frozen=True):
    """A trainer's signature of a publication (security/trust.py names the signed fields)."""

    signer: AgentName
    previous: HeldVersion | None
    """Version committed when the lease was granted: the previous link of the channel's hash chain."""
    signature: Signature
    """Ed25519, in hexadecimal."""


class Policy(Fragment, frozen=True):
    """Policy of one round, set by the trainer and carried out by the coordinator."""

    pause: PauseMode = PauseMode.RETRACT
    flush: bool = True
    """True: drop the KV and prefix caches before resuming. Must be false with `PauseMode.IN_PLACE`."""
    min_engines: Count = 0
    """Least number of verified engines for a commit; 0: one, if any engine joined."""
    retries: Count = msgspec.field(default=1, name="redrives")
    """Retries of the transfer for each engine within the round.

    An attempt over a collective transport that another engine's failure ended before any byte was sent does not count.
    """
    transfer_timeout_s: Seconds = 600.0
    slow: StragglerPolicy = StragglerPolicy.WAIT_ALL
    quorum: Count = 0
    """Number of engines for `StragglerPolicy.QUORUM`; 0: one."""
    slow_s: Seconds = 30.0
    """Seconds for `StragglerPolicy.QUORUM` and `StragglerPolicy.EVICT_AFTER`."""
    max_paused: Count = 0
    """Most engines paused at a time (rolling round: the others follow in waves). 0: all at once.

    An engine that does not serve again counts as paused; when all places are taken by such engines, the round stops.
    """
    max_lag: Count = 0
    """Versions by which a stale engine may be behind the committed one and still be listed as ready."""


class ReceivingEngine(Fragment, frozen=True):
    """One engine of a transfer, and its transport."""

    engine: AgentName
    transport: TransportKind
    tp: Count
    url: Text = ""
    shares: bool = False
    """True if a worker is on a GPU of the trainer: a copy would wait there for digests that are still computed, and the
    worker cannot be in one NCCL group with that rank. Set for deferred digests and for `distributed`."""


class Endpoint(Fragment, frozen=True):
    """Endpoint of one transport in one epoch. Only the data plane reads `address`."""

    transport: TransportKind
    address: Text
    """Local, direct: path of a Unix socket. Sends, distributed: ``tcp://host:port``. Disk: path of the folder."""
    group: Text = ""
    """Distributed: name of the collective group; unchanged while its members are."""
    backend: Text = ""
    """Distributed: ``gloo`` or ``nccl``."""
    world_size: Count = 0
    """Distributed: the source rank and all engine ranks."""
    token: Text = ""
    """Sends, distributed: a secret of this epoch, by which the two sides know each other. Never logged."""
    signature: Signature | None = None
    """Signature of the publication's signer, where keys are used: engines cannot be redirected to another source."""


class EngineReport(Fragment, frozen=True):
    """Result of one engine in a round."""

    engine: AgentName
    outcome: Outcome
    transport: TransportKind | None = None
    version: VersionNumber | None = None
    bytes: Count = 0
    buckets: Count = 0
    seconds: dict[str, Seconds] = {}
    """Seconds by phase: prepare, pause, transfer, verify, resume; and ``paused``, from pause to resume."""
    verified_by: Text = ""
    """``live-digest``: read back from the server's parameters. ``bucket-digest``: checked before the load.

    A semicolon may follow, and which tensors were proven in another way, or not at all."""
    reason: Text = ""


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
    lacking: dict[TransportKind, MissingTransport] = {}  # msgspec gives each its own
    """Transports that the agent does not offer, with the reason."""
    takes: dict[TransportKind, Count] = {}  # msgspec gives each its own
    """Bytes of a version that the worker with the most received, by transport used so far (engines only)."""
    supports_deferred_digests: bool = msgspec.field(default=False, name="awaits_tables")
    """True if the agent supports deferred digests."""
    trouble: Text = ""
    """Why the engine's server can take no version now; empty if it can. Its duration is shown before the first ": "."""
    trouble_s: Seconds = 0.0
    """Seconds for which that had lasted when the message was made."""
    starting: bool = False
    """True if that server has held no version since its launch, or was never reached: it may still compile or capture
    graphs, and a publication with too few engines waits for it."""
    unclean: Text = ""
    """Why the engine's weights are not clean, or why it does not generate, outside of a round: such as what another
    party did to its server. Empty while it is clean. A round takes the engine in as ever."""


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
    run: Text = ""
    """The training run that publishes, the same after a restart of its job. The channel belongs to the run that was
    granted its lease last; another one is refused (`channel_taken`). Empty: names none, and neither takes nor asks."""
    takeover: bool = False
    """True: `run` takes the channel from the run that has it, which is refused from then on."""


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
    failed: dict[str, Text] = {}  # msgspec gives each its own
    """Engines whose transport could not be opened, with the reason."""


class Sent(Message, frozen=True, tag="Sent"):
    """The trainer's half of the transfer of `epoch` has ended. Answered by `Ack`."""

    request: RequestKey
    channel: ChannelName
    epoch: EpochNumber
    failed: dict[str, Text] = {}  # msgspec gives each its own
    """Engines that the trainer could not serve, with the reason. All others received every bucket."""
    table: TableDigest = Digest("")
    """Digest table of a version with deferred digests: must have been put, the same in every `Sent` of a round."""
    spared: tuple[AgentName, ...] = ()
    """Engines of `failed` to which nothing was sent only because another engine failed: not at fault."""
    nonfinite: Count = 0
    """Elements of the version that are NaN or infinite. A metric, as is `differing`."""
    differing: Count = 0
    """Tensors whose replicas differ between the trainer's ranks, as far as they were compared for this version."""


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
    """A step failed. `health` is the state of the weights now. PROTOCOL.md says what follows (Quarantine)."""

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
    doubted: bool = False
    """True if another agent had this engine's server since the engine wrote down what it knows of it (`follows`)."""


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
    routes: dict[str, TransportKind] = {}  # msgspec gives each its own
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
