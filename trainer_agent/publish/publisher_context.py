"""State that outlives a publication and serves each of them, and the interfaces it is used through."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Protocol

import msgspec

from weightbus.control import protocol as m
from weightbus.control.protocol import Digest, Epoch, RequestId
from weightbus.dataplane.transports import Sender

from ..checkpoints import Archive
from ..machine import Mode
from ..settings import TrainerSettings
from . import rank_commands as commands
from .bucket_staging import BucketStaging


class Bus(Protocol):
    """The part of control's `BusClient` that is used here."""

    def request(self, message: m.ToCoordinator, blob: bytes | None = None, deadline_s: float = 30.0) -> m.ToAgent:
        """Send `message` and return the answer. Raises on a refusal and on a timeout."""
        ...

    def request_with(
        self, message: m.ToCoordinator, blobs: Mapping[Digest, bytes], deadline_s: float = 30.0, blobs_s: float = 60.0
    ) -> m.ToAgent:
        """As `request`, after uploading those of `blobs` that the coordinator lacks, by their digests."""
        ...

    def put_blob(self, blob: bytes, deadline_s: float = 60.0, digest: str = "") -> Digest:
        """Upload `blob`, of that digest, unless the coordinator has it. From any thread."""
        ...

    def get_blob(self, digest: Digest, deadline_s: float = 60.0) -> bytes:
        """Download the blob of that digest."""
        ...

    def next(self, timeout_s: float) -> m.ToAgent | None:
        """The next message that the coordinator sends unasked; None after `timeout_s`."""
        ...

    @property
    def committed(self) -> int | None:
        """The channel's committed version, as of the coordinator's last message."""
        ...

    def status(self, deadline_s: float = 10.0) -> bytes:
        """The coordinator's status document."""
        ...

    def new_request(self) -> RequestId:
        """A key for a request that is not a retry."""
        ...

    def close(self) -> None:
        """Leave the channel."""
        ...


class Progress(msgspec.Struct, frozen=True):
    """Progress of a publication, for display."""

    version: int
    state: str
    buckets_sent: int
    buckets: int


class PublicationSigner(Protocol):
    """Signs the messages of this trainer."""

    def publication(self, message: m.Publish, previous: m.HeldVersion | None) -> m.Publish:
        """Sign `message`, which follows the committed version `previous`."""
        ...

    def table(self, message: m.Publish, table: Digest) -> bytes:
        """Sign `table` as the digest table of `message`, which deferred it."""
        ...

    def offer(self, offer: m.Endpoint, epoch: Epoch) -> m.Endpoint:
        """Sign `offer` for one epoch."""
        ...


class PublisherContext(msgspec.Struct):
    """State that outlives a publication and serves each of them."""

    settings: TrainerSettings
    bus: Bus
    ranks: commands.CommandedRanks
    staging: BucketStaging
    make_sender: Callable[[m.TransportKind], Sender]
    senders: MutableMapping[m.TransportKind, Sender]
    boot: int
    """Process generation of the coordinator, as of its last `Welcome`."""
    progress: Callable[[Progress], None] | None = None
    mode: Mode = Mode.LIVE
    signer: PublicationSigner | None = None
    """None if no keys are used."""
    archive: Archive | None = None
    """Keeps versions as files; None if none are kept."""
