"""Messages over a Unix socket or between hosts: whole, in order and authenticated, or not at all."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from weightbus.dataplane.errors import DeadlineExceeded, ForgedMessage, PeerLost, TransferFailed, Unsupported
from weightbus.dataplane.processes.connections import (
    MAX_FRAME,
    Deadline,
    FrameListener,
    Frames,
    MacFrames,
    MacListener,
    find_ended_peer,
    local_address_towards,
    parse_tcp_address,
)

from ...kit.unreadable import no_descriptors
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
    connect = (
        "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.send(b'x');"
        "time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", connect, os.fspath(listener.path)])
    left, right = (Frames(end) for end in socket.socketpair())
    try:
        frames = listener.accept(Deadline(30.0), "the child")
        assert not frames.peer_ended()
        assert find_ended_peer([(0, left), (1, frames)]) is None
        with no_descriptors():
            assert not frames.peer_ended(), "what cannot be looked at has not ended"
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


# Messages between hosts: accepted once, in order, and only with the epoch's token.


WAIT_S = 20.0
Pair = tuple[MacFrames, MacFrames]


def greeted(listener: MacListener, seconds: float) -> MacFrames:
    """The next connection; closed where the peer does not know the token."""
    deadline = Deadline(seconds)
    frames = listener.accept(deadline)
    try:
        frames.handshake(deadline)
    except TransferFailed:
        frames.close()
        raise
    return frames


def pair(host: str = "127.0.0.1", theirs: str = "token") -> Pair:
    """Both ends of a connection; the one that connects believes that the token is `theirs`."""
    listener = MacListener(host, "token")
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(greeted, listener, WAIT_S)
        reached = MacFrames.reach(listener.address, theirs, Deadline(WAIT_S))
        found = accepted.result(WAIT_S), reached
    listener.close()
    return found


@pytest.fixture
def ends() -> Iterator[Pair]:
    made = pair()
    yield made
    for end in made:
        end.close()


def test_messages_of_any_size_arrive_in_order(ends: Pair) -> None:
    """Both ways, empty ones too."""
    ours, theirs = ends
    for message in (b"", b"one", bytes(300_000)):
        theirs.send(message, Deadline(WAIT_S))
        assert ours.receive(Deadline(WAIT_S), "a message") == message
        ours.send(message, Deadline(WAIT_S))
        assert theirs.receive(Deadline(WAIT_S), "a message") == message


def test_the_first_message_may_be_large() -> None:
    """The first thing that a leader tells a rank is what to send, which grows with the model."""
    ours, theirs = pair()
    with ThreadPoolExecutor(1) as pool:
        said = pool.submit(ours.send, bytes(3_000_000), Deadline(WAIT_S))
        assert len(theirs.receive(Deadline(WAIT_S), "a message")) == 3_000_000
        said.result(WAIT_S)
    ours.close()
    theirs.close()


def test_a_peer_that_does_not_know_the_token_says_nothing() -> None:
    """Either end refuses a stranger before his first word (S16)."""
    listener = MacListener("127.0.0.1", "token")
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(greeted, listener, WAIT_S)
        with pytest.raises(ForgedMessage, match="stranger"):
            MacFrames.reach(listener.address, "another", Deadline(WAIT_S))
        with pytest.raises(ForgedMessage, match="stranger"):
            accepted.result(WAIT_S)
    listener.close()


def test_what_was_said_once_is_not_said_again(ends: Pair) -> None:
    """A message that is played back, into the same connection or back to its sender, is none (S16)."""
    ours, theirs = ends
    theirs.send(b"begin", Deadline(WAIT_S))
    mac = theirs._mac(b"begin", 1, by_listener=False)
    assert ours.receive(Deadline(WAIT_S), "a message") == b"begin"

    for end, raw in ((ours, theirs._socket), (theirs, ours._socket)):
        raw.sendall(struct.pack("<Q", len(mac) + 5) + mac + b"begin")
        with pytest.raises(ForgedMessage):
            end.receive(Deadline(WAIT_S), "a message")


def test_a_stranger_cannot_fill_the_memory() -> None:
    """Nothing that he announces is read: he has to show first that he knows the token."""
    listener = MacListener("127.0.0.1", "token")
    with socket.create_connection(parse_tcp_address(listener.address)) as stranger:
        stranger.sendall(bytes(16) + struct.pack("<Q", 1 << 40) + bytes(24))
        with pytest.raises(ForgedMessage):
            greeted(listener, WAIT_S)
    listener.close()


def test_a_peer_that_says_nothing_costs_a_deadline() -> None:
    """A connection without a handshake, and an address without a listener."""
    listener = MacListener("127.0.0.1", "token")
    with socket.create_connection(parse_tcp_address(listener.address)), pytest.raises(DeadlineExceeded):
        greeted(listener, 0.2)
    listener.close()

    with pytest.raises(PeerLost, match="does not answer"):
        MacFrames.reach(listener.address, "token", Deadline(WAIT_S))


def test_ipv6_and_what_is_no_address() -> None:
    """Brackets around the host; anything but tcp with a port is refused with advice."""
    try:
        ours, theirs = pair("::1")
    except TransferFailed:
        pytest.skip("no IPv6 here")
    theirs.send(b"six", Deadline(WAIT_S))
    assert ours.receive(Deadline(WAIT_S), "a message") == b"six"
    assert local_address_towards("::1", 9) == "::1"
    assert local_address_towards("127.0.0.1", 9) == "127.0.0.1"
    ours.close()
    theirs.close()

    for wrong in ("/run/socket", "tcp://host", "http://h:1", "tcp://h:99999999"):
        with pytest.raises(TransferFailed, match="expected tcp"):
            parse_tcp_address(wrong)


def test_what_is_pulled_is_looked_at_as_what_is_received(ends: Pair) -> None:
    """In order, and only from a peer that knows the token."""
    ours, theirs = ends
    for message in (b"", b"one", bytes(3_000_000)):
        with ThreadPoolExecutor(1) as pool:
            saying = pool.submit(theirs.send, message, Deadline(WAIT_S))
            while (found := ours.pull()) is None:
                ours.readable(WAIT_S)
            saying.result(WAIT_S)
        assert found == message
    theirs._sent += 1
    theirs.send(b"said in another place", Deadline(WAIT_S))
    with pytest.raises(ForgedMessage):
        while ours.pull() is None:
            ours.readable(WAIT_S)
