"""Messages between two hosts over TCP, each with a MAC keyed by the epoch's token: a stranger cannot inject a message.

The token is new in every epoch and travels on the authenticated bus, never here. Both ends contribute a nonce and
number their messages, so a message of another connection, or an earlier one, is refused. Contents are readable on the
way: they are layouts and plans, not weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
from typing import Final
from urllib.parse import urlsplit

from ..errors import DeadlineExceeded, ForgedMessage, PeerLost, TransferFailed
from .deadline import Deadline
from .frames import Frames

_NONCE_BYTES: Final = 16
_MAC_BYTES: Final = 32
_GREETING: Final = b"weightbus"


class MacFrames(Frames):
    """One end of a TCP connection."""

    def __init__(self, sock: socket.socket, token: str, *, listening: bool) -> None:
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
        try:
            sock = socket.create_connection(where, deadline.check(address))
        except TimeoutError as error:
            raise DeadlineExceeded(f"{address} to answer", deadline.seconds) from error
        except OSError as error:
            raise PeerLost(f"{address} does not answer: {error}") from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
        try:
            self._socket.settimeout(deadline.check("a greeting"))
            self._socket.sendall(mine)
        except TimeoutError as error:
            raise DeadlineExceeded("a greeting", deadline.seconds) from error
        except OSError as error:
            raise PeerLost(f"the other end is gone: {error}") from error
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


class MacListener:
    """A TCP port on one address of this host."""

    def __init__(self, host: str, token: str) -> None:
        self._token = token
        self._socket = listen_tcp(host)
        self.address = f"tcp://{bracket_ipv6(host)}:{self._socket.getsockname()[1]}"

    def accept(self, deadline: Deadline) -> MacFrames:
        """The next connection, before its handshake; blocks. Raises `DeadlineExceeded`, `PeerLost`."""
        try:
            self._socket.settimeout(deadline.check("a connection"))
            sock, _ = self._socket.accept()
        except TimeoutError as error:
            raise DeadlineExceeded("a connection", deadline.seconds) from error
        except OSError as error:
            raise PeerLost("the port was closed") from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return MacFrames(sock, self._token, listening=True)

    def close(self) -> None:
        """Close the port. May be called twice."""
        with contextlib.suppress(OSError):  # there may be no connection
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


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
