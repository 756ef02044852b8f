"""What a coordinator shows is read by a deadline for all of it, from the port that was named."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import msgspec
import pytest
from rich.console import Console

from tests.kit.status import EVERYTHING
from tests.kit.trickle import trickling
from weightbus.control.cli import status_view as page
from weightbus.control.cli.entry_point import main
from weightbus.control.cli.status_view import fetch, print_unwrapped, render
from weightbus.control.machine import parse
from weightbus.control.protocol.errors import ConfigurationError, CoordinatorUnreachable

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n"


@pytest.mark.parametrize("answer", [b"", HEAD], ids=["header", "body"])
def test_a_coordinator_that_trickles_is_left_at_the_deadline(answer: bytes) -> None:
    """Each read is in time, and the page is not."""
    with trickling(answer) as url:
        began = time.monotonic()
        with pytest.raises(CoordinatorUnreachable, match=r"it was not complete after 0\.5 s"):
            fetch(url, 0.5)
        assert time.monotonic() - began < 2.0


def test_a_page_without_an_end_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not fill memory."""
    monkeypatch.setattr(page, "MAX_PAGE_BYTES", 1 << 20)
    with (
        trickling(HEAD, then=b"x" * (1 << 18), step_s=0.001) as url,
        pytest.raises(CoordinatorUnreachable, match="more than 1048576 bytes came"),
    ):
        fetch(url, 30.0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://", "http://:80", "http://h:x", "ftp://h:1", "h"])
@pytest.mark.parametrize("command", ["plan", "status"])
def test_what_is_no_address_is_not_asked(url: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor another port: 99999 would be 34463."""
    with pytest.raises(ConfigurationError, match="expected http://HOST:PORT"):
        fetch(url, 1.0)
    assert main([command, "--url", url]) == 2
    assert "expected http://HOST:PORT" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "status"])
def test_no_command_waits_for_ever(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A day is enough for a page; more than a clock can count is a typing error."""
    assert main([command, "--url", "http://127.0.0.1:1", "--timeout-s", "1e300"]) == 2
    assert "timeout_s" in capsys.readouterr().err


def shown(width: int) -> str:
    """The status as a terminal of this width gets it."""
    console = Console(width=width, file=(file := io.StringIO()), force_terminal=True, color_system=None)
    print_unwrapped(console, render(EVERYTHING))
    return file.getvalue()


@pytest.mark.parametrize("width", [10, 40, 80, 200])
def test_no_url_and_no_command_is_broken(width: int) -> None:
    """Whatever the terminal's width, a line ends where its content does: what is shown can be copied."""
    assert shown(width) == shown(1000)
    for engine in EVERYTHING.channels["policy"].engines.values():
        assert f" {engine.url} " in shown(width)
    assert "weightbus trust add e2 --role engine --channels policy" in shown(width)


def test_trainer_last_round_and_transport_are_shown() -> None:
    """With the phases of the round and by which transport each engine took its version."""
    text = shown(80)
    assert "channel policy: version 41, epoch 9, 1 of 3 engines ready, of run run-7\n" in text
    assert "t0: 4 ranks at 10.0.0.5 (cuda), announced version 42 last, lease for version 42 (epoch 9)" in text
    assert "t1: 1 rank at an unknown address (unknown device)\n" in text
    assert "round       transferring version 42, 1.5 s, at most 1 paused" in text
    assert "last round  version 41 committed 12 s ago, 1.25 s (prepare 0.25, transfer 1.00); " in text
    assert "engines: 2 committed, 1 left over direct, local" in text
    assert re.search(r"e0 +serving +41 +0 +direct +0\.5\.17 cuda tp2 +http://10\.0\.0\.7:30000 +yes\n", text)


def test_the_view_reads_what_an_older_coordinator_says() -> None:
    """Its document has no trainers and no finished rounds; the view does without."""
    known = msgspec.to_builtins(EVERYTHING)
    for name in ("trainers", "rounds"):
        del known["channels"]["policy"][name]
    console = Console(width=80, file=(file := io.StringIO()))
    print_unwrapped(console, render(parse(msgspec.json.encode(known))))
    assert "lease of t0 for version 42" in file.getvalue()


@pytest.fixture
def coordinator_url() -> Iterator[str]:
    """The address of a server that always answers with one status."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(msgspec.json.encode(EVERYTHING))

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name is the base class's
            del format, args

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_watch_into_a_pipe_writes_lines_at_once(coordinator_url: str) -> None:
    """Each status comes when it was read, without a control code, and a reader that has seen enough ends it quietly."""
    command = [sys.executable, "-m", "weightbus.control", "status", "--watch", "--interval-s=0.1"]
    with subprocess.Popen(
        [*command, f"--url={coordinator_url}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        late = threading.Timer(60.0, process.kill)
        late.start()
        try:
            lines: list[str] = []
            while sum(line.startswith("coordinator running") for line in lines) < 3:
                lines.append(process.stdout.readline())
                assert lines[-1], "it ended"
            process.stdout.close()
            process.wait()
            assert not re.search("[\x00-\x09\x0b-\x1f]", "".join(lines))
            assert process.stderr.read() == ""
        finally:
            late.cancel()
            process.kill()


def test_watch_clears_a_terminal(coordinator_url: str) -> None:
    """There, the newest status stands at the top."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "weightbus.control", "status", "--watch", "--interval-s=0.1"]
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(
        [*command, f"--url={coordinator_url}"], stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        late = threading.Timer(60.0, process.kill)
        late.start()
        try:
            text = b""
            while text.count(b"\x1b[2J\x1b[H") < 2:
                text += os.read(ours, 1 << 16)
        finally:
            late.cancel()
            process.kill()
            os.close(ours)
