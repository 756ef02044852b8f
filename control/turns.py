"""In what order engines have their turns, from version to version. Pure.

Who has its turn together is a group for some transports, which is formed anew when its members change. So whoever stays
keeps its place: one that became free is taken by somebody new, or else by the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from .ids import AgentId


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
