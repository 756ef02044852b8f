"""The bar of long work: silent unless it is long and somebody looks."""

import io

import pytest
from rich.console import Console

from weightbus.trainer_agent.publish import bucket_staging as progress


def written(*, terminal: bool, long: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(progress, "LONG_S", -1.0 if long else 3600.0)
    out = io.StringIO()
    with progress.ProgressBar("reading version 7", 100, Console(file=out, force_terminal=terminal)) as bar:
        bar.advance(40)
        bar.advance(60)
    return out.getvalue()


@pytest.mark.parametrize(("terminal", "long"), [(False, True), (True, False)])
def test_it_is_silent(terminal: bool, long: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs get no control characters, and short rounds no flicker."""
    assert written(terminal=terminal, long=long, monkeypatch=monkeypatch) == ""


def test_it_shows_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, once the work is long."""
    assert "reading version 7" in written(terminal=True, long=True, monkeypatch=monkeypatch)
