"""The seam between rounds and bytes: what every transport does, for the side that sends and the side that receives.

One `Sender` serves all receivers of one transport in one epoch; one `Receiver` serves one engine. Both are used
from one thread, every wait has a deadline (seconds from the call); `close` may be called at any time, twice too, and
`withdraw` from any thread.
The contract that all of them satisfy is tests/dataplane/transport_contract.py.

Order of calls, sender:    offer -> ready -> (send)* in bucket order -> finish -> close
Order of calls, receiver:  receive -> close

A receiver that fails is dropped and named in `Sender.failed`; the others are served to the end. A collective transport
cannot drop one: it names all of them, and the round is driven again under a new epoch. `withdraw` says from outside
that a receiver has failed, which the sender itself may learn late, or only from a deadline.

Ownership of slots: `send(index, slot)` hands the bytes of `slot` to the receivers until `reclaim(index)` returns; only
then may the caller write to that slot again.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import msgspec

from ..errors import TransferFailed
from ..processes import WireMessage

if TYPE_CHECKING:
    import torch

    from ..memory import CudaMemory, ExportMap, HostMemory
    from ..tensors import BucketSpec, DigestTable, Manifest, Shards, Sources, TensorSpec
    from .plan_exchange import PrerecordedTraces

JOIN_S: Final = 15.0
"""How long a sender waits for receivers to come. Engines are told where at once, and coming takes no time: an
engine that has not come by then is failed, so that the others, paused for this round, do not wait any longer. Above the
control plane's own silence_s, so that a lost message has been sent again."""


class TransferSession(msgspec.Struct, frozen=True):
    """What both sides of a transfer agree on before a byte moves."""

    channel: str
    epoch: int
    version: int
    manifest: Manifest
    table: DigestTable | None
    """Null where it follows: the sender `tabled` it once known, and the receiver waits for it before it proves."""

    @property
    def known(self) -> DigestTable:
        """The table. Raises `TransferFailed` where it follows, which not every transport can wait for."""
        if self.table is None:
            raise TransferFailed("the digest table follows, and this transport compares what it takes with it at once")
        return self.table


class Tabled(msgspec.Struct, frozen=True):
    """The digest table of a session that was begun without."""

    table: DigestTable
    seal: bytes = b""
    """Signature of the table, which the engine agent checks. Transports only carry it."""


class Peer(msgspec.Struct, frozen=True):
    """One engine as the sender sees it."""

    engine: str
    tp: int


class Address(msgspec.Struct, frozen=True):
    """Where a sender's half can be reached; carried to the receivers by the control plane, read only here."""

    address: str
    group: str = ""
    backend: str = ""
    world_size: int = 0
    token: str = ""
    """Distributed: a secret by which both sides know that the other is of this epoch, and no stranger."""


class StagingBuffer(Protocol):
    """A staging buffer that outlives rounds. `memory` is a 1-D uint8 tensor of its whole capacity."""

    @property
    def memory(self) -> torch.Tensor:
        """The whole buffer."""
        ...

    @property
    def exported(self) -> bytes:
        """How another process opens this memory: msgpack (shared_memory.py), never a pickle."""
        ...


class Sender(Protocol):
    """The trainer's half."""

    @property
    def failed(self) -> dict[str, str]:
        """Engines that will not get every bucket, with the reason. Grows only."""
        ...

    @property
    def spared(self) -> frozenset[str]:
        """Those of `failed` that were well, and to which nothing was sent: a collective that another one has ended."""
        ...

    def offer(self, session: TransferSession, peers: Sequence[Peer]) -> Address:
        """Open this half for `peers` and say where. Returns at once; receivers may come from now on."""
        ...

    def ready(self, deadline_s: float, join_s: float = JOIN_S) -> None:
        """Wait until every peer has come, or is in `failed`. Raises `TransferFailed` when none is left.

        Peers that have not come within `join_s` are failed; what else it takes to begin may last until `deadline_s`.
        """
        ...

    def send(self, index: int, slot: StagingBuffer, deadline_s: float) -> None:
        """Hand bucket `index`, packed in `slot`, to every peer. Raises `TransferFailed` when none is left."""
        ...

    def reclaim(self, index: int, deadline_s: float) -> None:
        """Wait until no peer reads bucket `index` any more."""
        ...

    def finish(self, deadline_s: float) -> None:
        """Wait until every peer has confirmed the last bucket, or is in `failed`."""
        ...

    def withdraw(self, engine: str, reason: str) -> None:
        """`engine` will not come, or not go on: fail it now. From any thread; at once, what waits for it notices.

        Says nothing of an engine that has confirmed the last bucket, of one that is no peer, and before `offer`.
        """
        ...

    def close(self) -> None:
        """Let go of everything that belongs to this epoch. Never raises for a peer's sake."""
        ...


class SharedBucket(msgspec.Struct, frozen=True):
    """A bucket in memory that the engine's workers can map by themselves."""

    index: int
    spec: BucketSpec
    tensors: tuple[TensorSpec, ...]
    memory: HostMemory | CudaMemory


class EngineServer(Protocol):
    """What a receiver asks of the inference server it loads. Implemented by engine_agent over HTTP.

    Every call blocks until the server has answered and raises `TransferFailed` on anything but success.
    """

    @property
    def tp(self) -> int:
        """Tensor-parallel workers of the server."""
        ...

    @property
    def drafts(self) -> bool:
        """Whether the server decodes speculatively: it calls a loader for each model apart, draft models included."""
        ...

    @property
    def launch(self) -> str:
        """Name of the server's running processes. A new one means that it was launched again, and is in no group."""
        ...

    @property
    def opens(self) -> str:
        """Where memory of another process has to lie for its workers to open it: ``cpu``, or a GPU by its uuid.

        Empty where this process has none such, or it is not known.
        """
        ...

    def load_shared(self, bucket: SharedBucket, deadline_s: float) -> None:
        """update_weights_from_tensor, load_format ``flattened_bucket``; every rank maps the same memory."""
        ...

    def join_group(self, address: Address, rank_offset: int, deadline_s: float) -> None:
        """init_weights_update_group; blocks until the whole group has formed."""
        ...

    def load_broadcast(self, group: str, tensors: Sequence[TensorSpec], deadline_s: float) -> None:
        """update_weights_from_distributed, load_format ``flattened_bucket``; blocks until the broadcast arrived."""
        ...

    def leave_group(self, group: str, deadline_s: float) -> None:
        """destroy_weights_update_group; no error when the server is not in it."""
        ...

    def watch_groups(self, groups: Sequence[str], *, used: bool) -> bool:
        """Have a watchdog make the server leave these groups if this process ends or, while they are `used`, stalls.

        They replace the groups named before; False where the server may have left those. Never raises.
        """
        ...

    def load_checkpoint(self, path: str, deadline_s: float) -> None:
        """update_weights_from_disk."""
        ...

    def load_direct(self, socket: str, deadline_s: float) -> None:
        """update_weights_from_tensor with our own loader, whose workers connect to `socket`; returns when all left it.

        Changes nothing by itself: what the workers do is led over the socket.
        """
        ...


class Receipt(msgspec.Struct, frozen=True):
    """What a receiver took."""

    bytes: int
    buckets: int
    checked: bool
    """Every byte was compared with the digest table before the server saw it."""
    tabled: Tabled | None = None
    """What the sender gave, and what was taken is proven by, where the session was begun without a table."""


@runtime_checkable
class Tabling(Protocol):
    """A sender whose session may begin before its digest table is known."""

    def tabled(self, tabled: Tabled) -> None:
        """Give it to all receivers, those connected and those still to come. Once in a session, from any thread."""
        ...


@runtime_checkable
class Dividing(Protocol):
    """A sender of which other ranks of the trainer send a part of the buckets, by groups of their own."""

    @property
    def differing(self) -> Sequence[str]:
        """Tensors that one of these ranks found changed since they were digested, for which the session failed."""
        ...

    def divide(self, sources: Sources | None) -> None:
        """Set the rank that sends each bucket, from the next `offer` on; null: the rank of this sender sends all.

        A bucket of another rank needs no slot here.
        """
        ...


@runtime_checkable
class Returning(Protocol):
    """A receiver that has taken and proven a version before the server has returned from the call it was taken in."""

    def returned(self, deadline_s: float) -> None:
        """Wait until it has. Raises `TransferFailed` if it did not, or not well, and again whenever it is asked."""
        ...


@runtime_checkable
class Remarking(Protocol):
    """A receiver that can say why it is slower than it could be."""

    @property
    def remark(self) -> str:
        """Of the last version; empty where there is nothing to say."""
        ...


@runtime_checkable
class Timed(Protocol):
    """A receiver that knows where its last transfer's time went."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """By step. The server stands still during all of them."""
        ...


@runtime_checkable
class Sized(Protocol):
    """A receiver whose workers take different parts of a version, each only what it stores."""

    @property
    def most_bytes(self) -> int:
        """Bytes of a round that the worker with most of them takes; 0 before anything was planned."""
        ...

    @property
    def devices(self) -> tuple[str, ...]:
        """``cpu``, or the uuid of its GPU, of each worker by its rank, as they said when they came last."""
        ...


class Receiver(Protocol):
    """The engine agent's half."""

    @property
    def touched(self) -> bool:
        """The server was asked to change weights at least once: from now on a failure leaves it DIRTY."""
        ...

    def receive(  # noqa: PLR0917 - session, address, engine and deadline in the order of the call
        self,
        session: TransferSession,
        address: Address,
        engine: str,
        rank_offset: int,
        server: EngineServer,
        deadline_s: float,
    ) -> Receipt:
        """Take every bucket and load it into `server`. Raises `TransferFailed`."""
        ...

    def close(self) -> None:
        """Let go of what belongs to the last session; memory and groups that outlive rounds stay until `shutdown`."""
        ...

    def shutdown(self) -> None:
        """Let go of everything."""
        ...


@runtime_checkable
class StallDetector(Receiver, Protocol):
    """A receiver that detects a stalled worker of its server."""

    def require_moving(self) -> None:
        """Raise `TransferFailed` while a worker that had stalled has not answered, or not gone on, since."""
        ...


@runtime_checkable
class DoubleBuffering(StallDetector, Protocol):
    """A receiver that can take a version into a second buffer, beside the weights that are served."""

    @property
    def mode(self) -> str:
        """How the last version was received, as text for logs and the status page."""
        ...

    def can_stage(self, manifest: Manifest) -> bool:
        """Whether there is a plan for this manifest, and room for a second buffer."""
        ...

    def stage(self, session: TransferSession, address: Address, engine: str, deadline_s: float) -> bool:
        """Take it while the server generates; `receive` of the same session puts it into place.

        False when the server has to stand still for it. Changes nothing that is served; raises `TransferFailed`.
        """
        ...


class Exporting(WireMessage, frozen=True, omit_defaults=True, tag="Exporting"):
    """One trainer rank: where its exporter listens, and which generation of its memory is current."""

    holder: int
    address: str
    generation: int
    round: int = 0
    """What the marks of its parts have to show; 0 where it makes nothing."""


class Group(WireMessage, frozen=True, tag="Group"):
    """The group of this epoch."""

    store: str
    """``tcp://host:port``."""
    name: str
    size: int
    rank: int
    """Of the trainer's rank, or of the engine's first worker."""
    form_s: float
    turn_s: float
    nixl: bool = False
    """It reads with NIXL, and does not send over gloo or NCCL."""
    stands: bool = False
    """Whether the group of the last round is used again: all members still have it, and `store` is empty."""
    keep_s: float = 0.0
    """For how long it may be used again afterwards."""
    ranks: int = 0
    """How many of its members, the first ones, are ranks of the trainer; told where it forms early."""


class Layout(WireMessage, frozen=True, tag="Layout"):
    """Sender: what every rank of the trainer holds and exports."""

    shards: bytes = msgspec.field(name="pieces")
    """`Shards.encode`."""
    exports: tuple[bytes, ...]
    """`ExportMap.encode`."""


@dataclass(frozen=True, eq=False)
class ExportedWeights:
    """The memory that all ranks of a trainer export, in one generation."""

    shards: Shards
    """Of all ranks, in the tensors of the manifest that is published."""
    exports: tuple[ExportMap, ...]
    exporters: tuple[Exporting, ...]

    @cached_property
    def given(self) -> Layout:
        """The part that a receiver keeps from round to round: the same in every generation."""
        return Layout(shards=self.shards.encode(), exports=tuple([export.encode() for export in self.exports]))

    @cached_property
    def layout(self) -> str:
        """The digest by which `given` is named on the wire."""
        parts = (self.given.shards, *self.given.exports)
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()

    def again(self, exporters: tuple[Exporting, ...]) -> ExportedWeights:
        """The same layout, in another generation or round."""
        found = replace(self, exporters=exporters)
        vars(found).update(given=self.given, layout=self.layout)  # which take as long as the layout is large
        return found


class LoadedBy(enum.Enum):
    """The call by which a server loads what arrives (`EngineServer`). It decides which servers can be served."""

    LOADER = "load_direct"
    """Our loader inside the workers writes their parameters along a plan and compares what they hold afterwards."""
    SHARED_MEMORY = "load_shared"
    """Every worker maps the buckets."""
    GROUP = "load_broadcast"
    """Every worker, or the sidecar for them, is a member of a collective group."""
    FILES = "load_checkpoint"
    """The server reads a checkpoint; the only call that reaches every replica of a server (dp > 1)."""


class SenderContext(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a trainer's half may be made of; each transport takes what it needs."""

    channel: str
    runtime_dir: Path | None = None
    """Folder for sockets; null: the default one of this user."""
    device: str = "cpu"
    """Device of the staging buffers, as torch names it."""
    host: str = "127.0.0.1"
    """Address at which engines reach this machine."""
    checkpoint_dir: Path | None = None
    """Folder that trainer and engines both see."""
    hf_config_dir: Path | None = None
    """Source of the config and tokenizer files of every checkpoint."""
    expose: Callable[[], ExportedWeights] | None = None
    """The memory that engines may read in place; null where the source cannot export it."""
    describe: Callable[[], ExportedWeights] | None = None
    """The memory that ranks send out of; null where the source cannot say where its tensors lie."""
    nixl: bool = False
    """Whether engines read what ranks send over NIXL."""
    keep_groups_s: float = 900.0
    """Seconds for which an unused process group is kept."""


class ReceiverContext(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that an engine's half may be made of; each transport takes what it needs."""

    runtime_dir: Path | None = None
    """Folder for sockets; null: the default one of this user."""
    beside: bool = True
    """Whether a version may be received into a second buffer, beside the served weights, while the server generates."""
    hands_on: bool = True
    """Whether the sidecar may be a member of broadcast groups in its server's place."""
    ahead: PrerecordedTraces | None = None
    """Load traces that were recorded before the first version."""


class Transport(msgspec.Struct, frozen=True, kw_only=True):
    """One way for weights to travel."""

    name: str
    """Name on the control plane: in settings, `Hello` and `Endpoint`."""
    sender: Callable[[SenderContext], Sender]
    """Makes the trainer's half; opens nothing before `offer`. Raises `Unsupported` where the context lacks a need."""
    receiver: Callable[[ReceiverContext], Receiver]
    """Makes the engine's half, which lives as long as the sidecar."""
    loaded_by: LoadedBy
    missing: Callable[[SenderContext], str] = lambda _: ""
    """Why a trainer cannot send this way, whatever memory it has, and what to do about it; empty when it can."""
    reads_memory: bool = False
    """Whether engine workers open the memory that the trainer's ranks export."""
    divides: bool = False
    """Whether other ranks of the trainer may send buckets of their own (`Dividing`)."""

    @property
    def in_place(self) -> bool:
        """Whether the ranks' memory itself is given: no bucket is assembled, and snapshots cannot travel."""
        return self.loaded_by is LoadedBy.LOADER
