"""Groups that are broken off take one time together, however many they are: one for each source, or each engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weightbus.dataplane.transports.distributed import broadcast_group
from weightbus.dataplane.transports.distributed.broadcast_group import EngineGroups
from weightbus.dataplane.transports.distributed.receiver import SidecarReceiver

EACH_S = 0.4
COUNT = 8


class Slow:
    """A group that takes its time, as NCCL's may while the driver is busy."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.left = threading.Event()

    def abort(self) -> None:
        time.sleep(self.seconds)
        self.left.set()


class Entwined(Slow):
    """A group that is not left before all are being left: work of the others keeps its GPU busy."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__(0.0)
        self._barrier = barrier

    def abort(self) -> None:
        self._barrier.wait(10 * EACH_S * COUNT)
        super().abort()


def _by_receiver(groups: list[Any], root: Path) -> None:
    receiver = SidecarReceiver(root)
    receiver._groups = {str(number): group for number, group in enumerate(groups)}
    receiver._break_off()
    assert receiver._groups == {}


def _by_source(groups: list[Any], _root: Path) -> None:
    EngineGroups("g", groups).abort()


ENDS = pytest.mark.parametrize("leave", [_by_receiver, _by_source], ids=["an engine's agent", "a source"])
Leave = Callable[[list[Any], Path], None]


@ENDS
def test_groups_are_broken_off_beside_one_another(leave: Leave, tmp_path: Path) -> None:
    """The slowest of them says how long it takes, not their sum."""
    groups = [Slow(EACH_S) for _ in range(COUNT)]
    began = time.monotonic()
    leave(groups, tmp_path)
    assert time.monotonic() - began < EACH_S * COUNT / 2
    assert all(group.left.is_set() for group in groups)


@ENDS
def test_groups_that_wait_for_each_other_are_broken_off(leave: Leave, tmp_path: Path) -> None:
    """Which one after the other would each take all its time, and not be left at all."""
    barrier = threading.Barrier(COUNT)
    groups = [Entwined(barrier) for _ in range(COUNT)]
    leave(groups, tmp_path)
    assert all(group.left.is_set() for group in groups)


@ENDS
def test_groups_that_cannot_be_left_hold_no_engine(
    leave: Leave, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them have one deadline; whoever can be left by then is."""
    monkeypatch.setattr(broadcast_group, "BREAK_OFF_S", EACH_S, raising=False)
    stuck, quick = [Slow(EACH_S * COUNT) for _ in range(COUNT)], Slow(0.0)
    began = time.monotonic()
    leave([*stuck, quick], tmp_path)
    assert time.monotonic() - began < EACH_S * COUNT / 2
    assert quick.left.is_set()


def test_the_time_of_all_is_no_more_than_that_of_one_was() -> None:
    """5 s, which one group of NCCL's may take: a survivor's part in the time after a death."""
    assert broadcast_group.BREAK_OFF_S <= 5.0
