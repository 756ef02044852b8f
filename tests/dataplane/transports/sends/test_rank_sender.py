"""What a rank of the trainer keeps from epoch to epoch, and how it takes part in one. No group, no sockets."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch

from weightbus.dataplane.copy.copy_table import CopyTable
from weightbus.dataplane.errors import ChunkTimeout, DeadlineExceeded, OutOfStagingMemory, PeerLost
from weightbus.dataplane.processes import threads as binding
from weightbus.dataplane.processes.connections import Deadline, MacFrames
from weightbus.dataplane.reshard.send_schedule import SendMessages
from weightbus.dataplane.transports.interface import Address, Group
from weightbus.dataplane.transports.sends import messages as wire, rank_sender as rank_sends
from weightbus.dataplane.transports.sends.message_queues import SendQueue
from weightbus.dataplane.transports.sends.rank_sender import RankSender

from ....kit.waiting import until

WAIT_S = 20.0
RANK = 3
GROUP = Group(store="tcp://127.0.0.1:9", name="g", size=9, rank=RANK, form_s=1.0, turn_s=1.0)
NOTHING = SendMessages.decode(b"")
ADDRESS = Address("127.0.0.1:9", token="t")


def one_message() -> SendMessages:
    """16 bytes out of the only region."""
    return SendMessages(*[np.array([value], np.int64) for value in (RANK, 0, 16, 0, 0, -1, 0)])


def part(peer: int, messages: SendMessages, name: str) -> wire.SchedulePart:
    return wire.SchedulePart(peer=peer, schedule=name, messages=messages.encode(), pack=CopyTable.empty().encode())


class Leader:
    """Says what a test has it say, and stands for the connection to it."""

    def __init__(self, *says: wire.ToReceiver) -> None:
        self.says = list(says)
        self.heard: list[wire.ToSender] = []
        self.notes: list[str] = []
        self.hung_up = threading.Event()

    def readable(self, within_s: float = 0.0) -> bool:
        if not within_s:
            return self.hung_up.is_set()
        if not self.says:
            time.sleep(within_s)
        return bool(self.says)

    def close(self) -> None:
        self.notes.append("closed")

    def hear(self, *_: object) -> wire.ToReceiver:
        return self.says.pop(0)

    def say(self, _frames: object, message: wire.ToSender, _deadline: Deadline) -> None:
        self.heard.append(message)


class Passage:
    """Stands for one in which everything moves, or nothing."""

    reason = ""
    error: Exception | None = None
    made: dict[str, Any] = {}  # noqa: RUF012  a fixture empties it

    def __init__(self, *_: object, **more: Any) -> None:
        self.made.update(more)

    def run(self, *_: object, ready: Any) -> float:
        if self.error is not None:
            raise self.error
        if self.reason:
            raise PeerLost(self.reason)
        ready()
        return 0.5


@pytest.fixture
def regions() -> tuple[torch.Tensor, ...]:
    return (torch.zeros(64, dtype=torch.uint8),)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankSender]:
    monkeypatch.setattr(rank_sends, "GroupTransfer", Passage)
    monkeypatch.setattr(Passage, "made", {})
    made = RankSender("c", RANK)
    yield made
    made.close()


def led(monkeypatch: pytest.MonkeyPatch, *says: wire.ToReceiver) -> Leader:
    """Whom the rank reaches next."""
    leader = Leader(*says)
    monkeypatch.setattr(MacFrames, "reach", lambda *_: leader)
    monkeypatch.setattr(wire.RECEIVER, "hear", leader.hear)
    monkeypatch.setattr(wire.RECEIVER, "say", leader.say)
    return leader


def ended(rank: RankSender) -> None:
    thread = rank._session.thread
    assert thread is not None
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_rank_is_connected_with_those_that_it_sends_to(
    rank: RankSender, monkeypatch: pytest.MonkeyPatch, regions: tuple[torch.Tensor, ...]
) -> None:
    """And with nobody who gets nothing of it: that worker does not name the pair, and both would wait for ever."""
    parts = part(5, one_message(), "some"), part(6, NOTHING, "nothing")
    leader = led(monkeypatch, wire.BeginSends(group=GROUP, parts=parts, others=("of another turn",)))
    rank.begin(ADDRESS, 1, regions, WAIT_S)
    until(lambda: len(leader.heard) > 1, "it to be through")
    assert leader.heard[1:] == [wire.BarrierReached(seconds=0.5, nbytes=16)]
    assert (Passage.made["to"], Passage.made["others"]) == (frozenset({5}), ("of another turn",))
    leader.hung_up.set()
    ended(rank)


def test_a_member_that_is_through_does_not_hang_up_first(
    rank: RankSender, monkeypatch: pytest.MonkeyPatch, regions: tuple[torch.Tensor, ...]
) -> None:
    """A leader that is late to read its last word would take the end for a death."""
    leader = led(monkeypatch, wire.BeginSends(group=GROUP, parts=(part(5, one_message(), "some"),)))
    rank.begin(ADDRESS, 1, regions, WAIT_S)
    until(lambda: len(leader.heard) > 1, "it to be through")
    time.sleep(0.2)
    assert leader.notes == []
    leader.hung_up.set()
    ended(rank)
    assert leader.notes == ["closed"]
    assert rank.failure == ""


def test_what_forms_is_called_off_with_an_epoch_that_fails(
    rank: RankSender, monkeypatch: pytest.MonkeyPatch, regions: tuple[torch.Tensor, ...]
) -> None:
    """It is asked for no more; the leader hears why, and then the connection ends."""

    class Forms:
        name, discarded = "early", 0

        def discard(self) -> None:
            self.discarded += 1

    forms = Forms()
    monkeypatch.setattr(rank_sends, "GroupForming", lambda *_: forms)
    monkeypatch.setattr(Passage, "reason", "a worker has died")
    leader = led(monkeypatch, wire.Form(group=GROUP), wire.BeginSends(group=GROUP))
    rank.begin(ADDRESS, 1, regions, WAIT_S)
    ended(rank)
    assert forms.discarded == 1
    assert leader.heard[1:] == [wire.Failed(reason=f"rank {RANK}: a worker has died")]
    assert leader.notes == ["closed"]
    assert rank.failure == "a worker has died"


@pytest.mark.parametrize(
    ("error", "less"),
    [
        (ChunkTimeout("a peer", 1.0), True),
        (OutOfStagingMemory("none"), True),
        (DeadlineExceeded("the group", 1.0), False),
    ],
    ids=["late", "no room", "not formed"],
)
def test_the_leader_hears_whether_less_at_a_time_may_do(
    rank: RankSender,
    monkeypatch: pytest.MonkeyPatch,
    regions: tuple[torch.Tensor, ...],
    error: Exception,
    *,
    less: bool,
) -> None:
    """By what went wrong, and not by how it is worded."""
    monkeypatch.setattr(Passage, "error", error)
    leader = led(monkeypatch, wire.BeginSends(group=GROUP))
    rank.begin(ADDRESS, 1, regions, WAIT_S)
    ended(rank)
    assert leader.heard[1:] == [wire.Failed(reason=f"rank {RANK}: {error}", less=less)]


def test_an_epoch_that_fails_ends_when_nothing_is_bound_any_more(
    rank: RankSender, monkeypatch: pytest.MonkeyPatch, regions: tuple[torch.Tensor, ...]
) -> None:
    """The next one may use the same, and would bind it too."""
    notes: list[str] = []

    def slowly(*arguments: Any) -> SendQueue:
        time.sleep(0.2)
        notes.append("bound")
        return SendQueue(*arguments)

    end = rank_sends._Session.end
    monkeypatch.setattr(rank_sends._Session, "end", lambda session: (notes.append("ended"), end(session))[1])
    monkeypatch.setattr(rank_sends, "SendQueue", slowly)
    monkeypatch.setattr(Passage, "reason", "a worker has died")
    led(monkeypatch, wire.BeginSends(group=GROUP, parts=(part(5, one_message(), "some"),)))
    rank.begin(ADDRESS, 1, regions, WAIT_S)
    ended(rank)
    assert notes == ["bound", "ended"]


def test_an_epoch_in_which_something_is_bound_for_ever_leaves_it_alone(
    rank: RankSender, monkeypatch: pytest.MonkeyPatch, regions: tuple[torch.Tensor, ...]
) -> None:
    """That thread is not waited for; the next epoch shares nothing with it, and it lets go of its part in the end."""
    bound, released, notes = threading.Event(), threading.Event(), list[str]()

    def for_ever(*arguments: Any) -> SendQueue:
        bound.set()
        assert released.wait(3 * WAIT_S)
        return SendQueue(*arguments)

    let_go = rank_sends._Kept.let_go
    monkeypatch.setattr(rank_sends._Kept, "let_go", lambda kept: (notes.append("let go"), let_go(kept))[1])
    monkeypatch.setattr(binding, "BOUND_S", 0.2)
    monkeypatch.setattr(rank_sends, "SendQueue", for_ever)
    leader = led(monkeypatch, wire.BeginSends(group=GROUP, parts=(part(5, one_message(), "some"),)))
    rank.begin(ADDRESS, 1, regions, WAIT_S)
    stuck = rank._session
    assert bound.wait(WAIT_S)
    ended(rank)
    assert leader.notes == ["closed"]
    assert "bound to memory" in rank.failure
    monkeypatch.setattr(MacFrames, "reach", lambda *_: Leader())
    rank.begin(ADDRESS, 2, regions, WAIT_S)
    assert rank._session.kept is not stuck.kept
    assert not notes
    released.set()
    until(lambda: notes == ["let go"], "it to let go")


def test_one_epoch_at_a_time(
    rank: RankSender, monkeypatch: pytest.MonkeyPatch, regions: tuple[torch.Tensor, ...]
) -> None:
    """A rank that still waits to begin has gone on when the next epoch does."""
    first = led(monkeypatch)
    rank.begin(ADDRESS, 1, regions, WAIT_S)
    until(lambda: bool(first.heard), "it to come")
    thread = rank._session.thread
    assert thread is not None
    monkeypatch.setattr(MacFrames, "reach", lambda *_: Leader())
    rank.begin(ADDRESS, 2, regions, WAIT_S)
    assert not thread.is_alive()
    assert wire.Failed(reason=f"rank {RANK}: this rank has gone on") in first.heard


def test_parts_that_no_worker_needs_are_forgotten(rank: RankSender) -> None:
    """Plans that are only named are known from earlier messages."""
    kept = rank_sends._Kept()
    first = rank._parts_of(kept, [part(5, one_message(), "a"), part(6, NOTHING, "b")])
    assert [(each.peer, len(each.messages)) for each in first] == [(5, 1), (6, 0)]
    (again,) = rank._parts_of(kept, [wire.SchedulePart(peer=7, schedule="a")])
    assert (again.peer, again.messages, again.pack) == (7, first[0].messages, first[0].pack)
    assert set(kept.parts) == {"a"}


def test_an_outbox_is_used_while_all_is_as_it_was(rank: RankSender, regions: tuple[torch.Tensor, ...]) -> None:
    """For the same workers and the same memory; one that is of no use any more lets go of its own."""
    kept = rank_sends._Kept()

    def outbox(peer: int, memory: tuple[torch.Tensor, ...]) -> SendQueue:
        told = [part(peer, one_message(), "a")]
        return rank_sends._send_queue_of(kept, rank._parts_of(kept, told), told, memory)

    first = outbox(5, regions)
    assert outbox(5, regions) is first
    for peer, memory in ((6, regions), (6, (regions[0].clone(),))):
        before, made = kept.bound, outbox(peer, memory)
        assert before is not None
        assert made is not before.queue
        assert before.queue.memory == ()
        assert made._sends[0][0].peer == peer
        assert made._sends[0][0].memory.data_ptr() == memory[0].data_ptr()
    kept.let_go()
    assert kept.bound is None


@pytest.mark.parametrize("stuck", [False, True])
def test_what_a_session_that_is_stuck_has_is_its_own(*, stuck: bool) -> None:
    """The next one begins with nothing, and the other lets go of it in the end. Otherwise it is handed on."""
    notes: list[str] = []

    class Kept(rank_sends._Kept):
        def let_go(self) -> None:
            notes.append("let go")

    session = rank_sends._Session(Kept())
    if not stuck:
        session.end()
    found = session.leave()
    assert (found is session.kept) is not stuck
    assert notes == []
    if stuck:
        session.end()
    assert notes == ["let go"] * stuck
    assert cast("Any", found).bound is None
