"""Messages over a Unix socket, whole or not at all."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest

from weightbus.dataplane.errors import DeadlineExceeded, PeerLost, Unsupported
from weightbus.dataplane.processes.connections import MAX_FRAME, Deadline, FrameListener, Frames, find_ended_peer

from ...kit.waiting import until


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
    """A peer that announces the largest message and goes away costs a block, not half a gigabyte."""
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


def test_a_process_that_ended_is_known_to_have(tmp_path: Path) -> None:
    """Also before its parent has asked how it ended, which for a worker of a server takes seconds."""
    listener = FrameListener(tmp_path / "s")
    connect = "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", connect, os.fspath(listener.path)])
    left, right = (Frames(end) for end in socket.socketpair())
    try:
        frames = listener.accept(Deadline(30.0), "the child")
        assert not frames.peer_ended()
        assert find_ended_peer([(0, left), (1, frames)]) is None
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert frames.peer_ended(), "a zombie counts as ended"
    finally:
        child.kill()
        child.wait()
    assert frames.peer_ended()
    assert find_ended_peer([(0, left), (1, frames)]) == 1
    right.close()
    assert find_ended_peer([(0, left)]) is None, "it has hung up, and lives"
    frames.close()
    assert find_ended_peer([(1, frames)]) is None, "of no use any more"
    left.close()
    listener.close()


def test_a_peer_that_finds_a_listeners_name_can_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name appears when the socket listens, not before; and nothing else is left beside it."""
    path, there = tmp_path / "s.sock", []

    class Watched(socket.socket):
        def listen(self, *backlog: int) -> None:
            there.append(path.exists())
            super().listen(*backlog)

    monkeypatch.setattr(socket, "socket", Watched)
    listener = FrameListener(path)
    Frames.connect(os.fspath(path), Deadline(30.0)).close()
    assert there == [False]
    assert list(tmp_path.iterdir()) == [path]
    listener.close()
    monkeypatch.undo()
    too_long = tmp_path / ("x" * 100 + ".sock")
    with pytest.raises(Unsupported, match="shorten runtime_dir"):
        FrameListener(too_long)
    assert not list(tmp_path.iterdir())


def test_messages_are_pulled_as_they_come() -> None:
    """Whole ones only, in their order, of any size; nothing is waited for."""
    end, other = socket.socketpair()
    frames, messages = Frames(end), [b"", b"x", bytes(range(256)) * 20_000, b"last"]
    stream, found = b"".join(part for each in messages for part in frames.framed(each)), []
    assert frames.pull() is None
    assert not frames.mid_message
    other.sendall(stream[:3])
    assert frames.pull() is None
    assert frames.mid_message
    other.sendall(stream[3:8])
    assert frames.pull() == b""
    assert not frames.mid_message
    sender = threading.Thread(target=other.sendall, args=(stream[8:],))
    sender.start()
    until(lambda: (one := frames.pull()) is not None and (found.append(one) or len(found) == 3))
    sender.join()
    assert found == messages[1:]
    other.close()
    with pytest.raises(PeerLost):
        frames.pull()
    frames.close()


def test_what_is_too_large_is_not_pulled() -> None:
    """It is known by its length, before any of it has come."""
    end, other = socket.socketpair()
    other.sendall(struct.pack("<Q", MAX_FRAME + 1))
    frames = Frames(end)
    with pytest.raises(PeerLost, match="at most"):
        frames.pull()
    frames.close()
    other.close()


def test_a_connect_whose_time_is_over_leaves_no_socket(tmp_path: Path) -> None:
    """Before it has begun to connect: what was opened for it is closed."""
    with pytest.raises(DeadlineExceeded):
        Frames.connect(str(tmp_path / "nobody.sock"), Deadline(0.0))
