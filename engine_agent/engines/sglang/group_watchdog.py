"""Somebody who has the server leave its weight-update groups when this process cannot do it any more.

In a collective everybody waits for everybody. A server whose sidecar died between two of its calls takes part in no
further one, and the workers of other servers would wait for it inside of theirs, where nobody reaches them. When it has
left the group its connections are closed, which tells them so at once (gloo).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from weightbus.control.log import get_log
from weightbus.control.machine import WATCHDOG_S

from ..connection import Keys
from .http_client import authorization

SILENCE_S: Final = WATCHDOG_S
"""Less than the coordinator's ``silence_s``: when that ends an attempt nobody waits in the group any more."""
_TICK_S: Final = 0.5
_END_S: Final = 1.0
_STOOD: Final = "this process had no time for so long while its server was in groups: it was made to leave them"
_PROGRAM: Final = Path(__file__).with_name("group_watchdog_main.py")

_log = get_log(__name__)


class GroupWatchdog:
    """A process that hears of the server's groups, and that this one lives. Started with the first group."""

    def __init__(self, url: str, keys: Keys, silence_s: float = SILENCE_S) -> None:
        """Who is silent for `silence_s` stands still. The keys are in no argument and no environment, but in a pipe."""
        self._first = f"{url}\n{authorization(keys, admin=True).get('Authorization', '')}\n"
        self._command = (sys.executable, "-I", "-S", str(_PROGRAM), str(silence_s))
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._used = False
        self._silence_s = silence_s
        self._said: tuple[float, bool] = 0.0, False
        """Since when the process waits for a word, and whether it leaves groups when none comes."""
        self._stood = False
        """It waited so long for one that it may have left them."""

    def entrust(self, groups: Sequence[str], *, used: bool) -> bool:
        """These are to be left when this process ends and, while they are `used`, also when it stands still.

        False where those before may have been left: this process stood still meanwhile. Never raises: without a
        stand-in it is as it was before there was one.
        """
        with self._lock:
            self._used = used and bool(groups)
            if groups and (self._process is None or self._process.poll() is not None):
                self._start()
            self._tell("\t".join(("used" if used else "held", *groups)) + "\n")
            stood, self._stood = self._stood, False
        return not stood

    def close(self) -> None:
        """Nothing is left when this process ends."""
        self.entrust((), used=False)
        with self._lock:
            process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
            if not _ended(process):
                _log.warning("stand_in_killed", reason=f"it had not ended {_END_S:g} s after it was told to")
                process.kill()  # it has nothing to leave any more
                _ended(process)

    def _start(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()  # of the one that ended
        try:
            # A session of its own: who kills all processes of this one's group leaves it to its task.
            self._process = process = subprocess.Popen(  # noqa: S603  our own file
                self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0, start_new_session=True
            )
        except OSError as error:
            _log.warning("no_stand_in", reason=str(error))
            return
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)  # one that stands still holds nobody up
        self._tell(self._first)
        threading.Thread(target=self._tick, args=(process,), name="stand-in", daemon=True).start()

    def _tick(self, process: subprocess.Popen[bytes]) -> None:
        while process is self._process and process.poll() is None:
            time.sleep(_TICK_S)
            with self._lock:
                if self._used:
                    self._tell("\n")

    def _tell(self, words: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            began = time.monotonic()
            with contextlib.suppress(OSError):  # it ended: the next groups have another one started
                if self._process.stdin.write(told := words.encode()) != len(told):
                    _log.warning("stand_in_killed", reason="it stands still, and its pipe is full")
                    self._process.kill()
            since, leaves = self._said
            self._said = began, self._used
            silent_s = time.monotonic() - since
            if leaves and silent_s >= self._silence_s:
                self._stood = True
                _log.warning("stood_still", seconds=round(silent_s, 1), reason=_STOOD)


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Wait a little; whether it has."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    return process.returncode is not None
