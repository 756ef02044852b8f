"""Real sockets on the loopback: delivery, slow and lost peers, keys and strangers."""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import zmq

from weightbus.control.bus import sockets
from weightbus.control.bus.interface import (
    UNTRUSTED_KEY,
    ConnectionRejected,
    Rejected,
    SendOutcome,
    Throttled,
    TrustRevoked,
    reply_to_rejected,
)
from weightbus.control.bus.sockets import (
    BURST,
    CUT_OFF_S,
    MAX_ACCOUNTS,
    RATE,
    DealerLink,
    RateDecision,
    RateLimiter,
    RouterBus,
    ServerKeys,
    new_keypair,
    public_of,
)
from weightbus.control.cli.key_commands import AgentKeys, make_deployment_keys
from weightbus.control.machine.effects import MessageReceived, Peer, Principal
from weightbus.control.protocol import codec
from weightbus.control.protocol.errors import ConfigurationError, Malformed, WeightbusError, WrongProtocol
from weightbus.control.protocol.messages import Ack, AgentId, BlobPage, Bye, Channel, Digest, GetStatus, RequestId, Role
from weightbus.control.security.keys import COORDINATOR_KEYS, CurveFiles, fingerprint, read_public_key, write_key_pair
from weightbus.control.security.trust import ALLOW_LIST_FILE, edit_allow_list

DEADLINE_S = 30.0


@pytest.fixture
def bus() -> Iterator[RouterBus]:
    served = RouterBus("127.0.0.1", 0)
    yield served
    served.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Keys of the coordinator and of agent `friend`, an engine of channel c."""
    make_deployment_keys(tmp_path, [AgentKeys(AgentId("friend"), Role.ENGINE, (Channel("c"),))])
    return tmp_path


@pytest.fixture
def curve_bus(folder: Path) -> Iterator[RouterBus]:
    served = RouterBus("127.0.0.1", 0, ServerKeys.read(folder))
    yield served
    served.close()


def until(action: Callable[[], object], deadline_s: float = DEADLINE_S) -> object:
    """The first true result of `action`, which waits a little by itself."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if result := action():
            return result
    pytest.fail(f"nothing came of it in {deadline_s} s")


def link_to(bus: RouterBus, curve: CurveFiles | None = None) -> DealerLink:
    link = DealerLink(f"tcp://127.0.0.1:{bus.router_port}", curve)
    link.open()
    return link


def say(bus: RouterBus, link: DealerLink, key: str = "k") -> MessageReceived | Rejected:
    """Send one message from `link` and return how it came in."""
    until(lambda: link.send(GetStatus(request=RequestId(key))) or link.poll(0.01))
    received = until(lambda: bus.poll(0.5))
    assert isinstance(received, list)
    (item,) = received
    assert isinstance(item, MessageReceived | Rejected)
    return item


def heard(link: DealerLink) -> object:
    return until(lambda: link.poll(0.5))


def test_messages_go_both_ways(bus: RouterBus) -> None:
    """A request comes in with its peer; the answer goes to that peer and no other."""
    one, other = link_to(bus), link_to(bus)
    first, second = say(bus, one), say(bus, other)
    assert isinstance(first, MessageReceived)
    assert (first.message, first.blob, first.principal) == (GetStatus(request=RequestId("k")), None, None)
    assert first.peer != second.peer
    assert bus.send(first.peer, Ack(request=RequestId("k"))) is SendOutcome.SENT
    assert heard(one) == [(Ack(request=RequestId("k")), None)]
    assert other.poll(0.01) == []
    one.close()
    other.close()


def test_unknown_and_lost_peers_are_told(bus: RouterBus) -> None:
    """Sending to an unknown peer is an answer, not a silent drop."""
    assert bus.send(Peer(b"nobody"), Ack(request=RequestId("k"))) is SendOutcome.GONE
    link = link_to(bus)
    peer = say(bus, link).peer
    link.close()

    def gone() -> bool:
        bus.poll(0.02)
        return bus.send(peer, Ack(request=RequestId("k"))) is SendOutcome.GONE

    until(gone)


def test_slow_peer_is_queued_then_gone(bus: RouterBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages for a peer that reads none are queued within bounds, then it counts as gone; no other waits."""
    monkeypatch.setattr(sockets, "QUEUE_LIMIT", 3)
    link = link_to(bus)
    peer = say(bus, link).peer
    monkeypatch.setattr(bus, "_offer", lambda *_: SendOutcome.QUEUED)
    answers = [Ack(request=RequestId(f"k{i}")) for i in range(4)]
    assert [bus.send(peer, each) for each in answers] == [SendOutcome.QUEUED] * 3 + [SendOutcome.GONE]
    assert bus.send(peer, answers[0]) is SendOutcome.QUEUED
    assert bus.send(peer, answers[1]) is SendOutcome.QUEUED
    monkeypatch.undo()
    bus.poll(0.0)
    assert bus.send(peer, answers[2]) is SendOutcome.SENT
    got: list[object] = []
    until(lambda: got.extend(link.poll(0.5)) or len(got) == 3)
    assert got == [(each, None) for each in answers[:3]]
    link.close()


def test_what_is_not_taken_is_bounded_in_bytes(bus: RouterBus) -> None:
    """A peer that asks for pages and reads none of them costs tens of megabytes, and then counts as gone."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    reads_nothing: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    reads_nothing.set(zmq.RCVHWM, 1)
    reads_nothing.connect(f"tcp://127.0.0.1:{bus.router_port}")
    reads_nothing.send_multipart(codec.pack(codec.TO_COORDINATOR.encode(GetStatus(request=RequestId("k")))))
    found: list[object] = []
    until(lambda: found.extend(bus.poll(0.1)) or found)
    (asked,) = found
    assert isinstance(asked, MessageReceived)
    page = BlobPage(request=RequestId("k"), digest=Digest("0" * 64), page=0, pages=1)
    blob, taken = bytes(512 * 1024), 0
    while bus.send(asked.peer, page, blob) is not SendOutcome.GONE:
        taken += 1
        assert taken < 2 * sockets.UNREAD + sockets.QUEUE_BYTES // len(blob)
    assert taken > sockets.QUEUE_BYTES // len(blob)
    context.destroy(linger=0)


def test_a_flood_is_dropped_and_its_neighbor_heard(bus: RouterBus) -> None:
    """Above its rate a peer's messages are dropped unread, counted, and told of once; another's come through.

    (N52, F20)
    """
    bus._rate_limiter = RateLimiter(rate=0.001, burst=20)
    flood, neighbor = link_to(bus), link_to(bus)
    say(bus, flood)
    sent, found = 0, list[object]()
    until(lambda: flood.send(GetStatus(request=RequestId("f"))))

    def flooded() -> bool:
        nonlocal sent
        sent += flood.send(GetStatus(request=RequestId("f")))
        found.extend(bus.poll(0.0))
        return bus.throttled.total() >= 50

    until(flooded)
    assert sum(isinstance(item, MessageReceived) for item in found) == 20
    assert [item.reason for item in found if isinstance(item, Throttled)] == [
        "says more than 2000 messages a second: what is above is dropped"
    ]
    while bus.poll(0.05):
        pass
    assert isinstance(say(bus, neighbor, "well"), MessageReceived)
    flood.close()
    neighbor.close()


def test_queue_of_a_peer_that_left_is_dropped(bus: RouterBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was queued goes with its peer, and when the coordinator forgets it."""
    for peer in (Peer(b"one"), Peer(b"two")):
        monkeypatch.setattr(bus, "_offer", lambda *_: SendOutcome.QUEUED)
        assert bus.send(peer, Ack(request=RequestId("k"))) is SendOutcome.QUEUED
    monkeypatch.undo()
    bus.forget(Peer(b"two"))
    bus.poll(0.0)
    assert bus._queues == {}


def test_garbage_is_rejected_by_kind(bus: RouterBus) -> None:
    """Raw frames that are no message come in as `Rejected`, with the error; the next message is read."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.connect(f"tcp://127.0.0.1:{bus.router_port}")
    raw.send_multipart([b"WB\x09>\xc0"])
    raw.send_multipart([b"junk"])
    raw.send_multipart(codec.pack(codec.TO_COORDINATOR.encode(Bye())))
    items: list[MessageReceived | Rejected] = []
    until(lambda: items.extend(bus.poll(0.5)) or len(items) == 3)
    raw.close(linger=0)
    context.term()
    kinds = [type(each.error) if isinstance(each, Rejected) else type(each.message) for each in items]
    assert kinds == [WrongProtocol, Malformed, Bye]


def test_a_message_of_thousands_of_frames_is_refused_once(bus: RouterBus, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not kept, dropped in bounded portions with others' turns in between, and what follows is read."""
    monkeypatch.setattr(sockets, "MAX_SKIPPED", 100)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.connect(f"tcp://127.0.0.1:{bus.router_port}")
    raw.send_multipart([*codec.pack(codec.TO_COORDINATOR.encode(Bye())), *([b"x"] * 5000)])
    raw.send_multipart(codec.pack(codec.TO_COORDINATOR.encode(Bye())))
    items: list[MessageReceived | Rejected] = []
    until(lambda: items.extend(bus.poll(0.5)) or items)
    polls = 0
    while len(items) < 2:
        items.extend(bus.poll(0.5))
        polls += 1
    raw.close(linger=0)
    context.term()
    first, second = items
    assert isinstance(first, Rejected)
    assert "parts" in str(first.error)
    assert isinstance(second, MessageReceived)
    assert polls >= 5000 // 100 - 1


def test_oversize_frame_costs_the_connection_only(bus: RouterBus) -> None:
    """A frame above the limit cuts its sender; the bus serves all others."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    raw = context.socket(zmq.DEALER)
    raw.connect(f"tcp://127.0.0.1:{bus.router_port}")
    raw.send_multipart([b"x" * (codec.MAX_FRAME_BYTES + 1)])
    link = link_to(bus)
    assert isinstance(say(bus, link), MessageReceived)
    link.close()
    raw.close(linger=0)
    context.term()


def test_wake_ends_a_poll(bus: RouterBus) -> None:
    """A wake from elsewhere ends the running poll or the next one, once."""
    bus.wake()
    begun = time.monotonic()
    assert bus.poll(DEADLINE_S) == []
    assert time.monotonic() - begun < DEADLINE_S / 2
    link = link_to(bus)
    link.wake()
    assert link.poll(DEADLINE_S) == []
    assert time.monotonic() - begun < DEADLINE_S / 2
    link.close()


def test_send_without_a_connection_is_false() -> None:
    """Nothing is queued for a coordinator that is not there."""
    link = DealerLink("tcp://127.0.0.1:1")
    assert link.send(Bye()) is False
    assert link.poll(0.0) == []
    link.open()
    assert link.send(Bye()) is False
    link.close()


def test_what_cannot_be_bound_or_connected(folder: Path) -> None:
    """Every address that cannot work is a configuration error that says what to do."""
    with pytest.raises(ConfigurationError, match="weightbus keygen"):
        RouterBus("0.0.0.0", 0)
    with pytest.raises(ConfigurationError, match="IP address"):
        RouterBus("localhost", 0)
    with pytest.raises(ConfigurationError, match="no address of this machine"):
        RouterBus("192.0.2.1", 0, ServerKeys.read(folder))
    first = RouterBus("127.0.0.1", 0)
    with pytest.raises(ConfigurationError, match="router_port"):
        RouterBus("127.0.0.1", first.router_port)
    first.close()
    link = DealerLink("nonsense")
    with pytest.raises(ConfigurationError, match="tcp://"):
        link.open()
    link.close()


@pytest.mark.parametrize("endpoint", ["tcp://10.0.0.1:5750", "tcp://coordinator:5750", "tcp://[2001:db8::1]:5750"])
def test_without_keys_nothing_is_said_to_another_machine(endpoint: str) -> None:
    """A stranger who answered there could make engines load any weights (S1)."""
    with pytest.raises(ConfigurationError, match="weightbus keygen"):
        DealerLink(endpoint)
    for near in ("tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:1"):
        DealerLink(near).close()


def test_old_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A libzmq with known holes, or one that cannot encrypt, is not used."""
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: (4, 3, 4))
    with pytest.raises(ConfigurationError, match=r"4\.3\.5"):
        sockets.check_library()
    monkeypatch.undo()
    monkeypatch.setattr(zmq, "has", lambda _: False)
    with pytest.raises(ConfigurationError, match="CURVE"):
        sockets.check_library()


def test_friend_is_known_by_its_key(curve_bus: RouterBus, folder: Path) -> None:
    """With keys, every message says whose connection it came on."""
    link = link_to(curve_bus, CurveFiles.of(folder, "friend"))
    item = say(curve_bus, link)
    assert isinstance(item, MessageReceived)
    assert item.principal == Principal(AgentId("friend"), Role.ENGINE, (Channel("c"),))
    link.close()


def distrust(folder: Path, name: str) -> None:
    with edit_allow_list(folder / ALLOW_LIST_FILE) as agents:
        del agents[name]


def trust_second(bus: RouterBus, folder: Path, role: Role) -> list[object]:
    """Put `second` on the list, and wait until the bus knows; what came in meanwhile."""
    make_deployment_keys(folder, [AgentKeys(AgentId("second"), role, (Channel("c"),))])
    came_in: list[object] = []
    until(lambda: came_in.extend(bus.poll(0.05)) or any(who.name == "second" for who in bus._trusted.values()))
    return came_in


def test_distrust_cuts_a_standing_connection(curve_bus: RouterBus, folder: Path) -> None:
    """An agent taken off the list is named at once, and nothing more is taken from its connection (S6)."""
    link = link_to(curve_bus, CurveFiles.of(folder, "friend"))
    assert isinstance(say(curve_bus, link), MessageReceived)
    distrust(folder, "friend")
    begun = time.monotonic()
    first = until(lambda: curve_bus.poll(DEADLINE_S))
    assert isinstance(first, list)
    assert isinstance(first[0], TrustRevoked)
    assert first[0].agent == "friend"
    assert time.monotonic() - begun < DEADLINE_S / 2

    def refused() -> list[Rejected]:
        link.send(Bye())
        return [item for item in curve_bus.poll(0.1) if isinstance(item, Rejected)]

    replies = [reply_to_rejected(item) for item in cast("list[Rejected]", until(refused))]
    ours = fingerprint(read_public_key(folder / "agents" / "friend.pub"))
    assert {each.request for each in replies} == {UNTRUSTED_KEY}, "which tells the agent that its key is meant (N55)"
    assert ours in replies[0].reason
    link.close()


def test_distrust_of_one_leaves_the_others(curve_bus: RouterBus, folder: Path) -> None:
    """A list that gains or loses one agent changes nothing for the others."""
    link = link_to(curve_bus, CurveFiles.of(folder, "friend"))
    assert isinstance(say(curve_bus, link), MessageReceived)
    assert trust_second(curve_bus, folder, Role.TRAINER) == []
    distrust(folder, "second")
    found = until(lambda: curve_bus.poll(0.3))
    assert isinstance(found, list)
    assert [(type(item), item.agent) for item in found] == [(TrustRevoked, "second")]
    assert isinstance(say(curve_bus, link), MessageReceived)
    link.close()


def test_a_changed_entry_is_a_lost_one(curve_bus: RouterBus, folder: Path) -> None:
    """Another role or channel than the agent joined with: it has to join again, as what it is now."""
    make_deployment_keys(folder, [AgentKeys(AgentId("friend"), Role.OBSERVER, (Channel("c"),))])
    found = until(lambda: curve_bus.poll(0.3))
    assert isinstance(found, list)
    assert [type(item) for item in found] == [TrustRevoked]


def test_list_that_others_may_write_cuts_every_agent(curve_bus: RouterBus, folder: Path) -> None:
    """In doubt no agent is trusted; the reason says what is wrong with the file (S7)."""
    (folder / ALLOW_LIST_FILE).write_text("nonsense")  # an error alone decides nothing
    assert curve_bus.poll(0.5) == []
    (folder / ALLOW_LIST_FILE).chmod(0o666)
    (found,) = until(lambda: curve_bus.poll(0.3))  # type: ignore[misc]  # a list of one
    assert isinstance(found, TrustRevoked)
    assert ALLOW_LIST_FILE in found.reason


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets that give a handshake a second."""
    monkeypatch.setattr(sockets, "HANDSHAKE_MS", 1000)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("who", ["unknown key", "no key", "no handshake", "other protocol"])
def test_every_connection_that_is_turned_away_is_counted(curve_bus: RouterBus, folder: Path, who: str) -> None:
    """Nothing was said on it, so only the socket's monitor could know (S13)."""
    target = ("127.0.0.1", curve_bus.router_port)
    with contextlib.ExitStack() as stack:
        if who in ("no handshake", "other protocol"):
            raw = stack.enter_context(socket.create_connection(target))
            if who == "other protocol":
                raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        else:
            stack.callback(link_to(curve_bus, _strangers(folder)[who]).close)
        turned_away = []

        def over() -> bool:
            turned_away.extend(curve_bus.poll(0.1))
            return curve_bus.connections["refused"] + curve_bus.connections["closed"] > 0

        until(over)
    assert curve_bus.connections["accepted"] >= 1
    assert curve_bus.connections["established"] == 0
    assert [type(item) for item in turned_away] == [ConnectionRejected] * curve_bus.connections["refused"]
    assert who == "other protocol" or turned_away  # libzmq drops ZMTP 1.0 without a word


def _strangers(folder: Path) -> dict[str, CurveFiles | None]:
    write_key_pair(folder / "elsewhere", "stranger", new_keypair, public_of)
    stranger = CurveFiles(folder / "elsewhere" / "stranger.key", folder / f"{COORDINATOR_KEYS}.pub")
    return {"unknown key": stranger, "no key": None}


def _let_in(bus: RouterBus, curve: CurveFiles | None, patience_s: float) -> bool:
    link = link_to(bus, curve)
    end = time.monotonic() + patience_s
    seen = False
    while not seen and time.monotonic() < end:
        link.send(Bye())
        seen = any(not isinstance(item, ConnectionRejected) for item in bus.poll(0.02))
    link.close()
    return seen


@pytest.mark.parametrize("who", ["unknown key", "no key"])
def test_stranger_is_refused(curve_bus: RouterBus, folder: Path, who: str) -> None:
    """An agent without a key, or with one that is not on the list, gets nothing through (S2)."""
    assert not _let_in(curve_bus, _strangers(folder)[who], patience_s=0.7)
    assert _let_in(curve_bus, CurveFiles.of(folder, "friend"), patience_s=DEADLINE_S)


def test_dead_authenticator_lets_no_agent_in(curve_bus: RouterBus, folder: Path) -> None:
    """When the thread that authenticates is gone, strangers and friends stay out, and the loop says so (S3)."""
    alive = curve_bus._authenticator
    assert alive is not None
    alive.stop()
    with pytest.raises(WeightbusError, match="authenticates"):
        curve_bus.poll(0.0)
    curve_bus._authenticator = None  # look past that check: what would the sockets do?
    assert not _let_in(curve_bus, _strangers(folder)["unknown key"], patience_s=0.7)


COMMON = {
    zmq.LINGER: 0,
    zmq.SNDHWM: 1000,
    zmq.RCVHWM: 1000,
    zmq.MAXMSGSIZE: 1 << 20,
    zmq.HEARTBEAT_TTL: 0,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 2,
    zmq.TCP_KEEPALIVE_INTVL: 1,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_MAXRT: 4000,
    zmq.ROUTING_ID: b"",
    zmq.MECHANISM: zmq.CURVE,
}
BOUND = {
    zmq.HEARTBEAT_IVL: 0,
    zmq.HANDSHAKE_IVL: 10_000,
    zmq.BACKLOG: 4096,
    zmq.CURVE_SERVER: 1,
    zmq.ZAP_DOMAIN: b"weightbus",
}
CONNECTED = {
    zmq.HEARTBEAT_IVL: 10_000,
    zmq.HEARTBEAT_TIMEOUT: 10_000,
    zmq.CONNECT_TIMEOUT: 1000,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 2000,
    zmq.CURVE_SERVER: 0,
}


def test_the_profile_of_every_socket(curve_bus: RouterBus, folder: Path) -> None:
    """Every option that was chosen against a failure is set, on both sides (F23)."""
    link = link_to(curve_bus, CurveFiles.of(folder, "friend"))
    for socket_, options in (
        (curve_bus._router, COMMON | BOUND | {zmq.SNDHWM: 64}),
        (link._socket, COMMON | CONNECTED | {zmq.IMMEDIATE: 1, zmq.MAXMSGSIZE: 4 << 20}),
    ):
        assert socket_ is not None
        assert {option: socket_.get(option) for option in options} == options
    link.close()


def test_a_peer_that_comes_back_is_never_ignored(bus: RouterBus) -> None:
    """Connections that break and are made anew while the socket is not served: the newest one is heard."""
    for _ in range(6):
        link = link_to(bus)
        until(lambda: link.send(GetStatus(request=RequestId("old"))) or link.poll(0.01))  # noqa: B023  used at once
        link.open()
        until(lambda: link.send(GetStatus(request=RequestId("new"))) or link.poll(0.01))  # noqa: B023  used at once
        until(lambda: any("new" in str(item) for item in bus.poll(0.1) if isinstance(item, MessageReceived)))
        link.close()


# A flooding agent is slowed, then cut off, then heard again once it was quiet; no other agent is concerned.


def test_what_a_fleet_says_is_never_touched() -> None:
    """Two thousand agents that return at once, page through blobs and beat for a minute lose nothing."""
    limiter = RateLimiter()
    agents = [f"e{number}" for number in range(2048)]
    assert {limiter.account(agent).count_message(0.0) for agent in agents for _ in range(20)} == {RateDecision.TAKEN}
    assert {limiter.account(agent).count_message(float(second)) for second in range(60) for agent in agents} == {
        RateDecision.TAKEN
    }
    assert {limiter.account("t0").count_message(100.0 + count / RATE) for count in range(30_000)} == {
        RateDecision.TAKEN
    }, "at its full rate"


def test_a_flood_is_slowed_and_its_neighbor_is_not() -> None:
    """Ten times the rate: a burst goes through, then a tenth; it is told of once."""
    limiter = RateLimiter()
    said = [limiter.account("flood").count_message(count / (10 * RATE)) for count in range(60_000)]
    paces = Counter(said)
    assert paces[RateDecision.SLOWED] == 1
    assert said[:BURST] == [RateDecision.TAKEN] * BURST
    late = Counter(said[20_000:40_000])
    assert late[RateDecision.TAKEN] <= 20_000 / 10 + 2
    assert late[RateDecision.DROPPED] >= 20_000 * 9 / 10 - 2
    assert limiter.account("neighbor").count_message(3.0) is RateDecision.TAKEN


def test_an_agent_that_goes_on_is_cut_off_until_it_was_quiet() -> None:
    """Everything is dropped as long as it goes on; after a pause it is an agent like any other."""
    limiter = RateLimiter(rate=10.0, burst=10, patience=20)
    said = [limiter.account("flood").count_message(0.0) for _ in range(40)]
    assert [said.index(each) for each in (RateDecision.SLOWED, RateDecision.CUT)] == [11, 30]
    assert said.count(RateDecision.TAKEN) == 11
    assert {limiter.account("flood").count_message(CUT_OFF_S * part / 2) for part in range(6)} == {
        RateDecision.DROPPED
    }, "it never was quiet"
    assert limiter.account("flood").count_message(2.5 * CUT_OFF_S + CUT_OFF_S + 0.1) is RateDecision.TAKEN


def test_an_agent_that_held_back_to_half_of_its_room_has_all_its_patience_again() -> None:
    """Two floods that are too short each are not one that is long enough; and it is told of the second one too."""
    account = RateLimiter(rate=10.0, burst=10, patience=20).account("flood")
    first = [account.count_message(0.0) for _ in range(26)]
    second = [account.count_message(0.7) for _ in range(22)]
    assert RateDecision.CUT not in first + second
    assert [first.count(RateDecision.SLOWED), second.count(RateDecision.SLOWED)] == [1, 1]
    assert account.count_message(1.0) is RateDecision.TAKEN, "it is still listened to"


def test_an_account_is_the_speakers_in_every_store() -> None:
    """Two connections of one key have one rate; one that was forgotten while it was within it begins anew."""
    limiter = RateLimiter(rate=10.0, burst=10)
    first, second = limiter.account("key"), limiter.account("key")
    said = [each.count_message(0.0) for _ in range(20) for each in (first, second)]
    assert said.count(RateDecision.TAKEN) == 11
    limiter.forget(0.5)
    assert limiter.account("key") is first, "it floods"
    limiter.forget(60.0)
    assert len(limiter) == 0


def test_memory_is_bounded() -> None:
    """Speakers that are within their rate are forgotten; one that floods is not."""
    limiter = RateLimiter(rate=10.0, burst=10)
    while limiter.account("flood").count_message(0.0) is RateDecision.TAKEN:
        pass
    for number in range(3 * MAX_ACCOUNTS):
        now = 0.5 + number * 1e-3 / MAX_ACCOUNTS * 100
        if limiter.full:
            limiter.forget(now)
        limiter.account(f"e{number}").count_message(now)
    assert len(limiter) <= 2 * MAX_ACCOUNTS + 1
    assert limiter.account("flood").count_message(0.0) is RateDecision.DROPPED
