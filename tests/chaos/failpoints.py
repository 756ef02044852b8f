"""Named places in the code at which `campaign.py` strikes; and the launcher that makes a process stop and tell there.

    python failpoints.py NAME FOLDER -m MODULE ARGUMENTS...
    python failpoints.py NAME FOLDER PROGRAM ARGUMENTS...

The product knows nothing of this: methods are wrapped in the processes of the campaign only. A process that comes to
the place for which it is armed (a file FOLDER/NAME.armed names it) connects to FOLDER/gate, says where it is, and
waits. So a fault strikes exactly there, whoever it strikes, and the campaign knows that it did.

The coordinator's process also keeps a ledger of its commits (ledger.py), and `PLANT` in the environment names a bug
that the campaign has to find (plants.py).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import runpy
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOLD_S = 60.0
"""How long a process waits to be let on; only where the campaign is gone it takes so long."""
Only = Callable[[tuple[Any, ...]], bool]


@dataclass(frozen=True)
class Point:
    """One place: before (or `after`) any of `places`, ``module:Class.method`` each, is called with such arguments."""

    program: str
    places: tuple[str, ...]
    only: Only
    after: bool = False
    skip: int = 0
    """How many times it is passed by first."""


def _kind(at: int, *names: str) -> Only:
    """The argument at that place has one of these tags, which do not change."""
    return lambda arguments: arguments[at].__struct_config__.tag in names


_JOURNAL = ("weightbus.control.journal.sqlite_journal:SqliteJournal.write",)
_SENDS = ("weightbus.control.bus.sockets:RouterBus.send", "weightbus.control.bus.sockets:RouterBus.send_to_all")
_WORK = ("weightbus.engine_agent.sidecar.operation_executor:OperationExecutor.perform",)
_RECORD = ("weightbus.engine_agent.state_file:StateFile.write",)
_CALL = ("weightbus.engine_agent.engines.sglang.http_client:HttpClient._request",)
_DRIVE = "weightbus.trainer_agent.publish.driver:PublicationDriver."


def _call(path: str) -> Only:
    return lambda arguments: arguments[2] == path


def _dirty(arguments: tuple[Any, ...]) -> bool:
    return bool(arguments[1].health.value == "dirty")


def _always(arguments: tuple[Any, ...]) -> bool:
    del arguments
    return True


def _journal(kind: str, *, after: bool) -> Point:
    return Point("coordinator", _JOURNAL, _kind(1, kind), after)


def _says(*kinds: str, after: bool = False) -> Point:
    return Point("coordinator", _SENDS, _kind(2, *kinds), after)


def _drive(method: str, *, after: bool = False) -> Point:
    return Point("trainer-0", (_DRIVE + method,), _always, after)


def _works(kind: str, *, after: bool = False) -> Point:
    return Point("sidecar", _WORK, _kind(1, kind), after)


def _calls(path: str, *, after: bool = False, skip: int = 0) -> Point:
    return Point("sidecar", _CALL, _call(path), after, skip)


POINTS: dict[str, Point] = {
    # What is durable, and what is not yet.
    "grant_unwritten": _journal("EpochTaken", after=False),
    "grant_durable": _journal("EpochTaken", after=True),
    "commit_unwritten": _journal("Committed", after=False),
    "commit_durable": _journal("Committed", after=True),
    "answer_unwritten": _journal("RoundClosed", after=False),
    "answer_durable": _journal("RoundClosed", after=True),
    # What the first engine, or the trainer, is told, or has just been told.
    "prepare_unsaid": _says("Prepare"),
    "send_unsaid": _says("Send"),
    "pause_unsaid": _says("Pause"),
    "transfer_said": _says("Transfer", after=True),
    "commit_said": _says("Commit", after=True),
    "done_unsaid": _says("RoundDone"),
    # The trainer's first rank, which speaks for all of them.
    "granted": _drive("_acquire", after=True),
    "unannounced": _drive("_announce"),
    "announced": _drive("_announce", after=True),
    "table_open": _drive("_await_digests"),
    "table_closed": _drive("_await_digests", after=True),
    "unoffered": _drive("_deliver"),
    "offered": _drive("_deliver", after=True),
    "sent": _drive("_report_delivery"),
    "reported": _drive("_report_delivery", after=True),
    # Any other rank.
    "rank_assembles": Point("trainer-1", ("weightbus.trainer_agent.sources.hf_module:FSDPSource.assemble",), _always),
    "rank_waits": Point("trainer-1", ("weightbus.trainer_agent.sources.hf_module:FSDPSource.agree",), _always),
    # A sidecar, by its steps and by what it asks of its server.
    "validated": _works("validate", after=True),
    "dirty_unwritten": Point("sidecar", _RECORD, _dirty),
    "dirty_durable": Point("sidecar", _RECORD, _dirty, after=True),
    "receives": _works("receive"),
    "received": _works("receive", after=True),
    "verified": _works("verify", after=True),
    "pauses": _calls("/pause_generation"),
    "first_bucket": _calls("/update_weights_from_tensor"),
    "second_bucket": _calls("/update_weights_from_tensor", skip=1),
    "bucket_loaded": _calls("/update_weights_from_tensor", after=True),
    "checksums": _calls("/weights_checker"),
    "resumes": _calls("/continue_generation"),
    "resumed": _calls("/continue_generation", after=True),
}
"""Name -> place."""
ONLY: dict[str, tuple[str, ...]] = {
    "local": ("rank_assembles", "second_bucket", "verified", "checksums"),
    "direct": ("table_open", "table_closed"),
}
"""Transport -> places that are passed over it alone. Over `direct` versions are announced with an open table, workers
copy in one call, and prove by themselves what they hold."""

AT_SERVER = tuple(name for name, point in POINTS.items() if point.places == _CALL)
"""Where a server has just been asked, or is about to be: faults of the server itself strike there."""


def passed(transport: str) -> tuple[str, ...]:
    """The places that are passed in every round of a campaign over `transport`, or every other one."""
    elsewhere = {name for kind, names in ONLY.items() if kind != transport for name in names}
    return tuple(name for name in POINTS if name not in elsewhere)


class Gate:
    """The side of the process that is launched."""

    def __init__(self, folder: Path, name: str) -> None:
        self._address = str(folder / "gate")
        self._armed = folder / f"{name}.armed"
        self._taken = folder / f"{name}.taken"

    def passes(self, point: str) -> None:
        """Stop and tell, if this is where the campaign wants to strike."""
        try:
            name, _, skip = self._armed.read_text().partition(" ")
        except FileNotFoundError:
            return
        if name != point:
            return
        if int(skip):
            arm(self._armed, point, int(skip) - 1)
            return
        with contextlib.suppress(OSError):  # another thread of this process was here first, or the campaign is over
            self._armed.rename(self._taken)
            with socket.socket(socket.AF_UNIX) as line:
                line.settimeout(HOLD_S)
                line.connect(self._address)
                line.sendall(point.encode())
                line.recv(1)


def arm(file: Path, point: str, skip: int) -> None:
    """Whole or not at all: it may be read at any moment."""
    fresh = file.with_suffix(".new")
    fresh.write_text(f"{point} {skip}")
    fresh.replace(file)


def found(place: str) -> tuple[Any, str]:
    """The class and the name of the method at ``module:Class.method``. Raises if there is none."""
    module, _, path = place.partition(":")
    owner, _, method = path.partition(".")
    kind = getattr(importlib.import_module(module), owner)
    getattr(kind, method)
    return kind, method


def install(names: dict[str, Point], gate: Gate) -> None:
    """Wrap every method that has one of these points."""
    for place in sorted({place for point in names.values() for place in point.places}):
        here = {name: point for name, point in names.items() if place in point.places}
        kind, method = found(place)
        setattr(kind, method, _wrapped(getattr(kind, method), here, gate))


def _wrapped(call: Callable[..., Any], here: dict[str, Point], gate: Gate) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        mine = [name for name, point in here.items() if point.only(arguments)]
        for name in mine:
            if not here[name].after:
                gate.passes(name)
        result = call(*arguments, **named)
        for name in mine:
            if here[name].after:
                gate.passes(name)
        return result

    return wrapped


def main() -> None:
    """Wrap what concerns this program, and be it."""
    name, folder, *argv = sys.argv[1:]
    program = name.partition("-")[0] if name.startswith("sidecar") else name
    import ledger  # beside this program; tests import this module without being beside them
    import plants

    plants.plant(program)
    if program == "coordinator":
        ledger.keep(Path(folder))
    install({key: point for key, point in POINTS.items() if point.program == program}, Gate(Path(folder), name))
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        sys.path.insert(0, os.path.dirname(argv[0]))  # noqa: PTH120  # as Python does
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
