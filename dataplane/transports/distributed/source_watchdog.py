"""A watchdog process that hangs up for a source that stalls in the middle of a broadcast over gloo.

The workers of servers that are not ours wait for its bytes inside of gloo, for half an hour, and answer nothing. The
connections of a source that was killed are ended by its kernel; one that is stopped keeps them. So a process beside it
has them too, and ends them: the workers are told so at once, and go on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torch._C import _distributed_c10d as c10d

from .source_watchdog_main import HELD, HUNG_UP, USED

SILENCE_S: Final = 8.0
"""Less than the coordinator's ``lease_s``: when that ends the attempt, servers have gone on and can say so."""
_TICK_S: Final = 0.5
_END_S: Final = 1.0
_PROGRAM: Final = Path(__file__).with_name("source_watchdog_main.py")
_FILES: Final = "/proc/self/fd"
_LOG: Final = logging.getLogger(__name__)


class Connections:
    """Duplicates of connections of this process. They end with this object, unless others have them too."""

    def __init__(self, files: Sequence[int] = ()) -> None:
        self.files = tuple(files)
        self._close = weakref.finalize(self, _close, self.files)

    def end(self) -> None:
        """Hang up, in all processes that have them."""
        if self._close.alive:
            for file in self.files:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
            self._close()


def connections_of(store: c10d.Store, rank: int, size: int) -> Connections:
    """What connects `rank`, in this process, to the others of a group of gloo's that has met in `store`.

    Each rank has published where it listens, for this group alone; of two ranks one connects to the other. Nothing
    where that is not all of them: then gloo does it in another way.
    """
    keys = [f"0/{each}" for each in range(size)]
    try:
        published = [bytes(store.get(key)) for key in keys] if store.check(keys) else []
        files = [int(file.name) for file in Path(_FILES).iterdir()]
    except (RuntimeError, OSError):  # torch's, of a store that has ended; or no Linux
        return Connections()
    own, others = b"".join(published[rank : rank + 1]), [*published[:rank], *published[rank + 1 :]]
    found: dict[tuple[bytes, bytes], int] = {}
    for file in files:
        with contextlib.suppress(OSError), _duplicate(file) as connection:
            mine, theirs = _as_published(connection.getsockname()), _as_published(connection.getpeername())
            # Once: other groups that form now have duplicates for a moment, too.
            if (mine, theirs) not in found and (mine in own or any(theirs in each for each in others)):
                found[mine, theirs] = os.dup(connection.fileno())  # `file` may be another by now
    connections = Connections(tuple(found.values()))
    return connections if len(found) == size - 1 else Connections()


def _close(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


def _duplicate(file: int) -> socket.socket:
    """Raises OSError for what is no socket, or closed meanwhile.

    No other file is touched: to close a duplicate of one would let go of this process's locks on it.
    """
    if not stat.S_ISSOCK(os.fstat(file).st_mode):
        raise OSError("no socket")
    mine = os.dup(file)
    try:
        return socket.socket(fileno=mine)
    except OSError:  # the number was another's by then
        os.close(mine)
        raise


def _as_published(address: object) -> bytes:
    """The beginning of a ``sockaddr``; raises OSError for what is none of TCP."""
    match address:
        case (str(host), int(port)):
            return struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_pton(socket.AF_INET, host)
        case (str(host), int(port), int(), int()):
            words = struct.pack("=H", socket.AF_INET6) + struct.pack("!HI", port, 0)
            return words + socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
        case _:
            raise OSError("no address of TCP")


class SourceWatchdog:
    """A process that has the connections, and hears that this one lives. It ends with this object."""

    def __init__(self, connections: Sequence[Connections], silence_s: float | None = None) -> None:
        """A source that is silent for `silence_s` is stalled.

        Never raises: without it servers wait, as they did before.
        """
        files = [file for each in connections for file in each.files]
        command = (sys.executable, "-I", "-S", str(_PROGRAM), str(silence_s or SILENCE_S), *map(str, files))
        self._line: _Line | None = None
        with contextlib.suppress(OSError):
            # A session of its own: stopping all processes of this one's group leaves it to its task.
            process = subprocess.Popen(  # noqa: S603  our own file
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
                pass_fds=files,
            )
            self._line = _Line(process)
            weakref.finalize(self, self._line.over.set)

    @property
    def hung_up(self) -> bool:
        """This process stood still meanwhile: the connections are of no use."""
        return self._line is not None and self._line.process.poll() == HUNG_UP

    def use(self, used: bool) -> None:
        """Whether servers wait for this process from now on."""
        if self._line is not None:
            self._line.use(used)

    def close(self) -> None:
        """End it."""
        if self._line is not None:
            self._line.over.set()
            self._line.thread.join(2 * _END_S)


class _Line:
    """What is told to the process, by a thread that ends it too."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        if process.stdin is not None:
            os.set_blocking(process.stdin.fileno(), False)  # a stalled one hears nothing, and holds up none
        self.over = threading.Event()
        self._used = False
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, name="weightbus-watchdog", daemon=True)
        self.thread.start()

    def use(self, used: bool) -> None:
        with self._lock:
            self._used = used
            self._tell()

    def _run(self) -> None:
        while not self.over.wait(_TICK_S):
            with self._lock:
                if self._used:
                    self._tell()
        with self._lock:
            if self.process.stdin is not None:
                self.process.stdin.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:  # it has the connections as long as it is there
            _LOG.warning("the process that hangs up for this one did not end within %g s: it is killed", _END_S)
            self.process.kill()
            self.process.wait()  # nothing keeps a process from that; and this thread is not waited for

    def _tell(self) -> None:
        if self.process.stdin is not None and not self.process.stdin.closed:
            with contextlib.suppress(OSError):  # it ended
                self.process.stdin.write(USED if self._used else HELD)
