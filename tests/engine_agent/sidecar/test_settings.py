"""What is said of an engine agent's settings, and where the server's keys come from."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from weightbus.control.cli.entry_point import main
from weightbus.control.cli.settings import load_settings
from weightbus.control.protocol.errors import ConfigurationError
from weightbus.engine_agent.engines.registry import Keys
from weightbus.engine_agent.errors import KeyFileUnusable
from weightbus.engine_agent.sidecar.driver import EngineAgent
from weightbus.engine_agent.sidecar.settings import SECTION, EngineAgentSettings, read_keys

KEYS = pytest.mark.parametrize("key", ["api_key", "admin_api_key"])
SECRET = "open-sesame"


@pytest.fixture(autouse=True)
def _quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTBUS_CONFIG", raising=False)


def settings(**changes: object) -> EngineAgentSettings:
    return load_settings(EngineAgentSettings, SECTION, flags={"name": "e0", "channel": "c", **changes}).value


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


@KEYS
def test_keys_of_the_server_are_never_shown(key: str) -> None:
    """Neither --check-config nor the agent's log says what opens the server."""
    environ = {f"WEIGHTBUS_ENGINE_AGENT_{key.upper()}": SECRET}
    resolved = load_settings(EngineAgentSettings, SECTION, environ=environ, flags={"name": "e0", "channel": "c"})
    assert getattr(resolved.value, key) == SECRET
    shown = resolved.render()
    assert SECRET not in shown
    assert f'{key} = "******"' in shown


@KEYS
def test_check_config_shows_where_a_key_is_and_not_what(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file's name is no secret; its content does not appear."""
    path = written(tmp_path / "key", SECRET)
    flag = f"--{key.replace('_', '-')}-file={path}"
    assert main(["engine-agent", "--name=e0", "--channel=c", flag, "--check-config", "--insecure-loopback"]) == 0
    shown = capsys.readouterr().out
    assert f'{key}_file = "{path}"' in "".join(shown.split("\n"))
    assert SECRET not in shown


@KEYS
def test_keys_are_no_flags(key: str) -> None:
    """Command lines can be read by every user: there is no flag for a key, and no abbreviation is taken for one."""
    flag = f"--{key.replace('_', '-')}={SECRET}"
    with pytest.raises(SystemExit):
        main(["engine-agent", "--name=e0", "--channel=c", flag, "--check-config"])


def test_keys_come_from_files(tmp_path: Path) -> None:
    """One line, whatever ends it; files for the owner alone are nothing to warn of."""
    one, two = written(tmp_path / "one", "first\n"), written(tmp_path / "two", "second")
    assert read_keys(settings(api_key_file=str(one), admin_api_key_file=str(two))) == (Keys("first", "second"), {})
    assert read_keys(settings()) == (Keys(), {})


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_key_file_that_others_can_read_is_used_with_a_warning(tmp_path: Path, mode: int) -> None:
    """The warning names the file, its mode and what to do; the key is not in it."""
    path = written(tmp_path / "key", SECRET, mode)
    with capture_logs() as logs:
        EngineAgent(settings(admin_api_key_file=str(path), state_dir=str(tmp_path)))
    (warning,) = [line for line in logs if line["event"] == "key_file_exposed"]
    assert warning["log_level"] == "warning"
    assert warning["reason"] == f"others may read it (mode {mode:04o}): chmod 600 {path}"
    assert SECRET not in str(logs)


@pytest.mark.parametrize(("text", "said"), [(None, "cannot be read"), ("", "is empty"), ("open sesame", "2 words")])
def test_a_file_without_a_key(tmp_path: Path, text: str | None, said: str) -> None:
    """Refused at the start, saying which setting and what is wrong with the file, never what it holds."""
    path = tmp_path / "key"
    if text is not None:
        written(path, text)
    with pytest.raises(KeyFileUnusable, match=said) as refused:
        read_keys(settings(api_key_file=str(path)))
    assert isinstance(refused.value, ConfigurationError)
    assert str(refused.value).startswith("api_key_file = ")
    assert "sesame" not in str(refused.value)


def test_a_key_is_given_once() -> None:
    """Two sources of one key could differ: which one counts would be a guess."""
    environ = {"WEIGHTBUS_ENGINE_AGENT_API_KEY": SECRET}
    flags = {"name": "e0", "channel": "c", "api_key_file": "/run/key"}
    with pytest.raises(ConfigurationError, match="api_key and api_key_file are both given") as refused:
        load_settings(EngineAgentSettings, SECTION, environ=environ, flags=flags)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_key_in_a_settings_file_that_others_can_read(tmp_path: Path, mode: int) -> None:
    """It is a secret file like any other, and is warned of; without a key in it the file is no secret."""
    text = f'[{SECTION}]\nname = "e0"\nchannel = "c"\n'
    with_key = written(tmp_path / "key.toml", f'{text}api_key = "{SECRET}"\n', mode)
    found = load_settings(EngineAgentSettings, SECTION, file=with_key).exposed()
    assert bool(found) is (mode == 0o644)
    assert SECRET not in str(found)
    assert not load_settings(EngineAgentSettings, SECTION, file=written(tmp_path / "plain.toml", text, mode)).exposed()


def test_settings_come_from_environment_and_file(tmp_path: Path) -> None:
    """The section has the name that the loader knows: neither a variable nor a file is passed over in silence."""
    file = tmp_path / "w.toml"
    file.write_text('[engine_agent]\nname = "e0"\nchannel = "c"\n')
    environ = {"WEIGHTBUS_ENGINE_AGENT_API_KEY": SECRET}
    found = load_settings(EngineAgentSettings, SECTION, file=file, environ=environ).value
    assert (found.name, found.channel, found.api_key) == ("e0", "c", SECRET)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"server": "foo"}, "server = 'foo': expected http://HOST:PORT"),
        ({"server": "http://h:port"}, "expected http://HOST:PORT"),
        ({"url": "10.0.0.7:30000"}, "url = '10.0.0.7:30000': expected http://HOST:PORT"),
        ({"coordinator": "10.0.0.5:5750"}, "coordinator = '10.0.0.5:5750': expected tcp://HOST:PORT"),
        ({"coordinator": "tcp://10.0.0.5:5750,tcp://10.0.0.6"}, "'tcp://10.0.0.6': expected tcp://HOST:PORT"),
        ({"engine": "abacus"}, "there is no engine 'abacus': choose one of sglang"),
        ({"poll_s": "soon"}, "poll_s = 'soon' (flag --poll-s): expected a number"),
        ({"http_port": "1.5"}, "http_port = '1.5' (flag --http-port): expected a whole number"),
    ],
)
def test_what_can_only_fail_later_fails_at_once(changes: dict[str, str], said: str) -> None:
    """`--check-config` and a start refuse alike, in words of settings and not of Python."""
    with pytest.raises(ConfigurationError) as refused:
        settings(**changes)
    assert said in str(refused.value)


def test_check_config_reads_the_key_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is not there is found before anything is started."""
    flag = f"--admin-api-key-file={tmp_path / 'nowhere'}"
    assert main(["engine-agent", "--name=e0", "--channel=c", flag, "--check-config"]) == 2
    assert "No such file" in capsys.readouterr().err


def test_check_config_reads_the_bus_keys_and_the_allow_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The settings are shown, then what a start would refuse is: the sidecar's key, its coordinator's, its trainers."""
    asked = ["engine-agent", "--name=e0", "--channel=c", f"--keys={tmp_path}", "--check-config"]
    assert main(asked) == 2
    shown = capsys.readouterr()
    assert 'name = "e0"' in shown.out
    assert "coordinator.pub: cannot be read" in shown.err
    assert main(["keygen", f"--keys={tmp_path}", "e0"]) == 0
    assert main(asked) == 0
    capsys.readouterr()
    (tmp_path / "trust.toml").rename(tmp_path / "elsewhere")
    assert main(asked) == 2
    assert "trust.toml" in capsys.readouterr().err
    (tmp_path / "elsewhere").rename(tmp_path / "trust.toml")
    (tmp_path / "agents/e0.key").chmod(0o644)
    assert main(asked) == 2
    assert "others may read it (mode 0644)" in capsys.readouterr().err


@KEYS
def test_a_mask_is_no_secret(key: str) -> None:
    """Settings that were shown, and read back, do not open a server with stars."""
    with pytest.raises(ConfigurationError, match="give the secret itself"):
        load_settings(
            EngineAgentSettings,
            SECTION,
            environ={f"WEIGHTBUS_ENGINE_AGENT_{key.upper()}": "******"},
            flags={"name": "e0", "channel": "c"},
        )
