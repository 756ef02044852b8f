"""Messages of any size between two processes of one user on one host: a Unix stream socket, a length before each."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

from ..errors import DeadlineExceeded, PeerLost, TransferFailed
from .deadline import Deadline
from .unix_sockets import peer_pid

MAX_FRAME: Final = 512 * 1024 * 1024
"""Bytes. A load trace of a million copies takes a fifth of it."""
_LENGTH: Final = struct.Struct("<Q")
_BLOCK: Final = 1024 * 1024
_JOINED: Final = 64 * 1024
"""Bytes. Up to so many a message is copied behind its length: one packet instead of two."""
_ENDING_S: Final = 0.5
"""Seconds from a process's last connection to its end."""
_LOOK_S: Final = 0.005


class Frames:
    """One end of an established connection, whose other end was found to be a process of this user."""

    limit: int = MAX_FRAME
    """Bytes of the largest message that is accepted."""
    _length: int | None = None
    """Bytes of the message that is being pulled, once its length has arrived."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = bytearray()
        self.pid = peer_pid(sock)

    @classmethod
    def connect(cls, path: str, deadline: Deadline) -> Self:
        """Connect to the listening socket `path`. Raises `PeerLost` when no process of this user listens there."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(deadline.check(path))
            sock.connect(path)
            return cls(sock)
        except OSError as error:
            sock.close()
            raise PeerLost(f"the socket {path} does not answer: {error}") from error
        except TransferFailed:
            sock.close()
            raise

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._socket.fileno()

    def framed(self, message: bytes) -> tuple[memoryview, ...]:
        """The parts of `message` as it travels next, for `push`.

        A framed message must be sent: with a MAC it has a number.
        """
        mac = self._mac_of(message)
        head = _LENGTH.pack(len(mac) + len(message)) + mac
        if len(message) <= _JOINED:
            return (memoryview(head + message),)
        return memoryview(head), memoryview(message)

    def _mac_of(self, message: bytes) -> bytes:
        """The bytes before a message: none here, a MAC in `MacFrames`."""
        del message
        return b""

    def send(self, message: bytes, deadline: Deadline) -> None:
        """Send `message`, blocking until it is written. Raises `PeerLost`, `DeadlineExceeded`."""
        try:
            for part in self.framed(message):
                self._socket.settimeout(deadline.check("room to send"))
                self._socket.sendall(part)
        except TimeoutError as error:
            raise DeadlineExceeded("the other end to read", deadline.seconds) from error
        except OSError as error:
            raise PeerLost(f"the other end is gone: {error}") from error

    def push(self, part: memoryview) -> memoryview:
        """Send as much of a `framed` part as the socket takes now, without blocking; returns the rest.

        Raises `PeerLost`.
        """
        try:
            self._socket.settimeout(0.0)
            return part[self._socket.send(part) :]
        except BlockingIOError:
            return part
        except OSError as error:
            raise PeerLost(f"the other end is gone: {error}") from error

    def receive(self, deadline: Deadline, waiting_for: str) -> bytes:
        """The next message; blocks. Raises `PeerLost`, and `DeadlineExceeded` naming `waiting_for`."""
        return self._exactly(self._announced(self._exactly(_LENGTH.size, deadline, waiting_for)), deadline, waiting_for)

    def pull(self) -> bytes | None:
        """Read a block of the next message without blocking; the message, once it is complete. Raises `PeerLost`.

        Not to be mixed with `receive`.
        """
        if self._length is None:
            self._read(_LENGTH.size)
            if len(self._received) < _LENGTH.size:
                return None
            self._length = self._announced(bytes(self._received))
            self._received.clear()
        self._read(self._length)
        if len(self._received) < self._length:
            return None
        found, self._received, self._length = bytes(self._received), bytearray(), None
        return found

    @property
    def mid_message(self) -> bool:
        """True when a part of a message was pulled and the rest has not arrived."""
        return self._length is not None or bool(self._received)

    def _read(self, count: int) -> None:
        """Read what is there of `count` bytes, at most a block."""
        if len(self._received) == count:
            return
        try:
            self._socket.settimeout(0.0)
            block = self._socket.recv(min(count - len(self._received), _BLOCK))
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLost(f"the connection broke: {error}") from error
        if not block:
            raise PeerLost("the other end closed the connection")
        self._received += block

    def _announced(self, head: bytes) -> int:
        length = int(_LENGTH.unpack(head)[0])
        if length > self.limit:
            raise PeerLost(f"a message of {length} bytes is announced, at most {self.limit} are taken")
        return length

    def _exactly(self, count: int, deadline: Deadline, waiting_for: str) -> bytes:
        """Read `count` bytes. Memory grows with the bytes that arrive, not with an announced length."""
        found = bytearray()
        while len(found) < count:
            try:
                self._socket.settimeout(deadline.check(waiting_for))
                block = self._socket.recv(min(count - len(found), _BLOCK))
            except TimeoutError as error:
                raise DeadlineExceeded(waiting_for, deadline.seconds) from error
            except OSError as error:
                raise PeerLost(f"the connection broke: {error}") from error
            if not block:
                raise PeerLost(f"the other end closed the connection; {waiting_for} was expected")
            found += block
        return bytes(found)

    def peer_ended(self) -> bool:
        """True when the process at the other end has ended.

        False also where it cannot be seen, in another container.
        """
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        except OSError:
            return self.pid > 0 and self.readable()
        return state.split()[0] in {"Z", "X"}

    def readable(self) -> bool:
        """True when bytes have arrived or the other end has hung up: `receive` finds a beginning at once."""
        return self.readable_within(0.0)

    def readable_within(self, within_s: float) -> bool:
        """The same, waiting up to `within_s` seconds."""
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN | select.POLLHUP)
        return bool(poll.poll(within_s * 1000))

    def close(self) -> None:
        """Close the connection. May be called twice."""
        with contextlib.suppress(OSError):  # the other end may have closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def find_ended_peer(ends: Iterable[tuple[int, Frames]]) -> int | None:
    """The number of an end whose process has ended, or is about to: it closes its connections first.

    Blocks up to 0.5 s.
    """
    until, suspects = time.monotonic() + _ENDING_S, tuple(ends)
    try:
        while suspects := tuple((number, frames) for number, frames in suspects if frames.readable()):
            for number, frames in suspects:
                if frames.peer_ended():
                    return number
            if time.monotonic() >= until:
                return None
            time.sleep(_LOOK_S)
    except ValueError:  # closed meanwhile by another thread
        return None
    return None


class FrameListener:
    """A named Unix socket that only this user can connect to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        new = path.with_suffix(".bind")  # as long as ".sock": too long a name is found here
        new.unlink(missing_ok=True)
        try:
            self._socket.bind(os.fspath(new))
            new.chmod(0o600)
            self._socket.listen(128)
            new.rename(path)  # the name appears when the socket listens
        except OSError as error:
            self._socket.close()
            with contextlib.suppress(OSError):
                new.unlink()
            raise PeerLost(f"the socket {path} cannot be opened: {error}: shorten runtime_dir?") from error

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._socket.fileno()

    def accept(self, deadline: Deadline, waiting_for: str) -> Frames:
        """The next connection of a process of this user; blocks. Raises `DeadlineExceeded`, `PeerLost` when closed."""
        while True:
            self._socket.settimeout(deadline.check(waiting_for))
            try:
                sock, _ = self._socket.accept()
            except TimeoutError as error:
                raise DeadlineExceeded(waiting_for, deadline.seconds) from error
            except OSError as error:
                raise PeerLost(f"the socket {self.path} was closed") from error
            try:
                return Frames(sock)
            except PeerLost:
                sock.close()

    def close(self) -> None:
        """Close the socket and remove its name. May be called twice."""
        with contextlib.suppress(OSError):  # there may be no connection
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.path.unlink(missing_ok=True)
