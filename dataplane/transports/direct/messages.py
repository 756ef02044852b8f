"""What the two halves of the direct transport say to each other: the engine, the layout, the plan, and how it ended.

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

Each side says only what the other has asked for, but for Failed: a receiver that copies reads nothing meanwhile.
"""

from __future__ import annotations

from typing import Final

from ...processes import WireEnd, WireMessage
from ..interface import Exporting
from ..plan_messages import Agreed, Failed, Finished, GiveLayout, Hello, Layout, Proposal, Propose, Refused


class Welcome(WireMessage, frozen=True, tag="Welcome"):
    """Sender: the receiver takes part."""

    epoch: int
    layout: str
    """Digest of what `Layout` holds."""
    exporters: tuple[Exporting, ...]


class GiveTable(WireMessage, frozen=True, tag="GiveTable"):
    """Receiver: it is about to copy, and has no digest table yet. Answered once, when there is one."""


class Table(WireMessage, frozen=True, tag="Table"):
    """Sender: what is copied has to be this. At most `MOST_TABLE_BYTES` and `MOST_SEAL_BYTES`."""

    table: bytes
    """`DigestTable.encode`."""
    seal: bytes


ToReceiver = Welcome | Refused | Layout | Agreed | Table | Failed
ToSender = Hello | GiveLayout | Propose | GiveTable | Finished | Failed

MOST_TABLE_BYTES: Final = 128 * 1024 * 1024
"""Of a digest table that follows: 16 for each of a million tensors are an eighth of it."""
MOST_SEAL_BYTES: Final = 4096

RECEIVER: Final = WireEnd[ToSender, ToReceiver](ToReceiver)
SENDER: Final = WireEnd[ToReceiver, ToSender](ToSender)

__all__ = [
    "MOST_SEAL_BYTES",
    "MOST_TABLE_BYTES",
    "RECEIVER",
    "SENDER",
    "Agreed",
    "Failed",
    "Finished",
    "GiveLayout",
    "GiveTable",
    "Hello",
    "Layout",
    "Proposal",
    "Propose",
    "Refused",
    "Table",
    "ToReceiver",
    "ToSender",
    "Welcome",
]
