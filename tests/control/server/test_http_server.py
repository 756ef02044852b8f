"""The HTTP port, over real connections."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator

import pytest
import structlog

from weightbus.control.protocol.errors import ConfigurationError
from weightbus.control.server import http_server as http_module, metrics as telemetry
from weightbus.control.server.http_server import HttpPort, Readiness
from weightbus.control.server.metrics import Metrics, MetricSource


class World:
    """What the port shows, to be changed by tests."""

    def __init__(self) -> None:
        self.verdict = Readiness(True)
        self.broken = False
        self.metrics = Metrics(MetricSource.COORDINATOR)
        self.port = HttpPort(
            "127.0.0.1",
            0,
            registry=self.metrics.registry,
            readiness=lambda: self.verdict,
            status=self._status,
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
        return b'{"boot":1}'


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


def test_silent_client_is_dropped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without a request ends by itself, and delays no other."""
    handler = world.port._server.RequestHandlerClass
    monkeypatch.setattr(handler, "timeout", 2.0)
    with socket.create_connection(("127.0.0.1", world.port.port), timeout=30) as idle:
        assert world.ask("/healthz")[0] == 200
        assert idle.recv(1) == b""
    assert http_module.REQUEST_TIMEOUT_S <= 10


def test_client_that_goes_away_costs_no_traceback(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    """A scraper that hangs up is a line for debugging; what is our fault stays an error with its cause."""
    with structlog.testing.capture_logs() as logs:
        for problem in (BrokenPipeError(), ConnectionResetError(), TimeoutError(), ValueError("ours")):
            try:
                raise problem  # noqa: TRY301
            except Exception:  # noqa: BLE001
                world.port._server.handle_error(None, ("127.0.0.1", 1))
    assert [entry["log_level"] for entry in logs] == ["debug", "debug", "debug", "error"]
    assert capfd.readouterr().err == ""


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
