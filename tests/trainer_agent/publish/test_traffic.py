"""What a round says over the bus, counted: as many messages for twenty thousand tensors as for ten."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from weightbus.control import protocol as m
from weightbus.control.protocol import codec

from ...kit.fake_source import group_of
from .test_rounds import RANKS, Deployment

NOT_COUNTED = (m.Heartbeat, m.Alive, m.Hello, m.Welcome, m.Ack)
"""Said as time passes, and not because of a round; the answers to what is counted, of which the last ones may leave
after the trainer has its report."""


class Wiretap:
    """Every message that was encoded, once: what is sent again, because nobody answered yet, is the same bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heard: dict[bytes, tuple[str, int]] = {}
        encode = codec.MessageCodec.encode

        def listen(wire: codec.MessageCodec[Any], message: Any, blob: bytes | None = None) -> codec.Frames:
            frames = encode(wire, message, blob)
            if not isinstance(message, NOT_COUNTED):
                self.heard[frames[1]] = (type(message).__name__, len(blob or b""))
            return frames

        monkeypatch.setattr(codec.MessageCodec, "encode", listen)

    def clear(self) -> None:
        self.heard.clear()

    @property
    def messages(self) -> Counter[str]:
        return Counter(name for name, _ in self.heard.values())

    @property
    def payload_bytes(self) -> int:
        return sum(map(len, self.heard))

    @property
    def blob_bytes(self) -> int:
        return sum(size for _, size in self.heard.values())


class Traffic(msgspec.Struct):
    """Of one steady round."""

    messages: dict[str, int]
    payload_bytes: int
    blob_bytes: int


def steady_round(root: Path, tensors: int, wire: Wiretap) -> Traffic:
    """The second publication of a layout of so many tensors, to two engines."""
    deployment = Deployment(root)
    try:
        weights = {f"model.layers.{i}.weight": torch.full((4,), i, dtype=torch.bfloat16) for i in range(tensors)}
        deployment.sources = group_of(weights, RANKS, timeout_s=60.0)
        for name in ("e0", "e1"):
            deployment.engine(name)
        deployment.connect(bucket_bytes=1 << 20)
        deployment.publish(1)
        wire.clear()
        report = deployment.publish(2)
        assert {engine.outcome for engine in report.engines} == {m.Outcome.COMMITTED}
        return Traffic(dict(wire.messages), wire.payload_bytes, wire.blob_bytes)
    finally:
        deployment.close()


def test_a_steady_round_does_not_grow_with_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same messages, of the same size, for 10 and for 20,000 tensors; the manifest does not travel again.

    What grows is the digest table, one blob of 16 bytes a tensor: one page up to some 30,000 tensors.
    """
    wire = Wiretap(monkeypatch)
    small, large = (steady_round(tmp_path / str(count), count, wire) for count in (10, 20_000))
    assert large.messages == small.messages
    assert large.messages["PutBlob"] == 1
    assert large.messages["BlobPage"] == 2
    assert sum(large.messages.values()) < 50
    assert abs(large.payload_bytes - small.payload_bytes) < 64  # numbers with more digits
    assert large.blob_bytes <= 3 * (20_000 * 16 + 1024)
