"""What was said lately, as errors of the machine tell it."""

from __future__ import annotations

from typing import Final

import msgspec

from ..protocol import Abandon, Acquire, AgentId, EngineMessage, Offered, Publish, Release, Sent

STORY: Final = 64
"""Recent events that an error carries."""


class TracedMessage(msgspec.Struct, frozen=True):
    """A line of the story. Thousands are written for each that is read."""

    at: float
    agent: AgentId
    message: EngineMessage | Acquire | Release | Publish | Offered | Sent | Abandon

    def __str__(self) -> str:
        """When, who, what."""
        epoch = getattr(self.message, "epoch", None)
        return f"{self.at:.3f} {self.agent} {self.message.kind}{f' epoch {epoch}' if epoch else ''}"
