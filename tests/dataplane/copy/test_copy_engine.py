"""Copies of memory that is read while it is made, and prepared copies that follow their source to another place."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.copy import copy_engine as module
from weightbus.dataplane.copy.copy_cuda import CudaCopyEngine
from weightbus.dataplane.copy.copy_engine import (
    ReadyFlags,
    TorchCopyEngine,
    needed_parts_by_stage,
    ready_flags_in,
    stages_of_rows,
)
from weightbus.dataplane.copy.copy_table import AXES, ITEM_SIZES, CopyTable
from weightbus.dataplane.errors import DeadlineExceeded, ManifestError, PeerLost, StaleSession
from weightbus.dataplane.memory.export_map import ArenaRegion
from weightbus.dataplane.tensors.shards import DTYPES

from .test_tiles import REGION, column, copies, fits, memory


def never() -> bool:
    return False


def alive() -> None: ...


def wanted() -> None: ...


def runs_of(table: CopyTable, row: int) -> list[tuple[int, int]]:
    """First byte and end of each run that a row reads of its source region."""
    nbytes = int(table.run[row] * ITEM_SIZES[table.source_dtype[row]])
    places = np.indices(table.grid[row].tolist()).reshape(3, -1)
    starts: list[int] = (int(table.source_at[row]) + table.source_step[row] @ places).tolist()
    return [(at, at + nbytes) for at in starts]


@given(copies(), st.sets(st.integers(1, 400), min_size=1, max_size=5), st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_a_row_is_of_the_stage_by_which_all_that_it_reads_is_made(table: CopyTable, ends: set[int], begin: int) -> None:
    """Never before; at once, where it lies in front of the arena or behind it."""
    made = ArenaRegion(0, begin, tuple(sorted(begin + end for end in ends)), 0)
    stages = stages_of_rows(table, {0: made})

    for row, stage in enumerate(stages.tolist()):
        if table.grid[row].prod() > 1000:
            continue
        read = runs_of(table, row)
        first, last = min(at for at, _ in read), max(end for _, end in read)
        if not any(at < made.ends[-1] and end > begin for at, end in read):
            assert not stage or (first < made.ends[-1] and last > begin)  # across it: later than it must be
            continue
        assert made.ends[stage - 1] >= min(last, made.ends[-1])
        assert stage == 1 or made.ends[stage - 2] < last
    assert not stages_of_rows(table, {}).any()


def test_a_row_that_is_read_backwards_is_of_the_stage_of_its_end() -> None:
    """Tables come over the wire: torch has no such views, and such a row reads nothing before it is made."""
    flat, wide = np.zeros(1, np.int64), np.ones((1, 3), np.int64)
    grid, step = wide * (1, 1, 3), wide * (0, 0, -8)
    table = CopyTable(flat, flat, flat + 16, flat, flat, flat, flat + 1, grid, step, wide)

    assert stages_of_rows(table, {0: ArenaRegion(0, 0, (4, 10), 0)}).tolist() == [2]


def test_stages_say_whose_parts_they_need() -> None:
    """Each row the parts of the rank that it reads, and nothing of the others."""
    column = np.array([0, 1, 1, 2], np.int64)
    table = SimpleNamespace(source=column)

    found = needed_parts_by_stage(table, np.array([2, 2, 0, 0]), {0: 7, 1: 8})  # type: ignore[arg-type]

    assert found == {2: ((7, 2), (8, 2))}


@pytest.mark.parametrize("made", [ArenaRegion(0, 0, (8,), 57), ArenaRegion(0, 0, (8, 9), 56), ArenaRegion(0, 0, (), 0)])
def test_marks_lie_in_their_region(made: ArenaRegion) -> None:
    """Flags outside of the region are refused."""
    region = torch.arange(64, dtype=torch.uint8)
    with pytest.raises(ManifestError, match="flags"):
        ready_flags_in(region, made)
    found = ready_flags_in(region, ArenaRegion(0, 0, (8, 16), 8))
    assert found.shape == (2,)
    assert found.data_ptr() == region.data_ptr() + 8


def bound(parts: int, round_: int, gone: Callable[[], None] = alive, within_s: float = 30.0) -> tuple[ReadyFlags, Any]:
    memory = torch.zeros(parts, dtype=torch.int64)
    made = ReadyFlags({3: memory}, gone)
    made.begin({3: round_}, within_s, wanted)
    return made, memory


def test_a_part_is_there_when_it_and_all_before_show_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later flags say nothing of earlier parts, and other numbers say nothing at all."""
    flags, memory = bound(3, 9)
    shown = iter([(8, 8, 8), (0, 9, 9), (9, 0, 9), (9, 9, 0)])
    seen: list[tuple[int, ...]] = []

    def step(_: float) -> None:
        seen.append(next(shown))
        memory.copy_(torch.tensor(seen[-1]))

    monkeypatch.setattr(module.time, "sleep", step)
    flags.wait(((3, 1),), never)
    assert seen[-1] == (9, 0, 9)
    flags.wait(((3, 2),), never)
    assert seen[-1] == (9, 9, 0)
    flags.wait((), never)


def test_only_the_time_in_which_nothing_is_copied_was_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is under way meanwhile hides it."""
    for busy in (True, False):
        flags, memory = bound(1, 5)
        looks = [0]

        def step(_: float, memory: torch.Tensor = memory, looks: list[int] = looks) -> None:
            looks[0] += 1
            if looks[0] == 5:
                memory.fill_(5)

        monkeypatch.setattr(module.time, "sleep", step)
        flags.wait(((3, 1),), lambda busy=busy: busy)  # type: ignore[misc]
        assert (flags.seconds > 0) is not busy
        flags.begin({3: 5}, 1.0, wanted)
        assert flags.seconds == 0.0


def test_a_wait_ends_with_its_holder_or_its_deadline() -> None:
    """Named, with the part that is missing."""
    flags, _ = bound(3, 9, within_s=0.05)
    with pytest.raises(DeadlineExceeded, match="part 1 of 3 that trainer rank 3 makes"):
        flags.wait(((3, 2),), never)

    def gone() -> None:
        raise PeerLost("trainer rank 3 is gone")

    flags, _ = bound(3, 9, gone)
    with pytest.raises(PeerLost):
        flags.wait(((3, 1),), never)


def test_a_wait_ends_when_it_is_called_off() -> None:
    """The sidecar that asked for the copies hung up."""

    def unwanted() -> None:
        raise PeerLost("the sidecar hung up")

    flags, _ = bound(3, 9)
    flags.begin({3: 9}, 30.0, unwanted)
    with pytest.raises(PeerLost, match="hung up"):
        flags.wait(((3, 1),), never)


@pytest.mark.parametrize("shown", [(0, 10, 0), (10, 9, 9)])
def test_a_newer_round_ends_the_wait_for_an_older_one(shown: tuple[int, ...]) -> None:
    """What was to be marked never will be: it is replaced by then."""
    flags, memory = bound(3, 9)
    memory.copy_(torch.tensor(shown))

    with pytest.raises(StaleSession, match="round 10, this session is of round 9"):
        flags.wait(((3, 1),), never)


def test_a_rank_that_makes_nothing_in_this_round_is_not_waited_for() -> None:
    """No number: all is there."""
    flags, _ = bound(3, 0, within_s=0.0)
    flags.wait(((3, 3),), never)


class FakeGPU:
    """Stands in for torch.cuda: copies arrive when the event is asked for the third time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.told: list[str] = []
        empty = torch.zeros
        stream = SimpleNamespace(synchronize=lambda: self.told.append("synchronized"))
        event = SimpleNamespace(query=self.query, record=lambda _: setattr(self, "asked", 0))
        monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: stream)
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch, "zeros", lambda *shape, **how: empty(*shape, dtype=how["dtype"]))

    def query(self) -> bool:
        self.asked += 1
        return self.asked > 2


def test_marks_on_a_gpu_are_read_beside_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """By copies of their own, one at a time; nothing is believed before such a copy has ended."""
    monkeypatch.setattr(module, "_SPIN_S", -1.0)
    gpu = FakeGPU(monkeypatch)
    memory = torch.tensor([4, 0])
    all_of_it = {1: memory}
    far = module._DeviceFlags(all_of_it, torch.device("cuda", 0))

    assert far.look(all_of_it) == {}
    assert far.look(all_of_it) == {}
    assert far.look(all_of_it) == {1: [4, 0]}
    memory[1] = 4
    monkeypatch.setattr(module, "_SPIN_S", 10.0)
    assert far.look(all_of_it) == {1: [4, 4]}
    far.close()
    assert gpu.told == ["synchronized"]


def on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, **memory: torch.Tensor
) -> tuple[ReadyFlags, FakeGPU, list[tuple[int, ...]]]:
    """Ready flags of ranks 0, 1, ... which are said to be on a GPU; and whose are looked at, look by look."""
    gpu, looks, look = FakeGPU(monkeypatch), list[tuple[int, ...]](), module._DeviceFlags.look
    monkeypatch.setattr(
        module._DeviceFlags, "look", lambda self, flags: (looks.append(tuple(flags)), look(self, flags))[1]
    )
    monkeypatch.setattr(module, "_SPIN_S", 10.0)
    flags = ReadyFlags(dict(enumerate(memory.values())), alive)
    flags._far = module._DeviceFlags(flags._flags, torch.device("cuda", 0))
    return flags, gpu, looks


def test_a_rank_that_has_shown_everything_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look costs a copy for each rank, beside the copies that the server waits for. The next round is another."""
    first, second = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    flags, _, looks = on_a_gpu(monkeypatch, first=first, second=second)
    for round_ in (5, 6):
        looks.clear()
        flags.begin({0: round_, 1: round_}, 30.0, wanted)
        first.fill_(round_)

        def step(_: float, round_: int = round_) -> None:
            second[len(looks) - 1] = round_

        monkeypatch.setattr(module.time, "sleep", step)
        flags.wait(((0, 2), (1, 2)), never)
        assert looks == [(0, 1), (1,), (1,)]


def test_memory_is_let_go_of_when_nothing_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look may be under way when the wait has ended: what it reads is unmapped next."""
    flags, gpu, _ = on_a_gpu(monkeypatch, only=torch.zeros(1, dtype=torch.int64))

    flags.close()

    assert gpu.told == ["synchronized"]
    flags.close()


# Prepared copies follow their source to another place, and let go of it. What they copy: test_tiles.py.


CPU = torch.device("cpu")
BYTES = column(DTYPES.index("uint8"))
ONE, NONE = np.ones((1, AXES), np.int64), np.zeros((1, AXES), np.int64)
ROW = CopyTable(column(0), column(0), column(64), column(0), BYTES, BYTES, column(4096), ONE, NONE, NONE)


@given(copies())
@settings(max_examples=100, deadline=None)
def test_what_follows_copies_as_if_it_were_bound_anew(table: CopyTable) -> None:
    """The CPU's engine, to any place, by way of nowhere."""
    if not fits(table):
        return
    first, second, found, expected = memory(1), memory(3), memory(2), memory(2)
    prepared = TorchCopyEngine().prepare_copies(table, [first], [found])
    prepared.move_source(None)
    prepared.move_source(second)
    prepared.run()

    TorchCopyEngine().prepare_copies(table, [second], [expected]).run()
    assert torch.equal(found, expected)


@given(copies())
@settings(max_examples=100, deadline=None)
def test_a_gpus_tiles_follow(table: CopyTable) -> None:
    """They are those of a table that is bound anew, in the same places; tiles need no GPU to be made."""
    if not fits(table):
        return
    whole, target = torch.zeros(3 * REGION, dtype=torch.uint8), memory(2)
    engine, region = CudaCopyEngine(CPU), whole[REGION:]
    prepared = engine.prepare_copies(table, [whole], [target])
    places = [tiles.data_ptr() for _, tiles in prepared._tiles]
    for source in (region, None, whole, region):
        prepared.move_source(source)
        anew = engine.prepare_copies(table, [whole if source is whole else region], [target])
        for (size, tiles), (expected_size, expected) in zip(prepared._tiles, anew._tiles, strict=True):
            assert size == expected_size
            assert torch.equal(tiles, expected)
    assert places == [tiles.data_ptr() for _, tiles in prepared._tiles]


@pytest.mark.parametrize("engine", [TorchCopyEngine(), CudaCopyEngine(CPU)], ids=["torch", "cuda"])
def test_what_lies_nowhere_is_not_held(engine: TorchCopyEngine | CudaCopyEngine) -> None:
    """Its memory is free for others."""
    source, target = memory(1), memory(2)
    prepared = engine.prepare_copies(ROW, [source], [target])
    watched = weakref.ref(source.untyped_storage())
    prepared.move_source(None)
    del source
    assert watched() is None


def test_another_alignment_is_refused() -> None:
    """A tile's vectors lie on multiples of their size, on both sides."""
    whole = memory(1)
    prepared = CudaCopyEngine(CPU).prepare_copies(ROW, [whole], [memory(2)])
    with pytest.raises(ValueError, match="cannot be followed"):
        prepared.move_source(whole[8:])
