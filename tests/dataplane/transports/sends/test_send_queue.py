"""What a rank does with its part of the schedules, in order, and in which memory. No group."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from weightbus.dataplane.errors import ManifestError
from weightbus.dataplane.processes.connections import Deadline
from weightbus.dataplane.reshard.send_schedule import NOWHERE, SendMessages
from weightbus.dataplane.transports.sends import message_queues as module
from weightbus.dataplane.transports.sends.message_queues import UNDER_WAY, PeerPart, SendQueue

from ....kit.noted_moves import NotedEngine, NotedGroup, byte_rows, lies_in

SIZE = 16
TURNS = 4
TURN_S = 20.0
PEER = 5


def mail(turns: int = TURNS, *, straight_at: int = 0, packed_at: int = SIZE, within: int = 0) -> PeerPart:
    """In each turn a message that lies in one piece and one that is packed out of the second half of its region."""
    count = 2 * turns
    turn, straight = np.arange(count) // 2, np.arange(count) % 2 == 0
    zeros = np.zeros(count, np.int64)
    source_at = np.where(straight, straight_at, 0)
    messages = SendMessages(
        zeros, turn, np.full(count, SIZE), np.where(straight, 0, NOWHERE), source_at, np.full(count, NOWHERE), zeros
    )
    return PeerPart(PEER, messages, byte_rows(*[(0, packed_at, 2 * each + 1, within, SIZE) for each in range(turns)]))


def region() -> torch.Tensor:
    return torch.arange(2 * SIZE, dtype=torch.uint8)


def test_a_turn_is_packed_before_it_is_sent_and_over_none_that_is_on_its_way() -> None:
    """In the lane that messages follow; all have been taken when it is through."""
    notes: list[str] = []
    group = NotedGroup(notes)
    SendQueue([mail()], [region()], NotedEngine(notes)).send(group, TURN_S)
    expected: list[str] = []
    for turn in range(TURNS):
        expected += [f"wait {turn - UNDER_WAY}"] if turn >= UNDER_WAY else []
        expected += ["in", f"copy {turn}", "out", f"post {turn}"]
    assert notes == [*expected, *(f"wait {turn}" for turn in range(TURNS - UNDER_WAY, TURNS))]
    assert {each.peer for each in group.chunks} == {PEER}
    packed, straight = torch.arange(SIZE, 2 * SIZE, dtype=torch.uint8), torch.arange(SIZE, dtype=torch.uint8)
    for number, each in enumerate(group.chunks):
        assert torch.equal(each.memory, packed if number % 2 else straight)


class _Point:
    """Of a device that is still at work in what torch has given away."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def wait(self, deadline: Deadline) -> None:
        deadline.check("the device")
        self._notes.append("vacated")


def test_nothing_is_packed_into_memory_before_the_device_has_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU memory is free for the stream that had it, and turns are packed on another one."""
    notes: list[str] = []
    monkeypatch.setattr(module, "DeviceFence", lambda _device: _Point(notes))
    SendQueue([mail()], [region()], NotedEngine(notes)).send(NotedGroup(notes), TURN_S)
    assert notes[0] == "vacated"


@pytest.mark.parametrize("turns", [1, TURNS])
def test_all_that_is_sent_lies_in_memory_that_it_names(turns: int) -> None:
    """Others read it there, where a group is told of it. It is as much as moves at a time, and let go of in the end."""
    notes: list[str] = []
    memory, group = region(), NotedGroup(notes)
    outbox = SendQueue([mail(turns)], [memory], NotedEngine(notes))
    assert [each.numel() for each in outbox.memory] == [outbox.staging_bytes, 2 * SIZE]
    assert outbox.staging_bytes == min(turns, UNDER_WAY) * SIZE
    assert outbox.nbytes == 2 * turns * SIZE
    outbox.send(group, TURN_S)
    assert all(lies_in(each.memory, outbox.memory) for each in group.chunks)
    outbox.close()
    assert outbox.memory == ()
    assert [note for note in notes if note.startswith("close")] == [f"close {turn}" for turn in range(turns)]


@pytest.mark.parametrize(
    "odd",
    [mail(straight_at=SIZE + 1), mail(packed_at=SIZE + 1), mail(within=(UNDER_WAY - 1) * SIZE + 1)],
    ids=["sent", "packed", "packed into"],
)
def test_nothing_is_sent_of_freed_memory(odd: PeerPart) -> None:
    """Neither as it lies, nor packed; and nothing is packed over what lies behind."""
    with pytest.raises(ManifestError):
        SendQueue([odd], [region()], NotedEngine([]))
