"""A second host for one engine of the demo: network and mount namespaces of its own, on this machine.

Without root there are none: the engine then stays on this host, limited to the transport `sends`. The namespaces belong
to a program of the demo and end with it, however the demo ends.
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
