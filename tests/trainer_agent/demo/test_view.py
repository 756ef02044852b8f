"""What a person sees of the demo."""

from __future__ import annotations

import pytest

from weightbus.trainer_agent.demo.round_records import ProgressView


def test_what_programs_say_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    """The end of a server's log is no markup, has no effect on the terminal, and keeps its lines."""
    view = ProgressView(as_json=False)
    view.say("the end of it:\nlost [/dev/shm] :x: \x1b[2J")
    with view.awaiting("[/x]"):
        pass
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" s  the end of it:")
    assert lines[1] == r"lost [/dev/shm] :x: \x1b[2J"
    assert lines[2].endswith(" s  [/x]")
