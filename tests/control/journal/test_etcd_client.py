"""The client of etcd, against members that answer what no etcd does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from weightbus.control.journal.etcd import Etcd, EtcdUnavailable, Login, parse_url, read_login
from weightbus.control.protocol.errors import ConfigurationError


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


def test_a_user_in_the_address_is_refused() -> None:
    """Addresses are shown by --check-config and logged; nor would it be used."""
    with pytest.raises(ConfigurationError, match="store_login_file") as refused:
        parse_url("etcd://root:secret@127.0.0.1:2379")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [
        ("root:secret", 0o644, "others may read it"),
        ("root:secret", 0o640, "others may read it"),
        ("root:secret", 0o604, "others may read it"),
        ("root", 0o600, "one line USER:PASSWORD"),
        (":secret", 0o600, "one line USER:PASSWORD"),
        ("root:secret\nmore", 0o600, "one line USER:PASSWORD"),
        (None, 0o600, "cannot be read"),
    ],
)
def test_a_login_that_is_none_or_no_secret_is_refused(tmp_path: Path, text: str | None, mode: int, said: str) -> None:
    """By name, and without what it holds."""
    path = tmp_path / "login"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with pytest.raises(ConfigurationError, match=said) as refused:
        read_login(path)
    assert "secret" not in str(refused.value)


def test_a_login_is_read_and_its_password_not_shown(tmp_path: Path) -> None:
    """A password may hold colons."""
    path = tmp_path / "login"
    path.write_text("root:se:cret\n")
    path.chmod(0o600)
    assert read_login(path) == Login("root", "se:cret")
    assert "cret" not in repr(read_login(path))
    assert read_login(None) is None
