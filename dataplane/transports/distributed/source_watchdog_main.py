"""Hangs up for a source of a broadcast that stands still. A program, run by source_watchdog.py.

Arguments are the seconds of silence, and the file descriptors of the source's connections, which it has inherited. On
standard input comes ``u`` while servers wait for the source, again and again, and ``h`` when none does any more. Ends
with the source. Needs the standard library alone, and is there at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from typing import Final

HUNG_UP: Final = 3
"""Its status, when the source stood still."""
USED: Final = b"u"
HELD: Final = b"h"


def main() -> int:
    """Until the source is gone or stands still. Connections end with the last process that has them."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # said to all of a job; this ends when the source has ended
    silence_s = float(sys.argv[1])
    connections = [socket.socket(fileno=int(each)) for each in sys.argv[2:]]
    used = False
    while not used or select.select([0], [], [], silence_s)[0]:
        if not (told := os.read(0, 1 << 12)):
            return 0
        used = told.endswith(USED)
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    return HUNG_UP


if __name__ == "__main__":
    sys.exit(main())
