"""What the two halves of the local transport say to each other over a Unix SEQPACKET socket.

One message is one packet: msgpack, tagged by ``type``, bounded by `MAX_PACKET`. Tensors never travel here, only the
names of the memory they lie in. Both ends insist on the same user id.
"""

from __future__ import annotations

import contextlib
import socket
import stat
from pathlib import Path
from typing import Annotated, Final, Self

import msgspec

from ...errors import DeadlineExceeded, PeerLost
from ...processes import Deadline, WireMessage, decode_message, peer_pid, why_not_private

MAX_PACKET: Final = 16 * 1024
_Text = Annotated[str, msgspec.Meta(max_length=2048)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Hello(WireMessage, frozen=True, tag="Hello"):
    """Receiver, first: who it is and which epoch it was told to take."""

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

_ENCODER: Final = msgspec.msgpack.Encoder()
_TO_RECEIVER: Final[msgspec.msgpack.Decoder[ToReceiver]] = msgspec.msgpack.Decoder(ToReceiver)
_TO_SENDER: Final[msgspec.msgpack.Decoder[ToSender]] = msgspec.msgpack.Decoder(ToSender)


def failed(reason: object) -> Failed:
    """A `Failed` whose reason fits."""
    return Failed(reason=str(reason)[:2048])


class Connection:
    """One end of an established socket. Sends never block: a peer that does not read its few messages is lost."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.setblocking(False)

    @classmethod
    def connect(cls, path: str, deadline: Deadline) -> Self:
        """Connect to a sender. Raises `PeerLost` when nobody of our user listens there.

        The path came over the network: only a socket of ours, in a folder that is ours alone, is spoken to.
        """
        where = Path(path)
        if reason := why_not_private(where.parent, stat.S_IFDIR) or why_not_private(where, stat.S_IFSOCK):
            raise PeerLost(f"the sender's socket is not one to be trusted: {reason}")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.settimeout(max(deadline.left(), 0.001))
            sock.connect(path)
            connection = cls(sock)
            connection.check_user()
        except OSError as error:
            sock.close()
            raise PeerLost(f"the sender's socket {path} does not answer: {error}") from error
        except PeerLost:
            sock.close()
            raise
        return connection

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def check_user(self) -> int:
        """The peer's PID. Raises `PeerLost` when it belongs to another user."""
        return peer_pid(self._socket)

    def send(self, message: ToReceiver | ToSender) -> None:
        """Raises `PeerLost` when the peer is gone or has stopped reading."""
        try:
            self._socket.send(_ENCODER.encode(message), socket.MSG_NOSIGNAL)
        except OSError as error:
            raise PeerLost(f"the peer cannot be reached: {error}") from error

    def from_receiver(self) -> ToSender | None:
        """The next message, or None when there is none yet. Raises `PeerLost`."""
        packet = self._packet()
        return None if packet is None else decode_message(_TO_SENDER, packet)

    def from_sender(self, deadline: Deadline, waiting_for: str) -> ToReceiver:
        """Wait for the next message. Raises `PeerLost`, `DeadlineExceeded`."""
        self._socket.settimeout(deadline.check(waiting_for))
        try:
            packet = self._packet()
        finally:
            self._socket.setblocking(False)
        if packet is None:
            raise DeadlineExceeded(waiting_for, deadline.seconds)
        return decode_message(_TO_RECEIVER, packet)

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
