"""What a member keeps of groups between rounds: for a time, and never one that was broken."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, cast

import pytest

from weightbus.dataplane.transports.interface import JOIN_S
from weightbus.dataplane.transports.sends import group_transfer as standing
from weightbus.dataplane.transports.sends.group_transfer import GroupCache, GroupForming
from weightbus.dataplane.transports.sends.p2p_group import P2PGroup
from weightbus.dataplane.transports.sends.sender import FORM_S


class Group:
    """Says how it ended."""

    def __init__(self) -> None:
        self.broken = False
        self.end = ""

    def close(self) -> None:
        self.end = "closed"

    def drop(self) -> None:
        self.end = "dropped"


def kept(group: Group, keep_s: float = 100.0) -> GroupCache:
    made = GroupCache()
    made.keep("g1", cast("P2PGroup", group), keep_s)
    return made


def test_a_group_is_used_by_one_at_a_time() -> None:
    """The taker has it, and keeps it again when all went well."""
    group = Group()
    stands = kept(group)
    assert stands.names == ("g1",)
    assert cast("Group", stands.take("g1")) is group
    assert stands.names == ()
    assert stands.take("g1") is None
    stands.keep("g1", cast("P2PGroup", group), 100.0)
    assert stands.names == ("g1",)
    assert group.end == ""
    stands.discard()


@pytest.mark.parametrize("by", ["another name", "discard"])
def test_a_group_that_is_not_named_any_more_is_let_go_of(by: str) -> None:
    """Without a word to those who may still be in it."""
    group = Group()
    stands = kept(group)
    if by == "another name":
        assert stands.take("g2") is None
        assert group.end == "dropped"
    stands.discard()
    assert group.end == "dropped"
    assert stands.names == ()


def test_groups_of_turns_stay_beside_each_other() -> None:
    """As long as whoever leads names them; the others go, and only they."""
    groups = {name: Group() for name in ("g1", "g2", "g3")}
    stands = GroupCache()
    for name, group in groups.items():
        stands.keep(name, cast("P2PGroup", group), 100.0)
    assert cast("Group", stands.take("g2", ("g3",))) is groups["g2"]
    assert stands.names == ("g3",)
    assert [each.end for each in groups.values()] == ["dropped", "", ""]
    stands.keep("g2", cast("P2PGroup", groups["g2"]), 100.0)
    assert stands.names == ("g3", "g2")
    stands.discard()
    assert [each.end for each in groups.values()] == ["dropped"] * 3


def test_a_broken_group_is_of_no_use() -> None:
    """Neither kept, nor spoken of, nor given to anybody."""
    group = Group()
    stands = kept(group)
    group.broken = True
    assert stands.names == ()
    assert stands.take("g1") is None
    assert group.end == "dropped"
    assert kept(group).take("g1") is None
    assert group.end == "closed"


def test_a_group_need_not_be_kept() -> None:
    """Then it ends as every group did."""
    group = Group()
    assert kept(group, 0.0).names == ()
    assert group.end == "closed"


def test_an_idle_group_is_not_spoken_of_and_then_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later than it is spoken of: whoever said that it has one still has it when it is used."""
    monkeypatch.setattr(standing, "SLACK_S", 0.3)
    group = Group()
    stands = kept(group, 0.01)
    until = time.monotonic() + 30
    while stands.names:
        assert time.monotonic() < until
    while not group.end:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert group.end == "dropped"
    assert stands.take("g1") is None


class Clock:
    """Stands for `threading.Timer`: its time comes when a test says so, unless it was cancelled."""

    made: ClassVar[list[Clock]] = []

    def __init__(self, interval: float, function: Callable[..., None], args: Sequence[object]) -> None:
        self.interval, self._function, self._args = interval, function, args
        self.cancelled = False
        self.made.append(self)

    def start(self) -> None:
        pass

    def cancel(self) -> None:
        self.cancelled = True

    def come(self) -> None:
        if not self.cancelled:
            self._function(*self._args)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> list[Clock]:
    """Of the groups that are kept from now on, in order."""
    monkeypatch.setattr(Clock, "made", [])
    monkeypatch.setattr(threading, "Timer", Clock)
    return Clock.made


def test_a_group_in_use_is_not_let_go_of(clocks: list[Clock]) -> None:
    """However long ago it was kept for the first time: its time begins when it is kept again."""
    group = Group()
    stands = kept(group)
    assert stands.take("g1") is not None
    stands.keep("g1", cast("P2PGroup", group), 100.0)
    clocks[0].come()
    assert (stands.names, group.end) == (("g1",), "")
    clocks[1].come()
    assert (stands.names, group.end) == ((), "dropped")


def test_a_group_that_was_let_go_of_takes_no_other_with_it(clocks: list[Clock]) -> None:
    """Of the same name, and of which the time has not come: neither when it goes, nor later."""
    first, second, third = Group(), Group(), Group()
    stands = kept(first)
    stands.keep("g1", cast("P2PGroup", second), 100.0)
    assert (first.end, second.end) == ("dropped", "")
    stands.discard()
    assert second.end == "dropped"
    stands.keep("g1", cast("P2PGroup", third), 100.0)
    for each in clocks[:2]:
        each.come()
    assert (stands.names, third.end) == (("g1",), "")


def test_a_member_that_said_that_it_has_a_group_has_it_for_a_while(clocks: list[Clock]) -> None:
    """All members have to come and to prepare between that and its use."""
    kept(Group(), 100.0)
    assert clocks[0].interval >= 100.0 + JOIN_S + FORM_S


def test_what_forms_under_another_name_is_not_taken() -> None:
    """It is another epoch's, and is called off."""

    class Forms:
        name, discarded = "of another epoch", False

        def discard(self) -> None:
            self.discarded = True

        def result(self) -> Group:
            return Group()

    stands, forms = GroupCache(), Forms()
    stands.begin(cast("GroupForming", forms))
    assert stands.take("g1") is None
    assert forms.discarded


@pytest.mark.parametrize("how", ["another begins to form", "nothing is kept any more", "it is called off"])
def test_what_forms_and_is_not_asked_for_is_called_off(how: str) -> None:
    """Its members would wait for each other, and keep what has formed for nobody."""

    class Forms:
        name = "early"

        def __init__(self) -> None:
            self.discarded = 0

        def discard(self) -> None:
            self.discarded += 1

    stands, first, second = GroupCache(), Forms(), Forms()
    stands.begin(cast("GroupForming", first))
    if how == "another begins to form":
        stands.begin(cast("GroupForming", second))
    elif how == "nothing is kept any more":
        stands.discard()
    else:
        stands.call_off()
    assert (first.discarded, second.discarded) == (1, 0)
    stands.discard()
    assert (first.discarded, second.discarded) == (1, int(how == "another begins to form"))


def test_a_group_that_forms_leaves_the_kept_one_alone() -> None:
    """Until it is known which of them is used: the other one is let go of then."""

    class Forms:
        name = "early"

        def __init__(self) -> None:
            self.discarded = False

        def discard(self) -> None:
            self.discarded = True

        def result(self) -> Group:
            return other

    for used in ("g1", "early"):
        group, other, forms = Group(), Group(), Forms()
        stands = kept(group)
        stands.begin(cast("GroupForming", forms))
        assert stands.names == ("g1",)
        assert cast("Group", stands.take(used)) is (group if used == "g1" else other)
        assert group.end == ("" if used == "g1" else "dropped")
        assert forms.discarded is (used == "g1")
