"""What is made aside is waited for so long and no longer, and belongs to its thread when it is given up."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from weightbus.dataplane.errors import DeadlineExceeded, TransferFailed
from weightbus.dataplane.processes import threads as binding
from weightbus.dataplane.processes.threads import BackgroundInit

WAIT_S = 20.0


class Slow:
    """Returns when it is let."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.late = threading.Event()

    def __call__(self) -> int:
        assert self.released.wait(3 * WAIT_S)
        return 7


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    monkeypatch.setattr(binding, "BOUND_S", 0.2)
    made = Slow()
    yield made
    made.released.set()


def test_the_made_object_is_returned_to_every_caller() -> None:
    """And what it raises is raised there; nothing is late."""
    late = threading.Event()
    made = BackgroundInit(lambda: 7, late.set)
    assert made.result() == 7
    assert made.settle()

    def refuse() -> int:
        raise TransferFailed("no room")

    failed = BackgroundInit(refuse, late.set)
    with pytest.raises(TransferFailed, match="no room"):
        failed.result()
    assert failed.settle()
    assert not late.is_set()


def test_one_that_does_not_return_holds_no_peer(slow: Slow) -> None:
    """After it was given up, `late` is called by its thread when it ends."""
    made = BackgroundInit(slow, slow.late.set)
    with pytest.raises(DeadlineExceeded, match="bound to memory"):
        made.result()
    assert not made.settle()
    assert not slow.late.is_set()
    slow.released.set()
    assert slow.late.wait(WAIT_S)
