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
    turn: int
    """Of duties that are due at the same time the one with the lower turn goes first. Another turn, another duty."""


_Turn = tuple[AgentId, int]


class Duties:
    """Commands without an answer. Assigning a new one replaces the last.

    Who is due next is read from a heap, in which those that were told together stand together: neither a command to
    thousands nor an answer of one of them looks at the others. A turn whose duty was replaced or dropped is passed over
    when its time comes.
    """

    def __init__(self, retry_s: float, retry_max_s: float) -> None:
        self._retry_s = retry_s
        self._retry_max_s = retry_max_s
        self._of: dict[AgentId, Duty] = {}
        self._timers: list[tuple[float, int, list[_Turn]]] = []
        """When they are due, the first of their turns, and who they are."""
        self._fresh: list[tuple[float, _Turn]] = []
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
        ready: list[_Turn] = []
        while self._timers and self._timers[0][0] <= now:
            ready += heapq.heappop(self._timers)[2]
        fresh, self._fresh = self._fresh, []
        for due_at, turn in fresh:
            if due_at <= now:
                ready.append(turn)
            else:
                self._wait_for(due_at, [turn])
        return self._tell(ready, now)

    def next_deadline(self) -> float | None:
        """When something is due."""
        for due_at, turn in self._fresh:
            self._wait_for(due_at, [turn])
        self._fresh.clear()
        while self._timers:
            due_at, _, waiting = self._timers[0]
            while waiting and self._duty(waiting[-1]) is None:
                waiting.pop()
            if waiting:
                return due_at
            heapq.heappop(self._timers)
        return None

    def __len__(self) -> int:
        return len(self._of)

    def _assign(self, agent: AgentId, commands: tuple[Command, ...], now: float) -> None:
        turn = next(self._turns)
        self._of[agent] = Duty(commands, self._retry_s, turn)
        self._fresh.append((now, (agent, turn)))

    def _tell(self, ready: list[_Turn], now: float) -> list[tuple[AgentId, Command]]:
        out: list[tuple[AgentId, Command]] = []
        later: dict[float, list[_Turn]] = {}
        for each in ready:
            duty, agent = self._duty(each), each[0]
            if duty is None:
                continue
            due_at, duty.turn = now + duty.wait_s, next(self._turns)
            duty.wait_s = min(duty.wait_s * 2, self._retry_max_s)
            later.setdefault(due_at, []).append((agent, duty.turn))
            out += [(agent, command) for command in duty.commands]
        for due_at, waiting in later.items():
            self._wait_for(due_at, waiting)
        return out

    def _wait_for(self, due_at: float, waiting: list[_Turn]) -> None:
        heapq.heappush(self._timers, (due_at, waiting[0][1], waiting))

    def _duty(self, turn: _Turn) -> Duty | None:
        """The duty that has this turn; None once it was replaced or dropped."""
        duty = self._of.get(turn[0])
        return duty if duty and duty.turn == turn[1] else None
