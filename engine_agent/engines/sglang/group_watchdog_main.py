"""Leaves weight-update groups in place of a sidecar that died or stalled. A program, run by group_watchdog.py.

Standard input has, a line each: the server's url; its Authorization header (may be empty); and then, with each
change, ``held`` or ``used`` and the names of the groups, separated by tabs. An empty line is a sign of life. The groups
are left when the input ends, or when it is silent, while they are used, for the seconds of the argument. Needs the
standard library alone, and so starts at once.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

CALL_S: Final = 60.0
"""Deadline of a call. The server answers once its workers have ended their present work."""


def lines(silence_s: float) -> Iterator[str | None]:
    """Each line, without its end; None for every `silence_s` without any."""
    rest = b""
    while True:
        if not select.select([0], [], [], silence_s)[0]:
            yield None
            continue
        if not (found := os.read(0, 1 << 16)):
            return
        *whole, rest = (rest + found).split(b"\n")
        for line in whole:
            yield line.decode()


def leave(url: str, authorization: str, group: str) -> None:
    """Ask once: a server that does not answer is gone, or out of reach in a collective."""
    where = urlsplit(url)
    connect = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json", **({"Authorization": authorization} if authorization else {})}
    path = f"{where.path.rstrip('/')}/destroy_weights_update_group"
    with (
        contextlib.suppress(OSError, http.client.HTTPException),
        contextlib.closing(connect(where.hostname or "", where.port, timeout=CALL_S)) as connection,
    ):
        connection.request("POST", path, json.dumps({"group_name": group}), headers)
        connection.getresponse().read()


def main() -> None:
    """Until the sidecar is gone."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # said to all of a container; this ends when the sidecar has ended
    told = lines(float(sys.argv[1]))
    said = (line for line in told if line is not None)
    url, authorization = next(said, ""), next(said, "")
    groups: list[str] = []
    used = False
    for line in told:
        if line:
            how, *groups = line.split("\t")
            used = how == "used"
        elif line is None and used:
            for group in groups:
                leave(url, authorization, group)
            groups, used = [], False
    for group in groups:
        leave(url, authorization, group)


if __name__ == "__main__":
    main()
