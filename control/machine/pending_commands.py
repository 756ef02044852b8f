"""What agents were told and have not answered yet, and when each is told again. One duty per agent."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import msgspec

from ..protocol import AgentId, ToEngine, ToTrainer

Command = ToEngine | ToTrainer


class PendingCommand(msgspec.Struct, eq=False):
    """What agents that were told it together have not answered: a command, and perhaps one to be carried out after it.

    They are told it again together, so thousands have one duty and one timer. Whose duty it is not any more, because it
    answered or was told something else, is found out when it is looked at.
    """

    commands: tuple[Command, ...]
    wait_s: float
    due_at: float
    agents: list[AgentId]
    """Empty once nobody is left and no timer waits for it."""
    rest: PendingCommand | None = None
    """Of those that have answered the first of two commands since they were told."""


class PendingCommands:
    """Commands without an answer. Assigning a new one replaces the last.

    Who is due next is read from a heap of duties: neither a command to thousands nor an answer of one of them looks at
    the others.
    """

    def __init__(self, retry_s: float, retry_max_s: float) -> None:
        self._retry_s = retry_s
        self._retry_max_s = retry_max_s
        self._of: dict[AgentId, PendingCommand] = {}
        self._timers: list[tuple[float, int, PendingCommand]] = []
        """When they are due; of those due at the same time the one with the lower turn goes first."""
        self._fresh: list[PendingCommand] = []
        """Told for the first time, which is mostly at once, without passing through the heap."""
        self._turns = itertools.count()

    def assign(self, agent: AgentId, command: Command, now: float) -> None:
        """`agent` is to be told `command` now, and again until `drop`."""
        self.assign_all((agent,), (command,), now)

    def assign_all(self, agents: Sequence[AgentId], commands: tuple[Command, ...], now: float) -> None:
        """The same of all of these, and of one command or two: the second is told at once behind the first."""
        duty = PendingCommand(commands, self._retry_s, now, list(agents))
        self._of.update(dict.fromkeys(agents, duty))
        self._fresh.append(duty)

    def get(self, agent: AgentId) -> Command | None:
        """What `agent` has not answered yet: the first of it."""
        duty = self._of.get(agent)
        return duty.commands[0] if duty else None

    def all(self) -> list[tuple[AgentId, Command]]:
        """What everybody has not answered yet: the first of it."""
        return [(agent, duty.commands[0]) for agent, duty in self._of.items()]

    def go_on(self, agent: AgentId) -> None:
        """`agent` has answered the first of two commands. The second was told with it, and is repeated alone now."""
        duty = self._of.get(agent)
        if duty is None or len(duty.commands) < 2:
            return
        rest = duty.rest
        if rest is None or not rest.agents:
            rest = duty.rest = PendingCommand(duty.commands[1:], duty.wait_s, duty.due_at, [])
            self._wait_for(rest)
        rest.agents.append(agent)
        self._of[agent] = rest

    def drop(self, agent: AgentId) -> None:
        """The command was answered, or nobody is left to answer it."""
        self._of.pop(agent, None)
        if not self._of:
            self._timers.clear()
            self._fresh.clear()

    def hurry(self, agent: AgentId, now: float) -> None:
        """`agent` is back on a new connection: tell it at once."""
        if duty := self._of.get(agent):
            self.assign_all((agent,), duty.commands, now)

    def due(self, now: float) -> list[tuple[tuple[AgentId, ...], Command]]:
        """What is to be sent now, the longest due first; each waits twice as long before the next time."""
        ready: list[PendingCommand] = []
        while self._timers and self._timers[0][0] <= now:
            ready.append(heapq.heappop(self._timers)[2])
        fresh, self._fresh = self._fresh, []
        for duty in fresh:
            if duty.due_at <= now:
                ready.append(duty)
            else:
                self._wait_for(duty)
        return [told for duty in ready for told in self._tell(duty, now)]

    def next_deadline(self) -> float | None:
        """When something is due."""
        for duty in self._fresh:
            self._wait_for(duty)
        self._fresh.clear()
        of = self._of
        while self._timers:
            due_at, _, duty = self._timers[0]
            agents = duty.agents
            while agents and of.get(agents[-1]) is not duty:
                agents.pop()
            if agents:
                return due_at
            heapq.heappop(self._timers)
        return None

    def __len__(self) -> int:
        return len(self._of)

    def _tell(self, duty: PendingCommand, now: float) -> list[tuple[tuple[AgentId, ...], Command]]:
        of = self._of
        duty.agents = [agent for agent in duty.agents if of.get(agent) is duty]
        if not duty.agents:
            return []
        duty.due_at, duty.rest = now + duty.wait_s, None
        duty.wait_s = min(duty.wait_s * 2, self._retry_max_s)
        self._wait_for(duty)
        agents = tuple(duty.agents)
        return [(agents, command) for command in duty.commands]

    def _wait_for(self, duty: PendingCommand) -> None:
        heapq.heappush(self._timers, (duty.due_at, next(self._turns), duty))
