"""Hostile input, made from good one: bytes that are bent, and messages that are wrong in one place.

Random bytes alone are refused at the first of them. So most inputs begin as golden messages (tests/control/golden):
their bytes are flipped, cut, doubled and spliced, or their fields are renamed, dropped, doubled and given values that
the types do not allow, and are encoded anew, so that they fail, or pass, as late as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Final

import msgspec

Frames = list[bytes]
_PACK: Final = msgspec.msgpack.Encoder().encode
_UNPACK: Final = msgspec.msgpack.Decoder().decode

HOSTILE: Final[tuple[object, ...]] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53, 2**53 + 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, -0.0, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), 5e-324),
    *("", "x", "a" * 64, "a" * 65, "A" * 2048, "A" * 2049, "\n", "e0\n", "../../etc", "\x00", "\u202e", "💥", "*"),
    *(b"", b"\x00", b"\xff" * 64),
    *([], [[]], [None] * 100, ["x"] * 4097, {}, {"": None}, {"type": "Hello"}, {"a": {"b": {"c": []}}}),
    *(msgspec.msgpack.Ext(1, b"x"), msgspec.msgpack.Ext(-1, b"\x00" * 12)),
)
"""What no field expects, or expects only just."""

RAW: Final[tuple[bytes, ...]] = (
    *(b"\xc1", b"\xc7\x00\x01", b"\xd9\x02\xff\xfe", b"\xa2\xc3\x28", b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff"),
    *(
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 200_000,
        b"\x81\xa1a" * 50_000,
        b"\xcf" + b"\xff" * 8,
    ),
)
"""Bytes that msgpack never writes, claims that are not kept, and depth without end."""


class Mutator:
    """Makes one hostile input after another from `good` frames; the same seed makes the same."""

    def __init__(self, good: Sequence[Frames], seed: int) -> None:
        self._good = good
        self._trees: list[Any] = [_UNPACK(frames[1]) for frames in good]
        self._random = Random(seed)
        self._ways: tuple[Callable[[int], Frames], ...] = (
            *(self._bent_bytes,) * 8,
            *(self._wrong_value,) * 6,
            *(self._wrong_shape,) * 4,
            *(self._wrong_frames,) * 2,
            self._noise,
        )

    def next(self) -> Frames:
        """The next input: the frames behind the routing id."""
        return self._ways[self._below(len(self._ways))](self._below(len(self._good)))

    def _below(self, limit: int) -> int:
        return int(self._random.random() * limit)

    def _bent_bytes(self, which: int) -> Frames:
        header, payload, *blob = self._good[which]
        bent = bytearray(payload)
        for _ in range(1 + self._below(3)):
            self._bend(bent)
        return [header, bytes(bent), *blob]

    def _bend(self, data: bytearray) -> None:
        at = self._below(len(data) + 1)
        match self._below(7):
            case 0 if at < len(data):
                data[at] ^= 1 << self._below(8)
            case 1 if at < len(data):
                data[at] = self._below(256)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + 1 + self._below(8)]
            case 4:
                data[at:at] = self._random.randbytes(1 + self._below(8))
            case 5:
                data[at:at] = RAW[self._below(len(RAW))] if self._below(50) == 0 else RAW[self._below(5)]
            case _:
                other = self._good[self._below(len(self._good))][1]
                data[at : at + self._below(16)] = other[self._below(len(other)) :][:16]

    def _wrong_value(self, which: int) -> Frames:
        header, _, *blob = self._good[which]
        return [header, _PACK(self._change(self._trees[which])), *blob]

    def _change(self, tree: Any) -> Any:
        """A copy of `tree` with one value in it replaced, somewhere."""
        if isinstance(tree, Mapping) and tree and self._below(8):
            key = list(tree)[self._below(len(tree))]
            return {**tree, key: self._change(tree[key])}
        if isinstance(tree, list) and tree and self._below(8):
            at = self._below(len(tree))
            return [*tree[:at], self._change(tree[at]), *tree[at + 1 :]]
        return HOSTILE[self._below(len(HOSTILE))]

    def _wrong_shape(self, which: int) -> Frames:
        header, payload, *blob = self._good[which]
        tree: dict[Any, Any] = dict(self._trees[which])
        key = list(tree)[self._below(len(tree))]
        match self._below(6):
            case 0:
                del tree[key]
            case 1:
                tree["x"] = 1
            case 2:
                tree[f"{key}_"] = tree.pop(key)
            case 3:
                tree["type"] = self._trees[self._below(len(self._trees))]["type"]
            case 4:
                tree[HOSTILE[self._below(8)]] = tree[key]
            case _:  # a key twice: the map says one more, and has it again
                again = _PACK(key) + _PACK(HOSTILE[self._below(len(HOSTILE))])
                return [header, bytes([payload[0] + 1]) + payload[1:] + again, *blob]
        return [header, _PACK(tree), *blob]

    def _wrong_frames(self, which: int) -> Frames:
        frames = list(self._good[which])
        match self._below(7):
            case 0:
                return []
            case 1:
                return frames[: self._below(len(frames))]
            case 2:
                return [*frames, self._random.randbytes(self._below(64))]
            case 3:
                return [*frames, *frames]
            case 4:
                frames[0] = bytes(b ^ (self._below(40) == 0) for b in frames[0]) + b"x" * self._below(2)
            case 5:
                frames[1] = b"\xc4" + b"\x00" * (1 << 20) if self._below(100) == 0 else b""
            case _:
                self._random.shuffle(frames)
        return frames

    def _noise(self, which: int) -> Frames:
        header = self._good[which][0]
        return [header, self._random.randbytes(self._below(128))]
