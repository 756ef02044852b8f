"""What the two halves of the local transport say to each other over a Unix SEQPACKET socket.

One message is one packet: msgpack, tagged by ``type``, bounded by `MAX_PACKET`. Tensors never travel here, only the
names of the memory they lie in. Both ends insist on the same user id.
"""

from __future__ import annotations

import contextlib
import socket
import stat
from pathlib import Path
from typing import Annotated, Final, Generic, TypeVar

import msgspec

from ...errors import DeadlineExceeded, PeerLost
from ...processes import Deadline, WireEnd, WireMessage, peer_pid, why_not_private

MAX_PACKET: Final = 16 * 1024
_Text = Annotated[str, msgspec.Meta(max_length=2048)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Hello(WireMessage, frozen=True, tag="Hello"):
    """Receiver, first: its engine, and the epoch that it was told to take."""

    channel: _Text
    epoch: _Count
    engine: _Text


class Welcome(WireMessage, frozen=True, tag="Welcome"):
    """Sender: the receiver takes part."""

    epoch: _Count


class Refused(WireMessage, frozen=True, tag="Refused"):
    """Sender: the receiver does not take part. `epoch` is the sender's."""

    epoch: _Count
    reason: _Text


class BucketReady(WireMessage, frozen=True, tag="BucketReady"):
    """Sender: bucket `index` lies in `handle` (ipc_handles.py) until the receiver is done with it."""

    index: _Count
    generation: _Count
    """Counts the buckets this sender ever announced; `BucketDone` repeats it."""
    handle: bytes


class BucketDone(WireMessage, frozen=True, tag="BucketDone"):
    """Receiver: it will not read the memory of bucket `index` any more."""

    index: _Count
    generation: _Count


class Finished(WireMessage, frozen=True, tag="Finished"):
    """Receiver: every bucket was loaded."""


class Failed(WireMessage, frozen=True, tag="Failed"):
    """Either side: it gives up."""

    reason: _Text


ToReceiver = Welcome | Refused | BucketReady | Failed
ToSender = Hello | BucketDone | Finished | Failed

Out = TypeVar("Out", bound=WireMessage)
In = TypeVar("In", bound=WireMessage)
RECEIVER: Final = WireEnd[ToSender, ToReceiver](ToReceiver)
SENDER: Final = WireEnd[ToReceiver, ToSender](ToSender)


def failed(reason: object) -> Failed:
    """A `Failed` whose reason fits."""
    return Failed(reason=str(reason)[:2048])


class Connection(Generic[Out, In]):
    """One end of an established socket. Sends never block: a peer that does not read its few messages is lost."""

    def __init__(self, sock: socket.socket, end: WireEnd[Out, In]) -> None:
        self._socket, self._end = sock, end
        sock.setblocking(False)

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def check_user(self) -> int:
        """The peer's PID. Raises `PeerLost` when it belongs to another user."""
        return peer_pid(self._socket)

    def say(self, message: Out) -> None:
        """Raises `PeerLost` when the peer is gone or has stopped reading."""
        try:
            self._socket.send(self._end.encode(message), socket.MSG_NOSIGNAL)
        except OSError as error:
            raise PeerLost(f"the peer cannot be reached: {error}") from error

    def poll(self) -> In | None:
        """The next message, or None when there is none yet. Raises `PeerLost`."""
        packet = self._packet()
        return None if packet is None else self._end.decode(packet)

    def hear(self, deadline: Deadline, waiting_for: str) -> In:
        """Wait for the next message. Raises `PeerLost`, `DeadlineExceeded`."""
        self._socket.settimeout(deadline.check(waiting_for))
        try:
            message = self.poll()
        finally:
            self._socket.setblocking(False)
        if message is None:
            raise DeadlineExceeded(waiting_for, deadline.seconds)
        return message

    def _packet(self) -> bytes | None:
        try:
            packet = self._receive()
        except (BlockingIOError, TimeoutError):
            return None
        except OSError as error:
            raise PeerLost(f"the connection broke: {error}") from error
        if not packet:
            raise PeerLost("the peer closed the connection before the end of the session")
        if len(packet) > MAX_PACKET:
            raise PeerLost(f"the peer sent a packet of more than {MAX_PACKET} bytes")
        return packet

    def _receive(self) -> bytes:
        try:
            return self._socket.recv(MAX_PACKET + 1)
        except ConnectionResetError:
            # The peer closed without reading all we sent. What it said last comes after this error.
            return self._socket.recv(MAX_PACKET + 1)

    def close(self) -> None:
        """Twice is fine."""
        with contextlib.suppress(OSError):  # the peer may have closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


ReceiverConnection = Connection[ToSender, ToReceiver]
SenderConnection = Connection[ToReceiver, ToSender]


def connect(path: str, deadline: Deadline) -> ReceiverConnection:
    """Connect to a sender. Raises `PeerLost` when no process of this user listens there.

    The path came over the network: only a socket of this user, in a folder that no other can enter, is spoken to.
    """
    where = Path(path)
    if reason := why_not_private(where.parent, stat.S_IFDIR) or why_not_private(where, stat.S_IFSOCK):
        raise PeerLost(f"the sender's socket is not one to be trusted: {reason}")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(max(deadline.left(), 0.001))
        sock.connect(path)
        connection = ReceiverConnection(sock, RECEIVER)
        connection.check_user()
    except OSError as error:
        sock.close()
        raise PeerLost(f"the sender's socket {path} does not answer: {error}") from error
    except PeerLost:
        sock.close()
        raise
    return connection
