"""Accepts connections to the sender, all at a time: a silent one keeps no other waiting.

Each connection has a thread until its first message is there, or the time for that is over. An accepted one waits to
be taken in; `fileno` is readable then.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from typing import Final

from ...errors import DataplaneError, DeadlineExceeded
from ...processes import Deadline, MacFrames, MacListener
from . import messages as wire

GREETING_S: Final = 2.0
"""For the first message of a connection."""
GREETED: Final = 256
"""Connections that are greeted at a time. Others wait in the socket's backlog until the time of one is over."""
_AGAIN_S: Final = 0.05
"""Before another connection is accepted, where one could not be."""


class Acceptor:
    """Of one epoch. `came` is called from one thread."""

    def __init__(self, host: str, token: str) -> None:
        """Raises `TransferFailed` where no port can be opened."""
        self._listener = MacListener(host, token)
        self.address = self._listener.address
        self._came: queue.SimpleQueue[tuple[MacFrames, wire.ToSender]] = queue.SimpleQueue()
        self._bell, self._rings = socket.socketpair()
        self._free = threading.BoundedSemaphore(GREETED)
        self._closed = False
        threading.Thread(target=self._open, name="weightbus-acceptor", daemon=True).start()

    def fileno(self) -> int:
        """For selectors."""
        return self._bell.fileno()

    def came(self) -> list[tuple[MacFrames, wire.ToSender]]:
        """Connections that know the token, with their first messages."""
        found: list[tuple[MacFrames, wire.ToSender]] = []
        self._bell.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)
        while not self._came.empty():
            found.append(self._came.get())
        return found

    def close(self) -> None:
        """Hang up on connections that were not taken. A greeting that runs ends in its time."""
        self._closed = True
        self._listener.close()
        for frames, _ in self.came():
            frames.close()
        self._bell.close()
        self._rings.close()

    def _open(self) -> None:
        while not self._closed:
            self._free.acquire()  # each greeting has `GREETING_S`
            try:
                frames = self._listener.accept(Deadline(GREETING_S))
            except DeadlineExceeded:
                self._free.release()
                continue
            except DataplaneError:  # the port was closed; or too many open files: the next one may be let in
                self._free.release()
                time.sleep(_AGAIN_S)
                continue
            threading.Thread(target=self._greet, args=(frames,), name="weightbus-greeting", daemon=True).start()

    def _greet(self, frames: MacFrames) -> None:
        deadline = Deadline(GREETING_S)
        try:
            frames.handshake(deadline)
            self._came.put((frames, wire.SENDER.hear(frames, deadline, "a receiver")))
            if self._closed:
                frames.close()
            self._rings.send(b".")
        except (DataplaneError, OSError):  # it is gone; a peer that never comes is failed at the deadline
            frames.close()
        finally:
            self._free.release()
