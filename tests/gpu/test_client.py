"""The client that programs measure with. No GPU."""

import http.server
import itertools
import threading
from collections.abc import Generator

import pytest

from tests.gpu import client, rig
from tests.kit.waiting import readable


class Server(http.server.BaseHTTPRequestHandler):
    """Generates for as long as somebody reads, or refuses."""

    refuses = False
    most = 0
    """Tokens after which it ends by itself; 0: none."""
    pace = threading.Event()

    def do_POST(self) -> None:
        self.send_response(400 if self.refuses else 200)
        self.end_headers()
        if self.refuses:
            self.wfile.write(b"no")
            return
        try:
            for count in itertools.count(1):
                self.wfile.write(b'data: {"text": "x"}\n\n')
                if count == self.most:
                    return
                self.pace.wait(0.001)
        except OSError:  # it has heard enough
            return

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  the name is http.server's
        """Nothing."""


class Servers(http.server.ThreadingHTTPServer):
    """No thread outlives it."""

    daemon_threads = False


@pytest.fixture
def url() -> Generator[str]:
    with Servers(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_client_tells_how_its_tokens_came(url: str) -> None:
    """Some before it is said that it generates, some after it was told to stop."""
    request = client.Client(url, 1000)
    request.start()
    request.stop()
    request.close()
    found = request.gaps()
    assert found["tokens"] >= 59
    assert found["pause_gap_s"] >= 0
    assert not found["client"]


def test_a_refused_client_says_why(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no gap, and nobody waits for its tokens."""
    monkeypatch.setattr(Server, "refuses", True)
    request = client.Client(url, 1000)
    request.start()
    request.stop()
    request.close()
    assert request.gaps() == {"client": "400: no"}


def test_a_client_that_is_not_served_to_the_end_has_no_gap(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it should have seen may have come after its last token."""
    monkeypatch.setattr(Server, "most", 40)
    request = client.Client(url, 1000)
    request.start()
    rig.wait("its last token", lambda: readable(request._process.stdout.fileno(), 0.1), 60, lambda: None)
    request.stop()
    request.close()
    assert request.gaps() == {"client": "it ended before it was told to"}
