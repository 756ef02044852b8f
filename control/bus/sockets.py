"""Options and keys of the sockets of both sides, and a way to end a poll. router.py explains the options."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Final

import zmq

from ..protocol import ConfigurationError, codec
from ..security import KeyPair

HWM: Final = 1000
KEEPALIVE_IDLE_S: Final = 2
KEEPALIVE_INTERVAL_S: Final = 1
KEEPALIVE_COUNT: Final = 3
UNACKNOWLEDGED_MS: Final = 4000
"""A silent connection, or one that takes nothing, is given up by the kernel after about four seconds."""
MAX_BURST: Final = 256
"""Messages taken per poll, so that a flood cannot keep timers from running."""


def new_keypair() -> KeyPair:
    """A new CURVE key pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


def public_of(secret: str) -> str:
    """The public half of a secret key."""
    return zmq.curve_public(secret.encode("ascii")).decode("ascii")


def libzmq_version() -> str:
    """Version of the loaded libzmq, and whether it can encrypt."""
    return f"{zmq.zmq_version()} ({'with' if zmq.has('curve') else 'WITHOUT'} CURVE)"


def check_library() -> None:
    """Refuse a libzmq with known holes, or one that cannot encrypt."""
    if zmq.zmq_version_info() < (4, 3, 5):
        raise ConfigurationError(f"libzmq {zmq.zmq_version()} has known holes, 4.3.5 is needed: upgrade pyzmq")
    if not zmq.has("curve"):
        raise ConfigurationError("this libzmq was built without CURVE: install pyzmq from its own wheels")


class Waker:
    """A file descriptor that a poll can wait for and any thread or signal handler can set."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """The file descriptor to poll."""
        return self._reader.fileno()

    def set(self) -> None:
        """End the wait. From any thread, and in a signal handler."""
        with contextlib.suppress(BlockingIOError, OSError):  # full: it is set already; closed: no poll is left to end
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Reset, so that the next poll blocks again."""
        with contextlib.suppress(BlockingIOError):
            while len(self._reader.recv(4096)) == 4096:
                pass

    def close(self) -> None:
        """Release the file descriptors."""
        self._reader.close()
        self._writer.close()


def set_common(each: zmq.Socket[bytes]) -> None:
    """The options of every socket, whichever side it is on."""
    each.set(zmq.LINGER, 0)
    each.set(zmq.SNDHWM, HWM)
    each.set(zmq.RCVHWM, HWM)
    each.set(zmq.MAXMSGSIZE, codec.MAX_FRAME_BYTES)
    each.set(zmq.IPV6, 1)
    each.set(zmq.TCP_KEEPALIVE, 1)
    each.set(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    each.set(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_INTERVAL_S)
    each.set(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_COUNT)
    each.set(zmq.TCP_MAXRT, UNACKNOWLEDGED_MS)


def explain_handshake(number: int, value: int) -> str:
    """Why a connection came to nothing, by the number and value of its monitor's event."""
    match number:
        case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return f"a connection was refused: its key is not trusted (ZAP said {value})"
        case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            return f"a connection was refused: its handshake broke the rules (ZMTP error {value:#x})"
        case _:
            return "a connection was refused: no handshake, or not the one asked for, within its time"


def burst(each: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
    """Messages that have arrived, at most `MAX_BURST`."""
    for _ in range(MAX_BURST):
        try:
            yield each.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
