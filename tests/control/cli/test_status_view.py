"""What a coordinator shows is read by a deadline for all of it, from the port that was named."""

from __future__ import annotations

import time

import pytest

from tests.kit.trickle import trickling
from weightbus.control.cli import status_view as page
from weightbus.control.cli.entry_point import main
from weightbus.control.cli.status_view import fetch
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
