"""What a round tells its agents: numbers that are counted when a command is made."""

from __future__ import annotations

from weightbus.control.machine.participants import Participant, RoundCommands
from weightbus.control.machine.states import EnginePhase, Limits
from weightbus.control.protocol.messages import (
    AgentId,
    Endpoint,
    Epoch,
    Publish,
    RequestId,
    Transfer,
    TransportKind,
    Version,
)

from ..world import CHANNEL, digest, engine_info


def member(name: str, tp: int, transport: TransportKind) -> Participant:
    return Participant(
        name=AgentId(name),
        info=engine_info(name, tp=tp),
        phase=EnginePhase.PREPARED,
        epoch=Epoch(1),
        transport=transport,
    )


def test_every_worker_of_a_group_has_a_rank_of_its_own() -> None:
    """0 is the trainer's; an engine has one for each of its workers; an engine with another transport has none."""
    publish = Publish(
        request=RequestId("k"),
        channel=CHANNEL,
        epoch=Epoch(1),
        version=Version(1),
        manifest=digest(b"manifest"),
        table=digest(b"table"),
        bytes=1,
        buckets=1,
    )
    group, alone = TransportKind.DISTRIBUTED, TransportKind.LOCAL
    members = [member("e0", 2, group), member("e1", 4, alone), member("e2", 3, group), member("e3", 1, group)]
    orders = RoundCommands(publish, Limits())
    send = orders.send(Epoch(1), members)
    assert [(each.transport, each.tp) for each in send.receivers] == [(group, 2), (alone, 4), (group, 3), (group, 1)]
    told = [
        orders.transfer(each, Endpoint(transport=group, address="a")) for each in members if each.transport is group
    ]
    assert [each.rank_offset for each in told if isinstance(each, Transfer)] == [1, 3, 6]
