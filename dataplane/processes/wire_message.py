"""What messages between processes of one host have in common, over whatever socket (frames.py, messages.py)."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ..errors import PeerLost


class WireMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Each names its tag itself: a class may be renamed, what travels may not. Unknown fields are refused."""

    @property
    def kind(self) -> str:
        """The tag it travels with; errors name a message by it."""
        return str(self.__struct_config__.tag)


_T = TypeVar("_T")


def decode_message(decoder: msgspec.msgpack.Decoder[_T], packet: bytes) -> _T:
    """Raises `PeerLost` for what none of ours says."""
    try:
        return decoder.decode(packet)
    except (ValueError, RecursionError) as error:
        raise PeerLost(f"the other end sent what is not a message: {error}") from error
