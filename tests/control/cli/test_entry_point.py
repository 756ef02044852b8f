"""The command line: what it finds, how it fails, and the four commands of the control side."""

from __future__ import annotations

import argparse
import io
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from rich.console import Console

from weightbus.control.cli import commands, entry_point as cli, settings, status_view
from weightbus.control.cli.entry_point import BUILT_IN, ENTRY_POINT_GROUP, main
from weightbus.control.cli.key_commands import make_deployment_keys
from weightbus.control.machine import status
from weightbus.control.protocol.errors import WeightbusError
from weightbus.control.security.keys import read_public_key
from weightbus.control.security.trust import read_allow_list
from weightbus.control.server.metrics import METRICS, MetricSource

ROOT = Path(__file__).parents[3]
DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def _no_settings_of_ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [each for each in os.environ if each.startswith("WEIGHTBUS_")]:
        monkeypatch.delenv(name)
    yield
    structlog.reset_defaults()


class Probe:
    """A command that does what the test says."""

    help = "does what it is told"

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """No flags."""

    def run(self, _args: argparse.Namespace) -> int:
        """Fail or succeed."""
        if self.error is not None:
            raise self.error
        return 0


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    probe = Probe()
    monkeypatch.setattr(cli, "command_table", lambda: {"probe": "here:probe"})
    monkeypatch.setattr(cli, "load_command", lambda *_: probe)
    return probe


def test_table_is_the_one_of_the_distribution() -> None:
    """What a tree that is not installed knows is what pyproject.toml declares."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][ENTRY_POINT_GROUP] == BUILT_IN
    assert project["scripts"]["weightbus"] == "weightbus.control.cli.entry_point:main"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Also those whose packages are missing: with what to install."""
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in BUILT_IN)


def test_command_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says what is missing and which extra brings it; the other commands are listed all the same."""
    monkeypatch.setattr(
        cli, "command_table", lambda: {"demo": "weightbus.nowhere:demo", "version": BUILT_IN["version"]}
    )
    assert main(["demo"]) == 2
    assert "pip install 'weightbus[demo]'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "not available" in capsys.readouterr().out
    monkeypatch.setattr(cli, "load_command", lambda *_: 1 / 0)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "not available: division" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(cli, "command_table", lambda: {"odd": "weightbus.control.cli.entry_point:ENTRY_POINT_GROUP"})
    assert main(["odd"]) == 2
    assert "not a weightbus command" in capsys.readouterr().err


def test_errors_are_one_line(probe: Probe, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback unless asked for; what was not foreseen says its type and how to see more."""
    assert main(["probe"]) == 0
    probe.error = WeightbusError("the coordinator is away")
    assert main(["probe"]) == 1
    assert capsys.readouterr().err == "weightbus: error: the coordinator is away\n"
    probe.error = KeyError("surprise")
    assert main(["probe"]) == 1
    assert "KeyError: 'surprise'" in (text := capsys.readouterr().err)
    assert "--debug" in text
    assert main(["probe", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    assert main(["--debug", "probe"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_foreseen_errors_say_what_to_do(probe: Probe, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors of the agents, the system's and missing packages are one line, without asking for a traceback."""
    ours = type("AnyError", (Exception,), {"__module__": "weightbus.engine_agent.errors"})
    for error, expected in (
        (ours("the server is away"), "the server is away"),
        (PermissionError(13, "Permission denied", "/keys"), "`weightbus probe`: /keys: Permission denied"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            "`weightbus probe` needs torch, which is not installed: pip install 'weightbus'",
        ),
    ):
        probe.error = error
        assert main(["probe"]) in {1, 2}
        assert capsys.readouterr().err == f"weightbus: error: {expected}\n"


def test_missing_package_names_the_extra(
    probe: Probe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A demo without torch says which installation brings it."""
    monkeypatch.setattr(cli, "command_table", lambda: {"demo": "here:probe"})
    probe.error = ModuleNotFoundError("No module named 'torch'", name="torch")
    assert main(["demo"]) == 2
    assert "pip install 'weightbus[demo]'" in capsys.readouterr().err


def test_interrupt_and_closed_pipe(probe: Probe, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C and a reader that has seen enough are no errors worth a message."""
    probe.error = KeyboardInterrupt()
    assert main(["probe"]) == 130
    probe.error = BrokenPipeError()
    assert main(["probe"]) == 141
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["version", "--nonsense"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and the usage."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert "usage: weightbus" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["coordinator", "status", "keygen", "version"])
def test_every_command_shows_its_settings(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--check-config prints a section that can be read as a file, and does nothing else."""
    alone = ["--insecure-loopback"] if command == "coordinator" else []
    assert main([command, "--check-config", *alone]) == 0
    (section,) = tomllib.loads(capsys.readouterr().out)
    assert section == command
    assert section in settings.SECTIONS


_NEEDED = {
    "check": ["--model=/models/m"],
    "coordinator": ["--insecure-loopback"],
    "engine-agent": ["--insecure-loopback", "--name=e0", "--channel=policy"],
    "trainer-agent": ["--insecure-loopback", "--channel=policy", "--watch=/checkpoints"],
    "rollback": ["--insecure-loopback", "--channel=policy", "7"],
    "forget-channel": ["policy"],
    "forget-engine": ["e0"],
    "trust": ["list"],
    "simulate-fleet": ["--model=/models/m"],
}


@pytest.mark.parametrize("command", sorted(BUILT_IN))
def test_what_check_config_prints_is_a_settings_file_at_any_width(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`--check-config > file` gives a file that the command takes, whatever the terminal is."""
    monkeypatch.setenv("COLUMNS", "20")
    given = _NEEDED.get(command, [])
    assert main([command, *given, "--check-config"]) == 0
    printed = capfd.readouterr().out
    assert tomllib.loads(printed)
    (tmp_path / "settings.toml").write_text(printed)
    assert main([command, *given, f"--config={tmp_path / 'settings.toml'}", "--check-config"]) == 0
    assert len(tomllib.loads(capfd.readouterr().out)) == 1


def test_a_coordinator_may_have_more_agents_than_a_shell_has_files() -> None:
    """The soft limit on open files is usually 1,024, which would be the number of agents."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        commands.raise_open_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_check_config_refuses_the_keys_that_a_start_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its settings are shown, and then what is wrong: no key, no allow-list, or one that others may read or write."""
    asked = ["coordinator", f"--keys={tmp_path}", "--check-config"]

    def refused() -> str:
        assert main(asked) == 2
        shown = capsys.readouterr()
        assert "router_port = 5750" in shown.out
        return shown.err

    assert "coordinator.key: cannot be read" in refused()
    assert main(["keygen", f"--keys={tmp_path}", "e0"]) == 0
    capsys.readouterr()
    assert main(asked) == 0
    capsys.readouterr()
    (tmp_path / "coordinator.key").chmod(0o640)
    assert "others may read it (mode 0640)" in refused()
    (tmp_path / "coordinator.key").chmod(0o600)
    public = (tmp_path / "coordinator.pub").read_bytes()
    (tmp_path / "coordinator.pub").write_bytes((tmp_path / "agents" / "e0.pub").read_bytes())
    said = refused()
    assert "coordinator.pub: does not belong to" in said
    assert read_public_key(tmp_path / "agents" / "e0.pub") in said, "found"
    assert public.decode().splitlines()[1] in said, "expected"
    (tmp_path / "coordinator.pub").unlink()
    assert main(asked) == 0, "the coordinator itself does not need it"
    capsys.readouterr()
    (tmp_path / "trust.toml").chmod(0o666)
    assert "trust.toml" in refused()
    (tmp_path / "trust.toml").unlink()
    assert "trust.toml" in refused()


def test_check_config_names_the_keys_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a folder the default one is used and shown; without keys none is."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    usual = f"# default: {tmp_path / 'weightbus' / 'keys'} is used"
    assert main(["keygen"]) == 0
    for command in (["coordinator"], ["keygen"]):
        capsys.readouterr()
        assert main([*command, "--check-config"]) == 0
        (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("keys = ")]
        assert line.split(maxsplit=3)[2:] == ['"none"', usual]
    for given in (["--insecure-loopback"], [f"--keys={tmp_path / 'weightbus' / 'keys'}"]):
        assert main(["coordinator", "--check-config", *given]) == 0
        assert "is used" not in capsys.readouterr().out


def test_a_wrong_word_is_answered_with_the_right_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A role that is none, a channel that is none: refused with what is allowed, not with how it is checked."""
    assert main(["keygen", f"--keys={tmp_path}", "e0"]) == 0
    add = ["trust", f"--keys={tmp_path}", "add", "e0"]
    assert main([*add, "--role=king", "--channels=policy"]) == 2
    assert "'king' (flag --role): Invalid enum value 'king'; expected one of trainer, engine, observer" in (
        capsys.readouterr().err
    )
    assert main([*add, "--role=engine", "--channels=../x"]) == 2
    said = capsys.readouterr().err
    assert "channels = ../x: expected a channel: up to 64 of" in said
    assert "regex" not in said


def test_check_config_refuses_to_listen_without_keys(capsys: pytest.CaptureFixture[str]) -> None:
    """Off the loopback keys are required, and `--check-config` already says so."""
    assert main(["coordinator", "--insecure-loopback", "--bind=0.0.0.0", "--check-config"]) == 2
    assert "without keys the bus may only listen on the loopback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--advertise=foo", "advertise = 'foo': expected tcp://HOST:PORT"),
        ("--advertise=tcp://10.0.0.5", "advertise = 'tcp://10.0.0.5': expected tcp://HOST:PORT"),
        ("--advertise=tcp://a:1,tcp://b:1", "expected tcp://HOST:PORT"),
        ("--advertise=tcp://10.0.0.5:0", "expected tcp://HOST:PORT"),
        ("--store=foo", "store = 'foo' is not a store; write etcd://127.0.0.1:2379"),
        ("--store-login-file=/nowhere", "store_login_file = /nowhere cannot be read"),
    ],
)
def test_check_config_refuses_what_several_coordinators_cannot_use(
    given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Agents would be sent to an address that is none, by a leader that has no other fault."""
    command = ["coordinator", "--insecure-loopback", "--check-config", "--store=etcd://127.0.0.1:2379"]
    assert main([*command, "--advertise=tcp://10.0.0.5:5750"]) == 0
    assert main([*command, given]) == 2
    assert said in capsys.readouterr().err


NOT_USED = (
    (["--advertise=tcp://10.0.0.5:5750"], "store_not_named: advertise; without --store"),
    (["--name=a", "--leader-s=9"], "store_not_named: name, leader_s; without --store"),
    (["--store=etcd://127.0.0.1:2379", "--journal=x.sqlite"], "journal_not_used: x.sqlite; etcd://127.0.0.1:2379; "),
)


@pytest.mark.parametrize(("given", "said"), NOT_USED)
def test_check_config_says_what_is_set_in_vain(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A start would do without it, and agents never hear of it. What is shown can be read as a file nevertheless."""
    assert main(["coordinator", "--insecure-loopback", "--check-config", *given]) == 0
    shown = capsys.readouterr()
    assert f"warning: {said}" in shown.err
    assert "coordinator" in tomllib.loads(shown.out)


@pytest.mark.parametrize(
    ("given", "named", "least"),
    [
        (["--silence-s=8.9"], ["silence_s"], "9"),
        (["--lease-s=8.9"], ["lease_s"], "9"),
        (["--lease-s=5", "--silence-s=5"], ["silence_s", "lease_s"], "9"),
        (["--heartbeat-s=2.5"], ["silence_s", "lease_s"], "10.5"),
        (["--lease-s=9", "--silence-s=9"], [], ""),
        (["--lease-s=8.5", "--silence-s=8.5", "--heartbeat-s=0.5"], [], ""),
    ],
)
def test_settings_that_end_attempts_before_watchdogs_are_warned_about(
    given: list[str], named: list[str], least: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The watchdogs of a sidecar and of a source wait for 8 s, and cannot be given a shorter wait."""
    assert main(["coordinator", "--insecure-loopback", "--check-config", *given]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ends_too_soon: ")]
    assert [line.split()[2] for line in said] == named
    for line, name in zip(said, named, strict=True):
        assert f"; set {name} to {least} (8 s and heartbeat_s) or more, or use no distributed" in line


def test_check_config_says_nothing_of_what_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither of one coordinator, nor of one of several."""
    several = ["--store=etcd://127.0.0.1:2379", "--advertise=tcp://10.0.0.5:5750", "--name=a"]
    for given in ([], several):
        assert main(["coordinator", "--insecure-loopback", "--check-config", *given]) == 0
        assert not capsys.readouterr().err


def test_a_coordinator_that_is_alone_warns_of_what_it_does_without(tmp_path: Path) -> None:
    """At its start: the operator believes that agents are told another address."""
    command = [sys.executable, "-m", "weightbus.control", "coordinator", "--log-format=json", "--insecure-loopback"]
    command += ["--router-port=0", "--http-port=0", "--advertise=tcp://10.0.0.5:5750", f"--journal={tmp_path / 'j'}"]
    command += ["--lease-s=5"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        late = threading.Timer(DEADLINE_S, process.kill)
        late.start()
        try:
            line = _line_with(process, "store_not_named")
            assert '"settings": "advertise"' in line
            assert '"warning"' in line
            line = _line_with(process, "ends_too_soon")
            assert '"setting": "lease_s = 5"' in line
            assert '"warning"' in line
        finally:
            late.cancel()
            process.kill()


def test_flag_set_is_a_promise(capsys: pytest.CaptureFixture[str]) -> None:
    """The coordinator's settings are counted: more of them must be worth it."""
    assert main(["coordinator", "--check-config", "--journal", "x.sqlite", "--insecure-loopback"]) == 0
    shown = tomllib.loads(capsys.readouterr().out)["coordinator"]
    assert shown["journal"] == "x.sqlite"
    assert len(shown) == 27


def test_wrong_setting_is_a_configuration_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and the flag is named."""
    assert main(["coordinator", "--router-port", "many"]) == 2
    assert "--router-port" in capsys.readouterr().err


def test_keygen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Makes what is missing, keeps what exists, and says which is which."""
    folder = tmp_path / "keys"
    assert main(["keygen", "--keys", str(folder), "t0", "e0"]) == 0
    assert capsys.readouterr().out.count("created") == 3
    assert main(["keygen", "--keys", str(folder), "--agents", "e0,e1", "--no-coordinator"]) == 0
    out = capsys.readouterr().out
    assert (out.count("created"), out.count("kept")) == (1, 1)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*.*") if "trust" not in path.name)
    pairs = ["coordinator", "agents/t0", "agents/e0", "agents/e1"]
    assert names == sorted(f"{pair}.{half}" for pair in pairs for half in ("key", "pub"))
    (tmp_path / "file").touch()
    assert main(["keygen", "--keys", str(tmp_path / "file" / "keys")]) == 2
    assert "--keys" in capsys.readouterr().err
    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    assert main(["keygen", "--keys", str(folder), "e2", "coordinator"]) == 2
    assert "no agent may be called 'coordinator'" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.rglob("*.*")} == before
    assert main(["keygen", "--keys", str(folder), "../escape"]) == 2
    assert "not a name" in capsys.readouterr().err


def test_trust(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Adding, listing and removing: each says what it did, twice is the same as once, nothing half."""
    folder = tmp_path / "keys"
    where = ["--keys", str(folder)]
    assert main(["keygen", *where, "t0", "e0", "e1"]) == 0
    assert main(["trust", *where, "list"]) == 0
    add = ["trust", *where, "add"]
    assert main([*add, "e0", "e1", "--role", "engine", "--channels", "policy"]) == 0
    assert main([*add, "t0", "--role", "trainer", "--channels", "policy,critic"]) == 0
    capsys.readouterr()
    assert main([*add, "e0", "--role", "engine", "--channels", "policy"]) == 0
    assert capsys.readouterr().out.split() == ["kept", "e0"]
    assert main(["trust", *where, "list"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:3] for row in rows[1:]] == [
        ["e0", "engine", "policy"],
        ["e1", "engine", "policy"],
        ["t0", "trainer", "policy,"],
    ]
    assert read_public_key(folder / "agents/t0.pub") in rows[3]
    assert main(["trust", *where, "remove", "e1", "e7"]) == 1
    assert capsys.readouterr().out.split("\n")[:2] == ["removed   e1", "not there e7"]
    assert set(read_allow_list(folder / "trust.toml").agents) == {"e0", "t0"}
    before = (folder / "trust.toml").read_bytes()
    for wrong in (
        [*add, "e9", "--role", "engine", "--channels", "policy"],
        [*add, "e0"],
        [*add, "--role", "engine", "--channels", "policy"],
        [*add, "e0", "--role", "engine", "--channels", "no/slash"],
        [*add, "t0", "e0", "--role", "trainer", "--channels", "policy"],
    ):
        assert main(wrong) == 2
        assert "weightbus: error: " in capsys.readouterr().err
    assert (folder / "trust.toml").read_bytes() == before
    assert main([*add, "t0", "--role", "trainer", "--channels", "policy"]) == 0
    assert capsys.readouterr().out.split() == ["changed", "t0"]


def test_an_addition_locks_no_agent_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An invalid name, and a key of another agent, are refused: they would make the list invalid."""
    where = ["--keys", str(tmp_path)]
    assert main(["keygen", *where, "e0"]) == 0
    policy = ["--role", "engine", "--channels", "policy"]
    assert main(["trust", *where, "add", "e0", *policy]) == 0
    (tmp_path / "agents/copy.pub").write_bytes((tmp_path / "agents/e0.pub").read_bytes())
    names = ("../coordinator", "../nowhere", "/etc/passwd", "e 0")
    for name, why in (
        *((name, f"{name!r}: expected a name: up to 64") for name in names),
        ("copy", "have the same key"),
    ):
        capsys.readouterr()
        assert main(["trust", *where, "add", name, *policy]) == 2
        said = capsys.readouterr()
        assert (why in said.err, said.out) == (True, "")
        assert set(read_allow_list(tmp_path / "trust.toml").agents) == {"e0"}


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        ((), ("weightbus keygen", "--insecure-loopback")),
        (("--bind", "0.0.0.0"), ("weightbus keygen",)),
        (("--bind", "0.0.0.0", "--insecure-loopback"), ("loopback", "weightbus keygen")),
        (("--insecure-loopback", "--keys", "k"), ("choose one",)),
    ],
)
def test_a_coordinator_without_keys_does_not_start(
    flags: tuple[str, ...],
    advice: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither off the loopback nor on it, unless told; the message says both ways out (S1)."""
    monkeypatch.setattr("weightbus.control.cli.commands.configure_logging", lambda *_: None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["coordinator", "--router-port", "0", "--http-port", "0", *flags]) == 2
    text = capsys.readouterr().err
    assert all(each in text for each in advice), text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Says what is installed, and what is not, without importing it."""
    assert main(["version"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "CURVE" in lines["libzmq"]
    assert set(lines) == {"weightbus", "python", "libzmq", *commands.PACKAGES}


def test_status_of_an_absent_coordinator(capsys: pytest.CaptureFixture[str]) -> None:
    """A coordinator that is away is one clear line; an address that is none is a configuration error."""
    assert main(["status", "--url", "http://127.0.0.1:1"]) == 1
    text = capsys.readouterr().err
    assert "http://127.0.0.1:1" in text
    assert "refused" in text
    assert "key" not in text
    assert main(["status", "--url", "ftp://x"]) == 2


def test_status_for_people() -> None:
    """Channels, lease, round and every engine with the reason why it is not ready."""
    document = b"""{"boot":3,"read_only":true,"stopping":false,"agents":3,"blob_bytes":0,"channels":{"policy":{
        "epoch":9,"committed":{"version":41,"manifest":"m","table":"t","epoch":8},
        "lease":{"holder":"t0","epoch":9,"version":42,"remaining_s":9.0},
        "round":{"state":"transferring","version":42,"epoch":9,"age_s":1.5,"engines":{"e0":"transferring"}},
        "engines":{"e0":{"url":"http://e0","state":"dirty","version":null,"lag":41,"ready":false,
            "reason":"half loaded","last_seen_s":0.5,"incarnation":"i","server_version":"0.5.23","tp":2,"pp":1,"dp":1,
            "device":"cpu","transports":["local"]}},
        "ready":[]}}}"""
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(status_view.render(status.parse(document)))
    text = console.export_text()
    for part in (
        "READ-ONLY",
        "version 41",
        "lease of t0 for version 42",
        "transferring version 42",
        "half loaded",
        "dirty",
        "tp2",
    ):
        assert part in text
    with pytest.raises(WeightbusError, match="not the status"):
        status.parse(b"{}")


def _get(url: str) -> bytes:
    body: bytes = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30).read()
    return body


def _line_with(process: subprocess.Popen[str], event: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if event in line:
            return line
    pytest.fail(f"it ended without {event}")


def test_what_a_coordinator_does_without_is_warned_of_at_once(tmp_path: Path) -> None:
    """Even without its store: otherwise no line would say why it does nothing, and that it has no keys."""
    command = [sys.executable, "-m", "weightbus.control", "coordinator", "--log-format=json", "--insecure-loopback"]
    command += ["--router-port=0", "--http-port=0", "--store=etcd://127.0.0.1:1", f"--journal={tmp_path / 'j'}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        late = threading.Timer(DEADLINE_S, process.kill)
        late.start()
        try:
            assert '"warning"' in _line_with(process, "insecure")
            assert str(tmp_path / "j") in _line_with(process, "journal_not_used")
            assert "127.0.0.1:1: ConnectionRefusedError" in _line_with(process, "store_unavailable")
        finally:
            late.cancel()
            process.kill()
    assert not list(tmp_path.iterdir())


def test_coordinator_runs_until_told_to_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The real process: says where it listens, answers, shows every metric it has, and ends by SIGTERM with code 0."""
    make_deployment_keys(tmp_path / "keys", [])
    command = [sys.executable, "-m", "weightbus.control", "coordinator", "--log-format", "json"]
    command += ["--keys", str(tmp_path / "keys")]
    command += ["--router-port", "0", "--http-port", "0", "--journal", str(tmp_path / "j.sqlite")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            line = _line_with(process, "coordinator_started")
            url = str(tomllib.loads("http = " + line.split('"http": ')[1].split(",")[0])["http"])
            assert _get(f"{url}/healthz") == b"alive\n"
            assert b"boot 1" in _get(f"{url}/readyz")
            assert b"<h2>No channel yet</h2>" in _get(f"{url}/")
            metrics = _get(f"{url}/metrics").decode()
            assert all(
                f"# TYPE {m.name.removesuffix('_total')}" in metrics
                for m in METRICS
                if m.side is MetricSource.COORDINATOR
            )
            assert main(["status", "--url", url]) == 0
            assert "boot 1" in capsys.readouterr().out
            assert main(["status", "--url", url, "--json"]) == 0
            assert '"boot":1' in capsys.readouterr().out
            assert main(["plan", "--url", url, "--explain"]) == 1
            assert "no trainer has joined or published yet" in capsys.readouterr().err
            process.send_signal(signal.SIGHUP)
            assert b"boot 1" in _get(f"{url}/readyz")
            begun = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 0
            assert time.monotonic() - begun < 10
        finally:
            process.kill()
