"""What agents were told and have not answered yet, and when each is told again. One duty per agent."""

from __future__ import annotations

import heapq
import itertools

import msgspec

from .ids import AgentId
from .messages import ToEngine, ToTrainer

Command = ToEngine | ToTrainer


class Duty(msgspec.Struct):
    """What one agent has not answered: a command, and perhaps one that is told with it and carried out after it."""

    commands: tuple[Command, ...]
    wait_s: float
    due_at: float
    turn: int
    """Of duties that are due at the same time the one with the lower turn goes first."""


class Duties:
    """Commands without an answer. Assigning a new one replaces the last.

    Who is due next is read from a heap, so that an answer of one among thousands costs no look at the others. An entry
    of the heap whose duty was replaced or dropped is passed over when its time comes.
    """

    def __init__(self, retry_s: float, retry_max_s: float) -> None:
        self._retry_s = retry_s
        self._retry_max_s = retry_max_s
        self._of: dict[AgentId, Duty] = {}
        self._timers: list[tuple[float, int, AgentId]] = []
        self._fresh: list[tuple[float, int, AgentId]] = []
        """Told for the first time, which is mostly at once: a whole fleet need not pass through the heap for that."""
        self._turns = itertools.count()

    def assign(self, agent: AgentId, command: Command, now: float, then: Command | None = None) -> None:
        """`agent` is to be told `command` now, and again until `drop`; at once behind it `then`, if there is one."""
        self._assign(agent, (command,) if then is None else (command, then), now)

    def get(self, agent: AgentId) -> Command | None:
        """What `agent` has not answered yet: the first of it."""
        duty = self._of.get(agent)
        return duty.commands[0] if duty else None

    def go_on(self, agent: AgentId) -> None:
        """`agent` has answered the first of two commands. The second was told with it, and is repeated alone now."""
        if (duty := self._of.get(agent)) and len(duty.commands) > 1:
            duty.commands = duty.commands[1:]

    def drop(self, agent: AgentId) -> None:
        """The command was answered, or nobody is left to answer it."""
        self._of.pop(agent, None)
        if not self._of:
            self._timers.clear()
            self._fresh.clear()

    def hurry(self, agent: AgentId, now: float) -> None:
        """`agent` is back on a new connection: tell it at once."""
        if duty := self._of.get(agent):
            self._assign(agent, duty.commands, now)

    def due(self, now: float) -> list[tuple[AgentId, Command]]:
        """What is to be sent now, the longest due first; each waits twice as long before the next time."""
        out: list[tuple[AgentId, Command]] = []
        if not self._fresh and (not self._timers or self._timers[0][0] > now):
            return out
        while (duty := self._next()) and duty.due_at <= now:
            out += self._tell(heapq.heappop(self._timers)[2], duty, now)
        fresh, self._fresh = self._fresh, []
        for entry in fresh:
            due_at, turn, agent = entry
            known = self._of.get(agent)
            if known and known.turn == turn:
                if due_at <= now:
                    out += self._tell(agent, known, now)
                else:
                    heapq.heappush(self._timers, entry)
        return out

    @property
    def fresh(self) -> bool:
        """Whether somebody is to be told something for the first time."""
        return bool(self._fresh)

    def next_deadline(self) -> float | None:
        """When something is due."""
        for entry in self._fresh:
            heapq.heappush(self._timers, entry)
        self._fresh.clear()
        duty = self._next()
        return duty.due_at if duty else None

    def __len__(self) -> int:
        return len(self._of)

    def _assign(self, agent: AgentId, commands: tuple[Command, ...], now: float) -> None:
        turn = next(self._turns)
        self._of[agent] = Duty(commands, self._retry_s, now, turn)
        self._fresh.append((now, turn, agent))

    def _tell(self, agent: AgentId, duty: Duty, now: float) -> list[tuple[AgentId, Command]]:
        duty.due_at, duty.turn = now + duty.wait_s, next(self._turns)
        duty.wait_s = min(duty.wait_s * 2, self._retry_max_s)
        heapq.heappush(self._timers, (duty.due_at, duty.turn, agent))
        return [(agent, command) for command in duty.commands]

    def _next(self) -> Duty | None:
        """The duty that is due first; entries that stand for nothing any more are thrown away."""
        while self._timers:
            _, turn, agent = self._timers[0]
            duty = self._of.get(agent)
            if duty and duty.turn == turn:
                return duty
            heapq.heappop(self._timers)
        return None
