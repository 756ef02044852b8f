"""Processes that are one end of a round: jobs go to a template by JSON lines, which forks a process for each."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .toy_direct import WAIT_S
from .waiting import readable


class Ends:
    """Of one program, of this folder (direct_ends.py) or by its path."""

    def __init__(self, program: str) -> None:
        # Unbuffered: a line that was read ahead would be waited for in vain.
        self._template = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._early: list[dict[str, Any]] = []
        assert self.answer() == {"up": True}

    def start(self, **job: Any) -> int:
        """Returns its process id."""
        assert self._template.stdin is not None
        self._template.stdin.write(json.dumps(job).encode() + b"\n")
        found: dict[str, Any] = {}
        while "pid" not in found:  # the new process may be quicker than its parent
            found = self._line()
            self._early += [found] if "pid" not in found else []
        return int(found["pid"])

    def answer(self) -> dict[str, Any]:
        """The next line of any of them."""
        return self._early.pop(0) if self._early else self._line()

    def close(self) -> None:
        """End the template; what it forked ends by its own."""
        assert self._template.stdin is not None
        assert self._template.stdout is not None
        self._template.stdin.close()
        self._template.wait(30)
        self._template.stdout.close()

    def _line(self) -> dict[str, Any]:
        assert self._template.stdout is not None
        assert readable(self._template.stdout.fileno(), WAIT_S), "no answer from the other process"
        return dict(json.loads(self._template.stdout.readline()))


def was_struck(pid: int, number: int, deadline_s: float = WAIT_S) -> bool:
    """Signal `number` ended the process, or stopped it; false where it ended in another way, or goes on.

    It must be of `TransferEnds`, which keeps what has ended until itself ends, and nobody else's signal may have come
    before.
    """
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] in "ZX":
            return int(fields[-1]) == number  # as wait() has it: the signal, or 256 times the status
        if fields[0] == "T":
            return number == signal.SIGSTOP
        time.sleep(0.01)
    return False
