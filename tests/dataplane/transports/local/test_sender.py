"""A local sender under faults: of its own process, of an engine that says too much, and while it is being closed."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightbus.dataplane.errors import TransferFailed, Unsupported
from weightbus.dataplane.memory.shared_memory import BucketBuffers
from weightbus.dataplane.processes.connections import Deadline, PacketFrames
from weightbus.dataplane.transports.interface import Peer
from weightbus.dataplane.transports.local.shared_buckets import (
    RECEIVER,
    BucketsLoaded,
    Hello,
    LocalSender,
    connect,
)

from ...loopback import CHANNEL, make_manifest, make_session

WAIT_S = 60.0
SESSION = make_session(1, 1, make_manifest(3))


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[LocalSender]:
    made = LocalSender(tmp_path / "run", CHANNEL)
    yield made
    made.close()


def come(address: str) -> PacketFrames:
    """Engine e0 has connected and said its name."""
    frames = connect(address, Deadline(WAIT_S))
    RECEIVER.say(frames, Hello(channel=CHANNEL, epoch=SESSION.epoch, engine="e0"), Deadline(WAIT_S))
    return frames


def test_too_long_a_path_is_a_setting_to_change(tmp_path: Path) -> None:
    """No later attempt would fare better: it is no lost peer."""
    with pytest.raises(Unsupported, match="107 bytes of a socket's name: shorten runtime_dir"):
        LocalSender(tmp_path / ("x" * 100), CHANNEL).offer(SESSION, [Peer("e0", 1)])


def test_too_many_open_files_fail_no_engine(
    sender: LocalSender, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection waits in the socket, is tried again, and the log says so once."""
    address, left, accept = sender.offer(SESSION, [Peer("e0", 1)]), [3], socket.socket.accept

    def accept_later(listener: socket.socket) -> tuple[socket.socket, object]:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    frames = come(address.address)
    sender.ready(WAIT_S)
    assert not sender.failed
    assert left == [0]
    assert [each.getMessage() for each in caplog.records if "Too many open files" in each.getMessage()] != []
    assert len(caplog.records) == 1
    frames.close()


def test_an_engine_that_has_finished_is_not_waited_for(sender: LocalSender) -> None:
    """It said so before the last buckets, and went: no slot waits for it until a deadline."""
    pool = BucketBuffers("cpu", 2, SESSION.manifest.largest_bucket, CHANNEL)
    frames = come(sender.offer(SESSION, [Peer("e0", 1)]).address)
    sender.ready(WAIT_S)
    RECEIVER.say(frames, BucketsLoaded(), Deadline(WAIT_S))
    sender.finish(WAIT_S)
    sender.send(0, pool.buffers[0], WAIT_S)
    frames.close()
    began = time.monotonic()
    sender.reclaim(0, WAIT_S)
    assert time.monotonic() - began < WAIT_S / 4
    assert not sender.failed
    pool.close()


def test_a_sender_that_is_closed_meanwhile_says_so(sender: LocalSender, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread closes it between two engines that were withdrawn."""
    sender.offer(SESSION, [Peer("e0", 1), Peer("e1", 1)])
    for engine in ("e0", "e1"):
        sender.withdraw(engine, "its agent is silent")
    monkeypatch.setattr(sender, "_lost", lambda *_: sender.close())
    with pytest.raises(TransferFailed, match="the sender was closed"):
        sender.ready(WAIT_S)
