"""The rendezvous store of a group, as the server beside this sidecar reaches it: through here, so that it can be cut.

A server whose workers wait in a store for the rest of their group answers nothing, for as long as whoever serves that
store stands still. Cut off from it they are told at once that there will be no group, and go on. Of a store that is not
there any more they are told nothing: torch tries to connect to it for half an hour. So who comes for one is let into a
store of our own, which has nothing, and out again.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

# torch.distributed has this name only where it was built with it, and type checkers do not see it there.
from torch._C._distributed_c10d import TCPStore

from weightbus.dataplane.broadcast_group import serve_store

_CONNECT_S: Final = 5.0
_LINGER_S: Final = 120.0
"""Who has not connected yet tries again and again, for half an hour, and is told only once it has."""
_DEAD_END_S: Final = 0.5
_CHUNK: Final = 1 << 16
_LISTENS: Final = "0A"
"""TCP_LISTEN, as /proc/net/tcp has it."""


class Relay:
    """Listens on the loopback, and connects whoever comes to ``host:port``. Few bytes go through it."""

    def __init__(self, host: str, port: int, at: str) -> None:
        """`at` is an address of the loopback. Raises OSError."""
        self.to = host, port
        self._waker, self._woken = socket.socketpair()
        self._listener = socket.create_server((at, 0), family=socket.AF_INET6 if ":" in at else socket.AF_INET)
        self.at = at, int(self._listener.getsockname()[1])
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._ending: dict[socket.socket, float] = {}
        """Connections that lead nowhere, and when they are ended."""
        self._dead_end: TCPStore | None = None
        self._over = threading.Event()
        threading.Thread(target=self._run, name="rendezvous-relay", daemon=True).start()

    def cut(self) -> None:
        """End every connection, and take none to the store any more. Waits for nobody."""
        self._over.set()
        self._waker.close()  # which is read at the other end, also by a process that can open nothing more

    def _run(self) -> None:
        until = float("inf")
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while time.monotonic() < until:
                for key, _ in selector.select(_DEAD_END_S if self._ending else None):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.fileobj is self._woken:
                        selector.unregister(self._woken)
                    elif isinstance(key.fileobj, socket.socket):
                        self._carry(selector, key.fileobj)
                if self._over.is_set() and until == float("inf"):
                    until = time.monotonic() + _LINGER_S
                    self._ending = dict.fromkeys(self._pairs, 0.0)
                for each in [each for each, end in self._ending.items() if end <= time.monotonic()]:
                    self._end(selector, each)
                if self._over.is_set():
                    self._ending.setdefault(self._listener, until)  # looked at every now and then
        self._listener.close()
        self._woken.close()
        self._dead_end = None

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:  # who came has gone
            return
        ends = float("inf")
        try:
            if self._over.is_set():
                raise ConnectionRefusedError
            far = socket.create_connection(self.to, _CONNECT_S)
        except OSError:
            try:
                if self._dead_end is None:
                    self._dead_end = serve_store(self.at[0])
                far = socket.create_connection((self._dead_end.host, self._dead_end.port), _CONNECT_S)
            except (OSError, RuntimeError):  # too many open files, say: who is sent away comes again
                near.close()
                return
            ends = time.monotonic() + _DEAD_END_S
        near.settimeout(_CONNECT_S)
        for one, other in ((near, far), (far, near)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs[one] = other
            selector.register(one, selectors.EVENT_READ)
        if ends < float("inf"):
            self._ending[near] = ends

    def _carry(self, selector: selectors.BaseSelector, come: socket.socket) -> None:
        other = self._pairs.get(come)
        if other is None:  # it ended with the other end, a moment ago
            return
        with contextlib.suppress(OSError):
            if found := come.recv(_CHUNK):
                other.sendall(found)
                return
        self._end(selector, come)

    def _end(self, selector: selectors.BaseSelector, one: socket.socket) -> None:
        self._ending.pop(one, None)
        other = self._pairs.get(one)
        for each in (one, other) if other is not None else ():
            self._ending.pop(each, None)
            del self._pairs[each]
            selector.unregister(each)
            each.close()


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
