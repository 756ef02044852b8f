"""`weightbus demo` as a person runs it: real servers, real ranks, and nothing left behind however it ends."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "weightbus.control.cli.entry_point", "demo"]
LAST_LINE = re.compile(
    r"demo: rounds=(\d+) engines=2 reward_first=(\d\.\d{3}) reward_last=(\d\.\d{3}) "
    r"mismatched_versions=(\d+) mixed=(\d+)"
    r"( spanning_versions=(\d+) max_lag=(\d+) dropped=(\d+) sync_s=\d+\.\d async_s=\d+\.\d)?"
)


def started_by(folder: Path) -> list[str]:
    """Command lines of living processes that name `folder`, this one's children or not."""
    found: list[str] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            environ = (entry / "environ").read_bytes().decode(errors="replace")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, UnicodeDecodeError):
            continue
        if state not in "ZX" and (str(folder) in line or f"TMPDIR={folder}" in environ):
            found.append(line or entry.name)
    return found


def demo(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Start the demo with its files in `folder`."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_heeding_interrupts,  # noqa: PLW1509 - one call, which takes no lock
    )


def _heeding_interrupts() -> None:
    """Shells have what they start in the background ignore Ctrl-C, and tests may have been started so."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.real
def test_three_rounds_reach_both_engines_both_ways(tmp_path: Path) -> None:
    """Every response comes from the version published before it; asynchronously none from one further behind than one.

    The second training begins anew with the same servers. In the end the folder and every process are gone.
    """
    process = demo(tmp_path, "--rounds", "3", "--asynchronous", "--environment-s", "0.1")
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, out + errors
    found = LAST_LINE.fullmatch(out.splitlines()[-1])
    assert found, out
    assert found[1] == "3"
    assert found[4] == "0"
    assert found[5] == "0"
    assert int(found[8]) <= 1
    assert found[9] == "0"
    assert sum("round " in line and "/3" in line for line in out.splitlines()) == 6
    until_nothing_runs(tmp_path)
    assert list(tmp_path.glob("weightbus-demo-*")) == []


@pytest.mark.real
def test_an_engine_beside_the_trainer_and_one_elsewhere_get_the_same_versions(tmp_path: Path) -> None:
    """One reads them in place, the other one is sent them, in the same rounds; no answer is of another version."""
    process = demo(tmp_path, "--mixed", "--rounds", "3", "--json")
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, out + errors
    *rounds, last = out.splitlines()
    found = LAST_LINE.fullmatch(last)
    assert found, out
    assert (found[1], found[4], found[5]) == ("3", "0", "0")
    told = [json.loads(line) for line in rounds]
    assert [each["version"] for each in told] == [1, 2, 3]
    for each in told:
        assert each["transports"] == {"e0": "direct", "e1": "sends"}
        assert each["lag"] == {"e0": 0, "e1": 0}
        assert each["responses"] > 0
    assert len({each["nbytes"] for each in told}) == 1
    until_nothing_runs(tmp_path)
    assert list(tmp_path.glob("weightbus-demo-*")) == []


def until_nothing_runs(folder: Path) -> None:
    """What was killed takes a moment on a busy machine."""
    until = time.monotonic() + 60
    while left := started_by(folder):
        assert time.monotonic() < until, left
        time.sleep(0.05)


def until_a_server_starts(process: "subprocess.Popen[str]", folder: Path) -> None:
    """Read what the demo says up to there, and wait for the server's process."""
    assert process.stdout
    for line in process.stdout:
        if "starting 2 SGLang servers" in line:
            break
    until = time.monotonic() + 180
    while not any("launch_server" in line for line in started_by(folder)):
        assert time.monotonic() < until, "no server was started"
        time.sleep(0.05)


@pytest.mark.real
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_ends_everything_it_started(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C while the servers start: none of them goes on, and the logs are named."""
    process = demo(tmp_path)
    until_a_server_starts(process, tmp_path)
    process.send_signal(number)
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 130
    assert "logs are in" in errors
    until_nothing_runs(tmp_path)


@pytest.mark.real
def test_a_killed_demo_leaves_nothing_running(tmp_path: Path) -> None:
    """After SIGKILL coordinator, servers and their workers are gone within seconds."""
    process = demo(tmp_path)
    until_a_server_starts(process, tmp_path)
    process.kill()
    process.communicate(timeout=150)
    until_nothing_runs(tmp_path)


@pytest.mark.real
def test_a_coordinator_killed_under_the_demo_is_named_with_its_log(tmp_path: Path) -> None:
    """The demo ends within seconds; its last line says what ended, how, and where the log is."""
    process = demo(tmp_path)
    until_a_server_starts(process, tmp_path)
    (coordinator,) = (
        pid for pid, line in children_of(process.pid) if "weightbus.control" in line and " coordinator " in line
    )
    began = time.monotonic()
    os.kill(coordinator, signal.SIGKILL)
    out, errors = process.communicate(timeout=150)
    assert time.monotonic() - began < 60
    assert process.returncode == 1
    last = out.splitlines()[-1]
    assert re.fullmatch(r"demo: failed: coordinator was ended by signal 9; its log is (\S+/coordinator\.log)", last), (
        out
    )
    assert Path(last.split()[-1]).exists()
    assert "logs are in" in errors
    until_nothing_runs(tmp_path)


def children_of(parent: int) -> list[tuple[int, str]]:
    """Process ids and command lines of what `parent` started itself."""
    found: list[tuple[int, str]] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append((int(entry.name), line))
    return found
