"""Messages over a Unix socket, whole or not at all."""

from __future__ import annotations

import socket
import struct
import threading
import tracemalloc

import pytest

from weightbus.dataplane.deadline import Deadline
from weightbus.dataplane.errors import PeerLost
from weightbus.dataplane.frames import MAX_FRAME, Frames


def test_a_large_message_arrives_whole() -> None:
    """Of more than one block, and of none."""
    left, right = (Frames(end) for end in socket.socketpair())
    message = bytes(range(256)) * 20_000
    sender = threading.Thread(target=lambda: [left.send(each, Deadline(30.0)) for each in (message, b"")])
    sender.start()
    assert right.receive(Deadline(30.0), "it") == message
    assert right.receive(Deadline(30.0), "nothing") == b""
    sender.join()
    left.close()
    right.close()


def test_memory_is_taken_for_what_came_not_for_what_is_announced() -> None:
    """Whoever announces the largest message and goes away costs a block, not half a gigabyte."""
    end, other = socket.socketpair()
    frames = Frames(end)
    other.sendall(struct.pack("<Q", MAX_FRAME) + b"x" * 1000)
    other.close()
    tracemalloc.start()
    try:
        with pytest.raises(PeerLost):
            frames.receive(Deadline(30.0), "it")
        assert tracemalloc.get_traced_memory()[1] < MAX_FRAME // 64
    finally:
        tracemalloc.stop()
        frames.close()
