"""Which groups of rounds before the leader of sends speaks of. No sockets."""

from __future__ import annotations

from weightbus.dataplane.transports.interface import Group
from weightbus.dataplane.transports.sends.sender import MOST_KEPT, Formed, KeptGroups, seen_by


def have(*names: str) -> KeptGroups:
    """Groups of one engine each, used for version 1."""
    stood = KeptGroups()
    stood.turn_to(1)
    for name in names:
        stood.keep(Formed(f"g-{name}", f"members of {name}", frozenset({name})))
    return stood


def everybody(_name: str) -> bool:
    return True


def test_a_group_is_used_by_the_same_members_if_all_have_it() -> None:
    """And until everything has moved in it again it is nobody's."""
    stood = have("a", "b")
    found = stood.take("members of a", frozenset({"a"}), everybody)
    assert found is not None
    assert (found.name, stood.names) == ("g-a", ("g-b",))
    stood.keep(found)
    assert stood.take("other members of a", frozenset({"a"}), everybody) is None
    assert stood.take("members of b", frozenset({"b"}), lambda name: name != "g-b") is None
    assert stood.names == ()


def test_an_engine_is_in_one_group() -> None:
    """A member that forms another group has left all others; groups without such a member stay."""
    stood = have("a", "b", "c")
    assert stood.take("members of a and b", frozenset({"a", "b"}), everybody) is None
    assert stood.names == ("g-c",)
    stood.keep(Formed("g-ab", "members of a and b", frozenset({"a", "b"})))
    assert stood.take("members of a", frozenset({"a"}), everybody) is None
    assert stood.names == ("g-c",)


def test_each_member_is_told_its_own_rank() -> None:
    """Of a group that is the same for all besides."""
    group = Group(store="s", name="g", size=3, rank=0, form_s=1.0, turn_s=2.0)
    assert seen_by(2, group) == Group(store="s", name="g", size=3, rank=2, form_s=1.0, turn_s=2.0)


def test_a_group_that_a_version_did_not_need_is_not_kept_for_long() -> None:
    """It may come in its turn of the next version, and not later; attempts and catch-ups do not count."""
    stood = have("a", "b")
    for version in (1, 2, 2):
        stood.turn_to(version)
        assert stood.names == ("g-a", "g-b")
    found = stood.take("members of a", frozenset({"a"}), everybody)
    assert found is not None
    stood.keep(found)
    stood.turn_to(3)
    assert stood.names == ("g-a",)


def test_with_more_turns_than_can_be_kept_those_that_are_stay() -> None:
    """Taking one in for another that comes next would never find any."""
    stood = have(*map(str, range(MOST_KEPT)))
    assert not stood.room
    found = stood.take("members of 0", frozenset({"0"}), everybody)
    assert found is not None
    assert stood.room
