"""HTTP port of the coordinator, the engine agent and the watcher: metrics, health and a read-only status.

Pages are read by GET. A process that takes commands over HTTP passes them as `actions`, requested by POST.

The port has no secrets and no authentication, so it listens on the loopback unless configured otherwise. Its callables
run on HTTP threads and must return snapshots instead of reading another thread's state.
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
"""Seconds that a client may take to send its request."""


class Readiness(msgspec.Struct, frozen=True):
    """Whether this process can do its work; the reason where it cannot."""

    ready: bool
    reason: str = ""


class HttpPort:
    """HTTP server that answers from `start` to `stop` on threads of its own."""

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
        actions: Mapping[str, Callable[[], Readiness]] | None = None,
    ) -> None:
        """Bind the port; 0 takes a free one.

        `status` and `plan` return JSON documents; `refresh` is called before the metrics are read. `actions` maps
        paths to functions that a POST calls; the result says whether the action was carried out.
        """
        self._plan = plan
        self._refresh = refresh
        self._readiness = readiness
        self._status = status
        self._registry = registry
        posts = {path: partial(_action_answer, action) for path, action in (actions or {}).items()}
        handler = type("Handler", (_Handler,), {"routes": self._routes(), "actions": posts})
        try:
            self._server = _Server((bind, port), handler)
        except OSError as problem:
            advice = "choose another port, or stop what listens there"
            raise ConfigurationError(f"cannot serve HTTP on {bind}:{port}: {problem.strerror}; {advice}") from problem
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="http", daemon=True)

    def start(self) -> None:
        """Start to answer requests."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and free the port. Idempotent."""
        if self._thread.is_alive():  # it only accepts, every 0.1 s; accepted connections have threads of their own
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
        result = self._readiness()
        if result.ready:
            return _text(HTTPStatus.OK, result.reason or "ready")
        return _text(HTTPStatus.SERVICE_UNAVAILABLE, result.reason)


class _Answer(msgspec.Struct, frozen=True):
    status: HTTPStatus
    content_type: str
    body: bytes


def _action_answer(action: Callable[[], Readiness]) -> _Answer:
    result = action()
    return _text(HTTPStatus.OK if result.ready else HTTPStatus.CONFLICT, result.reason or "done")


def _text(status: HTTPStatus, text: str) -> _Answer:
    return _Answer(status, "text/plain; charset=utf-8", text.encode() + b"\n")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def handle_error(self, request: object, client_address: object) -> None:
        """Log a client that went away or sent nothing at debug level, anything else as an error."""
        del request
        log = get_log(__name__)
        problem = sys.exc_info()[1]
        if isinstance(problem, (ConnectionError, TimeoutError)):
            log.debug("client_gone", client=client_address, problem=str(problem))
        else:
            log.error("request_failed", client=client_address, exc_info=problem)


class _Handler(BaseHTTPRequestHandler):
    """One connection. Answers GET for the paths in `routes`, and POST for those in `actions`."""

    routes: ClassVar[dict[str, Callable[[], _Answer]]] = {}
    actions: ClassVar[dict[str, Callable[[], _Answer]]] = {}
    timeout = REQUEST_TIMEOUT_S
    protocol_version = "HTTP/1.1"
    server_version = "weightbus"
    sys_version = ""

    def do_GET(self) -> None:
        """Send the page, or 404 with the known paths."""
        self._respond(self.routes)

    def do_POST(self) -> None:
        """Carry out an action; the request has no body."""
        if not self.actions:
            self.send_error(HTTPStatus.NOT_IMPLEMENTED)
            return
        self._respond(self.actions)

    def _respond(self, routes: Mapping[str, Callable[[], _Answer]]) -> None:
        route = routes.get(self.path.split("?", 1)[0])
        if route is None:
            self._reply(_text(HTTPStatus.NOT_FOUND, f"known: {', '.join(sorted(routes))}"))
            return
        try:
            answer = route()
        except Exception:  # noqa: BLE001  # an error in one page must not end the server
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
