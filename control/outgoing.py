"""What a channel wants sent, noted and written down, in the coordinator's hands until it is. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from .duties import Command
from .effects import AnyObservation, Committed, EpochRaised, EpochTaken, RoundClosed
from .ids import AgentId
from .lease import Late
from .messages import ToAgent


class Tell(msgspec.Struct, frozen=True):
    """Send `message` to whatever connections `agents` are on."""

    agents: tuple[AgentId, ...]
    message: ToAgent


ChannelRecord = EpochTaken | EpochRaised | Committed | RoundClosed
Out = Tell | Late | ChannelRecord | AnyObservation
RECORDS: Final = (EpochTaken, EpochRaised, Committed, RoundClosed)


def together(due: Iterable[tuple[tuple[AgentId, ...], Command]]) -> list[Tell]:
    """What many are told alike, at once to all of them; who is told two things is told the first one first.

    That is one object (orders.py): to compare values would cost more than it saves.
    """
    alike: dict[int, tuple[list[AgentId], Command]] = {}
    for agents, command in due:
        alike.setdefault(id(command), ([], command))[0].extend(agents)
    return [Tell(tuple(agents), command) for agents, command in alike.values()]
