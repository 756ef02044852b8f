"""Who published last in a channel, as the plan and the next round need to know it."""

from __future__ import annotations

from typing import Final

import msgspec

from .ids import AgentId, Incarnation, Version
from .messages import Topology, TrainerInfo


class Publisher(msgspec.Struct, frozen=True):
    """Who published last, in this life of the coordinator, and how much."""

    name: AgentId
    incarnation: Incarnation
    info: TrainerInfo
    topology: Topology | None
    version: Version
    bytes: int


NOBODY: Final = TrainerInfo(host="", device="", ranks=0, transports=())
"""Of a trainer that described nothing."""
SNAPSHOT: Final = "snapshot"
"""`Publish.mode` of a version whose trainer goes on meanwhile."""
