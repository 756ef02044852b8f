"""Messages between hosts: accepted once, in order, and only with the epoch's token."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from weightbus.dataplane.errors import DeadlineExceeded, ForgedMessage, PeerLost, TransferFailed
from weightbus.dataplane.processes.connections import (
    Deadline,
    MacFrames,
    MacListener,
    local_address_towards,
    parse_tcp_address,
)

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
