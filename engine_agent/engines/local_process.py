"""Processes of a server on this host, as the kernel shows them: which listens on a port, whether it lives, its workers.

What cannot be seen from here (another host, another container, another user) is reported as unknown, never guessed.
An error that says nothing of a process, such as file descriptors that have run out, is raised as `ProcessesUnread`: it
must be taken neither for the end of a server nor for another one.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
import sys
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from weightbus.dataplane.processes import network_identity

from ..errors import ServerError

_PROC: Final = Path("/proc")
_LISTEN: Final = "0A"
"""TCP_LISTEN, as /proc/net/tcp has it."""
_OPEN: Final = frozenset({"01", "03"})
"""TCP_ESTABLISHED, and TCP_SYN_RECV: the last acknowledgement of a connection may still be under way."""
_CONNECT_S: Final = 2.0
_START_FIELD: Final = 19
"""``starttime`` in /proc/PID/stat, counted after the command's closing parenthesis."""
_UNSEEN: Final = frozenset({errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EPERM, errno.ENOTDIR})
"""Errors that say that a process has ended, or is not shown to this one."""
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE})
"""File descriptors have run out, here or on this host."""


class ProcessesUnread(ServerError):
    """The processes of this host could not be looked at. That says nothing about them."""

    def __init__(self, problem: Exception) -> None:
        super().__init__(str(_PROC), f"the processes of this host cannot be looked at: {problem}")


@contextlib.contextmanager
def _seen() -> Generator[None]:
    """Leaves out what has ended meanwhile, or is not shown. Raises `ProcessesUnread` for any other error."""
    try:
        yield
    except OSError as error:
        require_unseen(error)


def require_unseen(error: OSError) -> None:
    """Raise `ProcessesUnread` unless `error` says that a process has ended, or is not shown to this one."""
    if error.errno not in _UNSEEN:
        raise ProcessesUnread(error) from error


def listener(url: str) -> tuple[int, int] | None:
    """Process id and start time of the process that listens on `url`'s port on this machine; None if not seen.

    Raises `ProcessesUnread`.
    """
    parts = urlsplit(url)
    if parts.hostname not in {"127.0.0.1", "localhost", "::1"} or parts.port is None:
        return None
    sockets = _listening(parts.port)
    if not sockets:
        return None
    for folder in _processes():
        if _holds(folder, sockets):
            started = start_time(int(folder.name))
            return None if started is None else (int(folder.name), started)
    return None


def listening_socket(url: str) -> str:
    """The socket that listens for `url`: host, network namespace, address and port; empty if it is not seen from here.

    Whatever address leads to it, and whichever process has it: only one socket has that address at a time, so a server
    that is launched again has the same. A connection is followed to its other end in the kernel's table, because a
    local address may lead elsewhere (forwarded ports, service addresses). Raises `ProcessesUnread`.
    """
    parts = urlsplit(url)
    if not parts.hostname:
        return ""
    try:
        with socket.create_connection((parts.hostname, parts.port or 80), _CONNECT_S) as line:
            ours, table = _endpoint(*line.getsockname()[:2]), tuple(_tcp_table())
    except OSError as error:
        if error.errno in _EXHAUSTED:
            raise ProcessesUnread(error) from error
        return ""
    here = network_identity()
    other_end = next((each.local for each in table if each.remote == ours and each.state in _OPEN), None)
    if not here or other_end is None:
        return ""
    anywhere = ("0.0.0.0", "::") if "." in other_end.address else ("::",)  # noqa: S104  # compared, not bound
    listening = {each.local for each in table if each.state == _LISTEN}
    wanted = (_Endpoint(address, other_end.port) for address in (other_end.address, *anywhere))
    found = next((each for each in wanted if each in listening), None)
    return f"{here}/{found.address}:{found.port}" if found else ""


def loopback_of(url: str) -> str:
    """The address of the loopback at which the server of `url` reaches this process; empty if it may be elsewhere.

    Behind a forwarded port (of a container, by ssh) stands a server whose loopback is another one. So the listening
    process has to be a Python of this host that can be seen from here: no port is forwarded with that. Raises
    `ProcessesUnread`.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    at = "127.0.0.1" if host == "localhost" or host.startswith("127.") else host if host == "::1" else ""
    return at if at and _a_python_listens(parts.port or 80) else ""


def workers_of(pid: int, name: bytes) -> dict[int, int]:
    """Start times of the processes below `pid` whose command begins with `name`, as far as they can be seen here.

    Raises `ProcessesUnread`.
    """
    parents: dict[int, int] = {}
    workers: list[int] = []
    for folder in _processes():
        with _seen():
            each = int(folder.name)
            parents[each] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if (folder / "cmdline").read_bytes().startswith(name):
                workers.append(each)
    found = {each: start_time(each) for each in workers if pid in _above(each, parents)}
    return {each: started for each, started in found.items() if started is not None}


def environment_of(pid: int) -> dict[str, str]:
    """Environment of a process at its start.

    Raises `OSError` where it may not be read, and while it begins or ends; `ProcessesUnread` where it may be later.
    """
    try:
        entries = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError as error:
        require_unseen(error)
        raise
    if not any(entries):
        raise ProcessLookupError(f"process {pid} has no environment: it is about to begin, or has ended")
    pairs = (entry.decode(errors="replace").partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}


def start_time(pid: int) -> int | None:
    """When process `pid` started, in clock ticks since boot; None when it has ended, reaped or not.

    Raises `ProcessesUnread`.
    """
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError as error:
        require_unseen(error)
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else int(fields[_START_FIELD])


def has_ended(pid: int, started: int) -> bool:
    """Whether the process that began at `started` is known to have ended."""
    try:
        return start_time(pid) != started
    except ProcessesUnread:
        return False


def _processes() -> list[Path]:
    try:
        return [folder for folder in _PROC.iterdir() if folder.name.isdigit()]
    except OSError as error:
        require_unseen(error)
        return []


def _above(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    while (pid := parents.get(pid, 0)) > 1:
        yield pid


class _Endpoint(NamedTuple):
    """One end of a connection. IPv4 addresses are written as such, also where a socket of IPv6 has them."""

    address: str
    port: int


class _TcpSocket(NamedTuple):
    """A row of the kernel's table."""

    local: _Endpoint
    remote: _Endpoint
    state: str
    inode: str


def _tcp_table() -> Iterator[_TcpSocket]:
    """The TCP sockets of this network namespace."""
    for table in ("net/tcp", "net/tcp6"):
        with _seen():  # nothing where a kernel has no IPv6
            for line in (_PROC / table).read_text().splitlines()[1:]:
                fields = line.split()
                yield _TcpSocket(_endpoint_in(fields[1]), _endpoint_in(fields[2]), fields[3], fields[9])


def _endpoint_in(field: str) -> _Endpoint:
    """An end as the table has it: words of the address in the machine's byte order, and the port."""
    words, _, port = field.partition(":")
    raw = b"".join(int(words[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(words), 8))
    return _endpoint(socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw), int(port, 16))


def _endpoint(address: str, port: int) -> _Endpoint:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return _Endpoint(str(mapped or parsed), port)


def _listening(port: int) -> set[str]:
    """Inodes of the sockets that listen on `port`, in this network namespace."""
    return {each.inode for each in _tcp_table() if each.state == _LISTEN and each.local.port == port}


def _a_python_listens(port: int) -> bool:
    sockets = _listening(port)
    for folder in _processes() if sockets else ():
        with _seen():
            if _holds(folder, sockets) and "python" in (folder / "exe").readlink().name:
                return True
    return False


def _holds(folder: Path, sockets: set[str]) -> bool:
    try:
        return any(_socket(link) in sockets for link in (folder / "fd").iterdir())
    except OSError as error:
        require_unseen(error)
        return False


def _socket(link: Path) -> str | None:
    """Inode of the socket behind one open file. A server closes some while they are looked at: that is not its end."""
    try:
        found = re.match(r"socket:\[(\d+)\]$", str(link.readlink()))
    except FileNotFoundError:
        return None
    return found[1] if found else None
