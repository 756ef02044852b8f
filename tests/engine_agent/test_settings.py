"""A sidecar is told what to do by more than its flags."""

from pathlib import Path

from weightbus.control import settings
from weightbus.engine_agent.settings import SECTION, EngineAgentSettings


def test_environment_and_file_are_read(tmp_path: Path) -> None:
    """Its section is one that a file may hold, and its variables are those that the documents name."""
    file = tmp_path / "weightbus.toml"
    file.write_text('[engine_agent]\nname = "e0"\nchannel = "policy"\n')
    environ = {"WEIGHTBUS_ENGINE_AGENT_POLL_S": "3"}
    given = settings.load(EngineAgentSettings, SECTION, file=file, environ=environ, flags={}).value
    assert (given.name, given.channel, given.poll_s) == ("e0", "policy", 3.0)
