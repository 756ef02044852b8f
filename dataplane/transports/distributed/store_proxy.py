"""The rendezvous store of a group, as servers reach it: through here, so that it can be cut; and what stays of it.

A server whose workers wait in a store for the rest of their group answers nothing, for as long as the process that
serves that store stands still. Cut off from it they are told at once that there will be no group, and go on. Of a store
that is not there any more they are told nothing: torch tries to connect to it for half an hour. So a worker that comes
for one is let into a store of our own, which has nothing, and out again: by the relay in front of a server, and where
the store was.
"""

from __future__ import annotations

import atexit
import contextlib
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from typing import Final

# torch.distributed has this name only where it was built with it, and type checkers do not see it there.
from torch._C._distributed_c10d import TCPStore

from ...errors import TransferFailed
from ...processes import address_family, serve_store, start_thread

_CONNECT_S: Final = 5.0
_LINGER_S: Final = 120.0
"""A worker that has not connected yet tries again for half an hour, and is told only once it has."""
_DEAD_END_S: Final = 0.5
"""For answers to what was said last."""
_SILENT_S: Final = 15.0
"""Torch may resolve the name of the peer before it says anything, which takes 10 s without an answer."""
_CHUNK: Final = 1 << 16
_DEAD_ENDS: Final = 4
"""As many are there at a time, with a thread each; a trainer that fails every few seconds leaves no more."""

_relays: Final[weakref.WeakSet[StoreProxy]] = weakref.WeakSet()
_dead_ends: Final[deque[StoreProxy]] = deque()
"""The oldest first."""
_lock: Final = threading.Lock()


class StoreProxy:
    """Listens at an address of this machine, and connects every comer to ``host:port``. Few bytes go through it."""

    def __init__(self, host: str, port: int, at: str, at_port: int = 0) -> None:
        """`at` is an address of the loopback, where it is for one server; a port of 0 is any. Raises OSError."""
        self.to = host, port
        self._listener = socket.create_server((at, at_port), family=address_family(at))
        self._waker, self._woken = socket.socketpair()
        self.at = at, int(self._listener.getsockname()[1])
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._ending: dict[socket.socket, float] = {}
        """Connections that lead nowhere, and when they are ended."""
        self._dead_end: TCPStore | None = None
        self._over = threading.Event()
        self._ended = threading.Event()
        _relays.add(self)
        start_thread(self._run, "rendezvous-relay")

    def cut(self) -> None:
        """End every connection, and take none to the store any more. Does not wait."""
        self._over.set()
        self._waker.close()  # which is read at the other end, also by a process that can open nothing more

    def end(self) -> None:
        """Be gone within moments, whether workers come or not. Does not wait."""
        self._ended.set()
        self.cut()

    def _run(self) -> None:
        until = float("inf")
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while time.monotonic() < until and not self._ended.is_set():
                for key, _ in selector.select(_DEAD_END_S if self._ending else None):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.fileobj is self._woken:
                        selector.unregister(self._woken)
                    elif isinstance(key.fileobj, socket.socket):
                        self._carry(selector, key.fileobj)
                if self._over.is_set() and until == float("inf"):
                    until = time.monotonic() + _LINGER_S
                    led = [near for near, far in self._pairs.items() if not {near, far} & self._ending.keys()]
                    self._ending |= dict.fromkeys(led, 0.0)
                for each in [each for each, end in self._ending.items() if end <= time.monotonic()]:
                    self._end(selector, each)
                if self._over.is_set():
                    self._ending.setdefault(self._listener, until)  # looked at every now and then
            for each in tuple(self._pairs):
                self._end(selector, each)
        self._listener.close()
        self._woken.close()
        self._dead_end = None

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:  # it has gone
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
            except (OSError, RuntimeError, TransferFailed):  # too many open files, say: a worker comes again
                near.close()
                return
            ends = time.monotonic() + _SILENT_S
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
                if come in self._ending:
                    self._ending[come] = time.monotonic() + _DEAD_END_S
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


def lead_nowhere(host: str, port: int) -> None:
    """Take the place of a store that was at ``host:port`` and has ended, for two minutes. Never raises.

    Workers that come for it are told that there will be no group.
    """
    with contextlib.suppress(OSError):  # another process has the port, or there are too many open files: as without
        relay = StoreProxy("", 0, host, port)
        relay.cut()
        with _lock:
            _dead_ends.append(relay)
            first = _dead_ends.popleft() if len(_dead_ends) > _DEAD_ENDS else None
        if first is not None:
            first.end()


def _end_all() -> None:
    for relay in tuple(_relays):
        relay.end()


atexit.register(_end_all)  # after that of threads.py, and so before it: it waits for their threads
