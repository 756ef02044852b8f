"""Times at which something is due, where None stands for never."""

from __future__ import annotations


def earlier(one: float | None, other: float | None) -> float | None:
    """The earlier of two times."""
    if one is None or (other is not None and other < one):
        return other
    return one
