"""Waiting for a descriptor, whatever its number: ``select.select`` refuses those above 1023, which long runs reach."""

from __future__ import annotations

import select


def readable(descriptor: int, deadline_s: float) -> bool:
    """Whether there is something to read, or an end to see, within the deadline."""
    wait = select.poll()
    wait.register(descriptor, select.POLLIN)
    return bool(wait.poll(deadline_s * 1000))
