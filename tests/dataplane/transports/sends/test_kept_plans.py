"""What the leader of sends keeps of its engines' workers, while thousands of them come and go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.reshard.load_trace import LoadTrace
from weightbus.dataplane.reshard.reshard_plan import PlanReader, ReshardPlan, make_plan
from weightbus.dataplane.reshard.send_schedule import SendSchedule
from weightbus.dataplane.transports import plan_exchange as direct_wire
from weightbus.dataplane.transports.interface import ExportedWeights
from weightbus.dataplane.transports.sends.plan_agreement import KEPT, PlanAgreement

from ....kit.toy_sends import SendsWorld

CUT = 1 << 20, 1 << 16


class Fleet:
    """Workers that are alike, but for their GPUs."""

    def __init__(self, exposed: ExportedWeights, trace: LoadTrace, reader: PlanReader) -> None:
        self.exposed, self._recording, self._reader = exposed, trace, reader
        self._plan = make_plan(exposed.shards, exposed.exports, trace, reader)

    def plan(self, device: str) -> ReshardPlan:
        return replace(self._plan, reader=msgspec.structs.replace(self._reader, device=device))

    def proposal(self, device: str) -> direct_wire.Proposal:
        plan = self.plan(device)
        return direct_wire.Proposal(reader=plan.reader, recording=self._recording.encode(), plan=plan.digest())


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Of the workers of a toy engine, as they recorded themselves."""
    world = SendsWorld(tmp_path / "r", 1, monkeypatch)
    world.round()
    known = world.receiver._exchange.agreements[0]
    yield Fleet(world.trainer.describe(), world.receiver._exchange.traces[known.recordings[0]], known.readers[0])
    world.close()


def take_part(made: PlanAgreement, fleet: Fleet, version: int, *devices: str) -> list[SendSchedule]:
    """These workers take it; only whom the leader does not know proposes."""
    made.turn_to(fleet.exposed, version)
    for device in devices:
        if fleet.plan(device).digest() not in made.digests:
            made.agree(fleet.proposal(device))
    plans = [fleet.plan(device).digest() for device in devices]
    made.parts_of(0, (), list(enumerate(plans)), *CUT)
    return [made.schedule(plan, *CUT) for plan in plans]


def test_thousands_that_come_and_go_leave_nothing_behind(fleet: Fleet) -> None:
    """Weeks of a fleet that changes: every invitation names what is kept, and schedules are looked through."""
    made = PlanAgreement()
    for version in range(2000):
        take_part(made, fleet, version, "stays", f"guest {version}")
        assert len(made.digests) <= KEPT + 3
        assert len(made._schedules) <= KEPT + 3
        assert len(made._made) == len(made._names) == 1
    assert fleet.plan("stays").digest() in made.digests
    assert fleet.plan("guest 1999").digest() in made.digests
    assert fleet.plan("guest 0").digest() not in made.digests
    for version in range(2000, 2000 + KEPT + 3):
        take_part(made, fleet, version)
    assert (made._plans, made._made, made._schedules, made._names) == ({}, {}, {}, {})


def test_a_member_that_takes_part_in_every_version_proposes_once(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are that take turns, and though one is away for some versions."""
    made, proposed = PlanAgreement(), list[str]()
    agree = made.agree

    def counted(proposal: direct_wire.Proposal) -> str:
        proposed.append(proposal.plan)
        return agree(proposal)

    monkeypatch.setattr(made, "agree", counted)
    devices = [f"GPU-{number}" for number in range(200)]
    for version in (7, 8, 100, 3):
        for device in devices:
            take_part(made, fleet, version, device)
    for version in range(1000, 1000 + KEPT):
        take_part(made, fleet, version, *devices[1:])
    take_part(made, fleet, 2000, *devices)
    assert len(proposed) == len(set(proposed)) == len(devices)


def test_a_member_that_was_forgotten_proposes_again_and_gets_the_same_schedule(fleet: Fleet) -> None:
    """And who prepares by a plan that is not known here is told to propose it."""
    made = PlanAgreement()
    (before,) = take_part(made, fleet, 1, "away")
    for version in range(2, KEPT + 5):
        take_part(made, fleet, version, "another")
    with pytest.raises(TransferFailed, match="propose it first"):
        made.schedule(fleet.plan("away").digest(), *CUT)
    (after,) = take_part(made, fleet, KEPT + 5, "away")
    assert after.digest() == before.digest()


def test_workers_that_copy_the_same_have_one_schedule_each_under_its_own_plan(fleet: Fleet) -> None:
    """It is made once, and says whose it is."""
    one, two = take_part(PlanAgreement(), fleet, 1, "one", "two")
    assert one.messages is two.messages
    assert (one.plan, two.plan) == (fleet.plan("one").digest(), fleet.plan("two").digest())


def test_a_schedule_that_is_cut_otherwise_is_another_one(fleet: Fleet) -> None:
    """The cut is part of it; what was cut before is kept no longer."""
    made = PlanAgreement()
    (before,) = take_part(made, fleet, 1, "one")
    plan = fleet.plan("one").digest()
    other = made.schedule(plan, 64, 16)
    assert other.digest() != before.digest()
    assert len(made._schedules) == 1
    assert made.schedule(plan, *CUT).digest() == before.digest()


def test_of_memory_that_lies_otherwise_nothing_is_known(fleet: Fleet) -> None:
    """Plans are of the trainer's layout: what was agreed to under another one would be read from the wrong places."""
    made = PlanAgreement()
    take_part(made, fleet, 1, "one")
    exports = tuple([msgspec.structs.replace(each, host="elsewhere") for each in fleet.exposed.exports])
    made.turn_to(replace(fleet.exposed, exports=exports), 1)
    assert made.digests == ()
    assert not made._made
