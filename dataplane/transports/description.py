"""What a transport is to the rest of the product: a name, the traits that others ask about, and its two halves.

Each transport is a folder whose `transport.py` declares one `Transport`; registry.py lists them. Neither imports torch
before a half is made, so settings and routing may ask about traits in a process without tensors.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from .exported_weights import ExportedWeights
    from .interface import Receiver, Sender
    from .prerecorded_traces import PrerecordedTraces


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
    """Whether a version may be received while the server generates."""
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
    reads_memory: bool = False
    """Whether engine workers open the memory that the trainer's ranks export."""
    divides: bool = False
    """Whether other ranks of the trainer may send buckets of their own (`Dividing`)."""

    @property
    def in_place(self) -> bool:
        """Whether the ranks' memory itself is given: no bucket is assembled, and snapshots cannot travel."""
        return self.loaded_by is LoadedBy.LOADER
