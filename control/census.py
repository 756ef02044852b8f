"""How many members of a round stand in which phase, kept up as they move: an answer costs the same in any fleet. Pure.

A round asks after every answer whether it may go on. Counting its members each time would make a round of n engines
cost n times n.
"""

from __future__ import annotations

from collections.abc import Iterable

from .ids import AgentId
from .member import Member
from .states import EnginePhase


class Census:
    """Who stands where. Every change of a member's phase goes through `move`."""

    def __init__(self, members: Iterable[Member]) -> None:
        self._seats: dict[AgentId, int] = {}
        self._in: dict[EnginePhase, dict[AgentId, Member]] = {phase: {} for phase in EnginePhase}
        for seat, member in enumerate(members):
            self._seats[member.name] = seat
            self._in[member.phase][member.name] = member

    def count(self, *phases: EnginePhase) -> int:
        """How many stand in one of `phases`."""
        return sum(len(self._in[phase]) for phase in phases)

    def within(self, *phases: EnginePhase) -> list[Member]:
        """Those that stand in one of `phases`, in the order of the cohort. For moves that concern all of them."""
        found = [member for phase in phases for member in self._in[phase].values()]
        return sorted(found, key=lambda member: self._seats[member.name])

    def move(self, member: Member, phase: EnginePhase) -> None:
        """`member` stands in `phase` from now on."""
        del self._in[member.phase][member.name]
        member.phase = phase
        self._in[phase][member.name] = member
