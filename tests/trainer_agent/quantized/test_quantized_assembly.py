"""What a rank quantizes is made part by part: what lies in a part is final when its mark is set."""

from __future__ import annotations

import pytest
import torch

from weightbus.dataplane.quantize.schemes import fp8_block
from weightbus.dataplane.tensors.manifest import ITEM_BYTES
from weightbus.dataplane.tensors.shards import DTYPES as DTYPE_NAMES
from weightbus.trainer_agent.export.memory_export import PreparingSource
from weightbus.trainer_agent.quantized.quantization_plan import BucketWork, QuantizeJob, RankWork, WeightPlace
from weightbus.trainer_agent.quantized.quantized_assembly import (
    SHARES,
    ArenaReadyFlags,
    ReadyPart,
    ResidentQuantization,
    ready_parts_of,
)

from ...kit.quantized_world import small, tensor_parallel
from .test_quantized_memory import sources_of


def job(weight: int, at: int, nbytes: int, *, held: bool = True) -> QuantizeJob:
    place = WeightPlace(True, at, "uint8", (nbytes,), (1,))
    return QuantizeJob(weight, (nbytes,), object() if held else None, (0, 0), (place,))  # type: ignore[arg-type]


def work(*jobs: QuantizeJob, more: int = 0) -> RankWork:
    """Of jobs that lie one after another, and `more` bytes behind them."""
    end = max((each.targets[0].offset + each.targets[0].shape[0] for each in jobs), default=0)
    return RankWork((BucketWork((), jobs, (), ()),), None, end + more, 0)


def test_parts_grow_with_what_a_reader_has_copied_meanwhile() -> None:
    """Their ends are those of jobs, behind the shares of the bytes; the last one is all there is."""
    many = work(*(job(number, 16 * number, 16) for number in range(64)))

    assert ready_parts_of(many) == (
        ReadyPart(4, 64),
        ReadyPart(8, 128),
        ReadyPart(16, 256),
        ReadyPart(32, 512),
        ReadyPart(64, 1024),
    )
    assert len(ready_parts_of(many)) == len(SHARES) + 1
    flags = ArenaReadyFlags(many)
    assert flags.offset == 1024
    assert flags.arena_bytes == 1024 + 5 * 8
    assert flags.job_cuts == (4, 8, 16, 32)


@pytest.mark.parametrize(
    ("made", "parts"),
    [
        (work(), ()),
        (work(job(0, 0, 100)), (ReadyPart(1, 100),)),
        (work(job(0, 0, 16), job(0, 16, 16), job(1, 32, 32)), (ReadyPart(2, 32), ReadyPart(3, 64))),
        (work(job(0, 0, 16), job(1, 16, 16, held=False), more=32), (ReadyPart(1, 16), ReadyPart(2, 64))),
        (work(job(0, 0, 16, held=False)), (ReadyPart(1, 16),)),
        (work(more=48), (ReadyPart(0, 48),)),
    ],
    ids=["nothing", "one job", "a weight is in one part", "what is gathered is last", "all gathered", "shapes"],
)
def test_parts_of(made: RankWork, parts: tuple[ReadyPart, ...]) -> None:
    """A job that is larger than a share makes a part, and no empty one."""
    assert ready_parts_of(made) == parts


def test_marks_are_set_behind_what_they_speak_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """At each mark all bytes up to the end of its part are final; before the first byte is written, no mark is there.

    What others gather first, and numbers that are written once, are there at the last mark.
    """
    for world in (tensor_parallel(48), tensor_parallel(40)):
        sources = sources_of(world, small(fp8_block((16, 16))))
        for source in sorted(sources, key=lambda each: each.root):
            resident = source._resident
            for _ in range(2):
                check_round(monkeypatch, resident)


def check_round(monkeypatch: pytest.MonkeyPatch, resident: ResidentQuantization) -> None:
    shown: list[tuple[list[int], torch.Tensor]] = []
    mark = ArenaReadyFlags.set

    def watched(self: ArenaReadyFlags, arena: torch.Tensor, part: int, value: int) -> None:
        shown.append((self.of(arena).tolist(), arena.clone()))
        mark(self, arena, part, value)

    begun: list[list[int]] = []
    quantize = ResidentQuantization._quantize

    def first(self: ResidentQuantization, index: int, out: torch.Tensor | None) -> None:
        if not index:
            begun.append(self._flags.of(self._arena).tolist())
        quantize(self, index, out)

    with monkeypatch.context() as watching:
        watching.setattr(ArenaReadyFlags, "set", watched)
        watching.setattr(ResidentQuantization, "_quantize", first)
        resident.prepare()
    parts = resident.parts
    if parts is None:
        assert not shown
        return
    arena = resident._arena
    assert len(shown) == len(parts.ends)
    assert begun == [[0] * len(parts.ends)]
    for part, (marks, then) in enumerate(shown):
        assert marks == [resident.round] * part + [0] * (len(parts.ends) - part)
        assert torch.equal(then[: parts.ends[part]], arena[: parts.ends[part]])
    assert resident._flags.of(resident._arena).tolist() == [resident.round] * len(parts.ends)
    assert all(a < b for a, b in zip(parts.ends, parts.ends[1:], strict=False))


def test_every_result_lies_in_a_part() -> None:
    """All that others read of the arena is in front of the last end, and the marks are behind it."""
    for source in sources_of(tensor_parallel(48), small(fp8_block((16, 16)))):
        assert isinstance(source, PreparingSource)
        source.prepare()
        parts, resident = source.ready_parts(), source._resident
        assert parts is not None
        base = resident._work.base
        memory = source.memory(prepared=True)
        for row in range(len(resident.shards)):
            shard = resident.shards.at(row)
            if shard.view.storage < base:
                continue
            item = ITEM_BYTES[DTYPE_NAMES[shard.view.storage - base]]
            span = sum((n - 1) * step for n, step in zip(shard.box.shape, shard.view.strides, strict=True)) + 1
            assert (shard.view.offset + span) * item <= parts.ends[-1] <= parts.flags
        assert parts.flags % 8 == 0
        arena = memory[parts.storage]
        assert parts.flags + 8 * len(parts.ends) <= arena.numel() * arena.element_size()


def test_no_two_rounds_have_a_number_in_common() -> None:
    """Nor have two trainers, of which one has the other's memory."""
    first, second = (sources_of(tensor_parallel(48), small(fp8_block((16, 16))))[0] for _ in range(2))
    numbers: list[int] = []
    for source in (first, second, first):
        source.prepare()
        numbers.append(source.ready_round())
    assert len(set(numbers)) == 3
    assert numbers[2] == numbers[0] + 1
