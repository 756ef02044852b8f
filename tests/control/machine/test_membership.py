"""The agents that are alive: names, incarnations and connections."""

from __future__ import annotations

import msgspec
import pytest

from weightbus.control.machine.effects import (
    AgentLeft,
    ConnectionLost,
    Evict,
    MessageReceived,
    Peer,
    Principal,
    Refusal,
    Tick,
)
from weightbus.control.machine.engine_registry import LEFT_S
from weightbus.control.machine.membership import LINEAGE, Membership
from weightbus.control.machine.states import RoundState
from weightbus.control.protocol.messages import (
    PROTOCOL,
    AgentId,
    Bye,
    Channel,
    EngineHealth,
    GetStatus,
    Granted,
    Heartbeat,
    Hello,
    Incarnation,
    Message,
    Offered,
    Publish,
    RefusalCode,
    Refused,
    RequestId,
    Role,
    Sent,
    Status,
    Step,
    Topology,
    Transfer,
    Welcome,
)

from ..world import CHANNEL, LIMITS, World, engine_info, trainer_info


def refusals(world: World, name: str) -> list[RefusalCode]:
    return [message.code for message in world.agents[name].got(Refused) if isinstance(message, Refused)]


def answer(world: World, hello: Hello, peer: bytes = b"new", principal: Principal | None = None) -> Message:
    event = MessageReceived(peer=Peer(peer), message=hello, principal=principal)
    effects = world.machine.handle(event, world.now)
    world.machine.check()
    return next(e.message for e in effects if hasattr(e, "message") and isinstance(e.message, Welcome | Refused))


def test_killed_agent_is_back_within_takeover() -> None:
    """A new life is refused while the old one may be alive, told when to retry, and let in then."""
    world = World()
    engine = world.engine("e0")
    engine.die()
    world.now += 1.0
    engine.live()
    world.settle()
    (refused,) = engine.got(Refused)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.retry_after_s) == (RefusalCode.NAME_TAKEN, world.limits.takeover_s - 1.0)
    world.advance(world.limits.takeover_s)
    assert world.ready == ("e0",)
    assert world.machine.membership.get(engine.name).incarnation == "e0.2"  # type: ignore[union-attr]


def test_dead_connection_frees_the_name_at_once() -> None:
    """If the connection is known to be gone, no agent has to wait."""
    world = World()
    engine = world.engine("e0")
    engine.die()
    world.handle(ConnectionLost(peer=engine.peer))
    engine.live()
    world.settle()
    assert refusals(world, "e0") == []
    assert world.ready == ("e0",)


@pytest.mark.parametrize("again", [True, False])
def test_where_an_agent_is_was_said_by_one_life_of_it(again: bool) -> None:
    """A new connection changes nothing about it; another process may be on another GPU, and is asked anew."""
    members = Membership(LIMITS)

    def hello(incarnation: str) -> Hello:
        return Hello(
            request=RequestId("k"),
            agent=AgentId("e0"),
            role=Role.ENGINE,
            channel=CHANNEL,
            incarnation=Incarnation(incarnation),
            engine=engine_info(),
        )

    where = Topology(request=RequestId("where"), address="10.0.0.1")
    members.join(hello("first"), Peer(b"1"), 0.0).topology = where
    members.disconnect(Peer(b"1"), 1.0)
    back = members.join(hello("first" if again else "second"), Peer(b"2"), 2.0)
    assert back.topology == (where if again else None)


def test_two_live_processes_of_one_name() -> None:
    """The one that is there stays; the other one never gets in while the first is well."""
    world = World()
    world.engine("e0")
    for _ in range(5):
        world.advance(1.0)
        hello = Hello(
            request=RequestId("r"),
            agent=world.agents["e0"].name,
            role=Role.ENGINE,
            channel=CHANNEL,
            incarnation="other",  # type: ignore[arg-type]
            engine=engine_info(),
        )
        found = answer(world, hello)
        assert isinstance(found, Refused)
        assert found.code is RefusalCode.NAME_TAKEN


def test_silent_agent_is_lost_and_seen_as_lost() -> None:
    """After `silence_s` an engine is out of the ready list, and the status says since when and why."""
    world = World()
    world.engine("e0").die()
    world.advance(world.limits.silence_s + 1)
    view = world.machine.status(world.now).channels[CHANNEL].engines["e0"]
    assert (view.state, view.ready, view.last_seen_s) == ("lost", False, None)
    assert "silent for" in view.reason
    assert [note.agent for note in world.observed if isinstance(note, AgentLeft)] == ["e0"]


@pytest.mark.parametrize("back", [False, True])
def test_an_engine_whose_connection_is_gone_is_lost_unless_it_comes_back(back: bool) -> None:
    """A round does not wait `silence_s` for a killed agent; one that only lost its connection keeps its seat."""
    world = World()
    engine = world.engine("e0")
    engine.alive = False
    world.handle(ConnectionLost(peer=engine.peer))
    assert world.ready == ("e0",)
    world.now += world.limits.reconnect_s - 0.1
    world.handle(Tick())
    assert world.ready == ("e0",)
    if back:
        engine.connect()
        world.settle()
    world.now += 0.1
    assert (world.machine.next_deadline() == world.now) is not back
    world.handle(Tick())
    assert world.ready == (("e0",) if back else ())


def test_a_trainer_without_a_connection_keeps_its_lease() -> None:
    """It may be busy assembling for longer than it takes to reconnect: only silence ends a lease."""
    world = World()
    trainer = world.trainer()
    trainer.stop_before = Publish
    trainer.acquire(1)
    world.settle()
    world.handle(ConnectionLost(peer=trainer.peer))
    world.now += world.limits.reconnect_s + 0.1
    world.handle(Tick())
    assert world.machine.channels[CHANNEL].lease is not None
    assert (world.machine.next_deadline() or 0.0) > world.now, "the coordinator would tick without end"


def test_a_trainer_that_engines_stand_still_for_has_to_come_back_soon() -> None:
    """Its connection is gone in the middle of a transfer: no engine waits until its lease has run out."""
    world = World()
    world.engine("e0")
    trainer = world.trainer()
    trainer.stop_before = Sent
    trainer.acquire(1)
    world.settle()
    trainer.die()
    world.handle(ConnectionLost(peer=trainer.peer))
    began = world.now
    world.advance_until(lambda: world.ready == ("e0",) or world.machine.channels[CHANNEL].round is None)
    assert world.now - began < world.limits.reconnect_s + 2
    assert world.machine.channels[CHANNEL].lease is None


def test_a_trainer_whose_bytes_travel_has_to_come_back_as_soon() -> None:
    """To an engine that says nothing, too: it is paused, and nothing says for what."""
    world = World()
    engine, trainer = world.engine("e0"), world.trainer()
    trainer.stop_before = Offered
    trainer.acquire(1)
    world.settle()
    engine.deaf, trainer.deaf, trainer.stop_before = True, False, Sent
    trainer.say(trainer.offering)
    world.settle()
    trainer.die()
    world.handle(ConnectionLost(peer=trainer.peer))
    began = world.now
    world.advance_until(lambda: world.machine.channels[CHANNEL].lease is None)
    assert world.now - began < world.limits.reconnect_s + 2


def test_a_trainer_that_was_gone_before_its_bytes_were_needed_again_is_not_waited_for_longer() -> None:
    """Its connection broke when it had sent all; then an engine has to be driven again, and stands still for it."""
    world = World()
    e0, e1, trainer = world.engine("e0"), world.engine("e1"), world.trainer()
    e0.fail(Transfer, Step.TRANSFER, EngineHealth.DIRTY)
    held: list[Message] = []
    e1.script[Transfer] = held.append  # type: ignore[assignment]  # answers nothing yet
    trainer.acquire(1)
    world.settle()
    trainer.alive = False
    world.handle(ConnectionLost(peer=trainer.peer))
    world.advance(2.0)
    for answer in e1.answers(held[0]):
        e1.say(answer)
    world.settle()
    round_ = world.machine.channels[CHANNEL].round
    assert round_
    assert round_.state is RoundState.OFFERING
    began = world.now
    world.advance_until(lambda: world.machine.channels[CHANNEL].lease is None, 30.0)
    assert world.now - began < world.limits.reconnect_s + 1


def test_bye_is_immediate_and_silent() -> None:
    """An agent that leaves on purpose is gone at once, without an answer; its connection is forgotten."""
    world = World()
    engine = world.engine("e0")
    effects = world.handle(MessageReceived(peer=engine.peer, message=Bye(reason="done")))
    assert [e.peer for e in effects if isinstance(e, Evict)] == [engine.peer]
    assert not [e for e in effects if hasattr(e, "message")]
    assert world.ready == ()


def test_reconnect_of_the_same_life_keeps_its_seat() -> None:
    """A new connection of the same incarnation replaces the old one, at any time."""
    world = World()
    engine = world.engine("e0")
    engine.connect()
    world.settle()
    assert refusals(world, "e0") == []
    assert len(world.machine.membership) == 1


def test_an_agent_has_one_connection() -> None:
    """The one that it came from before is closed: nothing is said on it any more, and nothing kept for it."""
    world = World()
    engine = world.engine("e0")
    before = engine.peer
    engine.connect()
    (hello,) = [message for agent, message, _ in world.queue if agent is engine]
    effects = world.handle(MessageReceived(peer=engine.peer, message=hello))
    assert [each.peer for each in effects if isinstance(each, Evict)] == [before]
    effects = world.handle(MessageReceived(peer=engine.peer, message=hello))
    assert not [each for each in effects if isinstance(each, Evict)], "it said the same again where it is"


@pytest.mark.parametrize("role", [Role.TRAINER, Role.ENGINE])
def test_an_engine_that_is_missed_again_has_no_longer_to_come_back(role: Role) -> None:
    """It counts from when its connection was missed first, however often an engine begins to pause for it."""
    members = Membership(LIMITS)
    name = AgentId("a")
    hello = Hello(
        request=RequestId("k"),
        agent=name,
        role=role,
        channel=CHANNEL,
        incarnation=Incarnation("first"),
        engine=engine_info() if role is Role.ENGINE else None,
        trainer=trainer_info() if role is Role.TRAINER else None,
    )
    members.join(hello, Peer(b"1"), 0.0)
    members.disconnect(Peer(b"1"), 1.0)
    members.expect(name, 1.0)
    members.expect(name, 3.0)
    assert members.next_deadline() == 1.0 + LIMITS.reconnect_s
    assert members.lost(1.0 + LIMITS.reconnect_s - 0.1) == []
    assert [agent.name for agent in members.lost(1.0 + LIMITS.reconnect_s)] == [name]


URL = "http://10.0.0.7:30000"


def ready_urls(world: World) -> tuple[str, ...]:
    return world.machine.status(world.now).channels[CHANNEL].ready


def test_two_agents_of_one_server() -> None:
    """The second name is refused, loudly and for as long as the first is well; the ready list names the server once."""
    world = World()
    world.engine("e0", url=URL)
    second = world.engine("e1", url=f"{URL}/")
    for _ in range(5):
        assert refusals(world, "e1")[-1] is RefusalCode.SERVER_TAKEN
        assert ready_urls(world) == (URL,)
        world.advance(3.0)
    assert len(refusals(world, "e1")) > 3
    assert len(world.machine.membership) == 1
    noted = [note for note in world.observed if isinstance(note, Refusal) and note.code is RefusalCode.SERVER_TAKEN]
    assert {note.agent for note in noted} == {"e1"}
    assert "'e0' of channel 'policy' answers for the server at" in noted[0].reason
    assert "Stop one of the two" in noted[0].reason
    assert second.pending
    report = world.publish(world.trainer(), 1)
    assert [each.engine for each in report.engines] == ["e0"]


@pytest.mark.parametrize("channel", [CHANNEL, Channel("other")])
def test_one_server_at_two_addresses_is_one_agents(channel: Channel) -> None:
    """``localhost``, a second address of the loopback, a port that is forwarded: the server says which launch it is.

    (G1, N47, F37)
    """
    world = World()
    world.engine("e0", url="http://127.0.0.1:30000", generation="g1")
    url = "http://localhost:30000"
    found = answer(world, msgspec.structs.replace(HELLO, channel=channel, engine=engine_info(url=url, generation="g1")))
    assert isinstance(found, Refused)
    assert found.code is RefusalCode.SERVER_TAKEN
    for part in ("'e0' of channel 'policy'", url, "http://127.0.0.1:30000", "Stop one of the two", "--server"):
        assert part in found.reason
    assert ready_urls(world) == ("http://127.0.0.1:30000",)


@pytest.mark.parametrize("generation", ["g2", ""])
def test_servers_of_other_generations_are_others(generation: str) -> None:
    """An agent of an earlier release tells none: its server is known by its URL alone (N44, N47)."""
    world = World()
    world.engine("e0", generation="g1")
    world.engine("e1", generation=generation)
    world.engine("e2", generation="")
    assert refusals(world, "e1") == refusals(world, "e2") == []
    assert len(world.ready) == 3


@pytest.mark.parametrize("way", ["bye", "lost"])
def test_a_generation_is_free_once_its_agent_is_gone(way: str) -> None:
    """As a URL is: by `Bye` at once, by silence after its deadline; another name gets it then (N46, N47)."""
    world = World()
    first = world.engine("e0", generation="g1")
    if way == "bye":
        world.handle(MessageReceived(peer=first.peer, message=Bye()))
    else:
        first.die()
    world.engine("e1", generation="g1")
    assert (refusals(world, "e1") == []) is (way == "bye")
    world.advance(world.limits.silence_s + 1)
    assert world.ready == ("e1",)


@pytest.mark.parametrize("channel", [CHANNEL, Channel("other")])
def test_a_new_launch_on_the_same_socket_is_the_same_server(channel: Channel) -> None:
    """The first agent stands still while its server is launched again, and keeps it until it is lost (G7, N47)."""
    world = World()
    first = world.engine("e0", url="http://127.0.0.1:30000", generation="g1", socket="host/net:[1]/0.0.0.0:30000")
    again = engine_info(url="http://localhost:30000", generation="g2", socket="host/net:[1]/0.0.0.0:30000")
    found = answer(world, msgspec.structs.replace(HELLO, channel=channel, engine=again))
    assert isinstance(found, Refused)
    assert found.code is RefusalCode.SERVER_TAKEN
    assert "both are one listening socket of one host" in found.reason
    assert world.ready == ("e0",)
    first.info = msgspec.structs.replace(again, url="http://127.0.0.1:30000")
    first.say(first.hello())
    world.settle()
    assert refusals(world, "e0") == [], "its own agent says Hello for the new launch"
    first.die()
    world.advance(world.limits.silence_s + 1)
    taken = answer(world, msgspec.structs.replace(HELLO, request=RequestId("r2"), channel=channel, engine=again))
    assert isinstance(taken, Welcome)


def test_servers_on_other_sockets_are_others() -> None:
    """One port of two network namespaces is two servers, and a socket that is not seen is none (N47)."""
    world = World()
    for number, socket in enumerate(("host/net:[1]/0.0.0.0:30000", "host/net:[2]/0.0.0.0:30000", "", "")):
        world.engine(f"e{number}", generation=f"g{number}", socket=socket)
    assert len(world.ready) == 4


def test_a_server_launched_again_frees_its_generation() -> None:
    """Its agent says Hello again, and keeps its place; the earlier generation means nothing any more (N47)."""
    world = World()
    first = world.engine("e0", generation="g1")
    first.info = engine_info("e0", generation="g2")
    first.say(first.hello())
    world.settle()
    assert refusals(world, "e0") == []
    world.engine("e1", generation="g1")
    assert refusals(world, "e1") == []
    world.engine("e2", generation="g2")
    assert refusals(world, "e2") == [RefusalCode.SERVER_TAKEN]


def test_an_agent_whose_address_leads_to_anothers_server_is_out_at_once() -> None:
    """Behind a service address another server answers: it is listed under its own agent's name alone (G7, N47)."""
    world = World()
    world.engine("e0", generation="g1")
    second = world.engine("e1", generation="g2")
    assert world.ready == ("e0", "e1")
    second.info = engine_info("e1", generation="g1")
    second.say(second.hello())
    world.settle()
    assert refusals(world, "e1")[-1] is RefusalCode.SERVER_TAKEN
    assert world.ready == ("e0",)
    report = world.publish(world.trainer(), 1)
    assert [each.engine for each in report.engines] == ["e0"]


class TestLineage:
    """Whether an agent knows of everything that was done to its server (N59)."""

    def said(self, members: Membership, name: str, follows: str, key: str) -> bool:
        return members.note_owner(
            Hello(
                request=RequestId(key),
                agent=AgentId(name),
                role=Role.ENGINE,
                channel=CHANNEL,
                incarnation=Incarnation(name),
                engine=engine_info(generation="g", follows=follows),
            )
        )

    def test_an_agent_that_follows_the_last_one_knows_everything(self) -> None:
        """It comes back with the record, under whatever name."""
        members = Membership(LIMITS)
        assert not self.said(members, "first", "", "k1")
        assert not self.said(members, "second", "k1", "k2")
        assert not self.said(members, "third", "k2", "k3")

    @pytest.mark.parametrize("follows", ["", "k1"])
    def test_an_agent_that_follows_another_does_not(self, follows: str) -> None:
        """Its record is lost, or older than what another sidecar did meanwhile."""
        members = Membership(LIMITS)
        self.said(members, "first", "", "k1")
        self.said(members, "second", "k1", "k2")
        assert self.said(members, "third", follows, "k3")

    def test_a_repeated_hello_is_answered_as_before(self) -> None:
        """Its Welcome may be lost; the same words under another key come from a connection that broke."""
        members = Membership(LIMITS)
        self.said(members, "first", "", "k1")
        for key in ("k2", "k2", "k3"):
            assert self.said(members, "second", "", key)
        assert not self.said(members, "second", "k3", "k4")
        for key in ("k5", "k5", "k6"):
            assert not self.said(members, "second", "k4", key)

    def test_one_that_never_heard_its_doubt_dies(self) -> None:
        """Its successor has the old record, and is doubted as well."""
        members = Membership(LIMITS)
        self.said(members, "first", "", "k1")
        self.said(members, "other", "", "k2")
        assert self.said(members, "first", "k1", "k3")
        assert self.said(members, "successor", "k1", "k4")

    def test_what_is_remembered_is_bounded(self) -> None:
        """The oldest generations are forgotten."""
        members = Membership(LIMITS)
        hello = Hello(
            request=RequestId("k"),
            agent=AgentId("e"),
            role=Role.ENGINE,
            channel=CHANNEL,
            incarnation=Incarnation("i"),
            engine=engine_info(),
        )
        for number in range(LINEAGE + 10):
            info = engine_info(generation=str(number))
            assert not members.note_owner(msgspec.structs.replace(hello, engine=info))
        assert len(members._last_agents) == LINEAGE


def test_trainers_are_told_of_no_generation() -> None:
    """One of an earlier release does not know the fields, and would read none of its grants (N44)."""
    world = World()
    world.engine("e0", generation="g1", socket="s1")
    trainer = world.trainer()
    world.publish(trainer, 1)
    (granted,) = trainer.got(Granted)
    assert isinstance(granted, Granted)
    assert [(each.generation, each.socket) for each in granted.engines.values()] == [("", "")]


def test_a_server_is_one_agents_in_all_channels() -> None:
    """Weights of two models in one server would be worse than two agents of one."""
    world = World()
    world.engine("e0", url=URL)
    found = answer(world, msgspec.structs.replace(HELLO, channel=Channel("other"), engine=engine_info(url=URL)))
    assert isinstance(found, Refused)
    assert found.code is RefusalCode.SERVER_TAKEN


def test_restarted_agent_of_a_server_is_not_its_own_rival() -> None:
    """The same name comes back at once, in a new life too, where the old connection is known to be gone."""
    world = World()
    engine = world.engine("e0", url=URL)
    engine.connect()
    world.settle()
    engine.die()
    world.handle(ConnectionLost(peer=engine.peer))
    engine.live()
    world.settle()
    assert refusals(world, "e0") == []
    assert ready_urls(world) == (URL,)


def test_new_name_for_a_server_when_the_old_one_is_lost() -> None:
    """Told to come again until the old one is lost by silence; at once after `Bye`."""
    world = World()
    first = world.engine("e0", url=URL)
    world.advance(1.0)
    first.die()
    second = world.engine("e1", url=URL)
    (refused,) = second.got(Refused)
    assert isinstance(refused, Refused)
    assert refused.retry_after_s == world.limits.takeover_s
    world.advance(world.limits.silence_s + 1)
    assert world.ready == ("e1",)
    world.handle(MessageReceived(peer=second.peer, message=Bye()))
    world.engine("e2", url=URL)
    assert refusals(world, "e2") == []
    assert ready_urls(world) == (URL,)


def test_connection_that_breaks_does_not_hand_the_server_over() -> None:
    """An agent that may return keeps its server; another name gets it once the old one is lost, and keeps it."""
    world = World()
    first = world.engine("e0", url=URL)
    world.handle(ConnectionLost(peer=first.peer))
    world.engine("e1", url=URL)
    assert refusals(world, "e1") == [RefusalCode.SERVER_TAKEN]
    first.connect()
    world.settle()
    assert world.ready == ("e0",)
    first.die()
    world.handle(ConnectionLost(peer=first.peer))
    world.advance(world.limits.reconnect_s + 1)
    assert world.ready == ("e1",)
    first.live()
    world.settle()
    assert refusals(world, "e0") == [RefusalCode.SERVER_TAKEN]
    assert ready_urls(world) == (URL,)


HELLO = Hello(
    request=RequestId("r"),
    agent="x",  # type: ignore[arg-type]
    role=Role.ENGINE,
    channel=CHANNEL,
    incarnation="i",  # type: ignore[arg-type]
    engine=engine_info(),
)


SOMEBODY_ELSE = Principal(AgentId("y"), Role.ENGINE, (CHANNEL,))


@pytest.mark.parametrize(
    ("changes", "peer", "principal", "code"),
    [
        ({"protocol": PROTOCOL + 1}, b"new", None, RefusalCode.PROTOCOL_MISMATCH),
        ({"engine": None}, b"new", None, RefusalCode.NOT_ALLOWED),
        ({"trainer": trainer_info()}, b"new", None, RefusalCode.NOT_ALLOWED),
        ({}, b"new", SOMEBODY_ELSE, RefusalCode.NOT_ALLOWED),
        ({}, b"seat", None, RefusalCode.NOT_ALLOWED),
        ({"agent": "e0", "incarnation": "e0.1", "channel": "other"}, b"seat", None, RefusalCode.NOT_ALLOWED),
    ],
)
def test_hello_that_is_refused(
    changes: dict[str, object], peer: bytes, principal: Principal | None, code: RefusalCode
) -> None:
    """Wrong protocol, wrong description, another's key, another's connection, another channel: refused, no change."""
    world = World()
    engine = world.engine("e0")
    seat = engine.peer if peer == b"seat" else peer
    found = answer(world, msgspec.structs.replace(HELLO, **changes), seat, principal)
    assert isinstance(found, Refused)
    assert found.code is code
    assert world.ready == ("e0",)
    assert len(world.machine.membership) == 1


def test_room_for_agents_and_channels_is_bounded() -> None:
    """Names and channels cannot be made up without end (F23)."""
    world = World(World().limits.__class__(max_agents=2, max_channels=1))
    world.engine("e0")
    world.engine("e1")
    found = answer(world, HELLO)
    assert isinstance(found, Refused)
    world.agents["e1"].say(Bye())
    world.settle()
    found = answer(world, msgspec.structs.replace(HELLO, channel=Channel("second")))
    assert isinstance(found, Refused)
    assert "channels" in found.reason


def test_stranger_is_told_to_say_hello() -> None:
    """After a restart of the coordinator connections are strangers: their first message says so at once."""
    world = World()
    effects = world.machine.handle(MessageReceived(peer=Peer(b"?"), message=Heartbeat(seq=1)), 0.0)
    (refused,) = [e.message for e in effects if hasattr(e, "message")]
    assert isinstance(refused, Refused)
    assert (refused.code, refused.request) == (RefusalCode.UNKNOWN_AGENT, "heartbeat")


def test_observer_reads_status() -> None:
    """Status is one JSON document, for any role."""
    world = World()
    world.engine("e0")
    answer(world, msgspec.structs.replace(HELLO, role=Role.OBSERVER, engine=None))
    effects = world.machine.handle(MessageReceived(peer=Peer(b"new"), message=GetStatus(request=RequestId("s"))), 0.0)
    (sent,) = [e for e in effects if hasattr(e, "message")]
    assert isinstance(sent.message, Status)
    document = msgspec.json.decode(sent.blob)
    assert document["channels"]["policy"]["ready"] == ["http://e0:30000"]


@pytest.mark.parametrize(("leaves", "kept_s"), [(True, LEFT_S), (False, 3600.0)])
def test_an_engine_that_left_on_purpose_leaves_the_status_soon(leaves: bool, kept_s: float) -> None:
    """`LEFT_S` after its `Bye`, by itself and without another event; a silent one is kept for `forget_s` (N63)."""
    world = World()
    engine = world.engine("e0")
    if leaves:
        engine.say(Bye(reason="closed"))
        world.settle()
    engine.die()
    world.advance_until(lambda: not world.machine.channels[CHANNEL].engines["e0"].alive)
    lost_at = world.now
    world.advance_until(lambda: "e0" not in world.machine.channels[CHANNEL].engines, kept_s + 60.0)
    assert kept_s <= world.now - lost_at <= kept_s + 5.0


def test_a_lost_engine_is_forgotten_on_request_and_one_that_is_here_is_not() -> None:
    """The answer says why not; an engine that joins again is listed again (N63)."""
    world = World()
    engine = world.engine("e0")
    assert "stop its engine agent first" in world.machine.forget_engine(engine.name)
    assert "no engine 'e7' is known" in world.machine.forget_engine(AgentId("e7"))
    engine.say(Bye(reason="closed"))
    world.settle()
    assert not world.machine.forget_engine(engine.name)
    assert not world.machine.status(world.now).channels[CHANNEL].engines
    world.machine.check()
    engine.live()
    world.settle()
    assert world.machine.status(world.now).channels[CHANNEL].engines["e0"].ready
