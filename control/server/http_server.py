"""The HTTP port of the coordinator and of the sidecar: metrics, health and a read-only status.

GET and nothing else, unless whoever opens the port has orders to take; those are asked for by POST.

It holds no secrets and asks for none, so it listens on the loopback unless told otherwise. What it shows it gets from
two callables, which run on its threads and must not touch the state of others: hand it snapshots.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Final

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ..log import get_log
from ..protocol import ConfigurationError

REQUEST_TIMEOUT_S: Final = 5.0
"""How long a client may take to say what it wants."""


class Readiness(msgspec.Struct, frozen=True):
    """Whether to send work here, and why not."""

    ready: bool
    reason: str = ""


class HttpPort:
    """Serves from `start` to `stop` on threads of its own."""

    def __init__(
        self,
        bind: str,
        port: int,
        *,
        registry: CollectorRegistry,
        readiness: Callable[[], Readiness],
        status: Callable[[], bytes],
        refresh: Callable[[], None] = lambda: None,
        plan: Callable[[], bytes] | None = None,
        orders: Mapping[str, Callable[[], Readiness]] | None = None,
    ) -> None:
        """Binds at once; port 0 takes a free one.

        `status` returns the JSON document, and so does `plan`, where there is one; `refresh` is called before the
        metrics are read. `orders` are carried out by their path, and say whether they were.
        """
        self._plan = plan
        self._refresh = refresh
        self._readiness = readiness
        self._status = status
        self._registry = registry
        posts = {path: partial(_carried_out, order) for path, order in (orders or {}).items()}
        handler = type("Handler", (_Handler,), {"routes": self._routes(), "orders": posts})
        try:
            self._server = _Server((bind, port), handler)
        except OSError as problem:
            advice = "choose another port, or stop what listens there"
            raise ConfigurationError(f"cannot serve HTTP on {bind}:{port}: {problem.strerror}; {advice}") from problem
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="http", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and free the port. May be called at any time, more than once."""
        if self._thread.is_alive():  # it only looks who comes, every 0.1 s: those who came have threads of their own
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def _routes(self) -> dict[str, Callable[[], _Answer]]:
        routes = {
            "/metrics": self._metrics,
            "/healthz": lambda: _text(HTTPStatus.OK, "alive"),
            "/readyz": self._ready,
            "/status": lambda: _Answer(HTTPStatus.OK, "application/json", self._status()),
        }
        if (plan := self._plan) is not None:
            routes["/plan"] = lambda: _Answer(HTTPStatus.OK, "application/json", plan())
        return routes

    def _metrics(self) -> _Answer:
        self._refresh()
        return _Answer(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self._registry))

    def _ready(self) -> _Answer:
        verdict = self._readiness()
        if verdict.ready:
            return _text(HTTPStatus.OK, verdict.reason or "ready")
        return _text(HTTPStatus.SERVICE_UNAVAILABLE, verdict.reason)


class _Answer(msgspec.Struct, frozen=True):
    status: HTTPStatus
    content_type: str
    body: bytes


def _carried_out(order: Callable[[], Readiness]) -> _Answer:
    verdict = order()
    return _text(HTTPStatus.OK if verdict.ready else HTTPStatus.CONFLICT, verdict.reason or "done")


def _text(status: HTTPStatus, text: str) -> _Answer:
    return _Answer(status, "text/plain; charset=utf-8", text.encode() + b"\n")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away, or never spoke, is its own affair; anything else is logged as the error it is."""
        del request
        log = get_log(__name__)
        problem = sys.exc_info()[1]
        if isinstance(problem, (ConnectionError, TimeoutError)):
            log.debug("client_gone", client=client_address, problem=str(problem))
        else:
            log.error("request_failed", client=client_address, exc_info=problem)


class _Handler(BaseHTTPRequestHandler):
    """One connection. Answers GET for the paths in `routes`, and POST for those in `orders`."""

    routes: ClassVar[dict[str, Callable[[], _Answer]]] = {}
    orders: ClassVar[dict[str, Callable[[], _Answer]]] = {}
    timeout = REQUEST_TIMEOUT_S
    protocol_version = "HTTP/1.1"
    server_version = "weightbus"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer, or say that there is nothing under this path."""
        self._take(self.routes)

    def do_POST(self) -> None:
        """Carry out an order, which has no content."""
        if not self.orders:
            self.send_error(HTTPStatus.NOT_IMPLEMENTED)
            return
        self._take(self.orders)

    def _take(self, routes: Mapping[str, Callable[[], _Answer]]) -> None:
        route = routes.get(self.path.split("?", 1)[0])
        if route is None:
            self._reply(_text(HTTPStatus.NOT_FOUND, f"known: {', '.join(sorted(routes))}"))
            return
        try:
            answer = route()
        except Exception:  # noqa: BLE001  # whatever it was, this page is all that it may cost
            get_log(__name__).exception("page_failed", path=self.path)
            answer = _text(HTTPStatus.INTERNAL_SERVER_ERROR, "this page could not be made")
        self._reply(answer)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name is the base class's
        """Requests are not logged: scrapers ask every few seconds."""

    def _reply(self, answer: _Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(answer.body)
