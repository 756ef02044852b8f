"""Messages between processes of one host: tagged structs in msgpack, and the two ends of a conversation in them."""

from __future__ import annotations

from typing import Final, Generic, TypeVar, cast

import msgspec

from ..errors import PeerLost
from .deadline import Deadline
from .frames import Frames


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
    """One end of a conversation: the union of messages that it says, and of those that it hears.

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
