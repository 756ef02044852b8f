"""Waiting for a descriptor, whatever its number (``select.select`` refuses those above 1023); and what a host has."""

from __future__ import annotations

import select
import socket


def readable(descriptor: int, deadline_s: float) -> bool:
    """Whether there is something to read, or an end to see, within the deadline."""
    wait = select.poll()
    wait.register(descriptor, select.POLLIN)
    return bool(wait.poll(deadline_s * 1000))


def has_ipv6() -> bool:
    """The loopback of IPv6 is there."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
