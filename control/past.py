"""What a channel was before: the versions that were committed, what the journal restores of it, and its story."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from .effects import Committed
from .ids import AgentId, Epoch, RequestId, Version
from .messages import Held, RoundDone, ToCoordinator

HISTORY: Final = 64
"""Committed versions that are remembered, so that people can see what a channel may go back to."""


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
    answers: Mapping[RequestId, RoundDone] = {}
    history: tuple[Past, ...] = ()
    """What was committed, oldest first; the last `HISTORY`."""


def remembered(history: tuple[Past, ...], commit: Committed | Past) -> tuple[Past, ...]:
    """`history` with `commit`, which may be in it already: a record may be written twice."""
    past = Past(commit.version, commit.epoch, commit.rollback)
    return history if history[-1:] == (past,) else (*history, past)[-HISTORY:]


class Said(msgspec.Struct, frozen=True):
    """A line of the story. Thousands are written for each that is read."""

    at: float
    agent: AgentId
    message: ToCoordinator

    def __str__(self) -> str:
        """When, who, what."""
        epoch = getattr(self.message, "epoch", None)
        return f"{self.at:.3f} {self.agent} {type(self.message).__name__}{f' epoch {epoch}' if epoch else ''}"
