"""The thread that greets peers of the sender: nothing that goes wrong with one peer keeps out the others."""

from __future__ import annotations

import errno
import socket
import threading
from typing import Any

import pytest

from weightbus.dataplane.processes.connections import Deadline, MacFrames
from weightbus.dataplane.transports.sends import messages as wire
from weightbus.dataplane.transports.sends.sender import Acceptor

from ....kit.waiting import until

TOKEN = "t" * 32
WAIT_S = 30.0


class Flaky:
    """A socket of which some connections are not accepted, and then all again."""

    def __init__(self, real: socket.socket, failures: int) -> None:
        self._real, self.left = real, failures

    def accept(self) -> Any:
        if self.left:
            self.left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._real.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> list[Flaky]:
    """Of the doors that are opened."""
    create, made = socket.create_server, list[Flaky]()

    def flaky(*arguments: Any, **how: Any) -> Any:
        made.append(Flaky(create(*arguments, **how), 3))
        return made[-1]

    monkeypatch.setattr(socket, "create_server", flaky)
    return made


def test_a_connection_that_cannot_be_accepted_closes_no_door(sockets: list[Flaky]) -> None:
    """A process may have too many files open for a moment: whoever comes then, or later, is greeted."""
    door = Acceptor("127.0.0.1", TOKEN)
    try:
        until(lambda: sockets[0].left == 0)
        frames = MacFrames.reach(door.address, TOKEN, Deadline(WAIT_S))
        wire.RECEIVER.say(frames, wire.Finished(), Deadline(WAIT_S))
        found: list[tuple[MacFrames, wire.ToSender]] = []
        until(lambda: bool(found.extend(door.came()) or found))
        assert found[0][1] == wire.Finished()
        for each in (frames, found[0][0]):
            each.close()
    finally:
        door.close()


def test_a_door_that_is_closed_stays_closed() -> None:
    """And whoever stood at it goes home."""
    before = set(threading.enumerate())
    door = Acceptor("127.0.0.1", TOKEN)

    door.close()

    until(lambda: not any(each.name == "weightbus-acceptor" for each in set(threading.enumerate()) - before))
