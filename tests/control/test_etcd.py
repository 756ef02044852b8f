"""The client of etcd, against members that answer what no etcd does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from weightbus.control.etcd import Etcd, EtcdUnavailable


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    content = b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  as the base names it
        pass


@pytest.fixture
def member() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("content", [b"", b"[]", b'{"header":{"revision":"1\xff"},"succeeded":true}', b"\xff"])
def test_what_no_etcd_answers_is_no_answer(member: str, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text or not: another process may listen at the port."""
    monkeypatch.setattr(_Handler, "content", content)
    with closing(Etcd((member,), 2.0)) as etcd, pytest.raises(EtcdUnavailable, match="is it running"):
        etcd.txn([], [])
