"""What an agent answers is said in order, each until it is acknowledged, and without waiting for one another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from weightbus.control.bus.client import BusClient
from weightbus.control.protocol.errors import CoordinatorUnreachable, RequestRefused
from weightbus.control.protocol.messages import Ack, Channel, Epoch, Paused, RefusalCode, RequestId, ToAgent
from weightbus.engine_agent.sidecar.driver import ReplySender

WAIT_S = 30.0


class Line:
    """Notes what is asked; answers when it is told how."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer = threading.Event()
        self.errors: list[Exception] = []
        self.changed = threading.Condition()

    def ask(self, message: Paused, deadline_s: float) -> Callable[[], ToAgent]:
        with self.changed:
            self.asked.append(message.request)
            self.changed.notify_all()

        def wait() -> ToAgent:
            assert self.answer.wait(min(deadline_s, WAIT_S))
            if self.errors:
                raise self.errors.pop(0)
            return Ack(request=message.request)

        return wait

    def until(self, count: int) -> list[str]:
        """What was asked, once it is so much."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.asked) >= count, WAIT_S)
            return list(self.asked)


@pytest.fixture
def line() -> Line:
    return Line()


@pytest.fixture
def speaker(line: Line) -> Iterator[ReplySender]:
    made = ReplySender(lambda: cast("BusClient", line), "e0")
    yield made
    line.answer.set()
    made.stop()


def said(key: str) -> Paused:
    return Paused(request=RequestId(key), channel=Channel("c"), epoch=Epoch(1), seconds=0.1)


def test_what_is_there_is_said_at_once(speaker: ReplySender, line: Line) -> None:
    """In order, and no answer waits for the receipt of the one before."""
    for key in ("a", "b", "c"):
        speaker.say(said(key))
    speaker.start()
    assert line.until(3) == ["a", "b", "c"]


def test_the_same_words_are_said_once_at_a_time(speaker: ReplySender, line: Line) -> None:
    """A command that is repeated is answered with the same words; two questions of one key would have one answer."""
    for key in ("a", "a", "b"):
        speaker.say(said(key))
    speaker.start()
    assert line.until(2) == ["a", "b"]
    line.answer.set()
    speaker.say(said("c"))
    assert line.until(3) == ["a", "b", "c"]


def test_what_was_not_heard_is_said_again(speaker: ReplySender, line: Line) -> None:
    """Until it is; what was refused is not, and what was heard is not either."""
    unheard = CoordinatorUnreachable("tcp://nowhere", 1.0, "Paused", "nothing was heard")
    line.errors = [unheard, RequestRefused(RefusalCode.STALE_EPOCH, "too late", 0.0)]
    line.answer.set()
    for key in ("a", "b", "c"):
        speaker.say(said(key))
    speaker.start()
    assert line.until(4) == ["a", "b", "c", "a"]
    speaker.say(said("d"))
    assert line.until(5)[4:] == ["d"]


def test_another_boot_is_told_nothing_of_before(speaker: ReplySender, line: Line) -> None:
    """The coordinator has another life: what was for the last one is not said."""
    speaker.say(said("a"))
    speaker.forget()
    speaker.say(said("b"))
    speaker.start()
    assert line.until(1) == ["b"]
