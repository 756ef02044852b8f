"""A server of which a worker has died: it answers for a while, and must not be waited for."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightbus.engine_agent.engines import local_process
from weightbus.engine_agent.engines.local_process import start_time, workers_of
from weightbus.engine_agent.engines.sglang import server_identity as identity
from weightbus.engine_agent.engines.sglang.server_identity import WORKER
from weightbus.engine_agent.engines.sglang.sglang_server import SGLangServer
from weightbus.engine_agent.errors import ServerError, ServerUnreachable
from weightbus.engine_agent.machine.events import ServerFound, ServerGone
from weightbus.engine_agent.sidecar.driver import ServerMonitor

from ...kit import tiny_model
from ...kit.fake_sglang import FakeSGLang
from ...kit.unreadable import loop_at
from ...kit.waiting import until

AT_ONCE_S = 5.0
LAUNCH = """
import subprocess, sys
names = ["sglang::scheduler_TP0", "sglang::scheduler_TP1", "sglang::detokenizer"]
made = [subprocess.Popen([name, "-c", "import sys; sys.stdin.read()"], executable=sys.executable, stdin=subprocess.PIPE)
        for name in names]
print(*(each.pid for each in made), flush=True)
sys.stdin.read()
for each in made:
    each.kill()
    each.wait()
"""


class Launch:
    """Processes as those of a server with two workers: behind a port there is the first."""

    def __init__(self) -> None:
        argv = [sys.executable, "-c", LAUNCH]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.children = [int(pid) for pid in self.process.stdout.readline().split()]

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """The last one is behind the port."""
    made = [Launch()]

    def listener(_url: str) -> tuple[int, int] | None:
        pid = made[-1].process.pid
        started = start_time(pid)
        return None if started is None else (pid, started)

    monkeypatch.setattr(identity, "listener", listener)
    yield made
    for each in made:
        each.close()


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeSGLang]:
    """What answers."""
    made = FakeSGLang(tiny_model.write(tmp_path / "a", 1)).start()
    yield made
    made.stop()


def test_a_server_whose_process_cannot_be_looked_at_is_the_same_server(
    fake: FakeSGLang, launches: list[Launch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its process and its workers are taken for dead or for others' only when they are seen to be."""
    told: queue.Queue[ServerFound | ServerGone] = queue.Queue()
    server = SGLangServer(fake.url)
    watch = ServerMonitor(server, told.put)
    watch.poll()
    first = told.get(timeout=AT_ONCE_S)
    assert isinstance(first, ServerFound)
    server.pin(first.identity)
    real = local_process._PROC
    monkeypatch.setattr(local_process, "_PROC", loop_at(tmp_path / "proc"))
    for _ in range(3):
        watch.poll()
    server.set_label("5", 5)
    with pytest.raises(ServerError, match="cannot be looked at"):
        server.identify(5)
    monkeypatch.setattr(local_process, "_PROC", real)
    assert server.identify(5).identity == first.identity
    watch.poll()
    assert told.empty()
    os.kill(died := launches[0].children[1], signal.SIGKILL)
    until(lambda: start_time(died) is None, "its end", AT_ONCE_S)
    watch.poll()
    assert isinstance(told.get(timeout=AT_ONCE_S), ServerGone)
    server.close()


def test_workers_are_known_by_name_and_parent(launches: list[Launch]) -> None:
    """Not the detokenizer, and no other server's: another server of this host has its own."""
    launches.append(Launch())
    for each in launches:
        workers = each.children[:2]
        assert workers_of(each.process.pid, WORKER) == {pid: start_time(pid) for pid in workers}


@pytest.mark.parametrize("idle", [False, True])
def test_an_engine_that_waits_for_a_server_of_which_a_worker_has_died_is_told_at_once(
    fake: FakeSGLang, launches: list[Launch], idle: bool
) -> None:
    """SGLang takes seconds to end, and its HTTP side answers so long. The next launch is another server."""
    told: queue.Queue[ServerFound | ServerGone] = queue.Queue()
    server = SGLangServer(fake.url)
    watch = ServerMonitor(server, told.put)
    watch.start()
    assert isinstance(told.get(timeout=AT_ONCE_S), ServerFound)
    errors: queue.Queue[ServerUnreachable] = queue.Queue()

    def ask() -> None:
        try:
            server.live_digests(60.0)
        except ServerUnreachable as error:
            errors.put(error)

    calls = threading.Thread(target=ask, daemon=True)
    if not idle:
        fake.inject("/weights_checker", "hang")
        calls.start()
        until(lambda: "/weights_checker" in fake.calls, "the call", AT_ONCE_S)
    began, died = time.monotonic(), launches[0].children[1]
    os.kill(died, signal.SIGKILL)
    gone = told.get(timeout=AT_ONCE_S)
    assert isinstance(gone, ServerGone)
    assert f"its worker has died, process {died}" in gone.reason
    if idle:
        calls.start()
    assert "its worker has died" in str(errors.get(timeout=AT_ONCE_S))
    assert time.monotonic() - began < AT_ONCE_S
    with pytest.raises(queue.Empty):
        told.get(timeout=2.5)
    launches.append(Launch())
    launches[0].close()
    fake.restart()
    assert isinstance(told.get(timeout=AT_ONCE_S), ServerFound)
    assert server.live_digests(60.0)
    watch.stop()
    server.close()
