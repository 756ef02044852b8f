"""Connections on which a call ends at its deadline as a whole, and takes no more than so many bytes.

The timeouts of httpcore are for each read and each write: a peer that sends a byte now and then outlives them. A call
is made by one thread from its beginning to its end, so its remaining time is kept with the thread.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import httpcore


class TooLong(Exception):
    """More bytes came than an answer may have."""


class _Budget(threading.local):
    """Remaining time and bytes of the call that this thread makes."""

    until = float("inf")
    room = 0
    most = 0

    def left(self, timeout: float | None, late: type[Exception]) -> float:
        """Seconds for the next step, `timeout` at most. Raises `late` when there are none."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise late("the call has taken all of its time")
        return left if timeout is None else min(left, timeout)


class TimedNetwork(httpcore.SyncBackend):
    """Knows the connections that it makes."""

    def __init__(self) -> None:
        self.sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._budget = _Budget()

    @contextlib.contextmanager
    def call(self, seconds: float, most_bytes: int) -> Generator[None]:
        """What this thread does within ends after `seconds`, and reads `most_bytes` at most, or raises `TooLong`."""
        self._budget.until, self._budget.room, self._budget.most = time.monotonic() + seconds, most_bytes, most_bytes
        try:
            yield
        finally:
            self._budget.until = float("inf")

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        """As httpcore's own."""
        failure: Exception = httpcore.ConnectError(f"{host} has no address")
        for *_, address in _addresses(host, port):  # each of them within what is left, not one after the other
            left = self._budget.left(timeout, httpcore.ConnectTimeout)
            try:
                stream = super().connect_tcp(str(address[0]), port, left, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
            else:
                return _TimedStream(stream, self._budget, self.sockets)
        raise failure


def _addresses(host: str, port: int) -> Sequence[tuple[Any, ...]]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise httpcore.ConnectError(str(error)) from error


class _TimedStream(httpcore.NetworkStream):
    def __init__(
        self, stream: httpcore.NetworkStream, budget: _Budget, sockets: weakref.WeakSet[socket.socket]
    ) -> None:
        made: object = stream.get_extra_info("socket")
        assert isinstance(made, socket.socket)
        self._stream, self._socket, self._budget, self._sockets = stream, made, budget, sockets
        sockets.add(made)

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        found = self._stream.read(max_bytes, self._budget.left(timeout, httpcore.ReadTimeout))
        self._budget.room -= len(found)
        if self._budget.room < 0:
            raise TooLong(f"more than {self._budget.most} bytes came")
        return found

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        rest = memoryview(buffer)
        while rest:
            left = self._budget.left(timeout, httpcore.WriteTimeout)
            try:
                self._socket.settimeout(left)
                rest = rest[self._socket.send(rest) :]
            except TimeoutError as error:
                raise httpcore.WriteTimeout(str(error)) from error
            except OSError as error:
                raise httpcore.WriteError(str(error)) from error

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = self._budget.left(timeout, httpcore.ConnectTimeout)
        stream = self._stream.start_tls(ssl_context, server_hostname, left)
        return _TimedStream(stream, self._budget, self._sockets)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
