"""What the leader of sends makes of engines that say they are prepared, and of what it made ready for them before."""

from __future__ import annotations

import re
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from weightbus.dataplane.memory.export_map import ExportMap
from weightbus.dataplane.reshard.reshard_plan import make_plan
from weightbus.dataplane.reshard.send_schedule import make_send_schedule, pair_bytes_for
from weightbus.dataplane.tensors.manifest import DigestTable, Manifest, TensorSpec
from weightbus.dataplane.tensors.shards import Shards
from weightbus.dataplane.transports import plan_exchange as direct_wire
from weightbus.dataplane.transports.interface import ExportedWeights, Peer, TransferSession
from weightbus.dataplane.transports.sends import messages as wire
from weightbus.dataplane.transports.sends.sender import SendsSender

from ....kit.waiting import until
from ...reshard.test_send_schedule import SENT_TO, model
from .test_sender import PROMPT_S, WAIT_S, Crowd, toy_plans

__all__ = ["toy_plans"]


@pytest.mark.parametrize("how", ["a schedule that is cut otherwise", "a plan that nobody agreed to"])
def test_a_member_that_is_prepared_for_something_else_is_left_out_alone(how: str) -> None:
    """Of another version of weightbus, say: it would wait for messages that nobody sends. The others begin."""
    pieces, exports, recording = model(2)
    crowd = Crowd("odd", "fast", ranks=1, exposed=ExportedWeights(pieces, tuple(exports), ()))
    plan = make_plan(pieces, exports, recording, SENT_TO)
    proposal = direct_wire.Proposal(reader=SENT_TO, recording=recording.encode(), plan=plan.digest())
    right, other = (
        make_send_schedule(plan, 2, each, crowd.sender._alone_bytes) for each in (crowd.sender._pair_bytes, 1 << 16)
    )
    crowd.say("fast", wire.Propose(plans=(proposal,)))
    assert crowd.hear("fast") == wire.Agreed()
    if how == "a schedule that is cut otherwise":
        crowd.say("odd", wire.Prepared(plans=(plan.digest(),), schedules=(other.digest(),)))
        why = "the trainer .* from the same plan: both sides must run one version of weightbus"
    else:
        crowd.say("odd", wire.Prepared(plans=("unknown",), schedules=(right.digest(),)))
        why = "plan unknown was not agreed to: propose it first"
    told = crowd.hear("odd")
    crowd.say("fast", wire.Prepared(plans=(plan.digest(),), schedules=(right.digest(),)))
    for member in ("rank 0", "fast"):
        assert isinstance(crowd.hear(member), wire.BeginSends)
    crowd.pass_through("rank 0", "fast")
    assert isinstance(told, wire.Failed)
    assert crowd.end() == {"odd": told.reason}
    assert re.search(why, told.reason)


def test_turns_follow_the_size_of_the_fleet() -> None:
    """Room for hundreds of engines in turn is little for each pair: the few that stay have theirs again.

    One that is not much smaller costs nobody a new schedule.
    """
    exposed = ExportedWeights(Shards.of([TensorSpec("t", "bfloat16", (1,))], [], 0), (ExportMap(0, "h", (), ()),), ())
    sender = SendsSender("127.0.0.1", "c", torch.device("cpu"), lambda: exposed)
    manifest = Manifest.of("toy", exposed.shards.tensors)
    found: list[int] = []
    for epoch, workers in enumerate((4, 256, 128, 4), 1):
        table = DigestTable(manifest.digest(), epoch, "mix64x2", bytes(16))
        sender.offer(TransferSession("c", epoch, epoch, manifest, table), [Peer("e", workers)])
        found.append(sender._pair_bytes)
    sender.close()
    assert found == [pair_bytes_for(4), pair_bytes_for(256), pair_bytes_for(256), pair_bytes_for(4)]


@pytest.mark.usefixtures("toy_plans")
def test_a_member_that_has_finished_is_not_withdrawn() -> None:
    """Its agent died when it held the version: it took it, and that is no failure of its group either."""
    crowd = Crowd("e", "f", ranks=1)
    crowd.prepare("e", "f")
    for member in ("e", "f", "rank 0"):
        assert isinstance(crowd.hear(member), wire.BeginSends)
    crowd.pass_through("rank 0", "e")
    until(lambda: crowd.sender._engines["e"].finished, "the leader to know")
    crowd.sender.withdraw("e", "its agent died")
    crowd.say("f", wire.BarrierReached(seconds=0.0, nbytes=0))
    until(lambda: crowd.sender._engines["f"].through, "the leader to go on")
    crowd.say("f", wire.Finished())
    assert crowd.end() == {}
    assert crowd.sender._stood.names, "the group fell"


@pytest.mark.usefixtures("toy_plans")
def test_no_member_waits_in_a_group_that_is_not_used_after_all() -> None:
    """It began to form before it was known: whoever waits in its store is told when the others begin in another."""
    crowd = Crowd("e", ranks=1)
    assert crowd.sender._early is not None
    store = TCPStore(
        "127.0.0.1", crowd.sender._early[1].port, is_master=False, wait_for_workers=False,
        timeout=timedelta(seconds=WAIT_S),
    )  # fmt: skip
    told: list[float] = []

    def wait() -> None:
        with pytest.raises(RuntimeError):
            store.get("nobody sets this")
        told.append(time.monotonic())

    waiting = threading.Thread(target=wait)
    waiting.start()
    crowd.prepare("e")
    begin = crowd.hear("e")
    assert isinstance(begin, wire.BeginSends)
    assert not begin.group.name.endswith("-early")
    waiting.join(PROMPT_S)
    assert told
    assert isinstance(crowd.hear("rank 0"), wire.BeginSends)
    crowd.pass_through("rank 0", "e")
    assert crowd.end() == {}
    waiting.join()
