"""What messages between processes of one host have in common, over whatever socket (frames.py, local_wire.py)."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from .errors import PeerLost


class WireMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Tagged by its name; a field that is not known makes it no message."""


_T = TypeVar("_T")


def decode(decoder: msgspec.msgpack.Decoder[_T], packet: bytes) -> _T:
    """Raises `PeerLost` for what none of ours says."""
    try:
        return decoder.decode(packet)
    except (ValueError, RecursionError) as error:
        raise PeerLost(f"the other end sent what is not a message: {error}") from error
