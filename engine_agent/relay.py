"""The rendezvous store of a group, as the server beside this sidecar reaches it: through here, so that it can be cut.

A server whose workers wait in a store for the rest of their group answers nothing, for as long as whoever serves that
store stands still. Cut off from it they are told at once that there will be no group, and go on.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from typing import Final
from urllib.parse import urlsplit

_CONNECT_S: Final = 5.0
_CHUNK: Final = 1 << 16


class Relay:
    """Listens on the loopback, and connects whoever comes to ``host:port``. Few bytes go through it."""

    def __init__(self, host: str, port: int, at: str) -> None:
        """`at` is an address of the loopback. Raises OSError."""
        self.to = host, port
        self._listener = socket.create_server((at, 0), family=socket.AF_INET6 if ":" in at else socket.AF_INET)
        self.at = at, int(self._listener.getsockname()[1])
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._over = threading.Event()
        threading.Thread(target=self._run, name="rendezvous-relay", daemon=True).start()

    def cut(self) -> None:
        """End every connection, and take no more. Waits for nobody."""
        self._over.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for connections

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._over.is_set():
                for key, _ in selector.select():
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif isinstance(key.fileobj, socket.socket):
                        self._carry(selector, key.fileobj)
        self._listener.close()
        for each in self._pairs:
            each.close()

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:  # it was cut, or who came has gone
            return
        try:
            far = socket.create_connection(self.to, _CONNECT_S)
        except OSError:
            near.close()
            return
        near.settimeout(_CONNECT_S)
        for one, other in ((near, far), (far, near)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs[one] = other
            selector.register(one, selectors.EVENT_READ)

    def _carry(self, selector: selectors.BaseSelector, come: socket.socket) -> None:
        other = self._pairs.get(come)
        if other is None:  # it ended with the other end, a moment ago
            return
        with contextlib.suppress(OSError):
            if found := come.recv(_CHUNK):
                other.sendall(found)
                return
        for each in (come, other):
            del self._pairs[each]
            selector.unregister(each)
            each.close()


def loopback_of(url: str) -> str:
    """The address of the loopback at which the server of `url` reaches this process; empty if it may be elsewhere."""
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.startswith("127."):
        return "127.0.0.1"
    return host if host == "::1" else ""
