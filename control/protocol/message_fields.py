"""What messages are made of: their two roots, and the structures inside them."""

from __future__ import annotations

import msgspec

from .enums import EngineHealth, Outcome, PauseMode, PeerAccess, StragglerPolicy, TransportKind
from .ids import (
    AgentName,
    BlobDigest,
    Count,
    ParallelSize,
    Seconds,
    Text,
    VersionNumber,
)
from .signatures import Signature


class Message(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, tag_field="type"
):
    """Root of every message. Each names its tag itself: a class may be renamed, what travels may not."""

    @property
    def kind(self) -> str:
        """The tag it travels with; logs and errors name a message by it."""
        return str(self.__struct_config__.tag)


class Fragment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Root of structures that travel inside messages."""


class HeldVersion(Fragment, frozen=True):
    """A version an engine holds, complete and verified."""

    version: VersionNumber
    manifest: BlobDigest
    table: BlobDigest
    """Digest table of that version: two engines that hold the same table hold the same bits."""


class EngineInfo(Fragment, frozen=True):
    """What an engine agent read from its server. Fixed for an incarnation, but for `health`, `held` and `lent`."""

    url: Text
    """Where clients reach the server. Readers of the ready list send their requests there."""
    server_version: Text
    tp: ParallelSize
    pp: ParallelSize
    dp: ParallelSize
    device: Text
    """``cpu`` or ``cuda``."""
    host: Text
    """Identity of the machine (boot id), so that two agents can tell whether they share memory."""
    transports: tuple[TransportKind, ...]
    live_digest: Text = ""
    """Algorithm by which the server reports the digest of its live parameters; empty when it cannot."""
    health: EngineHealth = EngineHealth.CLEAN
    held: HeldVersion | None = None
    lent: bool = False
    """The server has given its weights' memory back."""


class TrainerInfo(Fragment, frozen=True):
    """What a trainer's leader says of its group."""

    host: Text
    device: Text
    ranks: Count
    transports: tuple[TransportKind, ...]
    """In order of preference."""


class ProcessLocation(Fragment, frozen=True):
    """Where one process keeps weights: a rank of a trainer, or a worker of a server."""

    rank: Count
    host: Text
    device: Text
    """uuid of its GPU; ``cpu`` where it has none."""
    reach: dict[str, PeerAccess] | None = None
    """To the other GPUs that the process sees, by uuid. Null: nobody could ask its driver."""
    seat: Text = ""
    """By which a group over NCCL knows its GPU; empty: by its uuid."""


class NetworkInterface(Fragment, frozen=True):
    """A network interface by which others may come."""

    name: Text
    addresses: tuple[Text, ...]
    mbps: Count = 0
    """Megabits a second, as its driver says; 0 where that is not known."""


class MissingTransport(Fragment, frozen=True):
    """Why an agent does not offer a transport."""

    found: Text
    needed: Text = ""
    """What would change that; empty where nothing would."""


class PublicationSignature(Fragment, frozen=True):
    """Who says that a version is to be published, and after which.

    signed_publications.py says what exactly is signed.
    """

    signer: AgentName
    previous: HeldVersion | None
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
    slow: StragglerPolicy = StragglerPolicy.WAIT_ALL
    quorum: Count = 0
    """For `StragglerPolicy.QUORUM`; 0 means one."""
    slow_s: Seconds = 30.0
    """For `StragglerPolicy.QUORUM` and `StragglerPolicy.EVICT_AFTER`."""
    max_paused: Count = 0
    """At most so many engines stand still at a time: the others take the version after them. 0: all at once.

    Who does not come back from it counts too: when so many have not, the round stops.
    """
    max_lag: Count = 0
    """Versions that an engine which a round left behind may be behind the committed one and still get requests."""


class ReceivingEngine(Fragment, frozen=True):
    """One engine that takes part in a transfer, and how its tensors travel."""

    engine: AgentName
    transport: TransportKind
    tp: Count
    url: Text = ""
    shares: bool = False
    """A worker of it is on a GPU of the trainer's: it would wait there for what is still made, and cannot be in one
    group with that rank. Said where the table is open, and of those that are broadcast to."""


class Endpoint(Fragment, frozen=True):
    """Where one transport's tensors can be had in one epoch. Only the data plane reads `address`."""

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
