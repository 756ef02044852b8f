"""A sidecar that is killed, stops, or ends as it should: what becomes of its server's groups."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from weightbus.control.machine.states import Limits
from weightbus.control.server.settings import CoordinatorSettings
from weightbus.engine_agent.engines.registry import Keys
from weightbus.engine_agent.engines.sglang import group_watchdog as stand_in
from weightbus.engine_agent.engines.sglang.group_watchdog import GroupWatchdog

from ....kit.waiting import until

SIDECAR = """
import sys, time
from weightbus.engine_agent.engines.sglang.group_watchdog import GroupWatchdog
from weightbus.engine_agent.engines.registry import Keys
stand_in = GroupWatchdog(sys.argv[1], Keys(admin="secret"), float(sys.argv[2]))
for line in sys.stdin:
    how, *groups = line.split()
    if how == "close":
        stand_in.close()
    else:
        how += "" if stand_in.watch_groups(groups, used=how == "used") else " left"
    print(how, flush=True)
"""
AT_ONCE_S = 10.0
SILENCE_S = 2.0


class Server:
    """Knows `/destroy_weights_update_group`."""

    def __init__(self) -> None:
        self.left: queue.Queue[tuple[str, str, str]] = queue.Queue()
        """Path, Authorization and group of each call."""
        heard = self.left

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                heard.put((self.path, self.headers.get("Authorization", ""), body["group_name"]))
                self.send_response(400)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002  as the base names it

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class Sidecar:
    """A process that has a stand-in, and does what it is told."""

    def __init__(self, url: str) -> None:
        """In a process group of its own, as a shell or a supervisor starts it."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", SIDECAR, url, str(SILENCE_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )

    def told(self, line: str, *, left: bool = False) -> None:
        """`left`: and hears that the groups that it told before may have been left."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == line.partition(" ")[0] + (" left" if left else "") + "\n"

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.communicate()


def is_dead(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] in "ZX"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def sidecar(server: Server) -> Iterator[Sidecar]:
    made = Sidecar(server.url)
    yield made
    made.close()


@pytest.mark.parametrize("how", ["used", "held"])
def test_the_groups_of_a_sidecar_that_was_killed_are_left(server: Server, sidecar: Sidecar, how: str) -> None:
    """All of them, with the key that the endpoint asks for: those that it named last."""
    sidecar.told("used old")
    sidecar.told(f"{how} one two")
    sidecar.process.kill()
    path = "/destroy_weights_update_group"
    assert server.left.get(timeout=AT_ONCE_S) == (path, "Bearer secret", "one")
    assert server.left.get(timeout=AT_ONCE_S) == (path, "Bearer secret", "two")
    assert server.left.empty()


def test_a_kill_of_the_sidecar_and_all_its_processes_leaves_the_stand_in(server: Server, sidecar: Sidecar) -> None:
    """As a supervisor ends what it has started, with a signal that cannot be ignored."""
    sidecar.told("used one")
    os.killpg(sidecar.process.pid, signal.SIGKILL)
    assert server.left.get(timeout=AT_ONCE_S)[2] == "one"


def test_a_server_behind_a_path_is_reached_there(server: Server) -> None:
    """As everything else that the sidecar asks of it."""
    sidecar = Sidecar(f"{server.url}/engines/0/")
    sidecar.told("used one")
    sidecar.close()
    assert server.left.get(timeout=AT_ONCE_S)[0] == "/engines/0/destroy_weights_update_group"


def test_no_engine_waits_in_a_group_any_more_when_the_coordinator_gives_a_sidecar_up() -> None:
    """It begins the next attempt then. The stand-in counts from the sidecar's last sign of life, a tick apart."""
    for limits in (CoordinatorSettings(), Limits()):
        assert limits.silence_s > stand_in.SILENCE_S + stand_in._TICK_S


def test_the_groups_of_one_that_stands_still_are_left_while_they_are_used(server: Server, sidecar: Sidecar) -> None:
    """Others wait in them. One that only keeps them for the next round may stand as long as it likes.

    A process that goes on learns of it: else it would say that its server is in them, and the next round would fail.
    """
    sidecar.told("used one")
    sidecar.process.send_signal(signal.SIGSTOP)
    assert server.left.get(timeout=SILENCE_S + AT_ONCE_S)[2] == "one"
    sidecar.process.send_signal(signal.SIGCONT)
    sidecar.told("held two", left=True)
    sidecar.process.send_signal(signal.SIGSTOP)
    with pytest.raises(queue.Empty):
        server.left.get(timeout=SILENCE_S + 1.0)
    sidecar.process.send_signal(signal.SIGCONT)
    sidecar.told("used three")
    with pytest.raises(queue.Empty):
        server.left.get(timeout=SILENCE_S + 1.0)


def test_one_that_ends_as_it_should_has_left_its_groups_itself(server: Server, sidecar: Sidecar) -> None:
    """It happens once, and no process is left."""
    sidecar.told("used one")
    (child,) = sidecar.children()
    sidecar.told("close")
    assert not Path(f"/proc/{child}").exists()
    sidecar.close()
    assert server.left.empty()


def test_signals_to_all_processes_do_not_end_it_before_the_sidecar(server: Server, sidecar: Sidecar) -> None:
    """As a launcher says SIGTERM to a whole group; and its keys are in no argument and no environment."""
    sidecar.told("used one")
    (child,) = sidecar.children()
    status = Path(f"/proc/{child}/status")
    until(
        lambda: bool(int(status.read_text().partition("SigIgn:\t")[2].split("\n")[0], 16) & 1 << 14),
        "it is up",
        deadline_s=AT_ONCE_S,
    )
    told = Path(f"/proc/{child}/cmdline").read_bytes() + Path(f"/proc/{child}/environ").read_bytes()
    assert b"secret" not in told
    for each in (signal.SIGTERM, signal.SIGINT):
        os.kill(child, each)
    sidecar.process.kill()
    assert server.left.get(timeout=AT_ONCE_S)[2] == "one"


def test_a_stand_in_that_was_killed_is_replaced(server: Server, sidecar: Sidecar) -> None:
    """With the next groups. The sidecar is not disturbed."""
    sidecar.told("used one")
    (child,) = sidecar.children()
    os.kill(child, signal.SIGKILL)
    until(lambda: child not in sidecar.children() or is_dead(child), "it is gone", deadline_s=AT_ONCE_S)
    sidecar.told("used two")
    sidecar.process.kill()
    assert server.left.get(timeout=AT_ONCE_S)[2] == "two"


def test_a_stand_in_that_stands_still_is_killed_when_the_sidecar_ends(sidecar: Sidecar) -> None:
    """It would be left when the machine lets it go on, and ask for nothing then: it has nothing to leave any more."""
    sidecar.told("used one")
    (child,) = sidecar.children()
    os.kill(child, signal.SIGSTOP)
    sidecar.told("close")
    assert not Path(f"/proc/{child}").exists()


def test_a_stand_in_that_hears_nothing_holds_no_engine_and_is_replaced(server: Server) -> None:
    """Its pipe is full at last: the sidecar goes on without it, and the next groups have another one."""
    made = GroupWatchdog(server.url, Keys(), 3600.0)
    made.watch_groups(["one"], used=True)
    assert made._process is not None
    first = made._process

    def say() -> None:
        while made._process is first:
            made.watch_groups(["one", "x" * 4000], used=True)

    os.kill(first.pid, signal.SIGSTOP)
    saying = threading.Thread(target=say, daemon=True)
    saying.start()
    saying.join(AT_ONCE_S)
    held = saying.is_alive()
    first.kill()
    assert not held
    made.close()


def test_no_process_is_started_for_a_server_without_groups() -> None:
    """Most transports have none."""

    def children() -> str:
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text()

    before = children()
    made = GroupWatchdog("http://127.0.0.1:9", Keys())
    made.watch_groups((), used=False)
    assert children() == before
    made.close()
