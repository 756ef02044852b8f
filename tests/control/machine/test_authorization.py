"""Authorization: every message, every role, with keys and without; one table decides."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from weightbus.control.machine.coordinator import Coordinator
from weightbus.control.machine.effects import MessageReceived, Peer, Principal, TrustLost
from weightbus.control.machine.membership import ALLOWED
from weightbus.control.machine.routing import Router
from weightbus.control.protocol.messages import (
    Acquire,
    AgentId,
    Channel,
    Epoch,
    Granted,
    Hello,
    Message,
    Prepared,
    RefusalCode,
    Refused,
    RequestId,
    Role,
    ToCoordinator,
    Version,
)

from ..protocol.test_codec import TO_COORDINATOR
from ..world import CHANNEL, World, engine_info, one_by_one, trainer_info

TRAINER_SAYS = {"Acquire", "Release", "PutBlob", "Publish", "Offered", "Sent", "Abandon", "GetBlob", "Topology"}
ENGINE_SAYS = {"Prepared", "Paused", "Transferred", "Verified", "Serving", "Failed", "GetBlob", "Topology"}
ANYBODY_SAYS = {"Hello", "Heartbeat", "Bye", "GetStatus"}
"""Said once more than in the table, on purpose: a change of rights is two changes."""
EXAMPLES = tuple(message for message, _ in TO_COORDINATOR)
SEAT = Peer(b"seat")


def hello_of(role: Role, name: str = "x") -> Hello:
    return Hello(
        request="h",  # type: ignore[arg-type]
        agent=AgentId(name),
        role=role,
        channel=CHANNEL,
        incarnation=f"{name}.1",  # type: ignore[arg-type]
        engine=engine_info() if role is Role.ENGINE else None,
        trainer=trainer_info() if role is Role.TRAINER else None,
    )


def say(world: World, message: Message, principal: Principal | None) -> list[Message]:
    event = MessageReceived(peer=SEAT, message=message, blob=b"x", principal=principal)  # type: ignore[arg-type]
    effects = world.machine.handle(event, 0.0)
    return [effect.message for effect in one_by_one(effects) if type(effect).__name__ == "SendTo"]


def leased(world: World) -> bool:
    return world.machine.status(world.now).channels[CHANNEL].lease is not None


def not_allowed(answers: list[Message]) -> bool:
    return [a.code for a in answers if isinstance(a, Refused)] == [RefusalCode.NOT_ALLOWED]


def test_every_message_has_a_row() -> None:
    """A message type that the table does not know cannot be sent: adding one without a row fails here (S5)."""
    assert set(ALLOWED) == set(get_args(ToCoordinator))
    assert {each.__name__ for each in ALLOWED} == TRAINER_SAYS | ENGINE_SAYS | ANYBODY_SAYS


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "no keys"])
@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_every_message_of_every_role(message: ToCoordinator, role: Role, keys: bool) -> None:
    """What a role may say is taken, whatever comes of it; anything else is `not_allowed` and changes nothing (S5)."""
    if isinstance(message, Hello):
        return  # below
    own = {Role.TRAINER: TRAINER_SAYS, Role.ENGINE: ENGINE_SAYS, Role.OBSERVER: set[str]()}[role]
    world = World()
    principal = Principal(AgentId("x"), role, (CHANNEL,)) if keys else None
    say(world, hello_of(role), principal)
    if hasattr(message, "channel"):
        message = msgspec.structs.replace(message, channel=CHANNEL)
    before = world.machine.status(0.0)
    answers = say(world, message, principal)
    allowed = type(message).__name__ in own | ANYBODY_SAYS
    assert not_allowed(answers) is not allowed or (allowed and "not for the role" not in str(answers))
    if not allowed:
        assert "not for the role" in str(answers)
        assert world.machine.status(0.0) == before


@pytest.mark.parametrize("key_role", list(Role))
@pytest.mark.parametrize("role", list(Role))
def test_the_key_decides_the_role(role: Role, key_role: Role) -> None:
    """A Hello of another role than its key's is refused, with a way out: an engine's key never makes a trainer (S4)."""
    world = World()
    answers = say(world, hello_of(role), Principal(AgentId("x"), key_role, (CHANNEL,)))
    assert not_allowed(answers) is (role is not key_role)
    assert ("`weightbus keygen NAME`" in str(answers)) is (role is not key_role)
    assert len(world.machine.membership) == (role is key_role)


def test_the_key_decides_name_and_channel() -> None:
    """Neither another's name nor another channel can be had with a key; ``*`` is every channel (S4)."""
    for principal in (
        Principal(AgentId("y"), Role.ENGINE, (CHANNEL,)),
        Principal(AgentId("x"), Role.ENGINE, (Channel("another"),)),
    ):
        assert not_allowed(say(World(), hello_of(Role.ENGINE), principal))
    world = World()
    say(world, hello_of(Role.ENGINE), Principal(AgentId("x"), Role.ENGINE, (Channel("*"),)))
    assert len(world.machine.membership) == 1


def test_a_key_for_other_channels_is_told_the_command_that_adds_this_one() -> None:
    """With the channels that it has: `trust add` replaces them."""
    (answer,) = say(World(), hello_of(Role.ENGINE), Principal(AgentId("x"), Role.ENGINE, (Channel("another"),)))
    assert f"`weightbus trust add x --role engine --channels another,{CHANNEL}`" in str(answer)


def test_rights_are_looked_up_for_every_message() -> None:
    """A connection whose key now belongs to another name, role or channel has lost what it could do before (S5)."""
    for now in (
        Principal(AgentId("x"), Role.OBSERVER, (CHANNEL,)),
        Principal(AgentId("y"), Role.TRAINER, (CHANNEL,)),
        Principal(AgentId("x"), Role.TRAINER, (Channel("another"),)),
    ):
        world = World()
        say(world, hello_of(Role.TRAINER), Principal(AgentId("x"), Role.TRAINER, (CHANNEL,)))
        acquire = next(each for each in EXAMPLES if type(each).__name__ == "Acquire")
        assert not_allowed(say(world, msgspec.structs.replace(acquire, channel=CHANNEL), now)), now


def test_a_trainer_that_is_distrusted_loses_its_lease() -> None:
    """At once, and not when it has been silent for long enough; a stranger's name changes nothing (S6)."""
    world = World()
    world.lose = lambda message: isinstance(message, Granted)
    world.trainer("t0").acquire(1)
    world.settle()
    assert leased(world)
    world.handle(TrustLost(agent=AgentId("nobody"), reason="r"))
    assert leased(world)
    world.handle(TrustLost(agent=AgentId("t0"), reason="r"))
    assert not leased(world)
    assert world.machine.membership.get(AgentId("t0")) is None


def test_an_engine_that_is_distrusted_leaves_the_ready_list() -> None:
    """No request is sent to an engine that is not trusted."""
    world = World()
    world.engine("e0")
    assert world.ready == ("e0",)
    world.handle(TrustLost(agent=AgentId("e0"), reason="r"))
    assert world.ready == ()


def test_a_rollback_takes_a_trainer_s_key() -> None:
    """An engine's key allows no rollback: neither as that engine, nor as the trainer it claims to be."""
    world = World()
    trainer = world.trainer()
    for version in (1, 2):
        world.publish(trainer, version)
    records = list(world.records)
    key = Principal(AgentId("x"), Role.ENGINE, (CHANNEL,))
    back = Acquire(request=RequestId("k"), channel=CHANNEL, version=Version(1), rollback=True)
    assert not_allowed(say(world, hello_of(Role.TRAINER), key)), "the key is an engine's"
    assert not_allowed(say(world, msgspec.structs.replace(hello_of(Role.TRAINER), agent=trainer.name), key))
    say(world, hello_of(Role.ENGINE), key)
    assert not_allowed(say(world, back, key))
    assert world.records == records
    assert world.committed == 2


@pytest.mark.parametrize("changed", [{"role": Role.TRAINER}, {"name": AgentId("y")}, {"channels": (Channel("other"),)}])
def test_what_the_list_says_now_counts_and_not_what_it_said_at_the_hello(changed: dict[str, object]) -> None:
    """Rights are looked up for every message, though the owner of a key is compared in full only once."""
    world = World()
    principal = Principal(AgentId("x"), Role.ENGINE, (CHANNEL,))
    say(world, hello_of(Role.ENGINE), principal)
    prepared = Prepared(request=RequestId("k"), channel=CHANNEL, epoch=Epoch(0), seconds=0.1)
    assert not not_allowed(say(world, prepared, principal))
    assert not not_allowed(say(world, prepared, msgspec.structs.replace(principal)))
    assert not_allowed(say(world, prepared, msgspec.structs.replace(principal, **changed)))
    elsewhere = msgspec.structs.replace(prepared, channel=Channel("other"))
    assert not_allowed(say(world, elsewhere, principal))


def test_where_keys_are_used_no_agent_speaks_without_one() -> None:
    """Not at `Hello`, and not later on a connection that came with one: the machine does not lean on its sockets."""
    world = World()
    world.machine = Coordinator(world.limits, 1, Router(), keyed=True)
    mine = Principal(AgentId("x"), Role.TRAINER, (CHANNEL,))
    assert not_allowed(say(world, hello_of(Role.TRAINER), None))
    assert not not_allowed(say(world, hello_of(Role.TRAINER), mine))
    acquire = Acquire(request=RequestId("a"), channel=CHANNEL, version=Version(1))
    assert not_allowed(say(world, acquire, None))
    assert not leased(world)
