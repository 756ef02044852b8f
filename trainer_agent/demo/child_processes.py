"""Programs that the demo starts: each in a process group of its own, with a log, and none left behind; their addresses.

A group is ended as a whole, because servers have workers; first politely, then not. `Programs` is a context manager
whose exit ends every group; after SIGKILL, process_guard.py does it. Ports are chosen before programs start, which bind
them up to a minute later. `second_host` makes a second host for one engine: network and mount namespaces of its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, NamedTuple, Self

import msgspec

from . import process_guard as guard
from .commands import ENGINES

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


class Program(NamedTuple):
    """One running program."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


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
        with handling_signals(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
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
def handling_signals(handler: Callable[[int, FrameType | None], None] | int, *numbers: int) -> Generator[None]:
    """Handle these signals with `handler` in the block."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


_HOLDER: Final = ["unshare", "--net", "--mount", "sleep", "infinity"]
_START_S: Final = 10.0
_CALL_S: Final = 30.0


class EngineHost(NamedTuple):
    """The host of one engine's server and sidecar."""

    address: str = "127.0.0.1"
    """Address at which they are reached from this host."""
    command_prefix: tuple[str, ...] = ()
    """Prefix of each of their commands."""
    sidecar_flags: tuple[str, ...] = ()
    """Further flags of the sidecar."""


class NetworkNamespace(NamedTuple):
    """A second host."""

    host: EngineHost
    here: str
    """Address at which the second host reaches this one."""
    description: str
    """Where the engine runs, for the user."""


class NoNamespace(Exception):
    """No namespace can be made on this machine; the message says why."""


def second_host(programs: Programs, folder: Path) -> NetworkNamespace:
    """A host with a network of its own where one can be made, else this one."""
    try:
        return _namespace(programs, folder)
    except NoNamespace as reason:
        host = EngineHost(sidecar_flags=("--transports", "sends"))
        description = f"beside the others, limited to sends over a gloo group (no second network: {reason})"
        return NetworkNamespace(host, "127.0.0.1", description)


def unavailable() -> str:
    """The reason why there can be no second network; empty where none is known."""
    if os.geteuid():
        return "only root may make network namespaces"
    missing = [each for each in ("ip", "unshare", "nsenter") if shutil.which(each) is None]
    return f"{missing[0]} is not installed" if missing else ""


def _namespace(programs: Programs, folder: Path) -> NetworkNamespace:
    if reason := unavailable():
        raise NoNamespace(reason)
    _run(*_HOLDER[:-2], "true")
    holder = programs.start("elsewhere", _HOLDER)
    pid = _entered(holder)
    inside = ("nsenter", f"--target={pid}", "--net", "--mount")
    subnet = f"10.203.{20 + os.getpid() % 200}"  # another demo may run beside this one
    here, there = f"{subnet}.1", f"{subnet}.2"
    card = f"wb{os.getpid()}"
    _run("ip", "link", "add", card, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    _run("ip", "address", "add", f"{here}/30", "dev", card)
    _run("ip", "link", "set", card, "up")
    _run(*inside, "ip", "address", "add", f"{there}/30", "dev", "eth0")
    _run(*inside, "ip", "link", "set", "eth0", "up")
    _run(*inside, "ip", "link", "set", "lo", "up")
    run = folder / "run-elsewhere"
    run.mkdir(mode=0o700)
    host = EngineHost(there, inside, ("--runtime-dir", str(run), "--http-bind", there))
    return NetworkNamespace(host, here, f"in network and mount namespaces of its own, at {there}, as on another host")


def _entered(holder: Program) -> int:
    """Process id of the holder, once it has namespaces of its own."""
    pid, until = holder.process.pid, time.monotonic() + _START_S
    while True:
        try:
            if Path(f"/proc/{pid}/ns/mnt").readlink() != Path("/proc/self/ns/mnt").readlink():
                return pid
        except OSError as error:
            raise NoNamespace(f"its holder has ended: {error}") from error
        if time.monotonic() >= until:
            raise NoNamespace(f"its holder did not come up in {_START_S:g} s")
        time.sleep(0.02)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_CALL_S, check=False)  # noqa: S603  written above
    except subprocess.TimeoutExpired as late:
        raise NoNamespace(f"`{' '.join(command)}` had not ended after {_CALL_S:g} s") from late
    except OSError as problem:
        raise NoNamespace(f"`{command[0]}` cannot be started: {problem.strerror}") from problem
    if done.returncode:
        raise NoNamespace(f"`{' '.join(command)}`: {done.stderr.decode(errors='replace').strip()}")


COUNT: Final = 3 + 2 * ENGINES
_LOWEST: Final = 10_000
_ROOM: Final = 1000
"""Fewest ports below the kernel's range for which the choice is limited to them."""
_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Ports(msgspec.Struct, frozen=True):
    """Every port of the demo, all on the loopback."""

    router: int
    status: int
    ranks: int
    servers: tuple[int, ...]
    sidecars: tuple[int, ...]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Ports:
        """Name `COUNT` ports."""
        router, status, ranks, *agents = numbers
        servers, sidecars = tuple(agents[:ENGINES]), tuple(agents[ENGINES:])
        return cls(router, status, ranks, servers, sidecars)


def choose_ports(base: int) -> Ports:
    """Consecutive ports from `base`, or free ones when it is 0.

    Free ones lie below those that the kernel gives to outgoing connections, and for port 0: a server needs a minute to
    bind its own, and any connection made meanwhile might have taken it.
    """
    if base:
        return Ports.of(range(base, base + COUNT))
    chosen: list[int] = []
    numbers = range(_LOWEST, _first_of_connections())
    for port in random.SystemRandom().sample(numbers, len(numbers)):
        if _is_free(port):
            chosen.append(port)
        if len(chosen) == COUNT:
            return Ports.of(chosen)
    raise ValueError(
        f"of the ports {numbers.start} to {numbers.stop - 1} only {len(chosen)} are free: name --port-base"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _first_of_connections() -> int:
    """First port of the kernel's range for connections; 65,536 where it is unknown or too low to stay below."""
    try:
        first = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 65_536
    return first if first >= _LOWEST + _ROOM else 65_536
