"""Groups that form before anybody knows whether they will be used."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from weightbus.dataplane import joining
from weightbus.dataplane.errors import DeadlineExceeded, PeerLost
from weightbus.dataplane.joining import Forming
from weightbus.dataplane.pair_group import PairGroup
from weightbus.dataplane.sends_wire import Group

from ..kit.waiting import until


class Dropped(PairGroup):
    """A group that says whether it was let go of."""

    def __init__(self) -> None:
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


class Slow:
    """Joins when a test has it do so."""

    def __init__(self) -> None:
        self.go_on, self.begun, self.group = threading.Event(), threading.Event(), Dropped()

    def join(self, *_: object, **__: object) -> PairGroup:
        self.begun.set()
        assert self.go_on.wait(60.0)
        return self.group


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow()
    monkeypatch.setattr(joining, "join", made.join)
    yield made
    made.go_on.set()


def forming(form_s: float = 60.0) -> Forming:
    where = Group(store="tcp://127.0.0.1:1", name="g", size=2, rank=0, form_s=form_s, turn_s=1.0, ranks=1)
    return Forming(where, torch.device("cpu"))


def test_who_asks_has_the_group(slow: Slow) -> None:
    """Once: it is nobody else's afterwards."""
    under_way = forming()
    slow.go_on.set()
    assert under_way.result() is slow.group
    with pytest.raises(PeerLost):
        under_way.result()
    under_way.discard()
    assert not slow.group.dropped


@pytest.mark.parametrize("when", ["before it has formed", "afterwards"])
def test_what_is_not_wanted_is_let_go_of(slow: Slow, when: str) -> None:
    """Also if it forms later: a communicator would stay in a server."""
    under_way = forming()
    assert slow.begun.wait(60.0)
    if when == "afterwards":
        slow.go_on.set()
        until(under_way._over.is_set)
    under_way.discard()
    slow.go_on.set()
    until(lambda: slow.group.dropped, "it to be let go of", 10.0)


def test_what_forms_too_late_is_let_go_of(slow: Slow) -> None:
    """Who waited for it has gone."""
    under_way = forming(0.1)
    with pytest.raises(DeadlineExceeded):
        under_way.result()
    slow.go_on.set()
    until(lambda: slow.group.dropped, "it to be let go of", 10.0)
