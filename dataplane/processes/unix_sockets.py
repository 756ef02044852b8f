"""Unix sockets of one user: their folder, its permissions, and the process at the other end."""

from __future__ import annotations

import os
import socket
import stat
import struct
import tempfile
from pathlib import Path

from ..errors import PeerLost, Unsupported


def why_not_private(path: Path, kind: int) -> str:
    """The reason why `path` is not a folder or socket (`kind`: S_IFDIR, S_IFSOCK) of this user alone; empty when it is.

    Looks at the entry itself: a link is neither.
    """
    try:
        found = path.lstat()
    except OSError as error:
        return f"{path} cannot be looked at: {error.strerror}"
    if stat.S_IFMT(found.st_mode) != kind:
        return f"{path} is a {stat.filemode(found.st_mode)}, expected a {stat.filemode(kind | 0o700)}"
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        return (
            f"{path} belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}, "
            f"expected user {os.getuid()} and no rights for others"
        )
    return ""


def open_runtime_dir(path: Path) -> None:
    """Create `path` for this user alone. Raises `Unsupported` when others can enter it, or it is a link."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if reason := why_not_private(path, stat.S_IFDIR):
        raise Unsupported(f"{reason}: choose another runtime_dir or correct it")


def peer_pid(sock: socket.socket) -> int:
    """PID of the process at the other end; 0 in another PID namespace. Raises `PeerLost` when another user owns it."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    if uid != os.getuid():
        raise PeerLost(f"process {pid} belongs to user {uid}, expected {os.getuid()}: run both sides as one user")
    return int(pid)


def default_runtime_dir() -> Path:
    """The folder of sockets unless settings name another: a short path, of this user alone."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base, "weightbus") if base else Path(tempfile.gettempdir(), f"weightbus-{os.getuid()}")
