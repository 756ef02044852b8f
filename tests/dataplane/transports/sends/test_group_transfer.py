"""A process's part in a group: nothing of it outlives the attempt, and it keeps nobody waiting."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from weightbus.dataplane.errors import (
    ChunkTimeout,
    DataplaneError,
    DeadlineExceeded,
    OutOfStagingMemory,
    PeerLost,
    TransferFailed,
)
from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.processes.process_groups import serve_store
from weightbus.dataplane.transports.interface import Group
from weightbus.dataplane.transports.sends import group_transfer as joining, group_transfer as transfers
from weightbus.dataplane.transports.sends.group_transfer import GroupCache, GroupForming, GroupTransfer, join
from weightbus.dataplane.transports.sends.message_queues import QueuePair
from weightbus.dataplane.transports.sends.nixl_group import NixlGroup
from weightbus.dataplane.transports.sends.p2p_group import NO_RANKS, P2PChunk, P2PGroup

from ....kit.waiting import until

FORM_S = 5.0
LONG_S = 60.0


def group(port: int, size: int = 2, rank: int = 1) -> Group:
    return Group(
        store=f"tcp://127.0.0.1:{port}", name="g", size=size, rank=rank, form_s=FORM_S, turn_s=FORM_S, nixl=False,
        stands=False, keep_s=0.0,
    )  # fmt: skip


def passing() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "weightbus-sends"]


def test_a_member_that_comes_too_late_for_the_store_ends_at_once() -> None:
    """Torch would knock for more than its deadline, and take the program with it that ends meanwhile (SIGABRT)."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(PeerLost, match="store"):
        GroupTransfer(group(port), 1, torch.device("cpu")).run(lambda _group: None, lambda: "", lambda: None)
    for thread in passing():
        thread.join(FORM_S)
    assert not passing()
    assert time.monotonic() - began < FORM_S


def test_a_store_that_is_there_is_joined() -> None:
    """A peer that only looked whether the group is there is not taken for a member."""
    server = serve_store("127.0.0.1")
    where = group(server.port, size=1, rank=0)
    moved: list[bool] = []
    GroupTransfer(where, 0, torch.device("cpu")).run(lambda _group: moved.append(True), lambda: "", lambda: None)
    assert moved == [True]


def test_a_member_that_is_called_off_frees_the_others() -> None:
    """Long before the deadline of those who wait for its messages; the reason stays with it."""
    server = serve_store("127.0.0.1")
    moving = [threading.Event(), threading.Event()]

    def take(rank: int) -> None:
        def move(group: QueuePair) -> None:
            moving[rank].set()
            group.post((), [P2PChunk(torch.zeros(8, dtype=torch.uint8), 1 - rank)]).wait(Deadline(LONG_S))

        def called_off() -> str:
            return "enough" if rank and all(each.is_set() for each in moving) else ""

        GroupTransfer(group(server.port, rank=rank), rank, torch.device("cpu")).run(move, called_off, lambda: None)

    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        waits, gives_up = (pool.submit(take, rank).exception for rank in range(2))
        assert "enough" in str(gives_up(LONG_S))
        assert isinstance(waits(LONG_S), PeerLost)
    assert time.monotonic() - began < LONG_S / 2


class Toy(P2PGroup):
    """A group of one, which says when it was broken."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(cast("Any", None), torch.device("cpu"), 0, 1)
        self._said = said

    def abort(self, reason: str = "") -> None:
        if not self.broken:
            self._broken = reason
            self._said.append(f"broken: {reason}")

    def drop(self) -> None:
        self._said.append("dropped")


class Course:
    """One transfer over a toy, and what happened in order."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.group: P2PGroup | NixlGroup = Toy(self.said)
        self.form, self.joining = threading.Event(), threading.Event()
        """It has formed; somebody waits for that."""
        self.groups = GroupCache()
        self.asked: dict[str, Any] = {}
        self.form.set()

    def join(self, where: Group, _device: torch.device, **asked: Any) -> P2PGroup | NixlGroup:
        self.asked = {"rank": where.rank, **asked}
        self.joining.set()
        assert self.form.wait(LONG_S)
        self.said.append("formed")
        return self.group

    def run(self, *, stands: bool = False, others: tuple[str, ...] = (), form_s: float = FORM_S, **does: Any) -> None:
        """With `move`, `called_off`, `beat` and `ready` of the test; how it ended is said, too."""
        does = {"move": self.move, "called_off": str, "beat": lambda: None, **does}
        where = msgspec.structs.replace(group(1, 1, 0), stands=stands, keep_s=LONG_S, form_s=form_s)
        try:
            GroupTransfer(where, 0, torch.device("cpu"), groups=self.groups, others=others).run(**does)
        except DataplaneError as error:
            self.said.append(f"raised: {error}")
            raise
        self.said.append("returned")

    def move(self, _group: QueuePair) -> None:
        self.said.append("moved")

    def over(self) -> None:
        """Wait until its thread has ended."""
        until(lambda: not passing(), "the thread to end")


@pytest.fixture
def course(monkeypatch: pytest.MonkeyPatch) -> Iterator[Course]:
    made = Course()
    monkeypatch.setattr(transfers, "join", made.join)
    yield made
    made.form.set()
    made.over()
    made.groups.discard()


def test_a_group_in_which_all_has_moved_is_kept_before_any_member_hears_of_it(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next epoch may begin at once, and use it; those of other turns stay beside it, and no others."""
    keep = GroupCache.keep

    def slowly(groups: GroupCache, *arguments: Any) -> None:
        time.sleep(0.2)
        keep(groups, *arguments)

    for name in ("of another turn", "of nobody"):
        course.groups.keep(name, Toy([]), LONG_S)
    monkeypatch.setattr(GroupCache, "keep", slowly)
    course.run(others=("of another turn",))
    assert course.groups.names == ("of another turn", "g")
    course.run(stands=True, others=())
    assert course.groups.names == ("g",)
    assert course.said == ["formed", "moved", "returned", "moved", "returned"]


def test_a_group_connects_members_that_exchange_messages(course: Course) -> None:
    """NCCL connects those pairs, and NIXL reads that memory; a pair that one of its ends does not name hangs."""
    memory = (torch.zeros(1, dtype=torch.uint8),)
    ends = frozenset({3, 4}), frozenset({5})
    where = msgspec.structs.replace(group(1, 6, 2), keep_s=LONG_S)
    made = GroupTransfer(
        where, 2, torch.device("cpu"), to=ends[0], from_=ends[1], memory=memory, groups=course.groups
    )  # fmt: skip
    made.run(course.move, str, lambda: None)
    assert course.asked == {"rank": 2, "to": ends[0], "from_": ends[1], "memory": memory}


def test_a_group_that_is_said_to_stand_is_not_formed_anew(course: Course) -> None:
    """The others have it still, and nobody would come to another one."""
    with pytest.raises(PeerLost, match="group g is not here any more"):
        course.run(stands=True)
    assert not course.joining.is_set()
    assert course.said == ["raised: group g is not here any more"]


def test_a_member_that_is_not_ready_says_why_before_the_others_see_it_break(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait in the group; what they would make of its end is that this process has died."""
    heard = threading.Event()
    monkeypatch.setattr(
        transfers, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: heard.wait(FORM_S))
    )

    def ready() -> None:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(OutOfStagingMemory, match="no room"):
        course.run(ready=ready)
    heard.set()
    course.over()
    assert course.said == ["formed", "raised: no room", "broken: no room"]
    assert course.groups.names == ()


def test_a_member_that_fails_while_messages_move_breaks_the_group_first(course: Course) -> None:
    """The others wait for them, for as long as a turn may take."""

    def move(_group: QueuePair) -> None:
        raise ValueError("odd")

    with pytest.raises(TransferFailed, match="ValueError: odd"):
        course.run(move=move)
    course.over()
    assert course.said == ["formed", "broken: odd", "raised: ValueError: odd"]
    assert course.groups.names == ()


def test_a_member_that_sees_the_group_break_hears_why_first(course: Course) -> None:
    """Else the leader would take for the cause that it broke: whoever broke it may speak later, or by its sidecar."""
    broke = threading.Event()

    def move(_group: QueuePair) -> None:
        broke.set()
        raise PeerLost("the group broke")

    def called_off() -> str:
        if not broke.is_set():
            return ""
        time.sleep(0.1)
        course.said.append("asked")
        return "rank 1 was late" if course.said.count("asked") > 1 else ""

    with pytest.raises(PeerLost, match=r"^rank 1 was late$"):
        course.run(move=move, called_off=called_off)
    course.over()
    assert course.said[-1] == "raised: rank 1 was late"


def test_a_member_that_hears_of_no_cause_says_what_it_saw(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a while: nobody else may know of any."""
    monkeypatch.setattr(transfers, "_SAY_FIRST_S", 0.1)

    def move(_group: QueuePair) -> None:
        raise PeerLost("the group broke")

    with pytest.raises(PeerLost, match=r"^the group broke$"):
        course.run(move=move)


def test_a_member_that_is_late_itself_says_so_at_once(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    """No member knows a better cause, and the others wait to hear it."""
    monkeypatch.setattr(transfers, "_SAY_FIRST_S", LONG_S)

    def move(_group: QueuePair) -> None:
        raise ChunkTimeout("a peer", 1.0)

    began = time.monotonic()
    with pytest.raises(ChunkTimeout):
        course.run(move=move)
    assert time.monotonic() - began < LONG_S / 2


def test_a_group_that_forms_for_a_member_that_was_called_off_is_broken(course: Course) -> None:
    """Nothing moves in it, whoever has come; nobody waits here for that."""
    course.form.clear()

    def move(moved: QueuePair) -> None:
        moved.post((), ())
        course.said.append("moved")

    with pytest.raises(PeerLost, match="enough"):
        course.run(move=move, called_off=lambda: "enough" if course.joining.is_set() else "")
    course.form.set()
    course.over()
    assert course.said == ["raised: enough", "formed", "broken: called off while it formed"]
    assert course.groups.names == ()


def test_a_group_that_does_not_form_is_waited_for_as_long_as_was_said(
    course: Course, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a little: it has a deadline of its own, whose reason is better."""
    monkeypatch.setattr(transfers, "_END_S", 0.1)
    course.form.clear()
    with pytest.raises(PeerLost, match="the group did not form within 0 s"):
        course.run(form_s=0.1)
    assert course.said[0].startswith("raised: ")


@pytest.mark.parametrize("how", ["says so", "fails to ask"])
def test_nothing_moves_any_more_when_it_was_called_off(course: Course, how: str) -> None:
    """The caller goes on to use the memory."""
    moving = threading.Event()

    def move(moved: QueuePair) -> None:
        moving.set()
        until(lambda: cast("P2PGroup", moved).broken, "it to break")
        time.sleep(0.2)
        course.said.append("still")

    def called_off() -> str:
        if moving.is_set() and how == "fails to ask":
            raise ValueError("closed under our hands")
        return "enough" if moving.is_set() else ""

    with pytest.raises((PeerLost, ValueError)):
        course.run(move=move, called_off=called_off)
    reason = "enough" if how == "says so" else "closed under our hands"
    assert course.said[:3] == ["formed", f"broken: {reason}", "still"]


def test_others_hear_that_it_moves(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again, also while a group forms."""
    monkeypatch.setattr(transfers, "BEAT_S", 0.01)
    course.form.clear()
    beats = threading.Semaphore(0)

    def move(_group: QueuePair) -> None:
        for _ in range(3):
            assert beats.acquire(timeout=LONG_S)

    def beat() -> None:
        beats.release()
        if course.joining.is_set():
            course.form.set()

    course.run(move=move, beat=beat)


def test_a_group_over_nixl_is_let_go_of_with_its_epoch(course: Course) -> None:
    """What was registered for it may be read by others as long as it is there."""

    class Nixl(NixlGroup):
        def __init__(self) -> None:
            """As nobody's."""

        def close(self) -> None:
            course.said.append("closed")

    course.group = Nixl()
    course.run()
    course.over()
    assert sorted(course.said) == ["closed", "formed", "moved", "returned"]
    assert course.groups.names == ()


# Groups that form before anybody knows whether they will be used.


class Dropped(P2PGroup):
    """A group that says whether it was let go of."""

    def __init__(self) -> None:
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


class Slow:
    """Joins when a test has it do so."""

    def __init__(self) -> None:
        self.go_on, self.begun, self.group = threading.Event(), threading.Event(), Dropped()
        self.ends: dict[str, frozenset[int]] = {}

    def join(self, *_: object, **ends: frozenset[int]) -> P2PGroup:
        self.ends = ends
        self.begun.set()
        assert self.go_on.wait(60.0)
        return self.group


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow()
    monkeypatch.setattr(joining, "join", made.join)
    yield made
    made.go_on.set()


def forming(form_s: float = 60.0) -> GroupForming:
    where = Group(store="tcp://127.0.0.1:1", name="g", size=2, rank=0, form_s=form_s, turn_s=1.0, ranks=1)
    return GroupForming(where, torch.device("cpu"))


def test_a_member_that_asks_has_the_group(slow: Slow) -> None:
    """Once: it is nobody else's afterwards."""
    under_way = forming()
    slow.go_on.set()
    assert under_way.result() is slow.group
    with pytest.raises(PeerLost):
        under_way.result()
    under_way.discard()
    assert not slow.group.dropped


@pytest.mark.parametrize("when", ["before it has formed", "afterwards"])
def test_what_is_not_wanted_is_let_go_of(slow: Slow, when: str) -> None:
    """Also if it forms later: a communicator would stay in a server."""
    under_way = forming()
    assert slow.begun.wait(60.0)
    if when == "afterwards":
        slow.go_on.set()
        until(under_way._over.is_set)
    under_way.discard()
    slow.go_on.set()
    until(lambda: slow.group.dropped, "it to be let go of", 10.0)


def test_what_forms_too_late_is_let_go_of(slow: Slow) -> None:
    """The member that waited for it has gone."""
    under_way = forming(0.1)
    with pytest.raises(DeadlineExceeded):
        under_way.result()
    slow.go_on.set()
    until(lambda: slow.group.dropped, "it to be let go of", 10.0)


@pytest.mark.parametrize(
    ("rank", "to", "from_"),
    [(0, {2, 3, 4}, set()), (1, {2, 3, 4}, set()), (2, set(), {0, 1}), (4, set(), {0, 1})],
)
def test_every_rank_is_connected_with_every_worker(slow: Slow, rank: int, to: set[int], from_: set[int]) -> None:
    """Before anybody knows who sends to whom: whom one end names the other one names too, or both wait for ever."""
    where = Group(store="tcp://127.0.0.1:1", name="g", size=5, rank=rank, form_s=60.0, turn_s=1.0, ranks=2)
    under_way = GroupForming(where, torch.device("cpu"))
    assert slow.begun.wait(60.0)
    assert slow.ends == {"to": to, "from_": from_}
    under_way.discard()


@pytest.mark.parametrize("rank", [0, 7, 8])
@pytest.mark.parametrize("workers", [8, 9])
def test_a_large_group_connects_no_pairs_ahead(slow: Slow, rank: int, workers: int) -> None:
    """Each costs time and memory, and most of them will exchange nothing. All members find the same."""
    where = Group(store="tcp://127.0.0.1:1", name="g", size=8 + workers, rank=rank, form_s=60.0, turn_s=1.0, ranks=8)
    under_way = GroupForming(where, torch.device("cpu"))
    assert slow.begun.wait(60.0)
    others = (
        {"to": frozenset(range(8, 16)), "from_": NO_RANKS}
        if rank < 8
        else {"to": NO_RANKS, "from_": frozenset(range(8))}
    )
    assert slow.ends == (others if workers == 8 else {"to": NO_RANKS, "from_": NO_RANKS})
    under_way.discard()


@pytest.mark.parametrize("kind", [P2PGroup, NixlGroup])
def test_members_that_exchange_messages_are_connected(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """As both ends have named them."""
    asked: list[Any] = []
    memory = (torch.zeros(1, dtype=torch.uint8),)

    def form(*arguments: Any, **more: Any) -> object:
        asked.append((arguments[1], *arguments[4:6], more))
        return kind

    monkeypatch.setattr(kind, "form", form)
    server, nixl = serve_store("127.0.0.1"), kind is NixlGroup
    where = Group(
        store=f"tcp://127.0.0.1:{server.port}", name="g", size=5, rank=2, form_s=60.0, turn_s=1.0, nixl=nixl
    )  # fmt: skip
    to, from_ = frozenset({1}), frozenset({3, 4})
    assert join(where, torch.device("cpu"), to=to, from_=from_, memory=memory) is kind
    ends = {"to": to, "from_": from_}
    assert asked == [("g", 2, 5, {**ends, "memory": memory} if nixl else ends)]
