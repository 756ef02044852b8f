"""What the sidecar and the workers of its server say to each other while the workers' schedulers are held.

One exchange for each round: every worker connects to the sidecar's socket when the server calls our loader, and returns
from the call at `Done`. Only what a worker does not know yet is sent: a steady round is Hello, Replay, Replayed, Done.

    worker                       sidecar
      Hello  ------------------->
             <-------------------  Record      (only when layout or server are new)
      Recorded ----------------->
             <-------------------  Prove       (ahead of any version, and never again)
      Adopted ------------------>
             <-------------------  Adopt       (only when plan or exports are new)
      Adopted ------------------>
             <-------------------  Replay
      Replayed ----------------->
             <-------------------  Done

Where weights are sent (sender.py), `Form` may come first, and `Expect` follows `InstallPlan`; the worker answers on a
connection of a thread of its own, which stays open between rounds and hears `Take`. Then `Swap` stands for
`ExecutePlan`.

    worker's thread              sidecar
      Expecting ---------------->
             <-------------------  Weigh       (may it be taken while the server generates?)
      Room --------------------->
             <-------------------  Take
      Taken -------------------->
"""

from __future__ import annotations

from typing import Final

from ..memory import ArenaRegion
from ..processes import WireEnd, WireMessage
from ..tensors import TensorSpec
from .interface import Group


class Hello(WireMessage, frozen=True, omit_defaults=True, tag="Hello"):
    """Worker, first: its rank and device, and what it has from earlier rounds."""

    rank: int
    device: str
    """``cpu`` or the GPU's uuid."""
    peers: tuple[str, ...] = ()
    layout: str = ""
    """Digest of the tensors of its recording."""
    recording: str = ""
    plan: str = ""
    schedule: str = ""
    """Of what it can be sent: a thread of its own is connected to the sidecar, and stays so."""
    seat: str = ""
    """By which a group over NCCL knows its GPU."""


class RecordTrace(WireMessage, frozen=True, tag="Record"):
    """Sidecar: run the loader once on these tensors, and say what it does."""

    layout: str
    tensors: tuple[TensorSpec, ...]


class TraceRecorded(WireMessage, frozen=True, tag="Recorded"):
    """Worker: `LoadTrace.encode`."""

    recording: bytes
    seconds: float


class Exports(WireMessage, frozen=True, omit_defaults=True, tag="Exports"):
    """Where one trainer rank's memory is had, and which regions of it."""

    holder: int
    address: str
    generation: int
    regions: tuple[int, ...]
    made: ArenaRegion | None = None
    """One of the regions, where it may be read before all of it is made."""


class Form(WireMessage, frozen=True, tag="Form"):
    """Sidecar: begin to join this group beside the rest. The next schedule takes it along."""

    group: Group


class Prove(WireMessage, frozen=True, omit_defaults=True, tag="Prove"):
    """Sidecar: what is reported of the memory that was recorded. The tables are those of verification.py, encoded."""

    proof: bytes
    """`BoxTable.encode`: regions are the targets, and then the staging buffer."""
    groups: int
    odd: bytes
    """`CopyTable.encode`: boxes of targets, or of sources where they are cast, that are read back into one buffer."""
    odd_bytes: int
    staging_bytes: int
    sent: bool = False
    """It may be sent to: what a first group takes longer for is done beside."""


class InstallPlan(WireMessage, frozen=True, tag="Adopt"):
    """Sidecar: what to do in every round from now on.

    The tables are those of reshard_plan.py and verification.py, encoded.
    """

    plan: str
    recording: str
    """Digest of the recording that the plan was made for."""
    sources: tuple[tuple[int, int], ...]
    """(holder, region) by number."""
    copies: bytes
    staging: bytes
    staged: tuple[int, ...]
    prove: Prove


class PlanInstalled(WireMessage, frozen=True, tag="Adopted"):
    """Worker: everything is bound."""

    seconds: float


class ExecutePlan(WireMessage, frozen=True, omit_defaults=True, tag="Replay"):
    """Sidecar: copy, then say what the engine holds."""

    epoch: int
    version: int
    exports: tuple[Exports, ...]
    rounds: tuple[int, ...] = ()
    """By the exports: what the marks of parts that are made have to show. Empty where nothing is made."""
    within_s: float = 0.0
    """How long they may be waited for."""


class PlanExecuted(WireMessage, frozen=True, omit_defaults=True, tag="Replayed"):
    """Worker: done. Lanes are of its groups, as little-endian uint64; `odd` are the bytes that were read back."""

    lanes: bytes
    odd: bytes
    copy_s: float
    verify_s: float
    wait_s: float = 0.0
    """Of neither: nothing was copied, because what there was to copy was not made yet."""
    remark: str = ""
    """Why it was slower than it could be."""


class Expect(WireMessage, frozen=True, tag="Expect"):
    """Sidecar: what the worker will be sent from now on, for the plan that it has.

    The tables are of send_schedule.py.
    """

    schedule: str
    messages: bytes
    unpack: bytes
    socket: str
    """Where its thread is to connect, and wait for `Take`."""


class Expecting(WireMessage, frozen=True, tag="Expecting"):
    """Worker's thread, first: which schedule it carries out."""

    rank: int
    schedule: str


class Weigh(WireMessage, frozen=True, tag="Weigh"):
    """Sidecar: is there room to take everything beside the parameters?"""


class Room(WireMessage, frozen=True, tag="Room"):
    """Worker's thread: bytes that it takes, and bytes that are free."""

    needed: int
    free: int


class Take(WireMessage, frozen=True, tag="Take"):
    """Sidecar: join this group, and take everything. `beside` the parameters, or into them while the server stands."""

    group: Group
    beside: bool


class Moving(WireMessage, frozen=True, tag="Moving"):
    """Worker's thread, every `sends_wire.BEAT_S` until it has taken everything: it does not stand still."""


class Taken(WireMessage, frozen=True, tag="Taken"):
    """Worker's thread: everything has arrived."""

    seconds: float
    nbytes: int


class Swap(WireMessage, frozen=True, tag="Flip"):
    """Sidecar: put what was taken into place, then say what the engine holds."""

    epoch: int
    version: int


class Done(WireMessage, frozen=True, tag="Done"):
    """Sidecar: return to the server."""


class Failed(WireMessage, frozen=True, omit_defaults=True, tag="Failed"):
    """Either side: it gives up. The worker has changed weights if `touched`."""

    reason: str
    touched: bool = False
    unrecordable: bool = False
    """The worker's loader is what cannot be followed: it would fail again."""
    less: bool = False
    """A worker had no memory or not the time for what it is sent at once: less at a time may do."""


ToWorker = RecordTrace | Form | Prove | InstallPlan | Expect | ExecutePlan | Swap | Weigh | Take | Done | Failed
ToSidecar = Hello | TraceRecorded | PlanInstalled | PlanExecuted | Expecting | Room | Moving | Taken | Failed

SIDECAR: Final = WireEnd[ToWorker, ToSidecar](ToSidecar)
WORKER: Final = WireEnd[ToSidecar, ToWorker](ToWorker)
