"""Settings: where a value comes from, what is refused, how it is shown."""

from __future__ import annotations

import argparse
import enum
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from weightbus.control.cli import settings
from weightbus.control.cli.settings import ResolvedSettings, SettingSource, load_settings
from weightbus.control.machine.states import Limits
from weightbus.control.protocol.errors import ConfigurationError
from weightbus.control.server.settings import CoordinatorSettings


class Mood(enum.StrEnum):
    """An enum among the settings."""

    CALM = "calm"
    WILD = "wild"


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """A setting of every type."""

    name: Annotated[str, Meta(description="who it is for")]
    count: Annotated[int, Meta(description="50 % of what", ge=0)] = 3
    wait_s: float = 2.5
    folder: Path = Path("/tmp")
    maybe: Path | None = None
    mood: Mood = Mood.CALM
    moods: tuple[Mood, ...] = ()
    numbers: tuple[int, ...] = (1, 2)
    loud: bool = False
    key: Annotated[str | None, Meta(extra={"secret": True})] = None

    def __post_init__(self) -> None:
        if self.count == 13:
            raise ValueError("count = 13 brings bad luck")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weightbus.toml"
    path.write_text('[demo]\nname = "file"\ncount = 1\nwait_s = 4\nmoods = ["wild"]\n[trainer]\nother = 1\n')
    return path


def resolve(
    environ: dict[str, str] | None = None, file: Path | None = None, **flags: object
) -> ResolvedSettings[Example]:
    return load_settings(Example, "demo", file=file, environ=environ or {}, flags=flags)


def test_precedence(file: Path) -> None:
    """A flag wins over the environment, that over the file, that over the default; each value knows its origin."""
    found = resolve({"WEIGHTBUS_DEMO_NAME": "environ", "WEIGHTBUS_DEMO_COUNT": "2"}, file, name="flag")
    assert (found.value.name, found.value.count, found.value.wait_s) == ("flag", 2, 4.0)
    sources = {name: origin.source for name, origin in found.origins.items()}
    assert sources["name"] is SettingSource.FLAG
    assert sources["count"] is SettingSource.ENVIRONMENT
    assert sources["wait_s"] is SettingSource.FILE
    assert sources["loud"] is SettingSource.DEFAULT
    assert str(found.origins["count"]) == "environment WEIGHTBUS_DEMO_COUNT"


def test_file_named_by_the_environment(file: Path) -> None:
    """WEIGHTBUS_CONFIG names the file where no flag does."""
    assert resolve({"WEIGHTBUS_CONFIG": str(file)}).value.name == "file"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("count", "1_000", 1000),
        ("wait_s", "3", 3.0),
        ("folder", "/x/y", Path("/x/y")),
        ("maybe", "/x", Path("/x")),
        ("maybe", "none", None),
        ("mood", "wild", Mood.WILD),
        ("moods", "calm, wild", (Mood.CALM, Mood.WILD)),
        ("moods", "", ()),
        ("numbers", "7", (7,)),
        ("loud", "yes", True),
        ("loud", "0", False),
        ("key", "s3cret", "s3cret"),
    ],
)
def test_text_becomes_a_value(name: str, text: str, value: object) -> None:
    """Text of flags and variables is read as the field's type."""
    assert getattr(resolve({f"WEIGHTBUS_DEMO_{name.upper()}": text}, name="x").value, name) == value


@pytest.mark.parametrize(
    ("environ", "flags", "said"),
    [
        ({}, {}, "name is needed: give --name, or set WEIGHTBUS_DEMO_NAME"),
        ({}, {"name": "x", "count": "-1"}, r"count = '-1' \(flag --count\)"),
        ({}, {"name": "x", "count": "many"}, "count = 'many'"),
        ({}, {"name": "x", "mood": "odd"}, "mood = 'odd'"),
        ({}, {"name": "x", "loud": "maybe"}, "true or false"),
        ({}, {"name": "x", "count": "13"}, "bad luck"),
        ({}, {"names": "x"}, "did you mean 'name'"),
        ({"WEIGHTBUS_DEMO_CUONT": "1"}, {"name": "x"}, "WEIGHTBUS_DEMO_CUONT: .*did you mean 'COUNT'"),
        ({"WEIGHTBUS_DEMO_ZZZ": "1"}, {"name": "x"}, "known: COUNT"),
        ({"WEIGHTBUS_CONFIG": "/nowhere.toml"}, {"name": "x"}, "cannot be read"),
    ],
)
def test_refused(environ: dict[str, str], flags: dict[str, object], said: str) -> None:
    """What is wrong is named with where it stands and what would be right."""
    with pytest.raises(ConfigurationError, match=said):
        load_settings(Example, "demo", environ=environ, flags=flags)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[demo]\ncuont = 1\n", "did you mean 'count'"),
        ("[demoo]\n", r"no section \[demoo\] is known; did you mean 'demo'"),
        ("demo = 1\n", r"must be a section"),
        ("[demo]\ncount = 'x'\n", "count = 'x'"),
        ("[demo]\nfolder = 3\n", "expected Path, found int"),
        ("[demo\n", "is not TOML"),
    ],
)
def test_file_refused(tmp_path: Path, text: str, said: str) -> None:
    """A file with an unknown name, or a value of the wrong type, stops the process before it starts."""
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        resolve(file=path, name="x")


def test_secret_is_never_shown() -> None:
    """Neither in the resolved settings nor in an error."""
    assert "s3cret" not in resolve({"WEIGHTBUS_DEMO_KEY": "s3cret"}, name="x").render()

    class Bounded(msgspec.Struct, frozen=True, kw_only=True):
        key: Annotated[str, Meta(extra={"secret": True}, min_length=20)]

    with pytest.raises(ConfigurationError) as error:
        load_settings(Bounded, "demo", flags={"key": "s3cret"})
    assert "s3cret" not in str(error.value)


def test_rendered_settings_can_be_read_again(tmp_path: Path) -> None:
    """What --check-config prints is a file that gives the same settings."""
    found = resolve(name='quo"ted', moods="wild,calm", loud=True, maybe="none", wait_s="0.5")
    path = tmp_path / "again.toml"
    path.write_text(found.render())
    tomllib.loads(found.render())
    assert resolve(file=path).value == found.value
    assert "# flag --loud" in found.render()


def test_flags_are_made_from_fields(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One flag for each field, with its description and default; one that is not given leaves the others their say."""
    parser = argparse.ArgumentParser()
    settings.add_settings_flags(parser, Example)
    text = parser.format_help()
    assert "who it is for (needed)" in text
    assert "50 % of what (default: 3)" in text
    assert "{calm,wild}" in text
    monkeypatch.setenv("WEIGHTBUS_DEMO_COUNT", "9")
    args = parser.parse_args(["--config", str(file), "--no-loud", "--wait-s", "1"])
    found = settings.settings_from_args(Example, "demo", args)
    assert (found.value.name, found.value.count, found.value.wait_s, found.value.loud) == ("file", 9, 1.0, False)
    assert found.origins["loud"].source is SettingSource.FLAG
    assert args.check_config is False


def test_union_of_types_is_no_setting() -> None:
    """A field that could be two things is a mistake of ours, found when the command is built."""

    class Odd(msgspec.Struct, frozen=True):
        what: int | str = 1

    with pytest.raises(TypeError, match="one type"):
        load_settings(Odd, "demo")


def test_sections_do_not_begin_each_other() -> None:
    """Environment variables start with the section's name: none may be the beginning of another."""
    for one in settings.SECTIONS:
        assert not [other for other in settings.SECTIONS if other != one and other.startswith(f"{one}_")]


def test_coordinator_defaults_are_the_limits_defaults() -> None:
    """The machine's waits have one default in both places; the ports are those of the documentation."""
    found = load_settings(CoordinatorSettings, "coordinator").value
    assert found.limits() == Limits()
    assert (found.router_port, found.http_port, found.bind) == (5750, 5752, "127.0.0.1")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"heartbeat_s": "6"}, "less than two heartbeats"),
        ({"lease_s": "1.5"}, "less than two heartbeats of 1 s: one late heartbeat would end a lease"),
        ({"takeover_s": "0.5"}, "less than one heartbeat of 1 s: one late heartbeat would give an agent's name away"),
        ({"bind": "localhost"}, "not an IP address"),
        ({"http_port": "70000"}, "http_port"),
        ({"lease_s": "0"}, "lease_s"),
        ({"router_port": "6000", "http_port": "6000"}, "router_port and http_port are both 6000: give each a port"),
        ({"http_port": "5750"}, "router_port and http_port are both 5750"),
        ({"http_port": "5750", "bind": "0.0.0.0", "http_bind": "10.0.0.5"}, "router_port and http_port"),
    ],
)
def test_coordinator_settings_refused(flags: dict[str, object], said: str) -> None:
    """Settings that cannot work together, or at all."""
    with pytest.raises(ConfigurationError, match=said):
        load_settings(CoordinatorSettings, "coordinator", flags=flags)


@pytest.mark.parametrize(
    "flags",
    [{"router_port": "0", "http_port": "0"}, {"http_port": "5750", "bind": "10.0.0.5"}],
)
def test_ports_that_do_not_meet(flags: dict[str, object]) -> None:
    """Whatever is free is never the same twice, and one port of two addresses is two ports."""
    load_settings(CoordinatorSettings, "coordinator", flags=flags)


def test_journal_does_not_follow_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A coordinator restarted from another folder finds what it had committed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert CoordinatorSettings().journal == tmp_path / "weightbus" / "journal.sqlite"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert CoordinatorSettings().journal == Path("/home/somebody/.local/state/weightbus/journal.sqlite")
    monkeypatch.setenv("HOME", "")
    assert CoordinatorSettings().journal.is_absolute()
