"""The folder in which a sidecar remembers."""

import stat
from pathlib import Path

import pytest

from weightbus.engine_agent.errors import StateUnreadable
from weightbus.engine_agent.record_file import RecordFile
from weightbus.engine_agent.settings import EngineAgentSettings


def test_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    """What a sidecar remembers is nobody else's to change."""
    folder = tmp_path / "state" / "weightbus"
    assert RecordFile(folder, "e0").read() is None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_folder_that_cannot_be_made_names_the_flag(tmp_path: Path) -> None:
    """An agent that could not remember does not start."""
    (tmp_path / "file").touch()
    with pytest.raises(StateUnreadable, match=r"file/state.*--state-dir"):
        RecordFile(tmp_path / "file" / "state", "e0")


def test_state_does_not_follow_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A sidecar restarted from another folder knows whether its server was left half loaded."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert EngineAgentSettings(name="e0", channel="policy").state_dir == tmp_path / "weightbus"
