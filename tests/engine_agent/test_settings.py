"""What is said of an engine agent's settings."""

from pathlib import Path

import pytest

from weightbus.control.settings import load
from weightbus.engine_agent.settings import SECTION, EngineAgentSettings


@pytest.mark.parametrize("key", ["api_key", "admin_api_key"])
def test_keys_of_the_server_are_never_shown(key: str) -> None:
    """Neither --check-config nor the agent's log says what opens the server."""
    flags = {"name": "e0", "channel": "c", key: "open-sesame"}
    resolved = load(EngineAgentSettings, SECTION, file=None, environ={}, flags=flags)
    assert getattr(resolved.value, key) == "open-sesame"
    shown = resolved.render()
    assert "open-sesame" not in shown
    assert f'{key} = "******"' in shown


def test_settings_come_from_environment_and_file(tmp_path: Path) -> None:
    """The section has the name that the loader knows: neither a variable nor a file is passed over in silence."""
    file = tmp_path / "w.toml"
    file.write_text('[engine_agent]\nname = "e0"\nchannel = "c"\n')
    environ = {"WEIGHTBUS_ENGINE_AGENT_API_KEY": "open-sesame"}
    found = load(EngineAgentSettings, SECTION, file=file, environ=environ).value
    assert (found.name, found.channel, found.api_key) == ("e0", "c", "open-sesame")
