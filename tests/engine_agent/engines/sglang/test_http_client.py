"""What servers answer, as bytes, and how long they may take for it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpcore
import pytest

from tests.kit.trickle import trickling
from weightbus.engine_agent.engines.registry import Keys
from weightbus.engine_agent.engines.sglang import http_client as wire
from weightbus.engine_agent.engines.sglang.http_client import HttpClient, _object, _reason
from weightbus.engine_agent.errors import ServerRefused, ServerSilent, ServerUnreachable

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n"


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"status":"\xff"}', b"\xff"])
def test_an_answer_that_is_no_object_is_a_refusal(content: bytes) -> None:
    """Text or not: the call has failed, and the agent lives."""
    response = httpcore.Response(200, content=content)
    response.read()
    with pytest.raises(ServerRefused, match="expected a JSON object"):
        _object("/get_server_info", response)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"\n<!DOCTYPE HTML><html><title>Error response</title></html>", "with a web page"),
        (b"Bad Gateway", "Bad Gateway"),
        (b'{"message": "<no>", "detail": "secret"}', "<no>"),
    ],
)
def test_a_refusal_is_one_sentence(content: bytes, told: str) -> None:
    """Another kind of server, or a proxy, answers with a page of which no reader of the error has anything."""
    response = httpcore.Response(404, content=content)
    response.read()
    assert _reason(response) == told


@pytest.mark.parametrize("answer", [b"", HEAD], ids=["header", "body"])
def test_a_call_ends_at_its_deadline_however_often_a_byte_comes(answer: bytes) -> None:
    """Pauses and aborts count on it. Each read is in time, and the call is not."""
    with trickling(answer) as url:
        server, began = HttpClient(url, Keys()), time.monotonic()
        with contextlib.closing(server), pytest.raises(ServerSilent, match=r"no answer in 0\.5 s"):
            server.get("/model_info", 0.5)
        assert time.monotonic() - began < 2.0


def test_calls_under_way_end_with_it() -> None:
    """A sidecar that is to end while its server hangs in a call would wait for that call's deadline."""
    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as thread:
        server, began = HttpClient(f"http://127.0.0.1:{silent.getsockname()[1]}", Keys()), time.monotonic()
        call = thread.submit(server.post, "/load", {}, 60.0)
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(65536)
            time.sleep(0.5)
            server.close()
            with pytest.raises(ServerUnreachable):
                call.result(10.0)
        assert time.monotonic() - began < 10.0


def test_a_body_that_is_taken_a_little_at_a_time_ends_at_the_deadline_too() -> None:
    """Each write is in time."""
    over = threading.Event()

    def sip() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            while not over.wait(0.02) and connection.recv(1 << 18):
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=sip).start()
        server = HttpClient(f"http://127.0.0.1:{listener.getsockname()[1]}", Keys())
        began = time.monotonic()
        with contextlib.closing(server), pytest.raises(ServerSilent):
            server.post("/load", {"payload": "x" * (64 << 20)}, 0.5)
        assert time.monotonic() - began < 2.0
        over.set()


def test_an_answer_without_an_end_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not fill the memory of the sidecar."""
    monkeypatch.setattr(wire, "MAX_ANSWER", 1 << 20)
    with trickling(HEAD, then=b"x" * (1 << 18), step_s=0.001) as url:
        server = HttpClient(url, Keys())
        with contextlib.closing(server), pytest.raises(ServerUnreachable, match="more than 1048576 bytes came"):
            server.get("/model_info", 30.0)


class Handler(BaseHTTPRequestHandler):
    """Answers {}, and keeps connections."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args: object) -> None:
        del args


def test_a_connection_serves_call_after_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one call has used up is not missing to the next."""
    monkeypatch.setattr(wire, "MAX_ANSWER", 400)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, args=(0.05,)).start()
        with contextlib.closing(HttpClient(f"http://127.0.0.1:{listener.server_port}", Keys())) as server:
            began = time.monotonic()
            while time.monotonic() - began < 0.3:
                assert server.get("/model_info", 0.2) == {}
            assert len(server._network.sockets) == 1
        listener.shutdown()
