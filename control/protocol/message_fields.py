"""The base classes of messages, and the structures inside messages."""

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
    """A trainer's signature of a publication (security/signed_publications.py names the signed fields)."""

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
    redrives: Count = 1
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
    """``live-digest``: read back from the server's parameters. ``bucket-digest``: checked before the load."""
    reason: Text = ""
