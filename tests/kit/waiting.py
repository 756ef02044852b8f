"""Waiting: for a descriptor, whatever its number (``select.select`` refuses those above 1023), and for anything."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar


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


def stands_still(pid: int) -> bool:
    """All threads of a process are stopped. The others go on until the one that takes a SIGSTOP is on a processor."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(each.read_text().rpartition(") ")[2][0] == "T" for each in tasks)


Found = TypeVar("Found")


def until(done: Callable[[], Found], what: str = "what was waited for", deadline_s: float = 60.0) -> Found:
    """The first true answer of `done`, asked again and again."""
    end = time.monotonic() + deadline_s
    while not (found := done()):
        assert time.monotonic() < end, f"{what} did not come about within {deadline_s:.0f} s"
        time.sleep(0.01)
    return found
