"""A watchdog process that has the server leave its weight-update groups when the sidecar cannot do it any more.

In a collective all ranks wait for one another. A server whose sidecar died between two calls takes part in no further
one, and the workers of other servers would wait for it inside of theirs, out of reach. When it has left the group its
connections are closed, which ends their wait at once (gloo).
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

from ..registry import Keys
from .http_client import authorization

SILENCE_S: Final = WATCHDOG_S
"""Less than the coordinator's ``silence_s``: when that ends an attempt, no rank waits in the group any more."""
_TICK_S: Final = 0.5
_END_S: Final = 1.0
_STALLED: Final = "this process had no time for so long while its server was in groups: it was made to leave them"
_PROGRAM: Final = Path(__file__).with_name("group_watchdog_main.py")

_log = get_log(__name__)


class GroupWatchdog:
    """The watchdog process, and its news of the server's groups and of this process. Started with the first group."""

    def __init__(self, url: str, keys: Keys, silence_s: float = SILENCE_S) -> None:
        """A sidecar that is silent for `silence_s` counts as stalled. The keys travel in a pipe alone."""
        self._first = f"{url}\n{authorization(keys, admin=True).get('Authorization', '')}\n"
        self._command = (sys.executable, "-I", "-S", str(_PROGRAM), str(silence_s))
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._used = False
        self._silence_s = silence_s
        self._said: tuple[float, bool] = 0.0, False
        """Time of the last word to the process, and whether it leaves groups when none comes."""
        self._stalled = False
        """True if it waited so long for a word that it may have left the groups."""

    def watch_groups(self, groups: Sequence[str], *, used: bool) -> bool:
        """Have these groups left when this process ends and, while they are `used`, also when it stalls.

        False where earlier groups may have been left, because this process stalled meanwhile. Never raises: a missing
        watchdog costs its protection alone.
        """
        with self._lock:
            self._used = used and bool(groups)
            if groups and (self._process is None or self._process.poll() is not None):
                self._start()
            self._tell("\t".join(("used" if used else "held", *groups)) + "\n")
            stalled, self._stalled = self._stalled, False
        return not stalled

    def close(self) -> None:
        """End the watchdog; no group is left by it any more."""
        self.watch_groups((), used=False)
        with self._lock:
            process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
            if not _ended(process):
                _log.warning("watchdog_killed", reason=f"it had not ended {_END_S:g} s after it was told to")
                process.kill()  # it has nothing to leave any more
                _ended(process)

    def _start(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()  # of the one that ended
        try:
            # A session of its own: a kill of this process group leaves the watchdog to its task.
            self._process = process = subprocess.Popen(  # noqa: S603  our own file
                self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0, start_new_session=True
            )
        except OSError as error:
            _log.warning("no_watchdog", reason=str(error))
            return
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)  # a stalled watchdog must not hold up the sidecar
        self._tell(self._first)
        threading.Thread(target=self._tick, args=(process,), name="group-watchdog", daemon=True).start()

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
                    _log.warning("watchdog_killed", reason="it has stalled, and its pipe is full")
                    self._process.kill()
            since, leaves = self._said
            self._said = began, self._used
            silent_s = time.monotonic() - since
            if leaves and silent_s >= self._silence_s:
                self._stalled = True
                _log.warning("sidecar_stalled", seconds=round(silent_s, 1), reason=_STALLED)


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """Wait a little; whether it has."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    return process.returncode is not None
