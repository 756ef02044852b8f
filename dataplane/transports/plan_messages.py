"""What receivers and senders of in-place transports (direct, sends) say to each other about layouts and plans.

Each transport's own messages.py has the order in which it is said, and what is said besides.
"""

from __future__ import annotations

from typing import Final

from ..processes import WireEnd, WireMessage
from ..reshard import PlanReader


class Hello(WireMessage, frozen=True, omit_defaults=True, tag="Hello"):
    """Receiver, first: which engine it is, and which session it was told to take."""

    channel: str
    epoch: int
    engine: str
    group: str = ""
    """Sends: the group that all of its workers still have from the last round."""


class Refused(WireMessage, frozen=True, tag="Refused"):
    """Sender: the receiver does not take part."""

    epoch: int
    reason: str


class GiveLayout(WireMessage, frozen=True, tag="GiveLayout"):
    """Receiver: the layout that the sender named is new to it."""


class Layout(WireMessage, frozen=True, tag="Layout"):
    """Sender: what every rank of the trainer holds and exports."""

    pieces: bytes
    """`Shards.encode`."""
    exports: tuple[bytes, ...]
    """`ExportMap.encode`."""


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


class Finished(WireMessage, frozen=True, tag="Finished"):
    """Receiver: the engine holds the version, and has proven it."""


class Failed(WireMessage, frozen=True, omit_defaults=True, tag="Failed"):
    """Either side: it gives up."""

    reason: str
    less: bool = False
    """Memory or time did not suffice for what is moved at once: smaller chunks may do."""


ToReceiver = Refused | Layout | Agreed | Failed
ToSender = Hello | GiveLayout | Propose | Finished | Failed

RECEIVER: Final = WireEnd[ToSender, ToReceiver](ToReceiver)


def reason_of(message: WireMessage) -> str:
    """Why the other side has given up; or what else it said, out of turn."""
    return message.reason if isinstance(message, Refused | Failed) else message.kind
