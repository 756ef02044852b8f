"""Programs that the demo starts: each in a process group of its own, with a log, and none left behind.

A group is ended as a whole, because servers have workers; first politely, then not. `Programs` is a context manager
whose exit ends every group; after SIGKILL, process_guard.py does it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from . import process_guard as guard

GRACE_S: Final = 3.0
"""How long a group may take to end after SIGTERM; an idle SGLang server takes five seconds and need not."""
_TAIL_LINES: Final = 15
_GUARD: Final = (sys.executable, "-I", "-S", guard.__file__)


class ProgramEnded(Exception):
    """A program ended early, or failed. The message names its log; `tail` is the end of it."""

    def __init__(self, name: str, code: int, log: Path) -> None:
        self.name = name
        self.code = code
        self.log = log
        self.tail = tail(log)
        how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
        super().__init__(f"{name} {how}; its log is {log}")


class Program:
    """One running program."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log


class Programs:
    """The running programs, which are ended in reverse order.

    Start programs from a thread that outlives them: the kernel ends them with it.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._running: list[Program] = []
        self._dismissed: list[Program] = []
        self._guard: subprocess.Popen[bytes] | None = None
        self._pipe = -1

    def __enter__(self) -> Self:
        read, self._pipe = os.pipe()
        try:
            self._guard = subprocess.Popen(  # noqa: S603 - our own file
                [*_GUARD, "guard", str(read)], pass_fds=[read], stdin=subprocess.DEVNULL, start_new_session=True
            )
        finally:
            os.close(read)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        os.write(self._pipe, guard.DONE)
        os.close(self._pipe)
        if self._guard is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it holds nothing, and ends when it goes on
                self._guard.wait(GRACE_S)

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Program:
        """Start `argv` with `env` added to ours; its output goes to ``NAME.log``."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - the demo's own programs
                [*_GUARD, "leash", str(self._pipe), str(os.getpid()), *argv],
                pass_fds=[self._pipe],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        program = Program(name, process, log)
        self._running.append(program)
        return program

    def check(self, may_end: Sequence[Program] = ()) -> None:
        """Raise `ProgramEnded` for a program that ended; those in `may_end` only when they failed."""
        for program in (each for each in self._running if each not in self._dismissed):
            code = program.process.poll()
            if code is not None and (code != 0 or program not in may_end):
                raise ProgramEnded(program.name, code, program.log)

    def dismiss(self, programs: Sequence[Program]) -> None:
        """Leave programs that ended normally out of `check`. `end` still ends their process groups."""
        self._dismissed.extend(programs)

    def end(self) -> None:
        """End every group and wait until nothing of it is left. A second interrupt cannot stop this half-way."""
        with _uninterrupted():
            groups = [program.process.pid for program in reversed(self._running)]
            for number, grace_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
                for group in groups:
                    with contextlib.suppress(ProcessLookupError):  # it ended by itself
                        os.killpg(group, number)
                until = time.monotonic() + grace_s
                while (groups := self._left(groups)) and time.monotonic() < until:
                    time.sleep(0.05)
            for program in self._running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    program.process.wait(GRACE_S)  # no longer among the living; ours to reap when its threads are too
            self._running.clear()
            self._dismissed.clear()

    def _left(self, groups: Sequence[int]) -> list[int]:
        for program in self._running:
            program.process.poll()  # reaps the leader
        alive = _living_groups()
        return [group for group in groups if group in alive]


def tail(log: Path) -> str:
    """The last lines of a log, indented."""
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join(f"    {line}" for line in lines) or "    (empty)"


def _living_groups() -> set[int]:
    """Process groups with a member that is not a zombie: an orphan's zombie may wait long for its reaper."""
    groups: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process ended meanwhile
            state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
            if state not in "ZX":
                groups.add(int(group))
    return groups


@contextlib.contextmanager
def _uninterrupted() -> Generator[None]:
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
