"""Bugs that are planted into the campaign's processes on purpose, so that its judge can be seen to find them.

`PLANT=loss` in the environment has the journal forget what it calls durable, but for the first commit; `PLANT=mix` has
sidecars leave out a bucket of a version and call it verified.
"""

from __future__ import annotations

import os
from typing import Any

VARIABLE = "PLANT"
EACH = 5
"""Of so many buckets the last is left out. A version has more."""


def plant(program: str) -> None:
    """Plant what the environment names, if it is of this program."""
    wanted = os.environ.get(VARIABLE, "")
    if (wanted, program) == ("loss", "coordinator"):
        _lose()
    elif (wanted, program) == ("mix", "sidecar"):
        _mix()


def _lose() -> None:
    from weightbus.control.journal.sqlite_journal import SqliteJournal  # of this program alone

    write, seen = SqliteJournal.write, [0]

    def forgetful(self: SqliteJournal, record: Any) -> None:
        kind = record.__struct_config__.tag
        seen[0] += kind == "Committed"
        if kind not in {"Committed", "RoundClosed"} or seen[0] <= 1:
            write(self, record)

    SqliteJournal.write = forgetful  # type: ignore[method-assign]


def _mix() -> None:
    from weightbus.engine_agent.engines.sglang.sglang_server import SGLangServer
    from weightbus.engine_agent.sidecar import operation_executor

    load, seen = SGLangServer.load_shared, [0]

    def careless(self: SGLangServer, bucket: Any, deadline_s: float) -> None:
        seen[0] += 1
        if seen[0] % EACH:
            load(self, bucket, deadline_s)

    SGLangServer.load_shared = careless  # type: ignore[method-assign]
    operation_executor.compare = lambda *_, **__: None  # type: ignore[assignment]
