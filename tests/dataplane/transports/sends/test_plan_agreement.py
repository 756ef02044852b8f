"""What a leader of sends works out for an engine, when, and how much of it ranks have to be told."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from weightbus.dataplane.copy.copy_table import CopyTable
from weightbus.dataplane.errors import ManifestError, TransferFailed
from weightbus.dataplane.memory.export_map import ExportedTensor, ExportMap, Region
from weightbus.dataplane.reshard.load_trace import LoadTarget, LoadTrace
from weightbus.dataplane.reshard.reshard_plan import PlanReader, make_plan
from weightbus.dataplane.reshard.send_schedule import SendMessages, SendSchedule, make_send_schedule
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import Shard, Shards, ShardView, whole_tensor_shard
from weightbus.dataplane.transports.interface import ExportedWeights
from weightbus.dataplane.transports.plan_exchange import Proposal
from weightbus.dataplane.transports.sends import messages as wire, plan_agreement as agreed_plans
from weightbus.dataplane.transports.sends.plan_agreement import PlanAgreement

CUT = 1 << 20, 1 << 16
ROWS = 8
TENSORS = (TensorSpec("a", "bfloat16", (ROWS, 4)), TensorSpec("b", "bfloat16", (ROWS, 4)))
ALONE = PlanReader(0, "elsewhere", "gpu-0", sent_to=True)
OTHER = msgspec.structs.replace(ALONE, device="gpu-1")


def _exposed() -> ExportedWeights:
    """Each of two ranks has one of the tensors."""
    parts = [Shards.of(TENSORS, [whole_tensor_shard(spec, "bfloat16", 0)], rank) for rank, spec in enumerate(TENSORS)]
    exports = [ExportMap(rank, "here", (Region(64, "cpu"),), (ExportedTensor(0, 0),)) for rank in range(2)]
    return ExportedWeights(Shards.join(parts), tuple(exports), ())


def _recording(*, swapped: bool = False) -> LoadTrace:
    """A worker that keeps both tensors one behind the other in one parameter."""
    order = reversed(TENSORS) if swapped else TENSORS
    pieces = [
        Shard(spec.name, whole_tensor_shard(spec, "bfloat16", 0).box, "bfloat16", ShardView(0, ROWS * 4 * at, (4, 1)))
        for at, spec in enumerate(order)
    ]
    target = LoadTarget("w", "bfloat16", (2, ROWS, 4), (ROWS * 4, 4, 1), parameter=True)
    return LoadTrace(0, (target,), Shards.of(TENSORS, pieces))


def _agreed(plans: PlanAgreement, reader: PlanReader = ALONE, *, swapped: bool = False) -> str:
    """The digest of a plan that was proposed and agreed to."""
    exposed, recording = _exposed(), _recording(swapped=swapped)
    plan = make_plan(exposed.shards, exposed.exports, recording, reader)
    plans.turn_to(exposed, 1)
    return plans.agree(Proposal(reader=reader, recording=recording.encode(), plan=plan.digest()))


def _names(parts: tuple[wire.SchedulePart, ...]) -> list[str]:
    return [each.schedule for each in parts]


def test_a_rank_is_told_its_own_part_in_full_once() -> None:
    """Of two workers that are sent the same the second one's is named only, in the same message or a later one."""
    plans = PlanAgreement()
    one, other = _agreed(plans), _agreed(plans, OTHER)
    assert one != other
    for holder in (0, 1):
        both = plans.parts_of(holder, (), [(2, one), (3, other)], *CUT)
        exposed, made = _exposed(), plans.schedule(one, *CUT)
        plan = make_plan(exposed.shards, exposed.exports, _recording(), ALONE)
        messages, pack = made.of_rank(holder, plan)
        assert (both[0].messages, both[0].pack) == (messages.encode(), pack.encode())
        assert len(SendMessages.decode(both[0].messages)) == 1
        assert both[1] == wire.SchedulePart(peer=3, schedule=both[0].schedule)
        later = plans.parts_of(holder, _names(both), [(2, other)], *CUT)
        assert later == (wire.SchedulePart(peer=2, schedule=both[0].schedule),)


def test_parts_that_differ_have_names_of_their_own() -> None:
    """By what is in them: another holder's, another worker's."""
    plans = PlanAgreement()
    one, other = _agreed(plans), _agreed(plans, swapped=True)
    parts = [plans.parts_of(holder, (), [(2, plan)], *CUT)[0] for holder in (0, 1) for plan in (one, other)]
    named = {each.schedule: (each.messages, each.pack) for each in parts}
    assert len(named) == len({(each.messages, each.pack) for each in parts}) > 1


def test_a_rank_that_began_anew_is_told_in_full() -> None:
    """What another one knows, or was told before, is not what it knows."""
    plans = PlanAgreement()
    one = _agreed(plans)
    before = plans.parts_of(0, (), [(2, one)], *CUT)
    plans.told()
    assert plans.parts_of(0, (), [(2, one)], *CUT) == before
    assert plans.parts_of(0, _names(plans.parts_of(1, (), [(2, one)], *CUT)), [(2, one)], *CUT) == before
    plans.schedule(one, 64, 16)  # cut otherwise for a version
    assert not plans._names, "nothing is left of what was cut before"
    assert plans.parts_of(0, (), [(2, one)], *CUT) == before


def test_what_is_asked_for_when_all_are_prepared_is_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole round waits then; when a plan was agreed to only the engine that has it is at work."""
    plans, twin = PlanAgreement(), PlanAgreement()
    one = _agreed(plans)
    wanted = [twin.parts_of(holder, (), [(2, _agreed(twin))], *CUT) for holder in (0, 1)]
    plans.make_ready(one, (0, 1), *CUT)
    digest = twin.schedule(one, *CUT).digest()
    for kind in (CopyTable, SendMessages):
        monkeypatch.setattr(kind, "encode", lambda _: pytest.fail("it is encoded now"))
    monkeypatch.setattr(SendSchedule, "of_rank", lambda *_: pytest.fail("it is divided now"))
    plans.check(wire.Prepared(plans=(one,), schedules=(digest,)), 1, *CUT)
    assert [plans.parts_of(holder, (), [(2, one)], *CUT) for holder in (0, 1)] == wanted


def test_parts_that_are_made_ahead_are_bounded_and_of_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """What there is no room for is made when it is told; what nobody was told of a version goes with it."""
    monkeypatch.setattr(agreed_plans, "_MOST_READY", 1)
    plans, twin = PlanAgreement(), PlanAgreement()
    one = _agreed(plans)
    plans.make_ready(one, (0, 1), *CUT)
    assert [holder for _, holder in plans._ready] == [0]
    wanted = [twin.parts_of(holder, (), [(2, _agreed(twin))], *CUT) for holder in (0, 1)]
    assert [plans.parts_of(holder, (), [(2, one)], *CUT) for holder in (0, 1)] == wanted
    plans.turn_to(_exposed(), 2)
    assert not plans._ready
    assert [plans.parts_of(holder, (), [(2, one)], *CUT) for holder in (0, 1)] == wanted
    other = _agreed(plans, swapped=True)
    plans.make_ready(other, (0, 1), *CUT)
    assert plans._ready, "there is room again"


def test_of_what_lies_otherwise_now_nothing_is_left() -> None:
    """What was worked out for the layout before is neither used for the next one, nor in its way."""
    plans, exposed = PlanAgreement(), _exposed()
    plans.schedule(_agreed(plans), *CUT)
    exports = tuple([msgspec.structs.replace(each, host="elsewhere") for each in exposed.exports])
    plans.turn_to(replace(exposed, exports=exports), 2)
    plan = make_plan(exposed.shards, exports, _recording(), OTHER)
    agreed = plans.agree(Proposal(reader=OTHER, recording=_recording().encode(), plan=plan.digest()))
    assert plans.schedule(agreed, *CUT).digest() == make_send_schedule(plan, 1, *CUT).digest()


def test_only_workers_that_are_alike_share_what_was_worked_out() -> None:
    """Of replicas each rank of an engine takes others, and whoever is near one of them takes that."""
    both = [whole_tensor_shard(spec, "bfloat16", at) for at, spec in enumerate(TENSORS)]
    parts = [Shards.of(TENSORS, both, rank) for rank in range(2)]
    exports = tuple(
        [
            ExportMap(rank, f"host {rank}", (Region(64, "cpu"),) * 2, (ExportedTensor(0, 0), ExportedTensor(1, 0)))
            for rank in range(2)
        ]
    )
    plans, exposed = PlanAgreement(), ExportedWeights(Shards.join(parts), exports, ())
    plans.turn_to(exposed, 1)
    readers = [ALONE, msgspec.structs.replace(ALONE, rank=1)]
    readers += [msgspec.structs.replace(ALONE, host=f"host {rank}", device="cpu") for rank in range(2)]
    taken: list[list[int]] = []
    for reader in readers:
        plan = make_plan(exposed.shards, exports, _recording(), reader)
        proposal = Proposal(reader=reader, recording=_recording().encode(), plan=plan.digest())
        assert plans.agree(proposal) == plan.digest()
        rows = plan.copies.target_at.argsort()
        taken.append([plan.sources[each].rank for each in plan.copies.source[rows].tolist()])
    assert taken == [[0, 1], [1, 0], [0, 0], [1, 1]]


def test_other_plans_and_schedules_than_its_own_are_refused() -> None:
    """Both sides make them: neither trusts the other's arithmetic."""
    plans, exposed = PlanAgreement(), _exposed()
    proposal = Proposal(reader=ALONE, recording=_recording().encode(), plan="another")
    plans.turn_to(exposed, 1)
    with pytest.raises(TransferFailed, match="planned another"):
        plans.agree(proposal)
    one = _agreed(plans)
    plan = make_plan(exposed.shards, exposed.exports, _recording(), ALONE)
    right = make_send_schedule(plan, 1, *CUT).digest()
    plans.check(wire.Prepared(plans=(one,), schedules=(right,)), 1, *CUT)
    with pytest.raises(ManifestError, match="scheduled another"):
        plans.check(wire.Prepared(plans=(one,), schedules=("another",)), 1, *CUT)
    with pytest.raises(TransferFailed, match="was not agreed to"):
        plans.check(wire.Prepared(plans=("unknown",), schedules=(right,)), 1, *CUT)
    with pytest.raises(TransferFailed, match="2 plans and 1 schedules came for 1 workers"):
        plans.check(wire.Prepared(plans=(one, one), schedules=(right,)), 1, *CUT)
    with pytest.raises(TransferFailed, match="1 plans and 1 schedules came for 2 workers"):
        plans.check(wire.Prepared(plans=(one,), schedules=(right,)), 2, *CUT)
    exports = tuple([msgspec.structs.replace(each, host="elsewhere") for each in exposed.exports])
    plans.turn_to(replace(exposed, exports=exports), 2)
    assert plans.digests == ()
    with pytest.raises(TransferFailed, match="was not agreed to"):
        plans.check(wire.Prepared(plans=(one,), schedules=(right,)), 1, *CUT)
