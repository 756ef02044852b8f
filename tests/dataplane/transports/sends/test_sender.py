"""The leader of sends talks to all of a round at a time: whoever stands still keeps nobody from what it waits for."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from weightbus.dataplane.errors import PeerLost, TransferFailed
from weightbus.dataplane.memory.export_map import ExportMap
from weightbus.dataplane.processes import connections as lines
from weightbus.dataplane.processes.connections import Deadline, MacFrames, parse_tcp_address
from weightbus.dataplane.reshard.reshard_plan import PlanReader, ReshardPlan, make_plan
from weightbus.dataplane.tensors.manifest import DigestTable, Manifest, TensorSpec
from weightbus.dataplane.tensors.shards import Shards
from weightbus.dataplane.transports import plan_exchange as direct_wire
from weightbus.dataplane.transports.interface import ExportedWeights, Group, Layout, Peer, TransferSession
from weightbus.dataplane.transports.sends import messages as wire
from weightbus.dataplane.transports.sends.plan_agreement import PlanAgreement
from weightbus.dataplane.transports.sends.sender import (
    LESS,
    MOST_KEPT,
    ConnectedPeer,
    Formed,
    KeptGroups,
    SendsSender,
    crowded,
    seen_by,
)

from ....kit.toy_sends import SendsWorld
from ....kit.waiting import until

WAIT_S = 30.0
PROMPT_S = 5.0
"""Half of what somebody who stands still is given."""
LARGE = 32 << 20
"""Bytes that no socket takes at once."""


class Crowd:
    """A leader with a layout that no socket takes at once, and members that do as a test has them do."""

    def __init__(self, *engines: str, ranks: int = 0, exposed: ExportedWeights | None = None) -> None:
        """With `exposed` it is of that."""
        tensors = exposed.shards.tensors if exposed else [TensorSpec("t", "bfloat16", (1,))]
        manifest = Manifest.of("toy", tensors)
        exports = tuple([ExportMap(rank, "h", (), ()) for rank in range(ranks)])
        exposed = exposed or ExportedWeights(Shards.of(manifest.tensors, [], 0), exports, ())
        vars(exposed).update(given=Layout(shards=bytes(LARGE), exports=()))
        self.sender = SendsSender("127.0.0.1", "c", torch.device("cpu"), lambda: exposed)
        session = TransferSession(
            "c", 1, 1, manifest, DigestTable(manifest.digest(), 1, "mix64x2", bytes(16 * len(tensors)))
        )
        self.address = self.sender.offer(session, [Peer(engine, 1) for engine in engines])
        self.failures: list[str] = []
        """What the leader raised."""
        self._serving = threading.Thread(target=self._serve)
        self._serving.start()
        self.members = {engine: self.reach() for engine in engines}
        for engine in engines:
            self.say(engine, wire.Hello(channel="c", epoch=1, engine=engine))
            assert isinstance(self.hear(engine), wire.Invited)
        for rank in range(ranks):
            self.members[f"rank {rank}"] = self.reach()
            self.say(f"rank {rank}", wire.RankHello(channel="c", epoch=1, rank=rank, known=()))

    def reach(self) -> MacFrames:
        return MacFrames.reach(self.address.address, self.address.token, Deadline(WAIT_S))

    def say(self, member: str, message: wire.ToSender) -> None:
        wire.RECEIVER.say(self.members[member], message, Deadline(WAIT_S))

    def begin(self, member: str, message: wire.Failed, count: int) -> bytes:
        """Say so many bytes of it; the others."""
        whole = b"".join(self.members[member].framed(wire.RECEIVER.encode(message)))
        self.members[member]._socket.sendall(whole[:count])
        return whole[count:]

    def hear(self, member: str) -> wire.ToReceiver:
        return wire.RECEIVER.hear(self.members[member], Deadline(WAIT_S), "the leader")

    def prepare(self, *engines: str) -> None:
        for engine in engines:
            self.say(engine, wire.Prepared(plans=("p",), schedules=("s",)))

    def pass_through(self, *members: str) -> None:
        """They hold the version, and have said so."""
        for member in members:
            self.say(member, wire.BarrierReached(seconds=0.0, nbytes=0))
            if not member.startswith("rank"):
                self.say(member, wire.Finished())

    def end(self) -> dict[str, str]:
        """Engines that did not take the version, once the leader knows of all."""
        self._serving.join(WAIT_S)
        assert not self._serving.is_alive()
        self.close()
        return self.sender.failed

    def close(self) -> None:
        for frames in self.members.values():
            frames.close()
        self.sender.close()
        self._serving.join(WAIT_S)

    def _serve(self) -> None:
        try:
            self.sender.ready(WAIT_S)
            self.sender.finish(WAIT_S)
        except TransferFailed as error:
            self.failures.append(str(error))


@pytest.fixture
def toy_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan is made here, and every rank has much to send."""
    monkeypatch.setattr(PlanAgreement, "check", lambda *_: None)
    parts = (wire.SchedulePart(peer=1, schedule="s", messages=bytes(LARGE)),)
    monkeypatch.setattr(PlanAgreement, "parts_of", lambda *_: parts)


def served_at_once(crowd: Crowd, engine: str) -> None:
    """Whatever it asks for until it is prepared."""
    began = time.monotonic()
    crowd.say(engine, wire.GiveLayout())
    assert isinstance(crowd.hear(engine), wire.Layout)
    crowd.say(engine, wire.Propose(plans=()))
    assert crowd.hear(engine) == wire.Agreed()
    assert time.monotonic() - began < PROMPT_S


@pytest.mark.parametrize("count", [4, 20, 1000], ids=["half a length", "half a seal", "half a message"])
def test_a_member_that_stops_while_it_speaks_holds_no_member(count: int) -> None:
    """Stopped in the middle of a recording of megabytes, say. It is heard to the end when it goes on."""
    crowd = Crowd("slow", "fast")
    rest = crowd.begin("slow", wire.Failed(reason="x" * 2000), count)
    served_at_once(crowd, "fast")
    crowd.members["slow"]._socket.sendall(rest)
    crowd.say("fast", wire.Failed(reason="enough"))
    assert crowd.end() == {"slow": "x" * 2000, "fast": "enough"}


@pytest.mark.parametrize("count", [0, 1000], ids=["nothing", "a part"])
def test_a_receiver_that_does_not_read_its_layout_holds_no_receiver(count: int) -> None:
    """However large it is. Whoever goes on to read has all of it."""
    crowd = Crowd("slow", "fast")
    crowd.say("slow", wire.GiveLayout())
    slow = crowd.members["slow"]
    assert slow.readable(WAIT_S)
    came = slow._exactly(count, Deadline(WAIT_S), "a part") if count else b""
    served_at_once(crowd, "fast")
    if not count:
        assert isinstance(crowd.hear("slow"), wire.Layout)
        crowd.say("slow", wire.Propose(plans=()))
        assert crowd.hear("slow") == wire.Agreed()
    assert len(came) == count
    crowd.close()


@pytest.mark.parametrize("knows", [True, False], ids=["one with the token", "a stranger"])
def test_a_member_that_comes_and_says_nothing_holds_no_member(*, knows: bool) -> None:
    """Whether it knows the token or not."""
    crowd = Crowd("fast")
    silent = crowd.reach() if knows else socket.create_connection(parse_tcp_address(crowd.address.address))
    served_at_once(crowd, "fast")
    silent.close()
    crowd.close()


@pytest.mark.parametrize("plans", [(), ("p",), ("p", "p")], ids=["none", "one", "two"])
def test_a_member_that_says_less_than_it_should_is_left_out_alone(plans: tuple[str, ...]) -> None:
    """An engine of one worker that is prepared for too little or too much: the others are served on."""
    crowd = Crowd("odd", "fast")
    crowd.say("odd", wire.Prepared(plans=plans, schedules=plans[1:]))
    told = crowd.hear("odd")
    assert isinstance(told, wire.Failed)
    assert f"{len(plans)} plans and {len(plans[1:])} schedules came for 1 workers" in told.reason
    served_at_once(crowd, "fast")
    crowd.say("fast", wire.Failed(reason="enough"))
    assert crowd.end() == {"odd": told.reason, "fast": "enough"}


@pytest.mark.usefixtures("toy_plans")
@pytest.mark.parametrize("how", ["reads nothing", "stops while it speaks"])
def test_a_member_that_stands_still_is_left_out_alone(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """After the time for a message, while nobody has begun: the others take the version."""
    monkeypatch.setattr(lines, "STALL_S", 0.5)
    crowd = Crowd("slow", "fast")
    if how == "reads nothing":
        crowd.say("slow", wire.GiveLayout())
    else:
        crowd.begin("slow", wire.Failed(reason="x" * 2000), 1000)
    served_at_once(crowd, "fast")
    crowd.prepare("fast")
    assert isinstance(crowd.hear("fast"), wire.BeginSends)
    crowd.pass_through("fast")
    failed = crowd.end()
    assert list(failed) == ["slow"]
    said = "read nothing for 0.5 s of what" if how == "reads nothing" else "stood still for 0.5 s in the middle of what"
    assert failed["slow"].startswith("slow: it has ")
    assert said in failed["slow"]


@pytest.mark.parametrize("how", ["speaks", "reads"])
def test_a_member_that_goes_on_while_the_leader_plans_has_not_stood_still(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Plans of a large model take seconds, in which the leader neither hears nor tells anybody."""
    crowd, came = Crowd("slow", "fast"), list[wire.ToReceiver]()
    rest = b""
    if how == "speaks":
        rest = crowd.begin("slow", wire.Failed(reason="x" * 2000), 1000)
        until(lambda: bool(crowd.sender._engines["slow"].received_at), "a half to be heard")
    else:
        crowd.say("slow", wire.GiveLayout())
        until(lambda: bool(crowd.sender._engines["slow"].unsent), "the layout to be too much")
    reading = threading.Thread(target=lambda: came.append(crowd.hear("slow")))

    def plan(*_: object) -> None:
        crowd.members["slow"]._socket.sendall(rest)
        if how == "reads":
            reading.start()
        time.sleep(1.0)
        monkeypatch.setattr(lines, "STALL_S", 0.5)

    monkeypatch.setattr(PlanAgreement, "agree", plan)
    monkeypatch.setattr(PlanAgreement, "make_ready", lambda *_: None)
    proposal = direct_wire.Proposal(reader=PlanReader(0, "h", "d"), recording=b"", plan="p")
    crowd.say("fast", wire.Propose(plans=(proposal,)))
    assert crowd.hear("fast") == wire.Agreed()
    if how == "reads":
        reading.join(WAIT_S)
        assert [type(message) for message in came] == [wire.Layout]
        crowd.say("slow", wire.Failed(reason="x" * 2000))
    crowd.say("fast", wire.Failed(reason="enough"))
    assert crowd.end() == {"slow": "x" * 2000, "fast": "enough"}


@pytest.mark.usefixtures("toy_plans")
def test_a_member_that_has_spoken_while_the_leader_was_away_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that was stopped, or waited for its own host, has heard nobody: that is nobody's fault."""
    finish = SendsSender.finish

    def late(sender: SendsSender, deadline_s: float) -> None:
        time.sleep(1.0)
        crowd.pass_through("rank 0", "e")
        monkeypatch.setattr(wire, "SILENT_S", 0.5)
        finish(sender, deadline_s)

    monkeypatch.setattr(SendsSender, "finish", late)
    crowd = Crowd("e", ranks=1)
    crowd.prepare("e")
    for member in ("e", "rank 0"):
        assert isinstance(crowd.hear(member), wire.BeginSends)
    assert crowd.end() == {}


@pytest.mark.usefixtures("toy_plans")
def test_a_member_that_has_just_read_how_to_begin_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that took: it has not been asked to say anything before."""
    looked, silent = threading.Event(), lines.ConnectionPool.silent_for

    def look(of: lines.ConnectionPool[ConnectedPeer], end: ConnectedPeer, seconds: float) -> bool:
        found = silent(of, end, seconds)
        if not end.workers:
            looked.set()
        return found

    monkeypatch.setattr(lines.ConnectionPool, "silent_for", look)
    monkeypatch.setattr(lines, "STALL_S", 1e9)
    crowd = Crowd("e", ranks=1)
    crowd.prepare("e")
    assert isinstance(crowd.hear("e"), wire.BeginSends)
    crowd.pass_through("e")
    end = crowd.sender._ranks[0]
    until(lambda: end.unsent, "the rank to be told")
    assert not looked.is_set(), "it has not read yet"
    end.received_at -= 3600.0
    end.progress_at -= 3600.0
    assert isinstance(crowd.hear("rank 0"), wire.BeginSends)
    assert looked.wait(WAIT_S)
    crowd.pass_through("rank 0")
    assert crowd.end() == {}
    assert crowd.sender._stood.names, "the group fell"


def test_the_name_of_a_group_tells_nothing_of_the_secret() -> None:
    """It goes in the clear, into logs and reports too; and no group has the name of another."""
    crowd = Crowd("e")
    names = {crowd.sender._name() for _ in range(9)}
    crowd.close()
    assert len(names) == 9
    token = crowd.address.token
    assert not [name for name in names for at in range(len(token) - 7) if token[at : at + 8] in name]


def test_a_receiver_that_asks_and_does_not_read_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before what it is to be told fills the leader's memory; a layout is there once for all who ask."""
    tell, told = lines.ConnectionPool.send, list[bytes]()
    monkeypatch.setattr(
        lines.ConnectionPool, "send", lambda of, line, message: (told.append(message), tell(of, line, message))
    )
    crowd = Crowd("greedy", "fast")
    with contextlib.suppress(PeerLost):
        for _ in range(1000):
            crowd.say("greedy", wire.GiveLayout())
    served_at_once(crowd, "fast")
    crowd.say("fast", wire.Failed(reason="enough"))
    failed = crowd.end()
    assert failed == {"greedy": "greedy: it goes on to ask, and does not read what it is told", "fast": "enough"}
    assert len({id(message) for message in told if len(message) >= LARGE}) == 1


@pytest.mark.usefixtures("toy_plans")
def test_no_member_begins_without_a_rank_that_has_gone_again() -> None:
    """All would wait for it in the group."""
    crowd = Crowd("e", ranks=2)
    until(lambda: all(end.frames is not None for end in crowd.sender._ranks.values()), "the ranks to be known")
    served_at_once(crowd, "e")
    crowd.members["rank 1"].close()
    until(lambda: 1 not in crowd.sender._ranks, "the rank to be missed")
    crowd.prepare("e")
    crowd._serving.join(PROMPT_S)
    assert not crowd._serving.is_alive()
    assert crowd.failures == ["ranks [1] of the trainer did not come to send, or are gone again"]
    crowd.sender.close()
    assert crowd.hear("e") == wire.Failed(reason="the sender closed this session")
    crowd.close()


@pytest.mark.usefixtures("toy_plans")
def test_nothing_has_ended_well_that_was_closed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that still moves had not said that it was through; so the group is not one to be used again."""
    pump, begun = lines.ConnectionPool.poll, threading.Event()

    def closed_then(of: lines.ConnectionPool[ConnectedPeer], timeout_s: float) -> None:
        pump(of, timeout_s)
        if begun.is_set():
            crowd.sender.close()

    monkeypatch.setattr(lines.ConnectionPool, "poll", closed_then)
    crowd = Crowd("e")
    crowd.prepare("e")
    assert isinstance(crowd.hear("e"), wire.BeginSends)
    begun.set()
    crowd._serving.join(WAIT_S)
    # which one depends on how far the sender was when it was closed
    assert crowd.failures in (["nothing is on offer: call offer first"], ["the sender was closed"])
    assert crowd.sender._stood.names == ()
    crowd.close()


class Late:
    """A group of two engines and a rank that moves. An engine says that less at a time may do."""

    def __init__(self) -> None:
        self.crowd = Crowd("e", "v", ranks=1)
        self.sender = self.crowd.sender
        self.sender._chunk_s = 2.0
        self.sender._pair_bytes = self.sender._most
        self.crowd.prepare("e", "v")
        for member in ("e", "v", "rank 0"):
            assert isinstance(self.crowd.hear(member), wire.BeginSends)

    def parts(self) -> int:
        """Into how many the next attempt cuts its turns, after what ``e`` says."""
        with contextlib.suppress(PeerLost):  # it was hung up on
            self.crowd.say("e", wire.Failed(reason="late", less=True))
        assert self.crowd.end()["e"].endswith("late")
        return self.sender._ceiling.parts


@pytest.mark.usefixtures("toy_plans")
def test_turns_shrink_where_all_move_and_one_is_late() -> None:
    """Once for an attempt: whoever else was late would be in turns of that size."""
    late = Late()
    late.crowd.say("v", wire.Failed(reason="late", less=True))
    assert late.parts() == LESS


@pytest.mark.usefixtures("toy_plans")
@pytest.mark.parametrize("member", ["v", "rank 0"])
@pytest.mark.parametrize("through", [False, True], ids=["moving", "through"])
def test_turns_stay_where_a_member_may_have_been_stopped(member: str, *, through: bool) -> None:
    """It was not heard of for most of a turn, and others wait for it; not if it is through and has no more to say."""
    late = Late()
    end = late.sender._engines["v"] if member == "v" else late.sender._ranks[0]
    if through:
        late.crowd.pass_through(member)
        until(lambda: end.finished if end.workers else end.through, "it to be through")
    end.received_at -= wire.SILENT_S / 2
    assert late.parts() == (LESS if through else 1)


@pytest.mark.usefixtures("toy_plans")
@pytest.mark.parametrize("meanwhile", [0, 3], ids=["at once", "later"])
def test_turns_stay_where_the_leader_itself_was_stopped(monkeypatch: pytest.MonkeyPatch, meanwhile: int) -> None:
    """The others ran out of time waiting for the rank in its process, and have said so when it goes on."""
    select, stopped, gone_on = lines.ConnectionPool.poll, threading.Event(), threading.Event()

    def stop(of: lines.ConnectionPool[ConnectedPeer], timeout_s: float) -> None:
        if stopped.is_set() and not gone_on.is_set():
            time.sleep(2.0)
            gone_on.set()
        select(of, timeout_s)

    late = Late()
    monkeypatch.setattr(lines.ConnectionPool, "poll", stop)
    stopped.set()
    until(lambda: late.sender._looked_at < time.monotonic() - 0.5, "it to stop")
    for member, beats in (("v", 1 + meanwhile), ("rank 0", 1 + meanwhile), ("e", meanwhile)):
        for _ in range(beats):
            late.crowd.say(member, wire.GroupBeat())
    assert late.parts() == 1


@pytest.mark.usefixtures("toy_plans")
def test_a_member_that_does_not_read_how_to_begin_holds_no_member_from_beginning() -> None:
    """What the trainer's ranks are told grows with the model, and they are told first."""
    crowd = Crowd("e", ranks=2)
    crowd.prepare("e")
    assert crowd.members["rank 0"].readable(WAIT_S)
    began = time.monotonic()
    for member in ("e", "rank 1", "rank 0"):
        assert isinstance(crowd.hear(member), wire.BeginSends)
    assert time.monotonic() - began < PROMPT_S
    crowd.pass_through("rank 0", "rank 1", "e")
    assert crowd.end() == {}


@pytest.mark.usefixtures("toy_plans")
def test_a_member_that_never_reads_how_to_begin_ends_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """In time: the others have begun, and would wait for it in the group."""
    monkeypatch.setattr(lines, "STALL_S", 0.5)
    crowd = Crowd("e", ranks=2)
    crowd.prepare("e")
    for member in ("e", "rank 1"):
        assert isinstance(crowd.hear(member), wire.BeginSends)
    told = crowd.hear("e")
    assert isinstance(told, wire.Failed)
    assert told.reason.startswith("the group broke: rank 0: it has read nothing for 0.5 s")
    assert set(crowd.end()) == {"e"}


def test_ranks_join_what_the_engine_has_begun_to_join() -> None:
    """Not before: of an engine that does not come to it they would wait for a group that nobody forms."""
    crowd = Crowd("e", ranks=2)
    until(lambda: all(end.frames is not None for end in crowd.sender._ranks.values()), "the ranks to be known")
    served_at_once(crowd, "e")
    assert not any(crowd.members[f"rank {rank}"].readable() for rank in range(2))
    crowd.say("e", wire.Forms())
    for rank in range(2):
        told = crowd.hear(f"rank {rank}")
        assert isinstance(told, wire.Form)
        assert told.group.rank == rank
    crowd.close()


def test_nothing_is_said_in_the_middle_of_something_else() -> None:
    """An engine that is let go of while its layout is on its way hears the end of the connection."""
    crowd = Crowd("slow", "idle")
    crowd.say("slow", wire.GiveLayout())
    until(lambda: bool(crowd.sender._engines["slow"].unsent), "the layout to be too much")
    crowd.sender.withdraw("slow", "no slow")
    crowd.sender.withdraw("idle", "no idle")
    assert crowd.hear("idle") == wire.Failed(reason="no idle")
    with pytest.raises(PeerLost, match="closed the connection"):
        crowd.hear("slow")
    assert crowd.end() == {"slow": "no slow", "idle": "no idle"}


def test_a_leader_that_is_closed_while_it_waits_says_so() -> None:
    """From another thread, as whoever calls a delivery off does: a transfer that failed, and no error of ours."""
    for _ in range(30):
        crowd = Crowd("e")
        failures: list[BaseException] = []

        def wait(crowd: Crowd = crowd, failures: list[BaseException] = failures) -> None:
            try:
                while True:
                    crowd.sender._pump(0.0)
            except BaseException as error:  # noqa: BLE001  it is looked at
                failures.append(error)

        crowd.say("e", wire.Failed(reason="enough"))
        crowd._serving.join(WAIT_S)
        waiting = threading.Thread(target=wait)
        waiting.start()
        crowd.sender.close()
        waiting.join(WAIT_S)
        assert [type(failure) for failure in failures] == [TransferFailed]
        crowd.close()


def placed(exposed: ExportedWeights, host: str) -> ExportedWeights:
    """The same, with the second rank on another host."""
    here, there = exposed.exports
    return replace(exposed, exports=(here, msgspec.structs.replace(there, host=host)))


@pytest.mark.parametrize("differ", ["rank", "place", "recording"])
def test_workers_that_differ_in_one_thing_have_plans_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, differ: str
) -> None:
    """One made for a like worker is taken for another only where it is the same: else the engine would be refused."""
    world = SendsWorld(tmp_path / "r", 2, monkeypatch)
    world.round()
    known = world.receiver._exchange.agreements[0]
    one, two = (world.receiver._exchange.traces[digest] for digest in known.recordings)
    exposed = world.trainer.describe()
    if differ == "place":
        exposed = placed(exposed, "elsewhere")
    reader = known.readers[0]
    others = {
        "rank": (one, msgspec.structs.replace(reader, rank=1)),
        "place": (one, msgspec.structs.replace(reader, host="elsewhere")),
        "recording": (two, reader),
    }
    proposals, plans = list[direct_wire.Proposal](), list[ReshardPlan]()
    for recording, who in ((one, reader), others[differ]):
        plan = make_plan(exposed.shards, exposed.exports, recording, who)
        plans.append(replace(plan, reader=reader))
        proposals.append(direct_wire.Proposal(reader=who, recording=recording.encode(), plan=plan.digest()))
    world.close()
    assert plans[0].digest() != plans[1].digest(), "they are alike"

    crowd = Crowd("e", exposed=exposed)
    crowd.say("e", wire.Propose(plans=tuple(proposals)))
    assert crowd.hear("e") == wire.Agreed()
    crowd.close()


@pytest.mark.usefixtures("toy_plans")
@pytest.mark.parametrize("answers", [True, False], ids=["an answer", "how to begin"])
def test_a_leader_that_is_closed_while_it_tells_says_so(monkeypatch: pytest.MonkeyPatch, *, answers: bool) -> None:
    """What it was about to say is gone under its hands: whom it spoke to did not fail, nor did we."""
    push, close, failures = MacFrames.push, lines.ConnectionPool.close, list[BaseException]()
    found = threading.Event()

    def close_later(of: lines.ConnectionPool[ConnectedPeer]) -> None:
        found.wait(WAIT_S)
        close(of)

    def closed_meanwhile(frames: MacFrames, part: memoryview) -> memoryview:
        left = push(frames, part)
        monkeypatch.setattr(MacFrames, "push", push)
        end = crowd.sender._engines["e"]
        closing.start()
        until(lambda: end.frames is None, "the engine to be let go of")
        return left

    def serve(self: Crowd) -> None:
        try:
            self.sender.ready(WAIT_S)
        except BaseException as error:  # noqa: BLE001  it is looked at
            failures.append(error)
        found.set()

    monkeypatch.setattr(lines.ConnectionPool, "close", close_later)
    monkeypatch.setattr(Crowd, "_serve", serve)
    crowd = Crowd("e")
    closing = threading.Thread(target=crowd.sender.close)
    monkeypatch.setattr(MacFrames, "push", closed_meanwhile)
    crowd.say("e", wire.Propose(plans=()) if answers else wire.Prepared(plans=("p",), schedules=("s",)))
    for each in (crowd._serving, closing):
        each.join(WAIT_S)
    assert [type(failure) for failure in failures] == [TransferFailed]
    assert str(failures[0]) == "the sender was closed"
    assert crowd.sender.failed == {}
    crowd.close()


# Which groups of rounds before the leader of sends speaks of. No sockets.


def have(*names: str) -> KeptGroups:
    """Groups of one engine each, used for version 1."""
    stood = KeptGroups()
    stood.turn_to(1)
    for name in names:
        stood.keep(Formed(f"g-{name}", f"members of {name}", frozenset({name})))
    return stood


def everybody(_name: str) -> bool:
    return True


def test_a_group_is_used_by_the_same_members_if_all_have_it() -> None:
    """And until everything has moved in it again it is nobody's."""
    stood = have("a", "b")
    found = stood.take("members of a", frozenset({"a"}), everybody)
    assert found is not None
    assert (found.name, stood.names) == ("g-a", ("g-b",))
    stood.keep(found)
    assert stood.take("other members of a", frozenset({"a"}), everybody) is None
    assert stood.take("members of b", frozenset({"b"}), lambda name: name != "g-b") is None
    assert stood.names == ()


def test_an_engine_is_in_one_group() -> None:
    """A member that forms another group has left all others; groups without such a member stay."""
    stood = have("a", "b", "c")
    assert stood.take("members of a and b", frozenset({"a", "b"}), everybody) is None
    assert stood.names == ("g-c",)
    stood.keep(Formed("g-ab", "members of a and b", frozenset({"a", "b"})))
    assert stood.take("members of a", frozenset({"a"}), everybody) is None
    assert stood.names == ("g-c",)


def test_each_member_is_told_its_own_rank() -> None:
    """Of a group that is the same for all besides."""
    group = Group(store="s", name="g", size=3, rank=0, form_s=1.0, turn_s=2.0)
    assert seen_by(2, group) == Group(store="s", name="g", size=3, rank=2, form_s=1.0, turn_s=2.0)


def test_a_group_that_a_version_did_not_need_is_not_kept_for_long() -> None:
    """It may come in its turn of the next version, and not later; attempts and catch-ups do not count."""
    stood = have("a", "b")
    for version in (1, 2, 2):
        stood.turn_to(version)
        assert stood.names == ("g-a", "g-b")
    found = stood.take("members of a", frozenset({"a"}), everybody)
    assert found is not None
    stood.keep(found)
    stood.turn_to(3)
    assert stood.names == ("g-a",)


def test_with_more_turns_than_can_be_kept_those_that_are_stay() -> None:
    """Taking one in for another that comes next would never find any."""
    stood = have(*map(str, range(MOST_KEPT)))
    assert not stood.room
    found = stood.take("members of 0", frozenset({"0"}), everybody)
    assert found is not None
    assert stood.room


# Engines that are left out of a group over NCCL, and the reason that is reported.


def test_workers_on_gpus_of_their_own_are_in() -> None:
    """As is who has none: there it is gloo's."""
    assert crowded({0: "a", 1: "b"}, {"e": ("c", "d"), "f": ("", "")}) == {}
    assert crowded({0: "", 1: ""}, {"e": ("",)}) == {}


def test_the_first_engine_on_a_gpu_has_it() -> None:
    """The second one could be in a group of its own, and its other GPUs are nobody's."""
    found = crowded({0: "a"}, {"e": ("b",), "f": ("c", "b"), "g": ("c",)})
    assert {name: each.spared for name, each in found.items()} == {"f": True}
    assert "a worker of f and a worker of e are on GPU b" in found["f"].reason


def test_every_gpu_of_the_first_engine_is_taken() -> None:
    """Not that of its first worker alone."""
    found = crowded({}, {"e": ("a", "b"), "f": ("b",)})
    assert list(found) == ["f"]
    assert found["f"].spared


def test_a_worker_without_a_gpu_hides_no_member() -> None:
    """Its neighbor's GPU may be taken all the same."""
    found = crowded({0: ""}, {"e": ("", "b"), "f": ("", "b"), "g": ("",)})
    assert list(found) == ["f"]


def test_an_engine_on_a_rank_of_the_trainer_is_in_no_group() -> None:
    """However often the version is sent."""
    found = crowded({0: "a"}, {"e": ("b", "a")})
    assert not found["e"].spared
    assert "rank 0 of the trainer" in found["e"].reason


def test_two_workers_of_one_engine_are_seen() -> None:
    """It is in no group either, and keeps nobody else from its GPU."""
    found = crowded({}, {"e": ("a", "a"), "f": ("a",)})
    assert {name: each.spared for name, each in found.items()} == {"e": False}
    assert "another of its workers" in found["e"].reason


def test_two_ranks_on_a_gpu_end_it_for_all() -> None:
    """They are in every group: another transport of an engine would help nobody, as all of them would need it."""
    told = "rank 0 of the trainer and rank 1 are on GPU a.*leave sends out of the trainer's setting transport"
    with pytest.raises(TransferFailed, match=told):
        crowded({0: "a", 1: "a"}, {"e": ("b",)})
