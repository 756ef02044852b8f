"""Nothing that the demo starts outlives it, and its ports are free."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from weightbus.trainer_agent.demo import child_processes as ports
from weightbus.trainer_agent.demo.child_processes import COUNT, Ports, ProgramEnded, Programs, choose_ports

from ...kit.waiting import until

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    """No process, or one that only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def test_workers_end_with_their_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that ignores SIGTERM is killed, with the workers whose parent never told us of them."""
    monkeypatch.setattr("weightbus.trainer_agent.demo.child_processes.GRACE_S", 0.2)
    with Programs(tmp_path) as programs:
        stubborn = programs.start("stubborn", [sys.executable, "-c", STUBBORN])
        until(lambda: stubborn.log.read_text().endswith("\n"))
        worker = int(stubborn.log.read_text())
        assert not gone(worker)
    until(lambda: gone(stubborn.process.pid) and gone(worker))  # killed; the kernel has its own pace


PARENT = """
import sys, time
from pathlib import Path
from weightbus.trainer_agent.demo.child_processes import Programs
with Programs(Path(sys.argv[1])) as programs:
    programs.start("stubborn", [sys.executable, "-c", sys.argv[2]])
    print(programs._guard.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("guarded", [True, False])
def test_a_parent_that_is_killed_leaves_nothing_behind(tmp_path: Path, guarded: bool) -> None:
    """SIGKILL leaves no time to end anything: the guard does it, and without a guard the kernel ends the children."""
    command = [sys.executable, "-c", PARENT, str(tmp_path), STUBBORN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        guard, log = int(parent.stdout.readline()), tmp_path / "stubborn.log"
        until(lambda: log.exists() and log.read_text().endswith("\n"))
        worker = int(log.read_text())
        child = int(Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[2])
        if not guarded:
            os.kill(guard, signal.SIGKILL)
        parent.kill()
    until(lambda: gone(child))
    if guarded:
        until(lambda: gone(worker) and gone(guard))
    else:
        os.kill(worker, signal.SIGKILL)


def test_a_group_that_was_ended_in_order_is_not_killed_later(tmp_path: Path) -> None:
    """Its number may be another's by then: what the guard knows is void when the programs were ended."""
    with Programs(tmp_path) as programs:
        ended = programs.start("ended", [sys.executable, "-c", "import time; time.sleep(600)"])
        guard = programs._guard
        assert guard is not None
        programs.end()
        assert gone(ended.process.pid)
        assert guard.poll() is None
    assert guard.returncode == 0


def test_programs_end_when_the_block_fails(tmp_path: Path) -> None:
    """An error in the demo leaves no program behind."""
    with pytest.raises(RuntimeError, match="on purpose"), Programs(tmp_path) as programs:
        sleeper = programs.start("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"])
        raise RuntimeError("on purpose")
    assert gone(sleeper.process.pid)


def test_a_program_that_ends_is_named_with_its_log(tmp_path: Path) -> None:
    """The reader of the error need not look for the log."""
    with Programs(tmp_path) as programs:
        short = programs.start("short", [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"])
        short.process.wait(60)
        with pytest.raises(ProgramEnded, match=r"short ended with status 3; its log is .*/short\.log") as ended:
            programs.check()
    assert "\n" not in str(ended.value)
    assert ended.value.tail == "    the reason"


def test_a_program_that_may_end_must_end_well(tmp_path: Path) -> None:
    """The trainer's ranks end by themselves; only a failure is an error."""
    with Programs(tmp_path) as programs:
        well = programs.start("well", [sys.executable, "-c", "pass"])
        well.process.wait(60)
        programs.check(may_end=[well])
        with pytest.raises(ProgramEnded, match="well ended with status 0"):
            programs.check()


def test_a_signal_is_named(tmp_path: Path) -> None:
    """A killed server reads differently from one that failed."""
    with Programs(tmp_path) as programs:
        killed = programs.start("killed", [sys.executable, "-c", "import time; time.sleep(600)"])
        os.kill(killed.process.pid, signal.SIGKILL)
        killed.process.wait(60)
        with pytest.raises(ProgramEnded, match="killed was ended by signal 9"):
            programs.check()


def test_environment_is_added_to_ours(tmp_path: Path) -> None:
    """A program finds our PATH and what it was given."""
    with Programs(tmp_path) as programs:
        script = "import os; print(os.environ['GIVEN'], 'PATH' in os.environ)"
        program = programs.start("env", [sys.executable, "-c", script], {"GIVEN": "yes"})
        assert program.process.wait(60) == 0
        assert program.log.read_text() == "yes True\n"


def test_programs_have_groups_of_their_own(tmp_path: Path) -> None:
    """Ctrl-C on the terminal reaches the demo alone, which then ends them in order."""
    with Programs(tmp_path) as programs:
        sleeper = programs.start("sleeper", [sys.executable, "-c", "import time; time.sleep(600)"])
        listed = subprocess.run(
            ["ps", "-o", "pgid=", "-p", str(sleeper.process.pid)],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert int(listed.stdout) == sleeper.process.pid


def numbers(chosen: Ports) -> list[int]:
    return [chosen.router, chosen.status, chosen.ranks, *chosen.servers, *chosen.sidecars]


def with_range(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    (folder / "range").write_text(text)
    monkeypatch.setattr(ports, "_RANGE", folder / "range")


def test_none_is_one_that_a_connection_may_get(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The kernel takes ports of outgoing connections from a range, and out of that range nobody's listening port."""
    with_range(monkeypatch, tmp_path, "12000\t60999\n")
    for _ in range(20):
        found = numbers(choose_ports(0))
        assert len(set(found)) == COUNT
        assert all(10_000 <= each < 12_000 for each in found)


@pytest.mark.parametrize("text", ["1024 65535\n", "", "none\n"])
def test_a_range_that_leaves_nothing_is_not_kept_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    """A host may give connections every port there is, or not say."""
    with_range(monkeypatch, tmp_path, text)
    assert len(set(numbers(choose_ports(0)))) == COUNT


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """And when too few are left, that is said."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert not ports._is_free(taken.getsockname()[1])
    monkeypatch.setattr(ports, "_is_free", lambda port: port == 10_001)
    with pytest.raises(ValueError, match=r"only 1 are free.*--port-base"):
        choose_ports(0)


def test_a_base_is_kept_to() -> None:
    """A port that is named is taken as free."""
    assert numbers(choose_ports(21_000)) == list(range(21_000, 21_000 + COUNT))
    assert msgspec.to_builtins(choose_ports(21_000))["router"] == 21_000
