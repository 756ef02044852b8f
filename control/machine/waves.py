"""In what order engines have their turns, from version to version, and whom they can do without. Pure.

Who has its turn together is a group for some transports, which is formed anew when its members change. So whoever stays
keeps its place: one that became free is taken by somebody new, or else by the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..protocol import AgentId


class Capacity(NamedTuple):
    """Who serves when a round begins, and is missed while it does not any more."""

    missed: frozenset[AgentId] = frozenset()
    down: int = 0
    """So many do not serve because of the version that a catch-up brings, and take no part in it."""
    owing: frozenset[AgentId] = frozenset()
    """A round ended without their answer, and they have not given it yet: this one does not wait for them."""


def in_turn(before: Sequence[AgentId], present: Iterable[AgentId]) -> tuple[AgentId, ...]:
    """All who are `present`, once; `before` is the order of the version before."""
    here = dict.fromkeys(present)
    staying = deque(name for name in before if name in here)
    known = set(before)
    new = deque(name for name in here if name not in known)
    order: list[AgentId] = []
    for name in before:
        if len(order) == len(here):
            break
        if name in here:
            order.append(name)
        elif new:
            order.append(new.popleft())
        else:
            order.append(staying.pop())
    return (*order, *new)
