"""What agents were told and have not answered yet, and when each is told again. One duty per agent."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import msgspec

from ..protocol import AgentId, ToEngine, ToTrainer

AgentCommand = ToEngine | ToTrainer


class PendingCommand(msgspec.Struct, eq=False):
    """What agents that were told it together have not answered: a command, and perhaps one to be carried out after it.

    They are told it again together, so thousands have one duty and one timer. Whose duty it is not any more, because it
    answered or was told something else, is found out when it is looked at.
    """

    commands: tuple[AgentCommand, ...]
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
        self._by_agent: dict[AgentId, PendingCommand] = {}
        self._timers: list[tuple[float, int, PendingCommand]] = []
        """When they are due; of those due at the same time the one with the lower turn goes first."""
        self._new: list[PendingCommand] = []
        """Told for the first time, which is mostly at once, without passing through the heap."""
        self._sequence = itertools.count()

    def assign(self, agent: AgentId, command: AgentCommand, now: float) -> None:
        """`agent` is to be told `command` now, and again until `drop`."""
        self.assign_all((agent,), (command,), now)

    def assign_all(self, agents: Sequence[AgentId], commands: tuple[AgentCommand, ...], now: float) -> None:
        """The same of all of these, and of one command or two: the second is told at once behind the first."""
        pending = PendingCommand(commands, self._retry_s, now, list(agents))
        self._by_agent.update(dict.fromkeys(agents, pending))
        self._new.append(pending)

    def get(self, agent: AgentId) -> AgentCommand | None:
        """What `agent` has not answered yet: the first of it."""
        pending = self._by_agent.get(agent)
        return pending.commands[0] if pending else None

    def all(self) -> list[tuple[AgentId, AgentCommand]]:
        """What everybody has not answered yet: the first of it."""
        return [(agent, pending.commands[0]) for agent, pending in self._by_agent.items()]

    def acknowledge_first(self, agent: AgentId) -> None:
        """`agent` has answered the first of two commands. The second was told with it, and is repeated alone now."""
        pending = self._by_agent.get(agent)
        if pending is None or len(pending.commands) < 2:
            return
        rest = pending.rest
        if rest is None or not rest.agents:
            rest = pending.rest = PendingCommand(pending.commands[1:], pending.wait_s, pending.due_at, [])
            self._schedule(rest)
        rest.agents.append(agent)
        self._by_agent[agent] = rest

    def drop(self, agent: AgentId) -> None:
        """The command was answered, or nobody is left to answer it."""
        self._by_agent.pop(agent, None)
        if not self._by_agent:
            self._timers.clear()
            self._new.clear()

    def resend_now(self, agent: AgentId, now: float) -> None:
        """`agent` is back on a new connection: tell it at once."""
        if pending := self._by_agent.get(agent):
            self.assign_all((agent,), pending.commands, now)

    def due(self, now: float) -> list[tuple[tuple[AgentId, ...], AgentCommand]]:
        """What is to be sent now, the longest due first; each waits twice as long before the next time."""
        ready: list[PendingCommand] = []
        while self._timers and self._timers[0][0] <= now:
            ready.append(heapq.heappop(self._timers)[2])
        new, self._new = self._new, []
        for pending in new:
            if pending.due_at <= now:
                ready.append(pending)
            else:
                self._schedule(pending)
        return [told for pending in ready for told in self._take_due(pending, now)]

    def next_deadline(self) -> float | None:
        """When something is due."""
        for pending in self._new:
            self._schedule(pending)
        self._new.clear()
        of = self._by_agent
        while self._timers:
            due_at, _, pending = self._timers[0]
            agents = pending.agents
            while agents and of.get(agents[-1]) is not pending:
                agents.pop()
            if agents:
                return due_at
            heapq.heappop(self._timers)
        return None

    def __len__(self) -> int:
        return len(self._by_agent)

    def _take_due(self, pending: PendingCommand, now: float) -> list[tuple[tuple[AgentId, ...], AgentCommand]]:
        of = self._by_agent
        pending.agents = [agent for agent in pending.agents if of.get(agent) is pending]
        if not pending.agents:
            return []
        pending.due_at, pending.rest = now + pending.wait_s, None
        pending.wait_s = min(pending.wait_s * 2, self._retry_max_s)
        self._schedule(pending)
        agents = tuple(pending.agents)
        return [(agents, command) for command in pending.commands]

    def _schedule(self, pending: PendingCommand) -> None:
        heapq.heappush(self._timers, (pending.due_at, next(self._sequence), pending))
