"""What a sidecar says to the workers of its server: to each what it has to know, and no more."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import pytest

from weightbus.dataplane.memory.export_map import ArenaRegion
from weightbus.dataplane.processes.connections import Deadline, Frames
from weightbus.dataplane.transports import worker_exchange as wire
from weightbus.dataplane.transports.interface import Exporting
from weightbus.dataplane.transports.worker_exchange import Workers

from ..reshard.test_send_schedule import model

WAIT_S = 20.0


@pytest.fixture
def crew() -> Iterator[tuple[Workers, list[Frames]]]:
    """Two workers that have come, and their ends."""
    workers, ends = Workers(), list[Frames]()
    for rank in range(2):
        ours, theirs = (Frames(end) for end in socket.socketpair())
        workers._workers.append(wire._Worker(ours, wire.Hello(rank=rank, device="cpu")))
        ends.append(theirs)
    yield workers, ends
    workers.close()
    for end in ends:
        end.close()


def test_marks_are_shown_to_readers_of_the_marked_memory(crew: tuple[Workers, list[Frames]]) -> None:
    """A reader of other memory of that rank need not open it anew when the memory is made otherwise than before."""
    workers, ends = crew
    made = ArenaRegion(4, 0, (8, 16), 16)
    exporters = [Exporting(holder=7, address="a", generation=1, round=3)]
    for end in ends:
        wire.WORKER.say(end, wire.PlanExecuted(lanes=b"", odd=b"", copy_s=0.0, verify_s=0.0), Deadline(WAIT_S))

    workers.replay(1, 1, exporters, {7: made}, [{7: (2, 4)}, {7: (2,)}], Deadline(WAIT_S))

    heard = [wire.WORKER.hear(end, Deadline(WAIT_S), "the sidecar") for end in ends]
    shown = [[each.made for each in replay.exports] for replay in heard if isinstance(replay, wire.ExecutePlan)]
    assert shown == [[made], [None]]


def test_an_engine_that_has_recorded_anew_has_no_plan_any_more(crew: tuple[Workers, list[Frames]]) -> None:
    """Also where the same one will be made again: it is given it once more, and nothing is placed by the old."""
    workers, ends = crew
    pieces, _, recording = model(1)
    for worker in workers._workers:
        worker.hello = msgspec.structs.replace(worker.hello, plan="p")
    assert workers.plans == ("p", "p")
    wire.WORKER.say(ends[1], wire.TraceRecorded(recording=recording.encode(), seconds=0.0), Deadline(WAIT_S))

    assert list(workers.recorded([1], pieces.tensors, Deadline(WAIT_S))) == [recording.digest()]

    assert workers.plans == ("p", "")
    assert workers.recordings == ("", recording.digest())
