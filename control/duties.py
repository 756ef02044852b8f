"""What agents were told and have not answered yet, and when each is told again. One duty per agent."""

from __future__ import annotations

import msgspec

from .ids import AgentId
from .messages import ToEngine, ToTrainer

Command = ToEngine | ToTrainer


class Duty(msgspec.Struct, frozen=True, kw_only=True):
    """One unanswered command."""

    command: Command
    wait_s: float
    due_at: float


class Duties:
    """Commands without an answer. Assigning a new one replaces the last."""

    def __init__(self, retry_s: float, retry_max_s: float) -> None:
        self._retry_s = retry_s
        self._retry_max_s = retry_max_s
        self._of: dict[AgentId, Duty] = {}

    def assign(self, agent: AgentId, command: Command, now: float) -> None:
        """`agent` is to be told `command` now, and again until `fulfil` or `drop`."""
        self._of[agent] = Duty(command=command, wait_s=self._retry_s, due_at=now)

    def get(self, agent: AgentId) -> Command | None:
        """What `agent` has not answered yet."""
        duty = self._of.get(agent)
        return duty.command if duty else None

    def drop(self, agent: AgentId) -> None:
        """The command was answered, or nobody is left to answer it."""
        self._of.pop(agent, None)

    def hurry(self, agent: AgentId, now: float) -> None:
        """`agent` is back on a new connection: tell it at once."""
        if duty := self._of.get(agent):
            self._of[agent] = Duty(command=duty.command, wait_s=self._retry_s, due_at=now)

    def due(self, now: float) -> list[tuple[AgentId, Command]]:
        """What is to be sent now, in the order of assignment; each waits twice as long before the next time."""
        out: list[tuple[AgentId, Command]] = []
        for agent, duty in self._of.items():
            if duty.due_at <= now:
                out.append((agent, duty.command))
                self._of[agent] = Duty(
                    command=duty.command,
                    wait_s=min(duty.wait_s * 2, self._retry_max_s),
                    due_at=now + duty.wait_s,
                )
        return out

    def next_deadline(self) -> float | None:
        """When something is due."""
        return min((duty.due_at for duty in self._of.values()), default=None)

    def __len__(self) -> int:
        return len(self._of)
