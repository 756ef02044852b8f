"""What the two halves of the sends transport, and the ranks of the trainer, say to each other over `MacFrames`.

receiver                     sender                      every rank of the trainer
  Hello  ------------------->       <-------------------  RankHello
         <-------------------  Invited | Refused
  GiveLayout --------------->                             (only when the layout is new)
         <-------------------  Layout
  Forms -------------------->  Form  -------------------->  (of one engine: its workers have begun to join a group)
  Propose ------------------>                             (only when the plan is new)
         <-------------------  Agreed
  Prepared ----------------->                             (its workers know their schedules)
         <-------------------  Begin  ------------------->
             ... all join the group; tensors travel there, never here ...
  Through | Failed --------->       <-------------------  Through | Failed
  Finished | Failed -------->                             (the engine holds the version, and has proven it)
"""

# ruff: noqa: PLC0414  messages of plan_exchange.py are said here, too
from __future__ import annotations

import contextlib
from typing import Final

import msgspec

from ...errors import DataplaneError, TransferFailed
from ...processes import Deadline, Frames, WireEnd, WireMessage
from ..interface import Group as Group, Layout as Layout
from ..plan_exchange import (
    Agreed as Agreed,
    Failed as Failed,
    Finished as Finished,
    GiveLayout as GiveLayout,
    Hello as Hello,
    Propose as Propose,
    Refused as Refused,
)
from ..sessions import reason_of


class RankHello(WireMessage, frozen=True, tag="RankHello"):
    """A rank of the trainer, first."""

    channel: str
    epoch: int
    rank: int
    known: tuple[str, ...]
    """The parts that it still has: `SchedulePart.schedule`."""
    groups: tuple[str, ...] = ()
    """Groups that it still has."""
    nccl_gpu_id: str = msgspec.field(default="", name="seat")
    """By which a group over NCCL knows its GPU."""


class Invited(WireMessage, frozen=True, tag="Invited"):
    """Sender: the receiver takes part."""

    epoch: int
    layout: str
    """Digest of what `Layout` holds."""
    pair_bytes: int
    """What one pair of ranks may move in a turn: part of every schedule."""
    alone_bytes: int
    """From how many bytes on a row is a message of its own: too."""
    plans: tuple[str, ...] = ()
    """Plans that need not be proposed."""
    form: Group | None = None
    """Its workers may begin to join this one: `BeginSends` says whether it is used."""


class Prepared(WireMessage, frozen=True, tag="Prepared"):
    """Receiver: its workers know what they will be sent."""

    plans: tuple[str, ...]
    schedules: tuple[str, ...]
    group: str = ""
    """The group that all of its workers still have."""
    nccl_gpu_ids: tuple[str, ...] = msgspec.field(default=(), name="seats")
    """The GPU of each worker as an NCCL group knows it; empty for a worker without one."""


class Form(WireMessage, frozen=True, tag="Form"):
    """Sender, to a rank of the trainer: begin to join this group. `BeginSends` says whether it is used."""

    group: Group


class Forms(WireMessage, frozen=True, tag="Forms"):
    """Receiver: its workers have begun to join `Invited.form`."""


class SchedulePart(WireMessage, frozen=True, tag="Letters"):
    """What one rank of the trainer sends to one worker. The tables are left out where the rank has them."""

    peer: int
    """Rank of the worker in the group."""
    schedule: str
    """The name of its part of the worker's schedule: a digest of both tables."""
    messages: bytes = b""
    pack: bytes = b""


class BeginSends(WireMessage, frozen=True, omit_defaults=True, tag="Begin"):
    """Sender: join the group, and move."""

    group: Group
    parts: tuple[SchedulePart, ...] = msgspec.field(default=(), name="letters")
    """For ranks of the trainer."""
    others: tuple[str, ...] = ()
    """The groups that a rank of the trainer keeps beside this one. A worker has no others."""


class GroupBeat(WireMessage, frozen=True, tag="Beat"):
    """Receiver or rank, every `BEAT_S` while the group forms and moves: it does not stand still."""


class BarrierReached(WireMessage, frozen=True, tag="Through"):
    """Receiver or rank: everything of it has moved."""

    seconds: float
    nbytes: int


ToReceiver = Invited | Refused | Layout | Agreed | Form | BeginSends | Failed
ToSender = Hello | RankHello | GiveLayout | Propose | Forms | Prepared | GroupBeat | BarrierReached | Finished | Failed

BEAT_S: Final = 0.5
SILENT_S: Final = 10.0
"""A member that says nothing for so long while the group forms or moves is stalled, and given up with the group."""

RECEIVER: Final = WireEnd[ToSender, ToReceiver](ToReceiver)
"""Also of a rank of the trainer."""
SENDER: Final = WireEnd[ToReceiver, ToSender](ToSender)

_SAY_S: Final = 10.0


def beat(frames: Frames) -> None:
    """Say that this member does not stand still. A sender that is gone is heard of next, by `over`."""
    with contextlib.suppress(DataplaneError, OSError):
        RECEIVER.say(frames, GroupBeat(), Deadline(_SAY_S))


def over(frames: Frames) -> str:
    """Why the sender has ended the attempt, and empty while it has not: it says nothing while the group moves.

    The connection may be closed meanwhile, by another thread.
    """
    try:
        if not frames.readable():
            return ""
        return reason_of(RECEIVER.hear(frames, Deadline(_SAY_S), "the sender"))
    except (TransferFailed, OSError, ValueError) as error:
        return f"the sender is gone: {error}"
