"""Which engine a request goes to, and what happens after each answer. Pure: time and load arrive as arguments.

A request is tried until an engine has answered it within its bound, or its deadline is over. Generation changes nothing
on a server, so a request that was lost on its way is sent again.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final

import msgspec

from weightbus.control.protocol import WeightbusError

RETRY_S: Final = 0.5
"""Seconds for which an engine is left alone after it failed, or refused without a time of its own."""
_MOST_RETRY_S: Final = 10.0
"""Longest wait that an engine may ask for."""
BUSY: Final = frozenset({409, 429, 500, 502, 503, 504})
"""HTTP statuses after which a request is tried again, elsewhere or later. Others are the request's own fault."""


class FleetError(WeightbusError):
    """Base class of the errors of `Fleet`."""


class NoEngineReady(FleetError):
    """No engine answered within the deadline: the message says which were ready, and what became of each try."""


class RolloutRefused(FleetError):
    """An engine refuses the request itself: another try, or another engine, would not help. `status` is of HTTP."""

    def __init__(self, engine: str, status: int, reason: str) -> None:
        self.engine, self.status = engine, status
        super().__init__(f"{engine} refuses the request with {status}: {reason[:500]}")


class ReadyEngine(msgspec.Struct, frozen=True):
    """An engine of the ready list."""

    name: str
    url: str
    version: int | None
    """Version that it serves; None for the weights of its launch."""


class FleetView(msgspec.Struct, frozen=True):
    """The ready list as it was read last."""

    engines: tuple[ReadyEngine, ...] = ()
    committed: int | None = None
    problem: str = "the coordinator has not answered yet"
    """Why it could not be read again; empty where it could."""

    def serving(self, min_version: int | None) -> tuple[ReadyEngine, ...]:
        """Engines that serve `min_version` or a later version; without one, all."""
        if min_version is None:
            return self.engines
        return tuple(each for each in self.engines if each.version is not None and each.version >= min_version)

    def told(self) -> str:
        """The list in words."""
        listed = ", ".join(
            f"{each.name} with {'its launch weights' if each.version is None else f'version {each.version}'}"
            for each in self.engines
        )
        return f"{listed or 'no engine'} ready{f' ({self.problem})' if self.problem else ''}"


class Send(msgspec.Struct, frozen=True):
    """Send the request to this engine."""

    engine: ReadyEngine
    timeout_s: float


class Wait(msgspec.Struct, frozen=True):
    """Wait until the ready list changes, at most so long."""

    seconds: float


class Attempts:
    """The tries of one request."""

    def __init__(self, min_version: int | None, deadline: float) -> None:
        self.min_version, self._deadline = min_version, deadline
        self._left_alone: dict[ReadyEngine, float] = {}
        """Until when. An engine with another version is another entry: it may be asked at once."""
        self._story: dict[str, str] = {}
        self.count = 0
        """Tries until now."""

    def next(self, view: FleetView, load: Mapping[str, int], now: float) -> Send | Wait:
        """The least loaded engine that may be asked; the first of the list among equals.

        `load`: requests under way by engine. Raises `NoEngineReady` at the deadline.
        """
        if now >= self._deadline:
            tries = "".join(f"; {name}: {what}" for name, what in self._story.items())
            wanted = "" if self.min_version is None else f" with version {self.min_version} or later"
            raise NoEngineReady(
                f"no engine{wanted} answered before the deadline: {view.told()}{tries}. See `weightbus status`"
            )
        fitting = view.serving(self.min_version)
        free = [each for each in fitting if self._left_alone.get(each, now) <= now]
        if free:
            self.count += 1
            return Send(min(free, key=lambda each: load.get(each.name, 0)), self._deadline - now)
        until = min((self._left_alone[each] for each in fitting), default=self._deadline)
        return Wait(max(0.0, min(until, self._deadline) - now))

    def answered(self, engine: ReadyEngine, status: int, reason: str, retry_after_s: float | None, now: float) -> None:
        """`engine` has refused the request. Raises `RolloutRefused` where no other try would help."""
        if status not in BUSY:
            raise RolloutRefused(engine.name, status, reason)
        self.failed(engine, f"answered {status}: {reason[:200]}", now, retry_after_s)

    def failed(self, engine: ReadyEngine, reason: str, now: float, retry_after_s: float | None = None) -> None:
        """`engine` did not answer, or not with what was asked for."""
        self._story[engine.name] = reason
        self._left_alone[engine] = now + min(RETRY_S if retry_after_s is None else retry_after_s, _MOST_RETRY_S)

    def within(self, first: int | None) -> bool:
        """Whether an answer may begin with version `first`; None: the weights of a launch."""
        return self.min_version is None or (first is not None and first >= self.min_version)


def shares(count: int, engines: int) -> list[slice]:
    """`count` prompts in as many runs as there are `engines`, of nearly equal length, in order; none is empty."""
    runs = min(count, max(1, engines))
    ends = [count * run // runs for run in range(runs + 1)] if runs else []
    return [slice(begin, end) for begin, end in itertools.pairwise(ends)]
