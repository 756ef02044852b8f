"""Encodes messages to frames and decodes them; the only module that knows the layout of a frame.

A message has two parts, or three when its type carries a blob::

    b"WB" | protocol number (1 byte) | direction (1 byte)
    msgpack map, tagged by "type"
    blob                                                    (`PutBlob`, `BlobPage`, `Status`)

The first two travel in one frame (`pack`), because every frame costs an encryption and a call on each side.

Decoding raises only `ProtocolError` and its subclasses, for any bytes. Encoding refuses at the sender every message
that the receiver would refuse, so that a value out of bounds is found where the traceback is useful.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Generic, NoReturn, TypeVar, cast, get_args

import msgspec

from .errors import Malformed, Oversize, ProtocolError, UnknownMessage, WrongProtocol
from .messages import PROTOCOL, Ack, Alive, BlobPage, Message, Offered, PutBlob, Sent, Status, ToAgent, ToCoordinator

MAGIC: Final = b"WB"
MAX_FRAME_BYTES: Final = 1 << 20
"""Limit of header and payload together, and of a blob. Also set on the sockets: libzmq drops larger frames itself."""

MAX_ANSWER_BYTES: Final = 4 << 20
"""The same limit towards agents: `Granted`, `RoundDone` and the status name every engine of a fleet."""

MAX_TEXT_CHARACTERS: Final = 2048
"""Characters of a `Text` field (messages.py). Longer reasons are cut, so that a long one does not lose the failure."""

MAX_REASONS_BYTES: Final = 256 * 1024
"""Bytes of the reasons of all engines together in one message, which may name thousands."""

MESSAGES_WITH_BLOB: Final[frozenset[type[Message]]] = frozenset({PutBlob, BlobPage, Status})

_UNCHECKED: Final[frozenset[type[Message]]] = frozenset({Ack, Alive})
"""Messages that their sender does not check by decoding: all their fields were checked already. Half of the traffic."""

Frames = list[bytes]
"""Parts of one message; once packed, its ZeroMQ frames."""
_HEADER_BYTES: Final = 4
MessageType = TypeVar("MessageType", bound=Message)


class _Tag(msgspec.Struct):
    """The tag of a message, for an error."""

    type: str


_TAG: Final = msgspec.msgpack.Decoder(_Tag)
_ENCODER: Final = msgspec.msgpack.Encoder()


class MessageCodec(Generic[MessageType]):
    """Codec of one direction of the control plane, for the union of messages that travel in it."""

    def __init__(self, mark: bytes, union: object, most: int = MAX_FRAME_BYTES) -> None:
        """`mark`: direction byte of the header. `most`: largest frame in bytes."""
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
        """The last message that came in one frame, decoded."""

    def encode(self, message: MessageType, blob: bytes | None = None) -> Frames:
        """Frames of `message`. Raises the `ProtocolError` that the receiver would raise."""
        unchecked = type(message) in _UNCHECKED
        try:
            payload = _ENCODER.encode(message if unchecked else _cut_reasons(message))
        except (ValueError, OverflowError) as problem:  # a lone surrogate; an integer above 64 bits
            raise Malformed(f"{message.kind} cannot be encoded: {problem}") from problem
        frames = [self._header, payload] if blob is None else [self._header, payload, blob]
        if not unchecked:
            self.decode(frames)
        return frames

    def decode(self, frames: Sequence[bytes]) -> tuple[MessageType, bytes | None]:
        """Message in `frames`, and its blob if the type carries one. Raises `ProtocolError`."""
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
        """Message received as `frames`: `decode` of `unpack`, with a faster path for messages in one frame.

        Thousands of agents that serve one version send the same heartbeat, byte for byte: it is decoded once.
        """
        return (self.read_one(frames[0]), None) if len(frames) == 1 else self.decode(unpack(frames))

    def read_one(self, frame: bytes) -> MessageType:
        """Message received as one frame, without a blob, as nearly all are. Raises `ProtocolError`."""
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
    """ZeroMQ frames of a message: header and payload joined."""
    return [parts[0] + parts[1], *parts[2:]] if len(parts) > 2 else [parts[0] + parts[1]]


def unpack(frames: Frames) -> Frames:
    """Parts of received frames, valid or not; `decode` refuses invalid ones."""
    first = frames[0]
    return [first[:_HEADER_BYTES], first[_HEADER_BYTES:], *frames[1:]]


def clip(text: str, limit: int = MAX_TEXT_CHARACTERS) -> str:
    """`text`, cut in the middle to `limit` characters: its ends usually say the most."""
    if len(text) <= limit:
        return text
    mark = f" ... ({len(text) - limit} characters cut) ... "
    half = (limit - len(mark)) // 2
    return text[:half] + mark + text[-half:]


def lasting(reason: str, seconds: float) -> str:
    """`reason` with its duration, which stands before its first colon and space; empty without one."""
    found, colon, advice = reason.partition(": ")
    return f"{found} for {max(0.0, seconds):.0f} s{colon}{advice}" if found else ""


def clip_each(text: str, count: int) -> str:
    """`text`, cut so that `count` texts of that length fit into one message."""
    room = MAX_REASONS_BYTES // max(1, count)
    if len(text) <= room // 4 or len(text.encode(errors="replace")) <= room:
        return clip(text)
    most = min(room if text.isascii() else room // 4, MAX_TEXT_CHARACTERS)
    return clip(text, most) if most > 80 else text[:most]


def _cut_reasons(message: MessageType) -> MessageType:
    """`message` with its reasons cut to the limits. Only text meant for people is ever cut."""
    reason: object = getattr(message, "reason", "")
    changes: dict[str, Any] = {}
    if isinstance(reason, str) and len(reason) > MAX_TEXT_CHARACTERS:
        changes["reason"] = clip(reason)
    if isinstance(message, Offered | Sent) and message.failed:
        changes["failed"] = {engine: clip_each(why, len(message.failed)) for engine, why in message.failed.items()}
    return msgspec.structs.replace(message, **changes) if changes else message


TO_COORDINATOR: Final[MessageCodec[ToCoordinator]] = MessageCodec(b">", ToCoordinator)
"""Codec of messages from agents."""
TO_AGENT: Final[MessageCodec[ToAgent]] = MessageCodec(b"<", ToAgent, MAX_ANSWER_BYTES)
"""Codec of messages to one agent."""
