"""Chooses the ports of the demo's programs before they start; they are bound up to a minute later."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from .settings import ENGINES

COUNT: Final = 3 + 2 * ENGINES
_LOWEST: Final = 10_000
_ROOM: Final = 1000
"""Fewest ports below the kernel's range for which the choice is limited to them."""
_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Ports(msgspec.Struct, frozen=True):
    """Every port of the demo, all on the loopback."""

    router: int
    status: int
    ranks: int
    servers: tuple[int, ...]
    sidecars: tuple[int, ...]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Ports:
        """Name `COUNT` ports."""
        router, status, ranks, *agents = numbers
        servers, sidecars = tuple(agents[:ENGINES]), tuple(agents[ENGINES:])
        return cls(router, status, ranks, servers, sidecars)


def choose_ports(base: int) -> Ports:
    """Consecutive ports from `base`, or free ones when it is 0.

    Free ones lie below those that the kernel gives to outgoing connections, and for port 0: a server needs a minute to
    bind its own, and any connection made meanwhile might have taken it.
    """
    if base:
        return Ports.of(range(base, base + COUNT))
    chosen: list[int] = []
    numbers = range(_LOWEST, _first_of_connections())
    for port in random.SystemRandom().sample(numbers, len(numbers)):
        if _is_free(port):
            chosen.append(port)
        if len(chosen) == COUNT:
            return Ports.of(chosen)
    raise ValueError(
        f"of the ports {numbers.start} to {numbers.stop - 1} only {len(chosen)} are free: name --port-base"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _first_of_connections() -> int:
    """First port of the kernel's range for connections; 65,536 where it is unknown or too low to stay below."""
    try:
        first = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 65_536
    return first if first >= _LOWEST + _ROOM else 65_536
