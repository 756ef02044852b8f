"""What the two halves of the direct transport say to each other: who, which layout, the plan, and how it ended.

receiver                     sender
  Hello  ------------------->
         <-------------------  Welcome | Refused
  GiveLayout --------------->                       (only when the layout is new)
         <-------------------  Layout
  Propose ------------------>                       (only when the plan is new)
         <-------------------  Agreed
  GiveTable ---------------->                       (only where the digest table follows)
         <-------------------  Table                 as soon as it is known
  Finished | Failed -------->

Nobody is told anything that it has not asked for, but for Failed: a receiver that copies reads nothing meanwhile.
"""

from __future__ import annotations

from typing import Final

from ...processes import WireEnd, WireMessage
from ...reshard import PlanReader
from ..exported_weights import Layout
from ..interface import Exporting


class Hello(WireMessage, frozen=True, omit_defaults=True, tag="Hello"):
    """Receiver, first."""

    channel: str
    epoch: int
    engine: str
    group: str = ""
    """Of what is sent: the group that all of its workers still have."""


class Welcome(WireMessage, frozen=True, tag="Welcome"):
    """Sender: the receiver takes part."""

    epoch: int
    layout: str
    """Digest of what `Layout` holds."""
    exporters: tuple[Exporting, ...]


class Refused(WireMessage, frozen=True, tag="Refused"):
    """Sender: the receiver does not take part."""

    epoch: int
    reason: str


class GiveLayout(WireMessage, frozen=True, tag="GiveLayout"):
    """Receiver: it does not know that layout yet."""


class Proposal(WireMessage, frozen=True, tag="Proposal"):
    """One worker's plan, and what it was made from."""

    reader: PlanReader
    recording: bytes
    plan: str


class Propose(WireMessage, frozen=True, tag="Propose"):
    """Receiver: what its workers will do. Nothing is read before the sender has agreed."""

    plans: tuple[Proposal, ...]


class Agreed(WireMessage, frozen=True, tag="Agreed"):
    """Sender: it made the same plans."""


class GiveTable(WireMessage, frozen=True, tag="GiveTable"):
    """Receiver: it is about to copy, and has no digest table yet. Answered once, when there is one."""


class Table(WireMessage, frozen=True, tag="Table"):
    """Sender: what is copied has to be this. At most `MOST_TABLE_BYTES` and `MOST_SEAL_BYTES`."""

    table: bytes
    """`DigestTable.encode`."""
    seal: bytes


class Finished(WireMessage, frozen=True, tag="Finished"):
    """Receiver: the engine holds the version, and has proven it."""


class Failed(WireMessage, frozen=True, omit_defaults=True, tag="Failed"):
    """Either side: it gives up."""

    reason: str
    less: bool = False
    """It, or a worker of it, had no memory or not the time for what it moves at once: less at a time may do."""


ToReceiver = Welcome | Refused | Layout | Agreed | Table | Failed
ToSender = Hello | GiveLayout | Propose | GiveTable | Finished | Failed

MOST_TABLE_BYTES: Final = 128 * 1024 * 1024
"""Of a digest table that follows: 16 for each of a million tensors are an eighth of it."""
MOST_SEAL_BYTES: Final = 4096

RECEIVER: Final = WireEnd[ToSender, ToReceiver](ToReceiver)
SENDER: Final = WireEnd[ToReceiver, ToSender](ToSender)
