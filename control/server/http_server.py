"""HTTP port of the coordinator, the engine agent and the watcher: metrics, health and a read-only status.

Pages are read by GET, or by HEAD without their bodies. A process that takes commands over HTTP passes them as
`actions`, requested by POST; `questions` are asked by any method, as proxies ask about the request that they hold.

The port has no secrets and no authentication, so it listens on the loopback unless configured otherwise. Its callables
run on HTTP threads and must return snapshots instead of reading another thread's state.

The server is waitress: one thread for all connections, a few for the pages. What a stranger can hold is bounded here: a
connection carries one request and lives for a fixed time, however slowly its bytes come or are read. A new connection
takes the place of the oldest one without a request, or else of the oldest one whose answer is not read.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from waitress import wasyncore
from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.parser import HTTPRequestParser
from waitress.server import TcpWSGIServer
from waitress.task import ThreadedTaskDispatcher

from ..log import get_log
from ..protocol import ConfigurationError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

REQUEST_S: Final = 5.0
"""Seconds that a client may take to send its request, from the first byte to the last."""
ANSWER_S: Final = 30.0
"""Seconds after which a connection is closed whose client has not read all of its answer."""
MOST_CONNECTIONS: Final = 64
"""Open connections. A new one replaces the oldest that waits for its client: to send its request, or to read."""
THREADS: Final = 4
"""Pages that are made at the same time."""
MOST_HEADER_BYTES: Final = 16 * 1024
_MOST_BODY_BYTES: Final = 4096
"""Requests have no body; a small one is read and ignored."""
_NO_FILE: Final = 1 << 40
"""Bytes from which waitress would buffer in a temporary file: never."""
_SWEEP_S: Final = 0.25
_REST_S: Final = 0.5
"""Seconds without accepting after the process ran out of file descriptors."""
_CLOSE_S: Final = 1
"""Seconds that `stop` waits for pages that are being made."""


class Readiness(msgspec.Struct, frozen=True):
    """Whether this process can do its work; the reason where it cannot."""

    ready: bool
    reason: str = ""


class HttpAnswer(msgspec.Struct, frozen=True):
    """A page, or the answer to an action."""

    content_type: str
    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    headers: tuple[tuple[str, str], ...] = ()
    """Further headers."""


class HttpQuestion(msgspec.Struct, frozen=True):
    """A request whose answer depends on more than its path."""

    path: str
    """What follows the question's own path: empty, or from a slash on."""
    query: tuple[tuple[str, str], ...]
    """Parameters of the query string, in order; empty values included."""
    headers: Mapping[str, str]
    """Headers by their names in lower case; the values of a repeated one are joined by commas."""


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
        warnings: Callable[[], Iterable[str]] = tuple,
        pages: Mapping[str, Callable[[], HttpAnswer]] | None = None,
        actions: Mapping[str, Callable[[], Readiness]] | None = None,
        named_actions: Mapping[str, Callable[[str], Readiness]] | None = None,
        questions: Mapping[str, Callable[[HttpQuestion], HttpAnswer]] | None = None,
    ) -> None:
        """Bind the port; 0 takes a free one.

        `status` returns a JSON document; `refresh` is called before the metrics are read; `warnings` are shown by
        ``/healthz``, one on each line after the first. `pages` maps further paths to functions that make them.
        `actions` maps paths to functions that a POST calls; the result says whether the action was carried out. One of
        `named_actions` gets the name that follows its path and a slash. `questions` answer requests of any method for
        their path and all paths below it.
        """
        gets = {
            "/metrics": lambda: _metrics(registry, refresh),
            "/healthz": lambda: _text(HTTPStatus.OK, "\n".join(("alive", *warnings()))),
            "/readyz": lambda: _ready(readiness()),
            "/status": lambda: HttpAnswer("application/json", status()),
            **(pages or {}),
        }
        posts = {path: partial(_action_answer, action) for path, action in (actions or {}).items()}
        listener = _listen(bind, port)
        self.port: int = listener.getsockname()[1]
        self._workers = _Workers()
        self._sockets: dict[int, Any] = {}
        """Every socket of this port by its descriptor; used by the thread `http` alone while it runs."""
        application = _Application(gets, posts, named_actions or {}, questions or {})
        self._server = _Server(application, listener, self._workers, self._sockets)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="http", daemon=True)

    def start(self) -> None:
        """Start to answer requests."""
        self._workers.set_thread_count(THREADS)
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and free the port; waits a moment for pages that are being made. Idempotent."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._thread.is_alive():
            self._server.pull_trigger()
            self._thread.join()
        self._workers.shutdown(timeout=_CLOSE_S)
        self._server.close()
        wasyncore.close_all(self._sockets)

    def _serve(self) -> None:
        while not self._stopping.is_set():
            wasyncore.loop(_SWEEP_S, use_poll=True, map=self._sockets, count=1)
            self._server.close_expired()


def url_of(bind: str, port: int) -> str:
    """Where a port that is bound to the address `bind` is reached."""
    return f"http://[{bind}]:{port}" if ":" in bind else f"http://{bind}:{port}"


def _listen(bind: str, port: int) -> socket.socket:
    """A listening socket for an IPv4 or IPv6 address, or for a name, of which the IPv4 address is preferred."""
    try:
        found = {entry[0] for entry in socket.getaddrinfo(bind, port, type=socket.SOCK_STREAM)}
        family = socket.AF_INET if socket.AF_INET in found else socket.AF_INET6
        both = family == socket.AF_INET6 and bind == "::" and socket.has_dualstack_ipv6()
        return socket.create_server((bind, port), family=family, dualstack_ipv6=both)
    except OSError as problem:
        advice = "choose another address or port, or stop what listens there"
        raise ConfigurationError(f"cannot serve HTTP on {bind}:{port}: {problem.strerror}; {advice}") from problem


# -- pages -----------------------------------------------------------------------------------------------------------


class _Application:
    """WSGI application: GET for the paths in `gets`, POST for those in `posts`, and below those in `named`."""

    def __init__(
        self,
        gets: Mapping[str, Callable[[], HttpAnswer]],
        posts: Mapping[str, Callable[[], HttpAnswer]],
        named: Mapping[str, Callable[[str], Readiness]],
        questions: Mapping[str, Callable[[HttpQuestion], HttpAnswer]],
    ) -> None:
        self._routes = {"GET": gets, "POST": posts}
        self._named = named
        self._questions = questions

    def __call__(self, request: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        method = request["REQUEST_METHOD"]
        path = request["PATH_INFO"]
        first, slash, rest = path[1:].partition("/")
        if (question := self._questions.get(f"/{first}")) is not None:
            answer = _guarded(partial(question, _question(slash + rest, request)), path)
        else:
            answer = self._answer("GET" if method == "HEAD" else method, path)
        length = str(len(answer.body))
        headers = [("Content-Type", answer.content_type), ("Content-Length", length), *answer.headers]
        start(f"{answer.status.value} {answer.status.phrase}", headers)
        return () if method == "HEAD" else (answer.body,)

    def _answer(self, method: str, path: str) -> HttpAnswer:
        routes = self._routes.get(method)
        folder, _, name = path.rpartition("/")
        if method == "POST" and name and (action := self._named.get(folder)):
            routes = {path: partial(_action_answer, partial(action, name))}
        if not routes:
            return _text(HTTPStatus.NOT_IMPLEMENTED, f"no page takes {method}")
        route = routes.get(path)
        if route is None:
            return _text(HTTPStatus.NOT_FOUND, f"known: {', '.join(sorted((*routes, *self._questions)))}")
        return _guarded(route, path)


def _guarded(route: Callable[[], HttpAnswer], path: str) -> HttpAnswer:
    try:
        return route()
    except Exception:  # noqa: BLE001  # an error in one page must not end the server
        get_log(__name__).exception("page_failed", path=path)
        return _text(HTTPStatus.INTERNAL_SERVER_ERROR, "this page could not be made")


def _question(path: str, request: WSGIEnvironment) -> HttpQuestion:
    headers = {name[5:].replace("_", "-").lower(): value for name, value in request.items() if name.startswith("HTTP_")}
    return HttpQuestion(path, tuple(parse_qsl(request["QUERY_STRING"], keep_blank_values=True)), headers)


def _metrics(registry: CollectorRegistry, refresh: Callable[[], None]) -> HttpAnswer:
    refresh()
    return HttpAnswer(CONTENT_TYPE_LATEST, generate_latest(registry))


def _ready(result: Readiness) -> HttpAnswer:
    if result.ready:
        return _text(HTTPStatus.OK, result.reason or "ready")
    return _text(HTTPStatus.SERVICE_UNAVAILABLE, result.reason)


def _action_answer(action: Callable[[], Readiness]) -> HttpAnswer:
    result = action()
    return _text(HTTPStatus.OK if result.ready else HTTPStatus.CONFLICT, result.reason or "done")


def _text(status: HTTPStatus, text: str) -> HttpAnswer:
    return HttpAnswer("text/plain; charset=utf-8", text.encode() + b"\n", status)


# -- waitress with our bounds ----------------------------------------------------------------------------------------

_ERRORS_ONLY: Final = logging.getLogger(f"{__name__}.waitress")
"""Logger of waitress' own lines. Its warnings, such as the length of a queue, are not worth a line."""
_ERRORS_ONLY.setLevel(logging.ERROR)


class _Workers(ThreadedTaskDispatcher):
    """The threads that make pages."""

    logger = queue_logger = _ERRORS_ONLY


class _Request(HTTPRequestParser):
    """One request, the only one of its connection."""

    def parse_header(self, header_plus: bytes) -> None:
        """Read the header; the connection is closed after the answer, whatever the client asks for."""
        super().parse_header(header_plus)
        self.headers = {**self.headers, "CONNECTION": "close"}


class _Connection(HTTPChannel):
    """One connection. Created, swept and closed on the thread `http`."""

    parser_class = _Request
    logger = _ERRORS_ONLY
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]  made by no other

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.accepted_at = time.monotonic()
        super().__init__(*args, **kwargs)
        self.server.connections[self] = None

    def handle_close(self) -> None:
        """Close the connection, whatever is left to be read or sent."""
        self.server.connections.pop(self, None)
        super().handle_close()

    @property
    def without_request(self) -> bool:
        """True until a whole request has arrived."""
        return not (self.requests or self.total_outbufs_len or self.close_when_flushed)

    def expired(self, now: float) -> bool:
        """Whether its client took too long. A page that is being made is waited for."""
        if self.requests:
            return False
        return now >= self.accepted_at + (REQUEST_S if self.without_request else ANSWER_S)


class _Server(TcpWSGIServer):
    """The listening socket."""

    channel_class = _Connection
    logger = _ERRORS_ONLY

    def __init__(
        self, application: _Application, listener: socket.socket, workers: _Workers, sockets: dict[int, Any]
    ) -> None:
        self.connections: dict[_Connection, None] = {}
        """Open connections, the oldest first."""
        self._rest_until = 0.0
        self._trigger_lock = threading.Lock()
        self._closed = False
        limits = Adjustments(
            sockets=[listener],
            connection_limit=2 * MOST_CONNECTIONS,
            max_request_header_size=MOST_HEADER_BYTES,
            max_request_body_size=_MOST_BODY_BYTES,
            outbuf_overflow=_NO_FILE,
            outbuf_high_watermark=_NO_FILE,
            inbuf_overflow=_NO_FILE,
            log_socket_errors=False,
            clear_untrusted_proxy_headers=False,
            ident="weightbus",
        )
        address = (listener.family, listener.type, listener.proto, listener.getsockname())
        super().__init__(
            application, sockets, _sock=listener, dispatcher=workers, adj=limits, sockinfo=address, bind_socket=False
        )

    def readable(self) -> bool:
        """Whether to accept connections."""
        return time.monotonic() >= self._rest_until and super().readable()

    def accept(self) -> tuple[socket.socket, Any] | None:
        """Accept a connection; if there are too many, in the place of one that waits for its client."""
        if len(self.connections) >= MOST_CONNECTIONS:
            waiting = [connection for connection in self.connections if not connection.requests]
            waiting.sort(key=lambda connection: not connection.without_request)
            for connection in waiting[: len(self.connections) - MOST_CONNECTIONS + 1]:
                connection.handle_close()
        try:
            return super().accept()
        except OSError as problem:  # file descriptors have run out: the client stays in the queue
            self._rest_until = time.monotonic() + _REST_S
            get_log(__name__).warning("connection_not_accepted", problem=problem.strerror)
            return None

    def maintenance(self, now: float) -> None:
        """Waitress' own sweep by the wall clock; `close_expired` stands in for it."""

    def close_expired(self) -> None:
        """Close the connections whose clients took too long."""
        now = time.monotonic()
        for connection in [each for each in self.connections if each.expired(now)]:
            connection.handle_close()

    def pull_trigger(self) -> None:
        """Wake the thread `http`; from any thread, and without effect once this is closed."""
        with self._trigger_lock:  # a worker that outlives `stop` must not write to a descriptor that was used again
            if not self._closed:
                super().pull_trigger()

    def close(self) -> None:
        """Close the listening socket and the trigger."""
        with self._trigger_lock:
            if not self._closed:
                self._closed = True
                super().close()
