"""The HTTP port, over real connections."""

from __future__ import annotations

import errno
import http.client
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus

import pytest
import structlog

from weightbus.control.protocol.errors import ConfigurationError
from weightbus.control.server import http_server as http_module, metrics as telemetry
from weightbus.control.server.http_server import HttpAnswer, HttpPort, HttpQuestion, Readiness
from weightbus.control.server.metrics import Metrics, MetricSource


class World:
    """What the port shows, to be changed by tests."""

    def __init__(
        self,
        address: str = "127.0.0.1",
        pages: Mapping[str, Callable[[], HttpAnswer]] | None = None,
        questions: Mapping[str, Callable[[HttpQuestion], HttpAnswer]] | None = None,
    ) -> None:
        self.verdict = Readiness(True)
        self.broken = False
        self.document = b'{"boot":1}'
        self.metrics = Metrics(MetricSource.COORDINATOR)
        self.port = HttpPort(
            address,
            0,
            registry=self.metrics.registry,
            readiness=lambda: self.verdict,
            status=self._status,
            pages=pages,
            questions=questions,
        )
        self.port.start()

    def ask(self, path: str, method: str = "GET") -> tuple[int, str, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port.port, timeout=30)
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, answer.headers["Content-Type"], body

    def _status(self) -> bytes:
        if self.broken:
            raise RuntimeError("no status")
        return self.document


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.port.stop()


def test_pages(world: World) -> None:
    """Metrics, health and status, each with its type; a query string changes nothing."""
    world.metrics.set(telemetry.BOOT, 7)
    status, kind, body = world.ask("/metrics")
    assert (status, kind.split(";")[0]) == (200, "text/plain")
    assert "weightbus_coordinator_boot 7.0" in body
    assert world.ask("/healthz")[0] == 200
    assert world.ask("/status?pretty=1") == (200, "application/json", '{"boot":1}')


def test_readiness_is_a_verdict_with_a_reason(world: World) -> None:
    """200 when ready, 503 with the reason when not."""
    assert world.ask("/readyz")[0] == 200
    world.verdict = Readiness(False, "the journal takes no writes")
    status, _, body = world.ask("/readyz")
    assert (status, body.strip()) == (503, "the journal takes no writes")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_only_get(world: World, method: str) -> None:
    """Nothing can be changed here."""
    assert world.ask("/status", method)[0] == 501


def test_head_is_get_without_the_body(world: World) -> None:
    """A balancer may ask so whether a process is ready, and gets the same status and length."""
    world.verdict = Readiness(False, "the journal takes no writes")
    for path, expected in (("/readyz", 503), ("/status", 200), ("/nowhere", 404)):
        with socket.create_connection(("127.0.0.1", world.port.port), timeout=10) as asked:
            asked.sendall(f"HEAD {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
            answer = b"".join(iter(lambda: asked.recv(4096), b""))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.split()[1] == str(expected).encode()
        assert f"Content-Length: {len(world.ask(path)[2].encode())}".encode() in head
        assert not body


def asking(world: World, raw: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", world.port.port), timeout=10) as asked:
        asked.sendall(raw)
        return b"".join(iter(lambda: asked.recv(4096), b""))


def test_questions_of_any_method() -> None:
    """A proxy asks with its request's method, path, query and headers, and gets status and headers of the answer."""
    asked: list[HttpQuestion] = []

    def answer(question: HttpQuestion) -> HttpAnswer:
        asked.append(question)
        if "breaks" in question.path:
            raise RuntimeError
        return HttpAnswer("text/plain", b"no", HTTPStatus.CONFLICT, (("Retry-After", "1"),))

    world = World(questions={"/ask": answer})
    try:
        got = asking(
            world,
            b"POST /ask/v1/x?a=1&b=&a=2 HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\nX-One: 1\r\nx-one: 2\r\n\r\n",
        )
        assert got.startswith(b"HTTP/1.1 409 Conflict")
        assert b"Retry-After: 1" in got
        assert (asked[0].path, asked[0].query) == ("/v1/x", (("a", "1"), ("b", ""), ("a", "2")))
        assert asked[0].headers["x-one"] == "1, 2"
        for path, left in (("/ask", ""), ("/ask/", "/")):
            assert world.ask(path)[0] == 409
            assert asked[-1].path == left
        assert world.ask("/ask/breaks")[0] == 500
        status, _, body = world.ask("/asking")
        assert (status, "/ask" in body) == (404, True)
        assert len(asked) == 4
    finally:
        world.port.stop()


def test_unknown_path_names_the_known_ones(world: World) -> None:
    """404 says what there is."""
    status, _, body = world.ask("/")
    assert status == 404
    assert "/metrics" in body


def test_page_that_cannot_be_made(world: World) -> None:
    """The client gets a 500 without details, the log gets the exception, and the port lives on."""
    world.broken = True
    with structlog.testing.capture_logs() as logs:
        status, _, body = world.ask("/status")
    assert status == 500
    assert "no status" not in body
    assert world.ask("/healthz")[0] == 200
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("page_failed", "error")]


def trickle(port: int, stop: threading.Event, answered: list[bytes]) -> None:
    """Send a request by one byte every 0.1 s, until the connection is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=0.1) as slow:
        while not stop.is_set():
            try:
                slow.sendall(b"G")
                answered.append(slow.recv(1))
            except TimeoutError:
                continue
            except OSError:
                answered.append(b"")
            return


def test_request_has_a_deadline_however_its_bytes_come(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends nothing, and one that sends a byte now and then, are closed; they delay no other."""
    monkeypatch.setattr(http_module, "REQUEST_S", 1.0)
    stop, answered = threading.Event(), list[bytes]()
    slow = threading.Thread(target=trickle, args=(world.port.port, stop, answered))
    began = time.monotonic()
    slow.start()
    try:
        with socket.create_connection(("127.0.0.1", world.port.port), timeout=30) as idle:
            assert world.ask("/healthz")[0] == 200
            assert idle.recv(1) == b""
        slow.join(10)
    finally:
        stop.set()
        slow.join()
    assert answered == [b""]
    assert 1.0 <= time.monotonic() - began < 8
    assert http_module.REQUEST_S <= 10


def test_answer_has_a_deadline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that does not read its answer holds it for a time only."""
    monkeypatch.setattr(http_module, "ANSWER_S", 1.0)
    world.document = b"x" * 16_000_000
    with socket.create_connection(("127.0.0.1", world.port.port), timeout=30) as deaf:
        deaf.sendall(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
        until = time.monotonic() + 20
        while not world.port._server.connections and time.monotonic() < until:
            time.sleep(0.01)
        while world.port._server.connections and time.monotonic() < until:
            time.sleep(0.05)
        assert not world.port._server.connections
        received = 0
        while data := deaf.recv(1 << 20):
            received += len(data)
        assert received < len(world.document)


def test_many_slow_clients_hold_neither_threads_nor_the_port(world: World) -> None:
    """Connections are bounded: the oldest one without a request gives way, and a prompt client is always answered."""
    assert world.ask("/healthz")[0] == 200
    before = threading.active_count()
    slow = []
    try:
        for _ in range(3 * http_module.MOST_CONNECTIONS):
            slow.append(socket.create_connection(("127.0.0.1", world.port.port), timeout=30))
            slow[-1].sendall(b"GET /st")
        assert world.ask("/healthz")[0] == 200
        assert len(world.port._server.connections) <= http_module.MOST_CONNECTIONS
        assert threading.active_count() == before
        assert slow[0].recv(1) == b""  # the oldest was closed
    finally:
        for each in slow:
            each.close()


def test_clients_that_do_not_read_do_not_hold_the_port(world: World) -> None:
    """The oldest answer that is not read gives way, too, and a prompt client is answered."""
    world.document = b"x" * 4_000_000
    deaf = []

    def ask_and_not_read() -> None:
        deaf.append(socket.socket())
        deaf[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf[-1].settimeout(30)
        deaf[-1].connect(("127.0.0.1", world.port.port))
        deaf[-1].sendall(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
        assert deaf[-1].recv(1)  # of an answer that is left unread from here on

    try:
        for _ in range(2 * http_module.MOST_CONNECTIONS + 8):
            ask_and_not_read()
        began = time.monotonic()
        assert world.ask("/healthz")[0] == 200
        assert time.monotonic() - began < http_module.ANSWER_S / 2
        assert len(world.port._server.connections) <= http_module.MOST_CONNECTIONS
    finally:
        for each in deaf:
            each.close()


def test_connection_carries_one_request(world: World) -> None:
    """It is closed after the answer, whatever its client asks for."""
    for version in ("1.0", "1.1"):
        with socket.create_connection(("127.0.0.1", world.port.port), timeout=30) as client:
            client.sendall(f"GET /healthz HTTP/{version}\r\nHost: x\r\nConnection: keep-alive\r\n\r\n".encode() * 2)
            answer = b""
            while data := client.recv(4096):
                answer += data
        assert answer.count(b"200 OK") == 1
        assert b"Connection: close" in answer
        assert b"keep-alive" not in answer.lower()


@pytest.mark.parametrize(
    ("request_text", "code"),
    [
        (b"GET /healthz HTTP/1.1\r\nX: " + b"x" * http_module.MOST_HEADER_BYTES + b"\r\n\r\n", b"431"),
        (b"POST /healthz HTTP/1.1\r\nContent-Length: 100000000\r\n\r\n", b"413"),
        (b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"400"),
    ],
)
def test_request_that_is_too_large_or_none_at_all(world: World, request_text: bytes, code: bytes) -> None:
    """It is refused, and the port lives on."""
    with socket.create_connection(("127.0.0.1", world.port.port), timeout=30) as client:
        client.sendall(request_text)
        assert code in client.recv(100)
    assert world.ask("/healthz")[0] == 200


def test_process_without_descriptors_accepts_later(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that cannot be accepted stays in the queue, the thread does not spin, and one line says why."""
    monkeypatch.setattr(http_module, "_REST_S", 0.5)
    accept, tries = socket.socket.accept, list[float]()

    def fails_at_first(listener: socket.socket) -> object:
        tries.append(time.monotonic())
        if len(tries) < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    listener = world.port._server.socket
    monkeypatch.setattr(type(listener), "accept", fails_at_first)
    with structlog.testing.capture_logs() as logs:
        assert world.ask("/healthz")[0] == 200
    assert tries[1] - tries[0] >= 0.5
    assert [(entry["event"], entry["problem"]) for entry in logs] == [
        ("connection_not_accepted", "Too many open files")
    ] * 2


def test_client_that_goes_away_costs_no_line(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    """A scraper that hangs up in the middle of anything is nothing to be logged."""
    world.document = b"x" * 4_000_000
    with structlog.testing.capture_logs() as logs:
        for sent in (b"", b"GET /st", b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n"):
            client = socket.create_connection(("127.0.0.1", world.port.port), timeout=30)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close by a reset
            client.sendall(sent)
            client.close()
        until = time.monotonic() + 10
        while world.port._server.connections and time.monotonic() < until:
            time.sleep(0.01)
        assert world.ask("/healthz")[0] == 200
    assert logs == []
    assert capfd.readouterr().err == ""


def test_ipv6() -> None:
    """An address of either family can be listened on."""
    world = World("::1")
    try:
        with socket.create_connection(("::1", world.port.port), timeout=30) as client:
            client.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            assert b"200" in client.recv(100)
    finally:
        world.port.stop()
    assert http_module.url_of("::1", 1) == "http://[::1]:1"
    assert http_module.url_of("10.0.0.1", 1) == "http://10.0.0.1:1"


def test_address_that_is_not_ours_is_a_configuration_error(world: World) -> None:
    """The message names it; so does that of a name that nothing resolves."""
    for address in ("192.0.2.1", "2001:db8::1"):
        with pytest.raises(ConfigurationError, match=f"cannot serve HTTP on {address}:"):
            HttpPort(
                address,
                0,
                registry=world.metrics.registry,
                readiness=lambda: Readiness(True),
                status=lambda: b"",
            )


def test_port_in_use_is_a_configuration_error(world: World) -> None:
    """The message names address and port."""
    with pytest.raises(ConfigurationError, match=f"127.0.0.1:{world.port.port}"):
        HttpPort(
            "127.0.0.1",
            world.port.port,
            registry=world.metrics.registry,
            readiness=lambda: Readiness(True),
            status=lambda: b"",
        )


def test_stop_frees_the_port() -> None:
    """After stop nothing listens; stopping twice, or before start, is harmless."""
    world = World()
    world.port.stop()
    world.port.stop()
    with pytest.raises(OSError, match="refused"):
        world.ask("/healthz")
    never = HttpPort(
        "127.0.0.1", 0, registry=world.metrics.registry, readiness=lambda: Readiness(True), status=lambda: b""
    )
    never.stop()


def test_stop_waits_for_pages_that_are_made_and_not_for_others() -> None:
    """`stop` ends in a moment while a page hangs; the thread that made it writes to nothing afterwards."""
    hangs = threading.Event()

    def page() -> HttpAnswer:
        hangs.wait(30)
        return HttpAnswer("text/plain", b"late")

    world = World(pages={"/hangs": page})
    with socket.create_connection(("127.0.0.1", world.port.port), timeout=30) as client:
        client.sendall(b"GET /hangs HTTP/1.1\r\nHost: x\r\n\r\n")
        time.sleep(0.3)
        began = time.monotonic()
        world.port.stop()
        assert time.monotonic() - began < 5
        read, write = os.pipe()  # takes the descriptors that were freed
        hangs.set()
        time.sleep(0.5)
        os.set_blocking(read, False)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
        for descriptor in (read, write):
            os.close(descriptor)
