"""What a channel was before: the versions that were committed, how rounds ended, and what the journal restores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from .answers import Ending
from .effects import Committed, RoundClosed
from .ids import Epoch, RequestId, Version
from .messages import Held, Outcome, RoundDone

HISTORY: Final = 64
"""Committed versions that are remembered, so that people can see what a channel may go back to."""
_NOT_CLOSED: Final = "was committed; the coordinator ended before the round did, and how its engines fared was not kept"


class Past(msgspec.Struct, frozen=True):
    """A version that was committed, now or once."""

    version: Version
    epoch: Epoch
    rollback: bool = False
    """The channel went back to it, or took it again."""


class Restored(msgspec.Struct, frozen=True, kw_only=True):
    """What the journal knows of a channel."""

    epoch: Epoch = Epoch(0)
    committed: Held | None = None
    committed_epoch: Epoch = Epoch(0)
    answers: Mapping[RequestId, Ending] = {}
    history: tuple[Past, ...] = ()
    """What was committed, oldest first; the last `HISTORY`."""


def remembered(history: tuple[Past, ...], commit: Committed | Past) -> tuple[Past, ...]:
    """`history` with `commit`, which may be in it already: a record may be written twice."""
    past = Past(commit.version, commit.epoch, commit.rollback)
    return history if history[-1:] == (past,) else (*history, past)[-HISTORY:]


def ending(record: Committed | RoundClosed) -> Ending:
    """What the `Publish` of `record` is answered once that is durable, unless a later record says more."""
    if isinstance(record, RoundClosed):
        return Ending(record.done, record.question)
    done = RoundDone(
        channel=record.channel,
        epoch=record.announced,
        version=record.version,
        outcome=Outcome.COMMITTED,
        reason=_NOT_CLOSED,
        engines=(),
        seconds={"total": 0.0},
    )
    return Ending(done, record.question, closed=False)
