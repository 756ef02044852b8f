"""A second host for one engine of the demo: a network and a view of the file system of its own, on this machine.

Where that cannot be had (it takes root) the engine stays beside the others, and is told to take what is sent to it.
The namespaces belong to a program of the demo: they are gone when it is, however the demo ends.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Final, NamedTuple

from .child_processes import Program, Programs

_HOLDER: Final = ["unshare", "--net", "--mount", "sleep", "infinity"]
_START_S: Final = 10.0
_CALL_S: Final = 30.0


class HostPlace(NamedTuple):
    """Where the server and the sidecar of one engine run."""

    address: str = "127.0.0.1"
    """At which they are reached from here."""
    before: tuple[str, ...] = ()
    """Words before each of their commands."""
    flags: tuple[str, ...] = ()
    """Of the sidecar alone."""


class NetworkNamespace(NamedTuple):
    """The other place, and the address at which this one is reached from there."""

    place: HostPlace
    here: str
    story: str
    """Where the engine is, in words."""


class NoNamespace(Exception):
    """This machine gives none; the message says why."""


def elsewhere(programs: Programs, folder: Path) -> NetworkNamespace:
    """A place with a network of its own if there can be one, else this one."""
    try:
        return _second_host(programs, folder)
    except NoNamespace as reason:
        place = HostPlace(flags=("--transports", "sends"))
        story = f"beside the others, told to take what is sent to it over a gloo group (no second network: {reason})"
        return NetworkNamespace(place, "127.0.0.1", story)


def unavailable() -> str:
    """Why there can be no second network; empty where nothing is known to speak against it."""
    if os.geteuid():
        return "only root may make network namespaces"
    missing = [each for each in ("ip", "unshare", "nsenter") if shutil.which(each) is None]
    return f"{missing[0]} is not installed" if missing else ""


def _second_host(programs: Programs, folder: Path) -> NetworkNamespace:
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
    place = HostPlace(there, inside, ("--runtime-dir", str(run), "--http-bind", there))
    return NetworkNamespace(place, here, f"in network and mount namespaces of its own, at {there}, as on another host")


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
