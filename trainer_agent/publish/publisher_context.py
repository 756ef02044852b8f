"""What outlives a publication and serves each of them, and what it speaks to."""

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
    """What is asked of control's `BusClient`."""

    def request(self, message: m.ToCoordinator, blob: bytes | None = None, deadline_s: float = 30.0) -> m.ToAgent:
        """The answer; a refusal and silence are raised."""
        ...

    def request_with(
        self, message: m.ToCoordinator, blobs: Mapping[Digest, bytes], deadline_s: float = 30.0, blobs_s: float = 60.0
    ) -> m.ToAgent:
        """As `request`, and see that the coordinator has `blobs`, by their digests, which the message names."""
        ...

    def put_blob(self, blob: bytes, deadline_s: float = 60.0, digest: str = "") -> Digest:
        """See that the coordinator has `blob`, of that digest. From any thread."""
        ...

    def get_blob(self, digest: Digest, deadline_s: float = 60.0) -> bytes:
        """The blob of that digest."""
        ...

    def next(self, timeout_s: float) -> m.ToAgent | None:
        """What the coordinator says unasked."""
        ...

    @property
    def committed(self) -> int | None:
        """The channel's committed version, as the coordinator said it last."""
        ...

    def status(self, deadline_s: float = 10.0) -> bytes:
        """The coordinator's status document."""
        ...

    def new_request(self) -> RequestId:
        """A key for a request that is not a repetition."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


class Progress(msgspec.Struct, frozen=True):
    """Where a publication stands, for whoever shows it."""

    version: int
    state: str
    buckets_sent: int
    buckets: int


class PublicationSigner(Protocol):
    """Signs for this trainer."""

    def publication(self, message: m.Publish, previous: m.HeldVersion | None) -> m.Publish:
        """`message`, to follow the committed version `previous`."""
        ...

    def table(self, message: m.Publish, table: Digest) -> bytes:
        """Why `table` is to be believed for `message`, which left it open."""
        ...

    def offer(self, offer: m.Endpoint, epoch: Epoch) -> m.Endpoint:
        """`offer`, for one epoch."""
        ...


class PublisherContext(msgspec.Struct):
    """What outlives a publication and serves each of them."""

    settings: TrainerSettings
    bus: Bus
    ranks: commands.CommandedRanks
    staging: BucketStaging
    make_sender: Callable[[m.TransportKind], Sender]
    senders: MutableMapping[m.TransportKind, Sender]
    boot: int
    """The life of the coordinator that was last heard of."""
    progress: Callable[[Progress], None] | None = None
    mode: Mode = Mode.LIVE
    signer: PublicationSigner | None = None
    """Null where no keys are used."""
    archive: Archive | None = None
    """Keeps versions as files; null where none are kept."""
