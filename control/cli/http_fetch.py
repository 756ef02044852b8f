"""Reads one page over HTTP with a deadline for the whole request: name lookup, connection, header and body.

The timeout of urllib holds for each read only: a server that sends a byte now and then outlives it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Final

MAX_PAGE_BYTES: Final = 64 << 20
"""Largest page. The status of 4,096 engines is some 2 MB."""


def read_page(url: str, timeout_s: float) -> bytes:
    """Body of the page at `url`. Raises `OSError` (`TimeoutError` at the deadline) or `HTTPException`."""
    reading = _Reading(url, timeout_s)
    thread = threading.Thread(target=reading.run, name="page", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        reading.end()
        raise TimeoutError(f"it was not complete after {timeout_s:g} s")
    if reading.failure is not None:
        raise reading.failure
    return reading.body


class _Reading:
    """One request on a thread of its own, because a name lookup has no timeout. Abandoned at the deadline."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._ended = False
        self._sockets: list[socket.socket] = []
        self.body = b""
        self.failure: Exception | None = None

    def run(self) -> None:
        # The port is on this host or this network: a proxy for the Internet has no business here.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Handler(self._sockets))
        try:
            with opener.open(self._url, timeout=self._timeout_s) as answer:
                self.body = answer.read(MAX_PAGE_BYTES + 1)
        except Exception as problem:  # noqa: BLE001  raised again by `read_page`
            self.failure = problem
        if len(self.body) > MAX_PAGE_BYTES:
            self.failure = HTTPException(f"more than {MAX_PAGE_BYTES} bytes came: this is no page of a coordinator")

    def end(self) -> None:
        """Abandon the request: wake its thread if it is blocked in a read."""
        for each in self._sockets:
            with contextlib.suppress(OSError):  # it has ended
                each.shutdown(socket.SHUT_RDWR)


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Makes connections and records their sockets."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        super().__init__()

        class Plain(HTTPConnection):
            def connect(self) -> None:
                super().connect()
                sockets.append(self.sock)

        class Secure(HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                sockets.append(self.sock)

        self._plain, self._secure = Plain, Secure

    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(self._plain, req)

    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(self._secure, req)
