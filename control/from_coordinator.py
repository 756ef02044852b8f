"""What the coordinator says: to any agent, to trainers, to engine agents. messages.py shows when."""

from __future__ import annotations

from .fragments import (
    EngineInfo,
    EngineReport,
    Held,
    Message,
    Offer,
    Policy,
    Receiver,
    Seal,
)
from .ids import (
    BlobDigest,
    ChannelName,
    Count,
    Digest,
    EpochNumber,
    RequestKey,
    Seconds,
    TableDigest,
    Text,
    VersionNumber,
)
from .terms import (
    Code,
    Outcome,
    PauseMode,
    TransportKind,
)

# -- coordinator -> any agent ----------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, tag="Welcome"):
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
    code: Code
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
    committed: Held | None
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
    receivers: tuple[Receiver, ...]
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
    seal: Seal | None = None
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
    offer: Offer
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
