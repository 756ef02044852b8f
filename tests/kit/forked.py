"""What templates of processes share (see `ends.Ends`): jobs come by JSON lines, each is a forked process's."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weightbus.engine_agent.worker.load_tracer import trace_load

from .toy_direct import SPECS, ToyShard

_answers = [1]
"""Where answers go: to standard output, and from `serve` on to what that was."""


def say(**answer: object) -> None:
    """One line."""
    os.write(_answers[0], json.dumps(answer).encode() + b"\n")


def log_to(path: Path) -> None:
    """Whatever this process writes."""
    log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)


def serve(halves: dict[str, Callable[[dict[str, Any]], None]]) -> None:
    """Fork a process for each job until the jobs end, then see that none is left."""
    _answers[0] = os.dup(1)
    os.dup2(2, 1)  # libraries write to standard output, too: NCCL its warnings
    children: list[int] = []
    model = ToyShard(0, 1)
    trace_load(model, model.load_weights, SPECS, 0)  # imports what every child would import for itself, for seconds
    say(up=True)
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            job = json.loads(line)
            threading.current_thread().name = job["half"]
            try:
                halves[job["half"]](job)
            except Exception as error:  # noqa: BLE001  told to the test
                say(error=f"{type(error).__name__}: {error}")
            os._exit(0)
        children.append(pid)
        say(pid=pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
