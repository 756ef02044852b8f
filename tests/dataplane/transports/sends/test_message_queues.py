"""What a worker does with its part of a schedule, in order, and in which memory. No group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from weightbus.dataplane.copy.copy_table import CopyTable
from weightbus.dataplane.errors import ManifestError
from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.reshard.send_schedule import NOWHERE, SendMessages
from weightbus.dataplane.transports.sends import message_queues as module
from weightbus.dataplane.transports.sends.message_queues import UNDER_WAY, ReceiveQueue, beside_bytes
from weightbus.dataplane.transports.sends.p2p_group import P2PChunk

from ....kit.noted_moves import NotedEngine, NotedGroup, byte_rows, lies_in

SIZE = 16
TURNS = 3
TURN_S = 20.0
HOLDER = 1
WAYS = pytest.mark.parametrize("beside", [False, True], ids=["in place", "beside"])


class Part(NamedTuple):
    """Of a schedule."""

    messages: SendMessages
    unpack: CopyTable


def part(*, straight_at: int = 0, unpacked_at: int = SIZE, within: int = 0) -> Part:
    """In each turn a message for the first half of the parameter and one that is unpacked into the second."""
    count = 2 * TURNS
    turn, straight, zeros = np.arange(count) // 2, np.arange(count) % 2 == 0, np.zeros(count, np.int64)
    messages = SendMessages(
        np.full(count, HOLDER), turn, np.full(count, SIZE), np.full(count, NOWHERE), zeros,
        np.where(straight, 0, NOWHERE), np.where(straight, straight_at, 0),
    )  # fmt: skip
    rows = [(2 * each + 1, within, 0, unpacked_at, SIZE) for each in range(TURNS)]
    return Part(messages, byte_rows(*rows))


def inbox(found: Part, notes: list[str], *, beside: bool, parameter: torch.Tensor | None = None) -> ReceiveQueue:
    held = torch.zeros(2 * SIZE, dtype=torch.uint8) if parameter is None else parameter
    return ReceiveQueue(found.messages, found.unpack, [held], NotedEngine(notes), torch.device("cpu"), beside=beside)


def test_a_turn_is_unpacked_when_it_has_come_and_before_its_room_is_used_again() -> None:
    """In the lane that the next messages follow; nothing is under way when all is said to be there."""
    notes: list[str] = []
    inbox(part(), notes, beside=False).receive(NotedGroup(notes), TURN_S)
    expected = [f"post {turn}" for turn in range(UNDER_WAY)]
    for turn in range(TURNS):
        expected += [f"wait {turn}", "in", f"copy {turn}", "out"]
        expected += [f"post {turn + UNDER_WAY}"] if turn + UNDER_WAY < TURNS else []
    assert notes == [*expected, "settle"]


@WAYS
def test_all_that_is_received_lies_in_memory_that_it_names(*, beside: bool) -> None:
    """A group may have to know it. Of what is taken beside the parameters nothing is received into them."""
    notes: list[str] = []
    parameter, group = torch.zeros(2 * SIZE, dtype=torch.uint8), NotedGroup(notes)
    box = inbox(part(), notes, beside=beside, parameter=parameter)
    box.receive(group, TURN_S)
    assert len(group.chunks) == 2 * TURNS
    assert {each.peer for each in group.chunks} == {HOLDER}
    assert all(lies_in(each.memory, box.memory) for each in group.chunks)
    assert lies_in(parameter, box.memory) is not beside
    assert sum(lies_in(each.memory, [parameter]) for each in group.chunks) == (0 if beside else TURNS)
    assert box.staging_bytes == (beside_bytes(part().messages) if beside else UNDER_WAY * SIZE)
    box.close()
    closed = [note for note in notes if note.startswith("close")]
    assert closed == (["close all"] if beside else [f"close {turn}" for turn in range(TURNS)])


def test_a_staged_version_is_freed_once_it_is_let_go_of() -> None:
    """The scheduler has this memory for its requests: neither messages nor copies keep it. Then there is other."""
    box = inbox(part(), [], beside=True)
    for _ in range(2):
        box.attach()
        (arena,) = box.memory
        memory = StorageWeakRef(arena.untyped_storage())
        del arena
        box.swap()
        assert not memory.expired()
        box.detach()
        assert memory.expired()
        assert box.memory == ()


def test_nothing_is_done_for_each_message_before_the_first_turn_is_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be tens of thousands, and memory is taken anew for each version: views are made turn by turn."""
    notes: list[str] = []
    box = inbox(part(), notes, beside=True)
    monkeypatch.setattr(module, "P2PChunk", lambda *of: (notes.append("view"), P2PChunk(*of))[1])
    for _ in range(2):
        notes.clear()
        box.detach()
        box.attach()
        assert not notes
        box.receive(NotedGroup(notes), TURN_S)
        begun = [note for note in notes if note.startswith(("view", "post"))]
        assert begun == [note for turn in range(TURNS) for note in ("view", "view", f"post {turn}")]


def test_a_receive_that_is_given_up_has_nothing_of_the_memory_that_comes_after_it() -> None:
    """It may be stuck in a group that is over, and go on when the next version is being taken."""
    box, group = inbox(part(), [], beside=True), NotedGroup([])
    post = group.post

    def post_late(sends: Sequence[P2PChunk], receives: Sequence[P2PChunk]) -> object:
        if not group.chunks:
            box.detach()
            box.attach()
        return post(sends, receives)

    group.post = post_late  # type: ignore[method-assign, assignment]
    box.receive(group, TURN_S)
    assert len(group.chunks) == 2 * TURNS
    assert not any(lies_in(each.memory, box.memory) for each in group.chunks)


class _Point:
    """Of a device that is still at work in what torch has given away."""

    def __init__(self, notes: list[str]) -> None:
        notes.append("given")
        self._notes = notes

    def wait(self, deadline: Deadline) -> None:
        deadline.check("the device")
        self._notes.append("vacated")


@WAYS
def test_nothing_arrives_in_memory_before_the_device_has_left_it(
    monkeypatch: pytest.MonkeyPatch, *, beside: bool
) -> None:
    """On a GPU memory is free for the stream that had it, and messages arrive on another one."""
    notes: list[str] = []
    monkeypatch.setattr(module, "DeviceFence", lambda _device: _Point(notes))
    box = inbox(part(), notes, beside=beside)
    posts = [f"post {turn}" for turn in range(TURNS)]
    for given in (["given"], ["given"] if beside else []):
        box.attach()
        box.receive(NotedGroup(notes), TURN_S)
        told = [note for note in notes if note in {"given", "vacated"} or note.startswith("post")]
        assert told == [*given, "vacated", *posts]
        box.detach()
        notes.clear()


@WAYS
@pytest.mark.parametrize(
    "odd",
    [part(straight_at=SIZE + 1), part(unpacked_at=SIZE + 1), part(within=2 * TURNS * SIZE)],
    ids=["received", "unpacked", "unpacked from"],
)
def test_nothing_is_written_into_freed_memory(odd: Part, *, beside: bool) -> None:
    """Neither from the wire nor out of staging; and nothing is unpacked of what lies behind that."""
    with pytest.raises(ManifestError):
        inbox(odd, [], beside=beside)
