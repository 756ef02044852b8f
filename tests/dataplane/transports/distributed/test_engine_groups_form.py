"""Groups of engines that form beside one another: one that does not, and what becomes of the others."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.transports.distributed import broadcast_group
from weightbus.dataplane.transports.distributed.broadcast_group import (
    BroadcastGroup,
    EngineGroups,
    GroupSettings,
    Stalled,
)

from ....kit.waiting import until

FORM_S = 30.0


class Formed:
    """A group that has formed."""

    def __init__(self) -> None:
        self.broken = threading.Event()

    def abort(self) -> None:
        self.broken.set()


def test_what_has_formed_is_let_go_of_whatever_kept_the_others_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what nobody foresaw: a host without descriptors, a torch that raises something else."""
    formed = Formed()

    def form(_store: object, name: str, *_: object) -> Formed:
        if name == "g-at2":
            raise OSError("too many open files")
        return formed

    monkeypatch.setattr(BroadcastGroup, "form", form)
    with pytest.raises(OSError, match="too many"):
        EngineGroups.form(
            lambda: None, "g", "h", torch.device("cpu"), GroupSettings(("g",), (), (1, 2)), Deadline(FORM_S)
        )  # type: ignore[arg-type, return-value]
    until(formed.broken.is_set, "the other group to be let go of", 10.0)


def test_a_group_that_cannot_be_left_keeps_no_other() -> None:
    """All are left, and then it is said."""

    class Odd:
        def abort(self) -> None:
            raise RuntimeError("torch's")

    formed = Formed()
    with pytest.raises(RuntimeError, match="torch's"):
        EngineGroups("g", [Odd(), formed]).abort()  # type: ignore[list-item]
    assert formed.broken.is_set()


def test_what_hangs_up_for_a_source_ends_with_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are left: else a process, with connections that are broken, for each of them."""
    closed = list[bool]()

    class StandIn:
        def __init__(self, *_: object) -> None:
            self.close = lambda: closed.append(True)

        def use(self, _used: bool) -> None:
            assert not closed

    class Connected(Formed):
        connections = SimpleNamespace(files=(3,))

        def abort(self) -> None:
            raise RuntimeError("torch's")

    monkeypatch.setattr(broadcast_group, "SourceWatchdog", StandIn)
    groups = EngineGroups("g", [Connected()])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
    groups.use(True)
    with pytest.raises(RuntimeError, match="torch's"):
        groups.abort()
    assert closed == [True]


def test_an_engine_that_does_not_join_is_named_and_the_others_groups_are_let_go_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long before the time for all of them is over. What forms after that is let go of, too: nobody would use it."""
    monkeypatch.setattr(broadcast_group, "STILL_FORMING_S", 0.2)
    comes, made = threading.Event(), dict[str, Formed]()

    def form(_store: object, name: str, *_: object) -> Formed:
        if name == "g-at2":
            comes.wait(FORM_S)
        made[name] = Formed()
        return made[name]

    monkeypatch.setattr(BroadcastGroup, "form", form)
    groups = GroupSettings(("g",), (), (1, 2))
    began = time.monotonic()
    with pytest.raises(Stalled, match="its group to form") as stood:
        EngineGroups.form(lambda: None, "g", "h", torch.device("cpu"), groups, Deadline(FORM_S))  # type: ignore[arg-type, return-value]
    assert time.monotonic() - began < FORM_S / 2
    assert stood.value.members == (1,)
    assert made["g-at1"].broken.is_set()
    comes.set()
    until(lambda: "g-at2" in made and made["g-at2"].broken.is_set(), "what has formed too late to be let go of", 10.0)
