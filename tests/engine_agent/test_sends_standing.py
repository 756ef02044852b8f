"""A group of sends serves round after round while nobody comes or goes; whatever happened to a member, none hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weightbus.dataplane import sends, standing
from weightbus.dataplane.errors import DataplaneError
from weightbus.dataplane.pair_group import PairGroup
from weightbus.dataplane.rank_sends import RankSends
from weightbus.dataplane.sends_receiver import SendsReceiver
from weightbus.engine_agent import worker_loader

from ..kit.toy_direct import WAIT_S, holds
from ..kit.toy_sends import SendingTrainer, SendsWorld


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SendsWorld]:
    """Two ranks, and one engine of two workers."""
    made = SendsWorld(tmp_path / "r", 2, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def formed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of groups, once for each member that joined one."""
    names: list[str] = []
    form = PairGroup.form.__func__  # type: ignore[attr-defined]

    def counted(kind: Any, store: Any, name: str, *arguments: Any, **more: Any) -> Any:
        names.append(name)
        return form(kind, store, name, *arguments, **more)

    monkeypatch.setattr(PairGroup, "form", classmethod(counted))
    return names


def a_round(world: SendsWorld) -> None:
    """One version, which must be served afterwards."""
    world.trainer.step(world.epoch + 10)
    world.round(stage=True)
    assert holds(world.server, world.trainer.values)


MEMBERS = 4


def test_rounds_of_the_same_members_form_one_group(world: SendsWorld, formed: list[str]) -> None:
    """In place and beside, while the engine is the only one, and until it need not be kept."""
    for _ in range(4):
        a_round(world)
    assert world.receiver.mode == "beside"
    assert (len(formed), len(set(formed))) == (MEMBERS, 1)
    world.trainer.sends._keep_s = 0.0
    for groups in (1, 2, 3):  # the one that was kept is used once more
        a_round(world)
        assert (len(formed), len(set(formed))) == (groups * MEMBERS, groups)


@pytest.mark.parametrize("what", ["a rank", "a sidecar", "the workers", "the leader", "the schedule"])
def test_whoever_begins_anew_is_in_a_new_group(
    world: SendsWorld, formed: list[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It died between two rounds: the next one does not wait for it in the old group."""
    a_round(world)
    a_round(world)
    match what:
        case "a rank":
            world.trainer.sending[1].close()
            world.trainer.sending[1] = RankSends("c", 1)
        case "a sidecar":
            world.receiver.shutdown()
            world.receiver = SendsReceiver(world.runtime)
        case "the workers":
            worker_loader.forget()
        case "the leader":
            world.trainer.close()
            world.trainer = SendingTrainer(world.runtime)
        case _:
            monkeypatch.setattr(sends, "pair_bytes_of", lambda _ranks: 256)
    a_round(world)
    assert (len(formed), len(set(formed))) == (2 * MEMBERS, 2)
    a_round(world)
    assert len(formed) == 2 * MEMBERS


@pytest.mark.parametrize("who", ["a rank", "a worker"])
def test_who_lost_the_group_after_all_costs_one_attempt(
    world: SendsWorld, formed: list[str], monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """It said that it has it, and has it no more: everybody hears of it at once, and the next attempt forms another."""
    a_round(world)
    a_round(world)
    take, left = standing.Standing.take, [1]

    def lose(self: standing.Standing, name: str) -> Any:
        if left[0] and self in ([world.trainer.sending[1]._standing] if who == "a rank" else takers()):
            left[0] -= 1
            self.discard()
        return take(self, name)

    def takers() -> list[standing.Standing]:
        states = worker_loader._states.values()
        return [state._taker._standing for state in states if state._taker is not None][:1]

    monkeypatch.setattr(standing.Standing, "take", lose)
    world.epoch += 1
    session = world.trainer.session(world.epoch)
    taken = world.receive(session, "e", world.offer(session), stage=True)
    began = time.monotonic()
    world.trainer.sends.ready(WAIT_S)
    world.trainer.sends.finish(WAIT_S)
    assert set(world.trainer.sends.failed) == {"e"}
    assert isinstance(taken.exception(WAIT_S), DataplaneError)
    assert time.monotonic() - began < WAIT_S / 2
    assert not world.receiver.touched
    a_round(world)
    a_round(world)
    assert (len(formed), len(set(formed))) == (2 * MEMBERS, 2)
