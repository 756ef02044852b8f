"""Commands that wait for an acknowledgement, and the times at which they are sent again. One entry per agent."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import msgspec

from ..protocol import AgentId, ToEngine, ToTrainer

AgentCommand = ToEngine | ToTrainer


class PendingCommand(msgspec.Struct, eq=False):
    """One command, or two to be carried out in order, that several agents have not acknowledged.

    The agents were told together and are told again together, so thousands share one timer. An agent that has answered
    or got another command is dropped from `agents` when the timer fires.
    """

    commands: tuple[AgentCommand, ...]
    wait_s: float
    due_at: float
    agents: list[AgentId]
    """Agents that may still have to be told; empty once no timer waits for them."""
    rest: PendingCommand | None = None
    """Entry of agents that have acknowledged the first of two commands since the last send."""


class PendingCommands:
    """Commands that are sent again until acknowledged. A new command to an agent replaces the last one.

    Timers are in a heap of entries, so neither a command to thousands of agents nor the answer of one of them costs a
    look at the others.
    """

    def __init__(self, retry_s: float, retry_max_s: float) -> None:
        self._retry_s = retry_s
        self._retry_max_s = retry_max_s
        self._by_agent: dict[AgentId, PendingCommand] = {}
        self._timers: list[tuple[float, int, PendingCommand]] = []
        """Heap of due time, sequence number and entry."""
        self._new: list[PendingCommand] = []
        """Entries not sent yet. Most are sent at once and never enter the heap."""
        self._sequence = itertools.count()

    def assign(self, agent: AgentId, command: AgentCommand, now: float) -> None:
        """Send `command` to `agent` now, and again until `drop`."""
        self.assign_all((agent,), (command,), now)

    def assign_all(self, agents: Sequence[AgentId], commands: tuple[AgentCommand, ...], now: float) -> None:
        """Send one command, or two in order, to all of `agents`."""
        pending = PendingCommand(commands, self._retry_s, now, list(agents))
        self._by_agent.update(dict.fromkeys(agents, pending))
        self._new.append(pending)

    def get(self, agent: AgentId) -> AgentCommand | None:
        """The first command that `agent` has not acknowledged."""
        pending = self._by_agent.get(agent)
        return pending.commands[0] if pending else None

    def all(self) -> list[tuple[AgentId, AgentCommand]]:
        """Each agent with the first command that it has not acknowledged."""
        return [(agent, pending.commands[0]) for agent, pending in self._by_agent.items()]

    def acknowledge_first(self, agent: AgentId) -> None:
        """`agent` has acknowledged the first of two commands: only the second is sent again."""
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
        """The command was acknowledged, or its agent is gone."""
        self._by_agent.pop(agent, None)
        if not self._by_agent:
            self._timers.clear()
            self._new.clear()

    def resend_now(self, agent: AgentId, now: float) -> None:
        """Send again at once: `agent` is back on a new connection."""
        if pending := self._by_agent.get(agent):
            self.assign_all((agent,), pending.commands, now)

    def due(self, now: float) -> list[tuple[tuple[AgentId, ...], AgentCommand]]:
        """Commands to send now, the longest due first. The wait before the next time doubles."""
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
        """The time at which the next command is due."""
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
