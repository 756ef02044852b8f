"""What agents were told and have not answered yet, and when each is told again. One duty per agent."""

from __future__ import annotations

import heapq

import msgspec

from .ids import AgentId
from .messages import ToEngine, ToTrainer

Command = ToEngine | ToTrainer


class Duty(msgspec.Struct, frozen=True, kw_only=True):
    """One unanswered command."""

    command: Command
    wait_s: float
    due_at: float
    assigned: int
    """Counts assignments: what is due at the same time is sent in this order."""
    turn: int
    """Counts entries in the queue: only the newest one of a duty is true."""


class Duties:
    """Commands without an answer. Assigning a new one replaces the last."""

    def __init__(self, retry_s: float, retry_max_s: float) -> None:
        self._retry_s = retry_s
        self._retry_max_s = retry_max_s
        self._of: dict[AgentId, Duty] = {}
        # By time. What was dropped or replaced stays in it until its turn comes: looking for it would cost the fleet.
        self._queue: list[tuple[float, int, AgentId]] = []
        self._turns = 0

    def assign(self, agent: AgentId, command: Command, now: float) -> None:
        """`agent` is to be told `command` now, and again until it is assigned another or `drop`."""
        self._put(agent, command, self._retry_s, now, self._turns)

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
            self._put(agent, duty.command, self._retry_s, now, duty.assigned)

    def due(self, now: float) -> list[tuple[AgentId, Command]]:
        """What is to be sent now, in the order of assignment; each waits twice as long before the next time."""
        found: list[tuple[Duty, AgentId]] = []
        while (at := self.next_deadline()) is not None and at <= now:
            _, _, agent = heapq.heappop(self._queue)
            found.append((self._of[agent], agent))
        found.sort(key=lambda each: each[0].assigned)
        for duty, agent in found:
            wait_s = min(duty.wait_s * 2, self._retry_max_s)
            self._put(agent, duty.command, wait_s, now + duty.wait_s, duty.assigned)
        return [(agent, duty.command) for duty, agent in found]

    def next_deadline(self) -> float | None:
        """When something is due."""
        while self._queue:
            due_at, turn, agent = self._queue[0]
            duty = self._of.get(agent)
            if duty is not None and duty.turn == turn:
                return due_at
            heapq.heappop(self._queue)
        return None

    def __len__(self) -> int:
        return len(self._of)

    def _put(self, agent: AgentId, command: Command, wait_s: float, due_at: float, assigned: int) -> None:
        self._turns += 1
        self._of[agent] = Duty(command=command, wait_s=wait_s, due_at=due_at, assigned=assigned, turn=self._turns)
        heapq.heappush(self._queue, (due_at, self._turns, agent))
