"""One HTTP call to the server: deadline, keys, and an error that says what happened without repeating the payload."""

import contextlib
import enum
import json
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import httpcore
import msgspec

from ...errors import ServerRefused, ServerSilent, ServerUnreachable
from ..interface import Observer
from ..registry import Keys

MAX_REASON: Final = 400
"""SGLang puts the whole body it was sent into a validation error."""

MAX_ANSWER: Final = 256 << 20
"""In bytes, with its header. The longest answers name every parameter of a server with its digest."""

_CONNECT_S: Final = 5.0
_IDLE_S: Final = 5.0
"""A connection that was idle for so long is not used again: servers close theirs by then."""
_BOUND_IDLE_S: Final = 4.0
"""The same for bound connections: one that a server closes just then fails an operation."""


def authorization(keys: Keys, *, admin: bool) -> dict[str, str]:
    """The header for one kind of endpoint.

    A server with an admin key takes only that at admin endpoints, and never elsewhere; one with only an API key takes
    it everywhere.
    """
    key = (keys.admin or keys.api) if admin else keys.api
    return {"Authorization": f"Bearer {key}"} if key else {}


class Way(enum.Enum):
    """The connection that a call may take."""

    ANY = enum.auto()
    """Any: a call that changes nothing, or that may meet any process generation."""
    NEW = enum.auto()
    """A new connection for this call alone."""
    BINDING = enum.auto()
    """A bound connection, or a new one that is bound from now on: the call that finds out where it leads."""
    BOUND = enum.auto()
    """A bound connection and no other. Raises `NotBound` before anything is sent where there is none."""


class NotBound(Exception):
    """No bound connection is open and free. Nothing was sent."""


class HttpClient:
    """Calls one server. May be used from several threads.

    A TCP connection that stays open leads to one process: calls on connections that were opened by a `Way.BINDING` call
    meet the process that answered it, or fail. (Not behind a proxy that forwards each request by itself.)
    """

    def __init__(self, url: str, keys: Keys) -> None:
        self.url = url.rstrip("/")
        self._keys = keys
        # httpx's own transport without httpx, which is half of a call: three calls are made while requests wait.
        # It takes no proxy from the environment: the server is near, and its payloads must not leave the host.
        self._network = TimedNetwork()
        self._pool = self._new_pool(_IDLE_S)
        self._bound = self._new_pool(_BOUND_IDLE_S)
        self._earlier: list[httpcore.ConnectionPool] = []
        """Pools of connections that were bound, with calls under way."""
        self._vain = ""
        self.observer: Observer | None = None

    def _new_pool(self, idle_s: float) -> httpcore.ConnectionPool:
        return httpcore.ConnectionPool(max_connections=100, keepalive_expiry=idle_s, network_backend=self._network)

    def unbind(self) -> None:
        """No connection that is open now counts as bound any more. A call under way on one goes on."""
        before, self._bound = self._bound, self._new_pool(_BOUND_IDLE_S)
        busy = [each for each in before.connections if not each.is_idle()]
        self._earlier = [each for each in self._earlier if each.connections]
        if busy:
            self._earlier.append(before)
        else:
            before.close()

    @property
    def bound(self) -> bool:
        """Whether a bound connection is open and free."""
        return any(each.is_idle() and not each.has_expired() for each in self._bound.connections)

    def get(self, path: str, deadline_s: float, way: Way = Way.ANY) -> dict[str, object]:
        """The JSON object at `path`, by GET with the API key."""
        return _object(path, self._call("GET", path, None, deadline_s, admin=False, way=way))

    def status(self, path: str, deadline_s: float) -> int:
        """The HTTP status of `path`, by GET with the API key."""
        return self._request("GET", path, None, deadline_s, admin=False, way=Way.ANY).status

    def alive(self, path: str, deadline_s: float) -> None:
        """GET `path` and take any answer but 200 for a failure."""
        self._call("GET", path, None, deadline_s, admin=False)

    def admin(self, path: str, body: Mapping[str, object], deadline_s: float, way: Way = Way.ANY) -> dict[str, object]:
        """POST `body` with the admin key. An answer that says ``success: false`` is a failure whatever its status."""
        response = self._call("POST", path, body, deadline_s, admin=True, way=way)
        answer = _object(path, response)
        if answer.get("success", True) is not True:
            raise ServerRefused(path, response.status, _reason(response))
        return answer

    def post(self, path: str, body: Mapping[str, object] | None, deadline_s: float, way: Way = Way.ANY) -> None:
        """POST `body` with the admin key; the answer's content does not matter."""
        self._call("POST", path, body, deadline_s, admin=True, way=way)

    def give_up(self, why: str) -> None:
        """The server's workers answer no more: end all calls, and make none by POST until `trust`."""
        self._vain = why
        for each in tuple(self._network.sockets):
            with contextlib.suppress(OSError):  # it has ended
                each.shutdown(socket.SHUT_RDWR)

    def trust(self) -> None:
        """It is another server."""
        self._vain = ""

    def close(self) -> None:
        """Drop the connections. Calls under way end: a thread in one would keep the process until its deadline."""
        self.give_up("the agent ends")
        for pool in (self._pool, self._bound, *self._earlier):
            pool.close()

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | None,
        deadline_s: float,
        *,
        admin: bool,
        way: Way = Way.ANY,
    ) -> httpcore.Response:
        started, failed, made = time.monotonic(), True, True
        try:
            response = self._request(method, path, body, deadline_s, admin=admin, way=way)
            failed = response.status != HTTPStatus.OK
        except NotBound:
            made = False
            raise
        finally:
            if self.observer is not None and made:
                self.observer(path.lstrip("/"), time.monotonic() - started, failed=failed)
        if failed:
            raise ServerRefused(path, response.status, _reason(response))
        return response

    def _request(
        self, method: str, path: str, body: Mapping[str, object] | None, deadline_s: float, *, admin: bool, way: Way
    ) -> httpcore.Response:
        if self._vain and method != "GET":
            raise ServerUnreachable(path, f"not made: {self._vain}")
        content = None if method == "GET" else b""
        headers = list(authorization(self._keys, admin=admin).items())
        if body is not None:
            content = msgspec.json.encode(body)
            headers.append(("Content-Type", "application/json"))
        left = max(deadline_s, 0.001)
        limits = {"connect": min(left, _CONNECT_S), "read": left, "write": left, "pool": left}
        pool = self._pool if way is Way.ANY else self._new_pool(0.0) if way is Way.NEW else self._bound
        try:
            with self._network.call(left, MAX_ANSWER, connects=way is not Way.BOUND):
                return pool.request(
                    method, self.url + path, headers=headers, content=content, extensions={"timeout": limits}
                )
        except TooLong as error:
            raise ServerUnreachable(path, f"{error}: this is no answer of SGLang's; look what listens there") from error
        except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
            raise ServerUnreachable(path, f"no connection to {self.url}: {error or type(error).__name__}") from error
        except httpcore.TimeoutException as error:
            raise ServerSilent(path, f"no answer in {deadline_s:.1f} s; it may still be carried out") from error
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol) as error:
            why = self._vain or str(error)[:MAX_REASON] or type(error).__name__
            raise ServerUnreachable(path, f"the connection broke before an answer came ({why})") from error
        finally:
            if way is Way.NEW:
                pool.close()


def _object(path: str, response: httpcore.Response) -> dict[str, object]:
    try:
        return msgspec.json.decode(response.content, type=dict[str, object])
    except ValueError as error:
        raise ServerRefused(path, response.status, "expected a JSON object in answer") from error


def _reason(response: httpcore.Response) -> str:
    """The server's own sentence, if it has one. Never its ``detail``, in which it repeats what it was sent."""
    try:
        content: object = json.loads(response.content)
    except ValueError:
        text = response.content.decode(errors="replace")
        return "with a web page" if text.lstrip().startswith("<") else _short(text)
    if isinstance(content, dict):
        for key in ("message", "error"):
            value: object = content.get(key)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            if isinstance(value, dict):
                value = value.get("message")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            if isinstance(value, str):
                return _short(value)
    return "no reason given"


def _short(text: str) -> str:
    words = [word if len(word) < 120 else f"[{len(word)} characters]" for word in text.split()]
    return " ".join(words)[:MAX_REASON] or "no reason given"


class TooLong(Exception):
    """More bytes came than an answer may have."""


class _Budget(threading.local):
    """Remaining time and bytes of the call that this thread makes."""

    until = float("inf")
    room = 0
    most = 0
    connects = True
    """False in a call for which no new connection may be made."""

    def left(self, timeout: float | None, late: type[Exception]) -> float:
        """Seconds for the next step, `timeout` at most. Raises `late` when there are none."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise late("the call has taken all of its time")
        return left if timeout is None else min(left, timeout)


class TimedNetwork(httpcore.SyncBackend):
    """Makes connections on which a call ends at its deadline as a whole, and takes no more than so many bytes.

    The timeouts of httpcore are for each read and each write: a peer that sends a byte now and then outlives them. A
    call is made by one thread from its beginning to its end, so its remaining time is kept with the thread.
    """

    def __init__(self) -> None:
        self.sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._budget = _Budget()

    @contextlib.contextmanager
    def call(self, seconds: float, most_bytes: int, *, connects: bool = True) -> Generator[None]:
        """Within, calls of this thread end after `seconds`, and read `most_bytes` at most, or raise `TooLong`.

        Unless one `connects`, it raises `NotBound` where it would need a new connection.
        """
        self._budget.until, self._budget.room, self._budget.most = time.monotonic() + seconds, most_bytes, most_bytes
        self._budget.connects = connects
        try:
            yield
        finally:
            self._budget.until, self._budget.connects = float("inf"), True

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        """As httpcore's own."""
        if not self._budget.connects:
            raise NotBound
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
