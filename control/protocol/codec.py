"""Messages to frames and back: the only place that knows what a frame looks like.

A message has two parts, or three when its type carries a blob::

    b"WB" | protocol number (1 byte) | direction (1 byte)
    msgpack map, tagged by "type"
    blob                                                    (`PutBlob`, `BlobPage`, `Status`)

The first two travel in one frame (`pack`): every frame costs an encryption and a call on each side.

Decoding raises nothing but the `ProtocolError` family, whatever the bytes. Encoding refuses, at the sender, what the
other side would refuse: a value out of bounds is found where the traceback is useful.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Generic, NoReturn, TypeVar, cast, get_args

import msgspec

from .enums import PROTOCOL
from .errors import Malformed, Oversize, ProtocolError, UnknownMessage, WrongProtocol
from .message_fields import Message
from .messages import Ack, Alive, BlobPage, Offered, PutBlob, Sent, Status, ToAgent, ToCoordinator

MAGIC: Final = b"WB"
MAX_FRAME_BYTES: Final = 1 << 20
"""For header and payload together, and for a blob. The sockets are told it too: libzmq cuts larger frames by itself."""

MAX_ANSWER_BYTES: Final = 4 << 20
"""The same for what an agent is told: `Granted`, `RoundDone` and the status name every engine of a fleet."""

MAX_TEXT_CHARACTERS: Final = 2048
"""Characters of a `Text` field (ids.py). Longer reasons are cut to it, so that no failure is lost for being wordy."""

MAX_REASONS_BYTES: Final = 256 * 1024
"""What the reasons of all engines together may take of one message, which may name thousands."""

MESSAGES_WITH_BLOB: Final[frozenset[type[Message]]] = frozenset({PutBlob, BlobPage, Status})

_PLAIN: Final[frozenset[type[Message]]] = frozenset({Ack, Alive})
"""Not decoded again by their sender: they hold nothing but what was decoded, or counted, here. Half of all messages."""

Frames = list[bytes]
"""The parts of one message; once packed, what ZeroMQ calls its frames."""
_HEADER_BYTES: Final = 4
MessageType = TypeVar("MessageType", bound=Message)


class _Tag(msgspec.Struct):
    """Just enough of a message to name its type, for the error."""

    type: str


_TAG: Final = msgspec.msgpack.Decoder(_Tag)
_ENCODER: Final = msgspec.msgpack.Encoder()


class MessageCodec(Generic[MessageType]):
    """One direction of the control plane: the union of messages that travel in it, and their frames."""

    def __init__(self, mark: bytes, union: object, most: int = MAX_FRAME_BYTES) -> None:
        """`mark` stands in the header, `most` bytes are in a frame."""
        members = cast("tuple[type[MessageType], ...]", get_args(union) or (union,))
        self.members: Final = members
        self._header: Final = MAGIC + bytes((PROTOCOL,)) + mark
        self._most: Final = most
        self._tags: Final = frozenset(member.__struct_config__.tag for member in members)
        self._decoder: Final[msgspec.msgpack.Decoder[MessageType]] = msgspec.msgpack.Decoder(
            cast("type[MessageType]", union)
        )
        self._decode: Final = self._decoder.decode
        self._last_frame: bytes | None = None
        self._last_read: MessageType
        """What came in as one frame, and what it said."""

    def encode(self, message: MessageType, blob: bytes | None = None) -> Frames:
        """Frames of `message`; raises the `ProtocolError` that the receiver would have raised."""
        plain = type(message) in _PLAIN
        try:
            payload = _ENCODER.encode(message if plain else _cut_prose(message))
        except (ValueError, OverflowError) as problem:  # a lone surrogate; an integer above 64 bits
            raise Malformed(f"{message.kind} cannot be encoded: {problem}") from problem
        frames = [self._header, payload] if blob is None else [self._header, payload, blob]
        if not plain:
            self.decode(frames)
        return frames

    def decode(self, frames: Sequence[bytes]) -> tuple[MessageType, bytes | None]:
        """The message in `frames` and its blob, if its type carries one."""
        if not 2 <= len(frames) <= 3:
            raise Malformed(f"{len(frames)} parts, expected a header, a payload and at most one blob")
        if frames[0] != self._header:
            self._explain_header(frames[0])
        if len(frames[1]) > self._most - _HEADER_BYTES:
            raise Oversize("payload", len(frames[1]), self._most - _HEADER_BYTES)
        blob = frames[2] if len(frames) == 3 else None
        if blob is not None and len(blob) > self._most:
            raise Oversize("blob", len(blob), self._most)
        message = self._decode_payload(frames[1])
        if (blob is not None) != (type(message) in MESSAGES_WITH_BLOB):
            problem = "lacks its blob frame" if blob is None else "carries a blob frame that it must not have"
            raise Malformed(f"{message.kind} {problem}")
        return message, blob

    def read(self, frames: Frames) -> tuple[MessageType, bytes | None]:
        """The message that came in as `frames`. As `decode` of `unpack`, and most messages take a shorter way to it.

        Thousands of agents that serve the same version say the same heartbeat, byte for byte: it is decoded once.
        """
        return (self.read_one(frames[0]), None) if len(frames) == 1 else self.decode(unpack(frames))

    def read_one(self, frame: bytes) -> MessageType:
        """The same for a message that came in as one frame, as nearly all do: it can carry no blob."""
        if frame == self._last_frame:
            return self._last_read
        if frame.startswith(self._header) and len(frame) <= self._most:
            try:
                message = self._decode(frame[_HEADER_BYTES:])
            except (ValueError, RecursionError):
                pass  # explained below
            else:
                if type(message) not in MESSAGES_WITH_BLOB:
                    self._last_frame, self._last_read = frame, message
                    return message
        return self.decode(unpack([frame]))[0]

    def _explain_header(self, header: bytes) -> NoReturn:
        if len(header) != len(self._header) or not header.startswith(MAGIC):
            raise Malformed(f"it begins with {header[:16]!r}, which is not a header, expected {self._header!r}")
        if header[2] != PROTOCOL:
            raise WrongProtocol(header[2], PROTOCOL)
        raise Malformed(f"header says direction {header[3:]!r}, this socket takes {self._header[3:]!r}")

    def _decode_payload(self, payload: bytes) -> MessageType:
        try:
            return self._decoder.decode(payload)
        # msgspec's errors and UnicodeDecodeError (bad UTF-8) are ValueErrors; deep nesting is a RecursionError.
        except (ValueError, RecursionError) as problem:
            raise self._explain(payload, problem) from problem

    def _explain(self, payload: bytes, problem: Exception) -> ProtocolError:
        try:
            tag = _TAG.decode(payload).type
        except (ValueError, RecursionError):
            return Malformed(f"payload of {len(payload)} bytes is not a message: {problem}")
        if tag not in self._tags:
            return UnknownMessage(tag[:64])
        return Malformed(f"{tag}: {problem}")


def pack(parts: Frames) -> Frames:
    """What travels of a message: header and payload as one."""
    return [parts[0] + parts[1], *parts[2:]] if len(parts) > 2 else [parts[0] + parts[1]]


def unpack(frames: Frames) -> Frames:
    """The parts of what came in, whatever it is; to be refused by `decode` if it is no message."""
    first = frames[0]
    return [first[:_HEADER_BYTES], first[_HEADER_BYTES:], *frames[1:]]


def clip(text: str, limit: int = MAX_TEXT_CHARACTERS) -> str:
    """`text`, cut in the middle if it is longer than a `Text` field may be: both ends usually tell the most."""
    if len(text) <= limit:
        return text
    mark = f" ... ({len(text) - limit} characters cut) ... "
    half = (limit - len(mark)) // 2
    return text[:half] + mark + text[-half:]


def clip_each(text: str, count: int) -> str:
    """`text`, so short that `count` like it fit into one message."""
    room = MAX_REASONS_BYTES // max(1, count)
    if len(text) <= room // 4 or len(text.encode(errors="replace")) <= room:
        return clip(text)
    most = min(room if text.isascii() else room // 4, MAX_TEXT_CHARACTERS)
    return clip(text, most) if most > 80 else text[:most]


def _cut_prose(message: MessageType) -> MessageType:
    """`message` with reasons short enough to travel. Nothing but prose meant for people is ever cut."""
    reason: object = getattr(message, "reason", "")
    changes: dict[str, Any] = {}
    if isinstance(reason, str) and len(reason) > MAX_TEXT_CHARACTERS:
        changes["reason"] = clip(reason)
    if isinstance(message, Offered | Sent) and message.failed:
        changes["failed"] = {engine: clip_each(why, len(message.failed)) for engine, why in message.failed.items()}
    return msgspec.structs.replace(message, **changes) if changes else message


TO_COORDINATOR: Final[MessageCodec[ToCoordinator]] = MessageCodec(b">", ToCoordinator)
"""What agents send."""
TO_AGENT: Final[MessageCodec[ToAgent]] = MessageCodec(b"<", ToAgent, MAX_ANSWER_BYTES)
"""What the coordinator sends to one agent."""
