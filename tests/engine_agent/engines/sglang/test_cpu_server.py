"""What the launcher of a CPU server sees to before it becomes the server."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SERVER = """
import os, sys, time
from weightbus.engine_agent.engines.sglang.cpu_server import end_group_with
end_group_with(os.getpid())
os.execv(sys.executable, [sys.executable, "-c", '''
import os, time
if os.fork() == 0:
    print(os.getpid(), flush=True)
time.sleep(600)
'''])
"""


def test_workers_end_with_a_server_that_is_killed() -> None:
    """SIGKILL of the server alone, which leads its group: its workers, which may not have seen to it yet, are gone."""
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        assert server.stdout
        worker = int(server.stdout.readline())
        assert os.getpgid(worker) == server.pid
        os.kill(server.pid, signal.SIGKILL)
        server.wait(60)
        until = time.monotonic() + 60
        while not gone(worker):
            assert time.monotonic() < until, "the worker goes on"
            time.sleep(0.01)


def gone(pid: int) -> bool:
    """No process, or one that only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True
