"""Whether the server beside this sidecar reaches a port of it: then it meets others through a relay, which can be cut.

The relay itself is ../dataplane/relay.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

_LISTENS: Final = "0A"
"""TCP_LISTEN, as /proc/net/tcp has it."""


def reached_at(url: str) -> str:
    """The address of the loopback at which the server of `url` reaches this process; empty if it may be elsewhere.

    Behind a port that is forwarded (of a container, by ssh) stands a server whose loopback is another one. So whoever
    listens has to be a Python of this host that can be seen from here: nobody forwards with that.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    at = "127.0.0.1" if host == "localhost" or host.startswith("127.") else host if host == "::1" else ""
    return at if at and _a_python_listens(parts.port or 80) else ""


def _a_python_listens(port: int) -> bool:
    sockets = {f"socket:[{inode}]" for inode in _listeners(port)}
    return bool(sockets) and any("python" in name for name in _programs_with(sockets))


def _programs_with(links: set[str]) -> Iterator[str]:
    """Names of the programs that have one of these open, as far as they can be looked at from here."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            for file in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    if str(file.readlink()) in links:
                        yield (process / "exe").readlink().name


def _listeners(port: int) -> Iterator[str]:
    """Inodes of the sockets that listen on a port, in this network namespace."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # a kernel without IPv6
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, local, _, state, *others = line.split()
                if state == _LISTENS and int(local.rpartition(":")[2], 16) == port:
                    yield others[5]
