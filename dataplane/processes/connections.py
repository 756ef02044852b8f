"""Typed connections between processes: deadlines, framed messages over Unix sockets and TCP, and pools of them.

`Frames` carries messages of any size between two processes of one user on one host, over a Unix stream socket, with a
length before each; `MacFrames` carries them between two hosts over TCP, with a MAC keyed by the epoch's token before
each. `WireEnd` says which messages each end says and hears, as tagged structs in msgpack. `ConnectionPool` serves the
connections of one session from one thread.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import select
import selectors
import socket
import stat
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Final, Generic, Protocol, Self, TypeVar, cast
from urllib.parse import urlsplit

import msgspec

from ..errors import DataplaneError, DeadlineExceeded, ForgedMessage, PeerLost, TransferFailed, Unsupported


class Deadline:
    """A point `seconds` from now on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds that remain, at least zero."""
        return max(0.0, self._end - time.monotonic())

    def check(self, waiting_for: str) -> float:
        """Seconds that remain. Raises `DeadlineExceeded`, naming `waiting_for`, when there are none."""
        left = self.left()
        if not left:
            raise DeadlineExceeded(waiting_for, self.seconds)
        return left


BUCKET_TIMEOUT_S: Final = 30.0
"""Seconds for one bucket, besides its bytes at `_LEAST_BYTES_S`, where no other receiver shows how long it takes.

A server loads the bucket before it meanwhile, and compiles kernels for the first one.
"""
_LEAST_BYTES_S: Final = 26e6


def bucket_timeout_s(nbytes: int) -> float:
    """Seconds after which a server that has not taken a bucket of `nbytes` counts as stalled."""
    return BUCKET_TIMEOUT_S + nbytes / _LEAST_BYTES_S


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


def default_runtime_dir() -> Path:
    """The folder of sockets unless settings name another: a short path, of this user alone."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base, "weightbus") if base else Path(tempfile.gettempdir(), f"weightbus-{os.getuid()}")


def peer_pid(sock: socket.socket) -> int:
    """PID of the process at the other end; 0 in another PID namespace. Raises `PeerLost` when another user owns it."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    if uid != os.getuid():
        raise PeerLost(f"process {pid} belongs to user {uid}, expected {os.getuid()}: run both sides as one user")
    return int(pid)


MAX_FRAME: Final = 512 * 1024 * 1024
"""Bytes. A load trace of a million copies takes a fifth of it."""
MAX_FDS: Final = 128
"""File descriptors with one message. Linux passes at most 253 at once."""
_LENGTH: Final = struct.Struct("<Q")
_MAX_PATH: Final = 107
"""Bytes of a Unix socket's path, less the terminating zero."""
_BLOCK: Final = 1024 * 1024
_JOINED: Final = 64 * 1024
"""Bytes. Up to so many a message is copied behind its length: one packet instead of two."""
_ENDING_S: Final = 0.5
"""Seconds from a process's last connection to its end."""
_LOOK_S: Final = 0.005


@contextlib.contextmanager
def _broken_as_lost(waiting_for: str, deadline: Deadline, gone: str) -> Generator[None]:
    """Errors of a socket as ours: `DeadlineExceeded` naming `waiting_for`, and `PeerLost` saying that it is `gone`."""
    try:
        yield
    except TimeoutError as error:
        raise DeadlineExceeded(waiting_for, deadline.seconds) from error
    except OSError as error:
        raise PeerLost(f"{gone}: {error}") from error


class Frames:
    """One end of an established connection, whose other end was found to be a process of this user."""

    limit: int = MAX_FRAME
    """Bytes of the largest message that is accepted."""
    kind: socket.SocketKind = socket.SOCK_STREAM
    """Of its Unix socket."""
    _length: int | None = None
    """Bytes of the message that is being pulled, once its length has arrived."""
    _fds: list[int] | None = None
    """Descriptors that have arrived and were not taken; None: none are accepted."""

    def __init__(self, sock: socket.socket, *, with_fds: bool = False) -> None:
        """`with_fds`: descriptors that come with messages are kept for `take_fds`."""
        self._socket = sock
        self._received = bytearray()
        self.pid = peer_pid(sock)
        if with_fds:
            self._fds = []

    @classmethod
    def connect(cls, path: str, deadline: Deadline, *, with_fds: bool = False) -> Self:
        """Connect to the listening socket `path`. Raises `PeerLost` when no process of this user listens there."""
        sock = socket.socket(socket.AF_UNIX, cls.kind)
        try:
            sock.settimeout(deadline.check(path))
            sock.connect(path)
            return cls(sock, with_fds=with_fds)
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

    def send(self, message: bytes, deadline: Deadline, fds: Sequence[int] = ()) -> None:
        """Send `message`, with descriptors, blocking until it is written. Raises `PeerLost`, `DeadlineExceeded`."""
        with _broken_as_lost("the other end to read", deadline, "the other end is gone"):
            for part in self.framed(message):
                self._socket.settimeout(deadline.check("room to send"))
                at = socket.send_fds(self._socket, [part], fds, socket.MSG_NOSIGNAL) if fds else 0
                self._socket.sendall(part[at:])
                fds = ()

    def push(self, part: memoryview, fds: Sequence[int] = ()) -> memoryview:
        """Send as much of a `framed` part as the socket takes now, without blocking; returns the rest.

        `fds` travel with its first byte. Raises `PeerLost`.
        """
        try:
            self._socket.settimeout(0.0)
            if fds:
                return part[socket.send_fds(self._socket, [part], fds, socket.MSG_NOSIGNAL) :]
            return part[self._socket.send(part) :]
        except BlockingIOError:
            return part
        except OSError as error:
            raise PeerLost(f"the other end is gone: {error}") from error

    def receive(self, deadline: Deadline, waiting_for: str) -> bytes:
        """The next message; blocks. Raises `PeerLost`, and `DeadlineExceeded` naming `waiting_for`."""
        return self._exactly(self._announced(self._exactly(_LENGTH.size, deadline, waiting_for)), deadline, waiting_for)

    def take_fds(self) -> list[int]:
        """The descriptors that came with the messages received since the last call; they are the caller's now."""
        found, self._fds = self._fds or [], []
        return found

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
            with _broken_as_lost(waiting_for, deadline, "the connection broke"):
                self._socket.settimeout(deadline.check(waiting_for))
                block = self._block(min(count - len(found), _BLOCK))
            if not block:
                raise PeerLost(f"the other end closed the connection; {waiting_for} was expected")
            found += block
        return bytes(found)

    def _block(self, most: int) -> bytes:
        if self._fds is None:
            return self._socket.recv(most)
        block, fds, flags, _ = socket.recv_fds(self._socket, most, MAX_FDS)
        self._fds += fds
        if flags & socket.MSG_CTRUNC:
            raise PeerLost(f"more than {MAX_FDS} descriptors came with a message")
        return block

    def peer_ended(self) -> bool:
        """True when the process at the other end has ended.

        False also where it cannot be seen, in another container.
        """
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
        except (FileNotFoundError, ProcessLookupError):
            return self.pid > 0 and self.readable()
        except OSError:  # such as too many open files, which say nothing of the other end
            return False
        return state.split()[0] in {"Z", "X"}

    def readable(self, within_s: float = 0.0) -> bool:
        """True when within `within_s` seconds bytes arrive or the other end hangs up: `receive` begins at once."""
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLIN | select.POLLHUP)
        return bool(poll.poll(within_s * 1000))

    def finish(self) -> None:
        """Send no more, which the other end hears as the end; it may go on to send."""
        with contextlib.suppress(OSError):  # the other end may have closed first
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection, and descriptors that were not taken. May be called twice."""
        _shut(self._socket)
        while self._fds:
            os.close(self._fds.pop())


def _shut(sock: socket.socket) -> None:
    """Close a socket, and end the waits for it of other threads."""
    with contextlib.suppress(OSError):  # there may be no connection, or none any more
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class _Listener:
    """A listening socket."""

    _socket: socket.socket

    def fileno(self) -> int:
        """The socket's descriptor, for selectors."""
        return self._socket.fileno()

    def _accept(self, deadline: Deadline, waiting_for: str, closed: str) -> socket.socket:
        with _broken_as_lost(waiting_for, deadline, closed):
            self._socket.settimeout(deadline.check(waiting_for))
            try:
                return self._socket.accept()[0]
            except OSError as error:
                if error.errno in _SCARCE:  # the connection keeps the socket readable: callers would spin
                    time.sleep(_AGAIN_S)
                raise

    def close(self) -> None:
        """Take no more connections. May be called twice."""
        _shut(self._socket)


_SCARCE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Errors of an accept that may pass."""
_AGAIN_S: Final = 0.01
"""Seconds before a connection that could not be accepted may be tried again."""


class FrameListener(_Listener):
    """A named Unix socket that only this user can connect to."""

    def __init__(self, path: Path, frames: type[Frames] = Frames) -> None:
        """Accepted connections are `frames`. Raises `Unsupported` for too long a path, `PeerLost`."""
        self.path = path
        self._frames = frames
        new = path.with_suffix(".bind")  # as long as ".sock"
        if len(os.fsencode(new)) > _MAX_PATH:
            raise Unsupported(f"{path} is longer than the {_MAX_PATH} bytes of a socket's name: shorten runtime_dir")
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, frames.kind)
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
            raise PeerLost(f"the socket {path} cannot be opened: {error}") from error

    def accept(self, deadline: Deadline, waiting_for: str) -> Frames:
        """The next connection of a process of this user; blocks. Raises `DeadlineExceeded`, `PeerLost` when closed."""
        while True:
            sock = self._accept(deadline, waiting_for, f"the socket {self.path} was closed")
            try:
                return self._frames(sock)
            except PeerLost:
                sock.close()

    def close(self) -> None:
        """Close the socket and remove its name. May be called twice."""
        super().close()
        self.path.unlink(missing_ok=True)


class PacketFrames(Frames):
    """A connection on which every message is a packet of the kernel's, of at most `limit` bytes."""

    limit = 16 * 1024
    kind = socket.SOCK_SEQPACKET

    def framed(self, message: bytes) -> tuple[memoryview, ...]:
        """The packet."""
        return (memoryview(message),)

    def receive(self, deadline: Deadline, waiting_for: str) -> bytes:
        """The next message; blocks. Raises `PeerLost`, and `DeadlineExceeded` naming `waiting_for`."""
        if (packet := self._packet(deadline.check(waiting_for))) is None:
            raise DeadlineExceeded(waiting_for, deadline.seconds)
        return packet

    def pull(self) -> bytes | None:
        """The next message, if one has arrived. Raises `PeerLost`."""
        return self._packet(0.0)

    def _packet(self, within_s: float) -> bytes | None:
        self._socket.settimeout(within_s)
        try:
            try:
                packet = self._socket.recv(self.limit + 1)
            except ConnectionResetError:
                # The peer closed without reading all we sent. What it said last comes after this error.
                packet = self._socket.recv(self.limit + 1)
        except (BlockingIOError, TimeoutError):
            return None
        except OSError as error:
            raise PeerLost(f"the connection broke: {error}") from error
        if not packet:
            raise PeerLost("the other end closed the connection before the end of the session")
        if len(packet) > self.limit:
            raise PeerLost(f"the other end sent a packet of more than {self.limit} bytes")
        return packet


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


_NONCE_BYTES: Final = 16
_MAC_BYTES: Final = 32
_GREETING: Final = b"weightbus"


class MacFrames(Frames):
    """One end of a TCP connection between two hosts: a stranger cannot inject a message.

    The token is new in every epoch and travels on the authenticated bus, never here. Both ends contribute a nonce and
    number their messages, so a message of another connection, or an earlier one, is refused. Contents are readable on
    the way: they are layouts and plans, not weights.
    """

    def __init__(self, sock: socket.socket, token: str, *, listening: bool) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._received = bytearray()
        self.pid = 0
        self._token = token.encode("ascii")
        self._key = b""
        self._listening = listening
        self._sent = self._heard = 0

    @classmethod
    def reach(cls, address: str, token: str, deadline: Deadline) -> MacFrames:
        """Connect to ``tcp://host:port``.

        Raises `PeerLost`, `DeadlineExceeded`, `TransferFailed` for another kind of address.
        """
        where = parse_tcp_address(address)
        with _broken_as_lost(f"{address} to answer", deadline, f"{address} does not answer"):
            sock = socket.create_connection(where, deadline.check(address))
        frames = cls(sock, token, listening=False)
        try:
            frames.handshake(deadline)
        except TransferFailed:
            frames.close()
            raise
        return frames

    def handshake(self, deadline: Deadline) -> None:
        """Exchange nonces, and prove that both ends know the token, before a message of any size is read.

        Raises `ForgedMessage`.
        """
        mine = secrets.token_bytes(_NONCE_BYTES)
        theirs = self._exchange(mine, deadline)
        both = mine + theirs if self._listening else theirs + mine
        self._key = hmac.new(self._token, both, hashlib.sha256).digest()
        shown = self._exchange(self._mac(_GREETING, 0, by_listener=self._listening), deadline)
        if not hmac.compare_digest(shown, self._mac(_GREETING, 0, by_listener=not self._listening)):
            raise ForgedMessage("a connection to the sender")
        self._sent = self._heard = 1

    def _exchange(self, mine: bytes, deadline: Deadline) -> bytes:
        """Send `mine` and read as many bytes of the other end."""
        with _broken_as_lost("a greeting", deadline, "the other end is gone"):
            self._socket.settimeout(deadline.check("a greeting"))
            self._socket.sendall(mine)
        return self._exactly(len(mine), deadline, "a greeting")

    def _mac_of(self, message: bytes) -> bytes:
        mac = self._mac(message, self._sent, by_listener=self._listening)
        self._sent += 1
        return mac

    def receive(self, deadline: Deadline, waiting_for: str) -> bytes:
        """The next message; blocks. Raises `PeerLost`, `DeadlineExceeded`, `ForgedMessage`."""
        return self._opened(super().receive(deadline, waiting_for))

    def pull(self) -> bytes | None:
        """See `Frames.pull`. Raises `PeerLost`, `ForgedMessage`."""
        found = super().pull()
        return None if found is None else self._opened(found)

    def _opened(self, found: bytes) -> bytes:
        mac, message = found[:_MAC_BYTES], found[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(message, self._heard, by_listener=not self._listening)):
            raise ForgedMessage("a connection to the sender")
        self._heard += 1
        return message

    def _mac(self, message: bytes, number: int, *, by_listener: bool) -> bytes:
        head = bytes([by_listener]) + number.to_bytes(8, "little")
        return hmac.new(self._key, head + message, hashlib.sha256).digest()


class MacListener(_Listener):
    """A TCP port on one address of this host."""

    def __init__(self, host: str, token: str) -> None:
        self._token = token
        self._socket = listen_tcp(host)
        self.address = f"tcp://{bracket_ipv6(host)}:{self._socket.getsockname()[1]}"

    def accept(self, deadline: Deadline) -> MacFrames:
        """The next connection, before its handshake; blocks. Raises `DeadlineExceeded`, `PeerLost`."""
        return MacFrames(self._accept(deadline, "a connection", "the port was closed"), self._token, listening=True)


def parse_tcp_address(address: str) -> tuple[str, int]:
    """Host and port of ``tcp://host:port``. Raises `TransferFailed` for anything else."""
    try:
        url = urlsplit(address)
        host, port = url.hostname, url.port
    except ValueError:
        host, port = None, None
    if not address.startswith("tcp://") or not host or not port:
        raise TransferFailed(f"{address!r} is not an address to send from, expected tcp://host:port")
    return host, port


def bracket_ipv6(host: str) -> str:
    """`host` as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def listen_tcp(host: str) -> socket.socket:
    """A listening socket on an ephemeral port of `host`. Raises `TransferFailed` where it cannot be opened."""
    try:
        return socket.create_server((host, 0), family=address_family(host), backlog=128)
    except OSError as error:
        raise TransferFailed(
            f"no port can be opened on {host}: {error}: set host to an address of this machine"
        ) from error


def address_family(host: str) -> socket.AddressFamily:
    """IPv4 where `host` has such an address, otherwise IPv6. Raises OSError where it has neither."""
    found = {family for family, *_ in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return socket.AF_INET if socket.AF_INET in found else socket.AF_INET6


def local_address_towards(host: str, port: int) -> str:
    """The address of this machine that a packet to `host` would carry. Sends nothing.

    Raises `PeerLost` without a route.
    """
    try:
        with socket.socket(address_family(host), socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            found: str = probe.getsockname()[0]
    except OSError as error:
        raise PeerLost(f"there is no way to {host}: {error}") from error
    return found


def new_token() -> str:
    """A random secret for one epoch."""
    return secrets.token_hex(16)


class WireMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Each names its tag itself: a class may be renamed, what travels may not. Unknown fields are refused."""

    @property
    def kind(self) -> str:
        """The tag it travels with; errors name a message by it."""
        return str(self.__struct_config__.tag)


Out = TypeVar("Out", bound=WireMessage)
In = TypeVar("In", bound=WireMessage)
_ENCODER: Final = msgspec.msgpack.Encoder()


class WireEnd(Generic[Out, In]):
    """One end of a conversation: the union of messages that it says, and the union of messages that it hears.

    Bytes are carried by `Frames`, or by what takes whole packets, such as a `ConnectionPool`.
    """

    def __init__(self, heard: object) -> None:
        """`heard` is `In` once more, for run time."""
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(cast("type[In]", heard))

    @staticmethod
    def encode(message: Out) -> bytes:
        """The packet that `say` sends."""
        return _ENCODER.encode(message)

    def decode(self, packet: bytes) -> In:
        """The message in `packet`. Raises `PeerLost` for bytes that are none of `In`."""
        try:
            return self._decoder.decode(packet)
        except (ValueError, RecursionError) as error:
            raise PeerLost(f"the other end sent what is not a message: {error}") from error

    def say(self, frames: Frames, message: Out, deadline: Deadline) -> None:
        """Send `message`. Raises `PeerLost`, `DeadlineExceeded`."""
        frames.send(self.encode(message), deadline)

    def hear(self, frames: Frames, deadline: Deadline, waiting_for: str) -> In:
        """Wait for the next message, called `waiting_for` in errors. Raises `PeerLost`, `DeadlineExceeded`."""
        return self.decode(frames.receive(deadline, waiting_for))


STALL_S: Final = 10.0
"""Seconds for a peer that stalls in the middle of a message, or does not read, and for the first message of a new one.
"""
MAX_UNSENT: Final = 32
"""Parts of messages in a peer's queue. A peer that asks on and does not read is dropped before they fill the memory."""
_CLOSED: Final = (ValueError, LookupError, RuntimeError, OSError)
"""Exceptions of a selector or a queue that another thread closes meanwhile."""


class PooledConnection:
    """A peer that is connected, or is expected to connect."""

    def __init__(self, name: str) -> None:
        self.name = name
        """Empty until the peer has said its name."""
        self.frames: Frames | None = None
        self.unsent: deque[memoryview] = deque()
        """Bytes that wait for room in the socket."""
        self.progress_at = 0.0
        """Monotonic time at which the socket last took bytes; or the peer connected."""
        self.received_at = 0.0
        """Monotonic time at which the last bytes of the peer came."""


class Watched(Protocol):
    """An object with a descriptor, as selectors take it."""

    def fileno(self) -> int:
        """The descriptor."""
        ...


L = TypeVar("L", bound=PooledConnection)


class ConnectionPool(Generic[L]):
    """The connections of one session, read and written without blocking, so that a stalled peer delays no other.

    A message is handed on when all of its bytes have arrived; outgoing bytes wait in a queue of their own for room in
    the socket. A peer that stalls in the middle of either is dropped after `STALL_S`. Bytes that arrived while the pool
    was not polled count: rank 0 plans for seconds, or may have been stopped itself.

    Used from one thread; `end` from any, after which `drop` and `close` may be too.
    """

    def __init__(self, on_message: Callable[[L, bytes], None], on_lost: Callable[[L, str], None]) -> None:
        """`on_message` gets every message, `on_lost` a peer that has to be dropped and the reason. It calls `drop`.

        A `DataplaneError` of `on_message` is such a reason.
        """
        self._on_message, self._on_lost = on_message, on_lost
        self._connections: dict[L, None] = {}
        self._ended = threading.Event()
        self._selector = selectors.DefaultSelector()

    def watch(self, what: Watched | int, ready: Callable[[], None]) -> None:
        """Call `ready` whenever `what` is readable."""
        self._selector.register(what, selectors.EVENT_READ, ready)

    def unwatch(self, what: Watched | int) -> None:
        """Undo `watch`, if it was called, before `what` is closed."""
        with contextlib.suppress(*_CLOSED):
            self._selector.unregister(what)

    def add(self, connection: L, frames: Frames) -> None:
        """Serve a peer over established `frames`.

        Raises `TransferFailed`, and closes `frames`, when the pool is closed.
        """
        connection.frames, connection.progress_at = frames, time.monotonic()
        connection.unsent = deque()
        self._connections[connection] = None
        try:
            self._selector.register(frames, selectors.EVENT_READ, connection)
        except _CLOSED as error:
            self.drop(connection)
            raise TransferFailed("the sender was closed") from error

    def identify(self, guest: L, connection: L) -> None:
        """Move the connection of `guest`, whose name was unknown, to the peer that it has said to be."""
        connection.frames, connection.unsent, connection.progress_at = guest.frames, guest.unsent, time.monotonic()
        guest.frames, guest.unsent = None, deque()
        self._connections.pop(guest, None)
        self._connections[connection] = None
        if connection.frames is not None:
            self._selector.modify(connection.frames, _wanted(connection), connection)

    def send(self, connection: L, message: bytes) -> None:
        """Queue `message` and send what the socket takes now. Does nothing for a dropped peer.

        Raises `PeerLost` for a failed connection or a queue of `MAX_UNSENT` parts, `TransferFailed` when the pool is
        closed.
        """
        frames = connection.frames
        if frames is None:
            return
        if len(connection.unsent) >= MAX_UNSENT:
            raise PeerLost("it goes on to ask, and does not read what it is told")
        if not connection.unsent:
            connection.progress_at = time.monotonic()
        connection.unsent.extend(frames.framed(message))
        try:
            self._push(connection)
        except _CLOSED as error:
            if not self._ended.is_set():
                raise
            raise TransferFailed("the sender was closed") from error

    def drop(self, connection: L, last: bytes = b"") -> None:
        """Close a peer's connection.

        `last` is sent before, if the socket takes it and no other message is half sent.
        """
        frames, connection.frames = connection.frames, None
        self._connections.pop(connection, None)
        if frames is None:
            return
        if last and not connection.unsent:
            with contextlib.suppress(DataplaneError):  # it is gone, nothing to tell
                for part in frames.framed(last):
                    if frames.push(part):
                        break
        connection.unsent = deque()
        with contextlib.suppress(*_CLOSED):
            self._selector.unregister(frames)
        frames.close()

    def poll(self, timeout_s: float | None) -> None:
        """Read and write what is ready within `timeout_s` seconds, a block for each connection, and drop stalled peers.

        None waits as long as it takes. Raises `TransferFailed` when the pool is closed meanwhile.
        """
        if self._ended.is_set():
            raise TransferFailed("the sender was closed")
        try:
            self._drop_stalled()
            for key, events in self._selector.select(timeout_s):
                if not isinstance(key.data, PooledConnection):
                    key.data()
                    continue
                connection: L = key.data  # type: ignore[assignment]  # registered by `add`
                if events & selectors.EVENT_WRITE:
                    self._guarded(connection, self._push)
                if events & selectors.EVENT_READ:
                    self._guarded(connection, self._pull)
        except _CLOSED as error:
            if not self._ended.is_set():
                raise
            self.close()  # of what came meanwhile
            raise TransferFailed("the sender was closed") from error

    def silent_for(self, connection: L, seconds: float) -> bool:
        """True when for `seconds` the peer has sent nothing and read nothing, and no bytes of it wait in the socket."""
        if time.monotonic() - max(connection.received_at, connection.progress_at) <= seconds:
            return False
        frames = connection.frames
        try:
            return frames is None or not frames.readable()
        except _CLOSED:  # by another thread: `poll` says it
            return False

    @property
    def ended(self) -> bool:
        """True once `end` was called; no message is delivered any more."""
        return self._ended.is_set()

    def end(self) -> None:
        """Make `poll` and `send` raise `TransferFailed`, from any thread. Only `drop` and `close` may follow."""
        self._ended.set()

    def close(self) -> None:
        """`end`, and close every connection that was not dropped."""
        self.end()
        self._selector.close()
        for connection in tuple(self._connections):
            self.drop(connection)

    def _guarded(self, connection: L, go_on: Callable[[L], None]) -> None:
        try:
            go_on(connection)
        except DataplaneError as error:
            if self._ended.is_set():
                raise TransferFailed("the sender was closed") from error
            self._on_lost(connection, str(error))

    def _pull(self, connection: L) -> None:
        """Read a block; deliver the message if it is complete. Raises `DataplaneError`."""
        frames = connection.frames
        if frames is None:  # let go of by an earlier event of the same batch
            return
        connection.received_at = time.monotonic()
        found = frames.pull()
        if found is not None:
            self._on_message(connection, found)

    def _push(self, connection: L) -> None:
        """Send what the socket takes now. Raises `PeerLost`."""
        frames = connection.frames
        if frames is None:
            return
        unsent = connection.unsent  # another thread that lets go of it puts an empty one there
        while unsent:
            left = frames.push(unsent[0])
            if len(left) < len(unsent[0]):
                connection.progress_at = time.monotonic()
            if left:
                unsent[0] = left
                break
            unsent.popleft()
        if self._selector.get_key(frames).events != _wanted(connection):
            self._selector.modify(frames, _wanted(connection), connection)

    def _drop_stalled(self) -> None:
        for connection in tuple(self._connections):
            if connection.unsent and _stalled(connection):
                self._guarded(connection, self._push)  # there may be room since the last poll
                if connection.unsent and _stalled(connection):
                    self._on_lost(connection, f"it has read nothing for {STALL_S:.1f} s of what it was told")
            elif (
                connection.frames is not None and connection.frames.mid_message and self.silent_for(connection, STALL_S)
            ):
                self._on_lost(connection, f"it has stood still for {STALL_S:.1f} s in the middle of what it said")
            elif (
                not connection.name
                and _stalled(connection)
                and (connection.received_at or self.silent_for(connection, STALL_S))
            ):
                self._on_lost(connection, f"it has not said within {STALL_S:.1f} s who it is")


def _stalled(connection: PooledConnection) -> bool:
    """True when no outgoing byte, or no first message, has made progress for `STALL_S`."""
    return time.monotonic() - connection.progress_at > STALL_S


def _wanted(connection: PooledConnection) -> int:
    return selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
