"""Groups that form before anybody knows whether they will be used."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from weightbus.dataplane.errors import DeadlineExceeded, PeerLost
from weightbus.dataplane.processes.process_groups import serve_store
from weightbus.dataplane.transports.interface import Group
from weightbus.dataplane.transports.sends import group_transfer as joining
from weightbus.dataplane.transports.sends.group_transfer import GroupForming, join
from weightbus.dataplane.transports.sends.nixl_group import NixlGroup
from weightbus.dataplane.transports.sends.p2p_group import NO_RANKS, P2PGroup

from ....kit.waiting import until


class Dropped(P2PGroup):
    """A group that says whether it was let go of."""

    def __init__(self) -> None:
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


class Slow:
    """Joins when a test has it do so."""

    def __init__(self) -> None:
        self.go_on, self.begun, self.group = threading.Event(), threading.Event(), Dropped()
        self.ends: dict[str, frozenset[int]] = {}

    def join(self, *_: object, **ends: frozenset[int]) -> P2PGroup:
        self.ends = ends
        self.begun.set()
        assert self.go_on.wait(60.0)
        return self.group


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow()
    monkeypatch.setattr(joining, "join", made.join)
    yield made
    made.go_on.set()


def forming(form_s: float = 60.0) -> GroupForming:
    where = Group(store="tcp://127.0.0.1:1", name="g", size=2, rank=0, form_s=form_s, turn_s=1.0, ranks=1)
    return GroupForming(where, torch.device("cpu"))


def test_a_member_that_asks_has_the_group(slow: Slow) -> None:
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
    """The member that waited for it has gone."""
    under_way = forming(0.1)
    with pytest.raises(DeadlineExceeded):
        under_way.result()
    slow.go_on.set()
    until(lambda: slow.group.dropped, "it to be let go of", 10.0)


@pytest.mark.parametrize(
    ("rank", "to", "from_"),
    [(0, {2, 3, 4}, set()), (1, {2, 3, 4}, set()), (2, set(), {0, 1}), (4, set(), {0, 1})],
)
def test_every_rank_is_connected_with_every_worker(slow: Slow, rank: int, to: set[int], from_: set[int]) -> None:
    """Before anybody knows who sends to whom: whom one end names the other one names too, or both wait for ever."""
    where = Group(store="tcp://127.0.0.1:1", name="g", size=5, rank=rank, form_s=60.0, turn_s=1.0, ranks=2)
    under_way = GroupForming(where, torch.device("cpu"))
    assert slow.begun.wait(60.0)
    assert slow.ends == {"to": to, "from_": from_}
    under_way.discard()


@pytest.mark.parametrize("rank", [0, 7, 8])
@pytest.mark.parametrize("workers", [8, 9])
def test_a_large_group_connects_no_pairs_ahead(slow: Slow, rank: int, workers: int) -> None:
    """Each costs time and memory, and most of them will exchange nothing. All members find the same."""
    where = Group(store="tcp://127.0.0.1:1", name="g", size=8 + workers, rank=rank, form_s=60.0, turn_s=1.0, ranks=8)
    under_way = GroupForming(where, torch.device("cpu"))
    assert slow.begun.wait(60.0)
    others = (
        {"to": frozenset(range(8, 16)), "from_": NO_RANKS}
        if rank < 8
        else {"to": NO_RANKS, "from_": frozenset(range(8))}
    )
    assert slow.ends == (others if workers == 8 else {"to": NO_RANKS, "from_": NO_RANKS})
    under_way.discard()


@pytest.mark.parametrize("kind", [P2PGroup, NixlGroup])
def test_members_that_exchange_messages_are_connected(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """As both ends have named them."""
    asked: list[Any] = []
    memory = (torch.zeros(1, dtype=torch.uint8),)

    def form(*arguments: Any, **more: Any) -> object:
        asked.append((arguments[1], *arguments[4:6], more))
        return kind

    monkeypatch.setattr(kind, "form", form)
    server, nixl = serve_store("127.0.0.1"), kind is NixlGroup
    where = Group(
        store=f"tcp://127.0.0.1:{server.port}", name="g", size=5, rank=2, form_s=60.0, turn_s=1.0, nixl=nixl
    )  # fmt: skip
    to, from_ = frozenset({1}), frozenset({3, 4})
    assert join(where, torch.device("cpu"), to=to, from_=from_, memory=memory) is kind
    ends = {"to": to, "from_": from_}
    assert asked == [("g", 2, 5, {**ends, "memory": memory} if nixl else ends)]
