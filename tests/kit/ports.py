"""Ports for programs that bind them later, after whoever chose them has let go."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port that nobody listens on now, and that no connection gets as its own in the meantime.

    What the kernel gives for port 0 lies in the range from which outgoing connections take theirs: beside a test that
    makes thousands of them, every tenth port would be gone when its program binds it, or binds it again.
    """
    choose = random.SystemRandom()
    while True:
        port = choose.randrange(_LOWEST, _first_of_connections())
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def _first_of_connections() -> int:
    """Where the kernel's range begins; where it begins too low to stay below, nothing is left out."""
    first = int(_RANGE.read_text().split()[0])
    return first if first > _LOWEST + 1000 else 65_536
