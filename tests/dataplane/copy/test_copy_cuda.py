"""Batches for copy engines: what libcuda is told, and that a kernel copies what it refuses."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.copy import copy_cuda as copy_batch
from weightbus.dataplane.copy.copy_cuda import (
    DEFAULT_COPY_STREAMS,
    SHARES,
    CopyBatch,
    CopyRuns,
    CudaCopies,
    CudaCopyEngine,
    PeerCopies,
    copy_streams_setting,
    rows_for_copy_engines,
    split_into_batches,
    split_into_runs,
)
from weightbus.dataplane.copy.copy_engine import StagedCopies, TorchCopies
from weightbus.dataplane.copy.copy_table import CopyTable
from weightbus.dataplane.errors import CopyEnginesUnavailable, PeerLost, Unsupported
from weightbus.dataplane.tensors.shards import DTYPES

from ...kit.fake_batches import NOT_SUPPORTED, Attributes, FakeBatches
from .test_tiles import column, copies, fits, memory

CPU = torch.device("cpu")
U8 = DTYPES.index("uint8")
MB = 2**20


def rows(*runs: int) -> CopyTable:
    """Of bytes, one after another on both sides."""
    run = column(*runs)
    at, zero, wide = np.cumsum(run) - run, run * 0, np.zeros((len(run), 3), np.int64)
    return CopyTable(zero, zero, at, at, zero + U8, zero + U8, run, wide + 1, wide, wide)


MIXED = rows(2 * MB, 5000, 3 * MB, MB, 17)


def test_the_struct_is_that_of_cuda_h() -> None:
    """CUmemcpyAttributes_v1 of CUDA 13.0: sizeof 24, and each field where a compiler of C put it."""
    for kind in (copy_batch._Attributes, Attributes):
        assert ctypes.sizeof(kind) == 24
        places = [getattr(kind, name).offset for name in ("srcAccessOrder", "srcLocHint", "dstLocHint", "flags")]
        assert places == [0, 4, 12, 20]


@pytest.mark.parametrize("branches", [1, 3])
@given(copies())
@settings(max_examples=60, deadline=None)
def test_a_batch_copies_what_the_table_says(branches: int, table: CopyTable) -> None:
    """On as many streams as it says, in turn, as often as it is launched."""
    if not fits(table):
        return
    source, expected, found, driver = memory(1), memory(2), memory(2), FakeBatches()
    TorchCopies(table, [source], [expected]).run()
    runs = split_into_runs(table, column(source.data_ptr()), column(found.data_ptr()))
    batch = CopyBatch(runs, branches, cast("Any", driver))
    before = found.clone()
    streams = [0x5_0000_0001 + at for at in range(len(batch))]
    for _ in range(2):
        found.copy_(before)
        batch.launch(streams)
        assert torch.equal(found, expected)
    assert len(batch) <= branches
    calls = len(driver.launched) // 2
    assert [stream for stream, _ in driver.launched] == [streams[at % len(streams)] for at in range(calls)] * 2
    assert len(set(streams)) == min(branches, calls)
    with pytest.raises(ValueError, match="streams, expected"):
        batch.launch([*streams, 7])
    assert sum(count for _, count in driver.launched) == 2 * len(runs)


def test_a_driver_without_batches_is_told() -> None:
    """A symbol is missing."""
    with pytest.raises(CopyEnginesUnavailable, match=r"older than 13.0.*WEIGHTBUS_WORKER_BRANCHES=0"):
        CopyBatch(CopyRuns(column(1), column(1), column(1), column(0)), 1, cast("Any", object()))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kernel's work is done by torch; bytes of every launch of it."""
    found: list[int] = []
    bind = CudaCopies.__init__

    def binding(self: CudaCopies, device: Any, table: CopyTable, *memory: Any, tiles: Any) -> None:
        sources, targets = memory
        bind(self, device, table, *memory, tiles=tiles)
        self.twin = TorchCopies(table, sources, targets)  # type: ignore[attr-defined]
        self.moves = int(table.target_bytes.sum())  # type: ignore[attr-defined]

    def launch(self: CudaCopies) -> None:
        found.append(self.moves)  # type: ignore[attr-defined]
        self.twin.launch()  # type: ignore[attr-defined]

    monkeypatch.setattr(CudaCopies, "__init__", binding)
    monkeypatch.setattr(CudaCopies, "launch", launch)
    return found


def bound(
    driver: Any, branches: int, *, remote: bool = True
) -> tuple[CudaCopies | StagedCopies | PeerCopies, torch.Tensor, torch.Tensor]:
    """`MIXED`, out of the memory of another GPU, or of the same one."""
    source = torch.randint(0, 256, (7 * MB,), dtype=torch.uint8)
    found, expected = torch.zeros_like(source), torch.zeros_like(source)
    TorchCopies(MIXED, [source], [expected]).run()
    elsewhere = [source.data_ptr()] if remote else []
    return CudaCopyEngine(CPU, branches, elsewhere, driver).prepare_copies(MIXED, [source], [found]), found, expected


def test_engines_and_kernel_share_a_table(launched: list[int]) -> None:
    """Each row is copied by one of the two, in every launch."""
    driver = FakeBatches()
    copies, found, expected = bound(driver, 2)
    for _ in range(2):
        found.zero_()
        copies.launch()
        assert torch.equal(found, expected)
    assert launched == [5017, 5017]
    assert [count for _, count in driver.launched] == [1, 1, 1] * 2
    assert copies.fallback_reason == ""
    copies.close()


@pytest.mark.parametrize("case", ["none asked for", "own memory", "no batches"])
def test_the_kernel_takes_what_engines_do_not(case: str, launched: list[int]) -> None:
    """All rows; and that there are no batches is told."""
    driver = FakeBatches()
    if case == "no batches":
        driver = cast("Any", object())
    branches = 0 if case == "none asked for" else 4
    copies, found, expected = bound(driver, branches, remote=case != "own memory")
    copies.launch()
    assert torch.equal(found, expected)
    assert launched == [int(MIXED.target_bytes.sum())]
    assert ("a kernel copies instead" in copies.fallback_reason) == (case == "no batches")


def test_a_call_that_is_refused_is_the_kernels_from_then_on(launched: list[int]) -> None:
    """In the same launch, all of what the engines would have copied; and it is told, and not tried again."""
    driver = FakeBatches()
    driver.code = NOT_SUPPORTED
    copies, found, expected = bound(driver, 2)
    copies.launch()
    assert torch.equal(found, expected)
    assert "CUDA_ERROR_NOT_SUPPORTED, 801" in copies.fallback_reason
    assert "WEIGHTBUS_WORKER_BRANCHES=0" in copies.fallback_reason
    driver.code = 0
    found.zero_()
    copies.launch()
    assert torch.equal(found, expected)
    assert not driver.launched
    assert launched == [5017, 6 * MB] * 2
    copies.close()


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("branches", [0, 2])
def test_a_stage_is_launched_when_it_is_ready(branches: int) -> None:
    """By engines and kernel alike, what is of earlier stages before; no batch is of two stages."""
    driver = FakeBatches()
    source = torch.randint(1, 256, (7 * MB,), dtype=torch.uint8)
    found = torch.zeros_like(source)
    engine = CudaCopyEngine(CPU, branches, [source.data_ptr()], driver)  # type: ignore[arg-type]
    stages = column(3, 0, 1, 1, 3)
    copies = engine.prepare_copies(MIXED, [source], [found], stages)
    places = [(int(at), int(at + run)) for at, run in zip(MIXED.target_at, MIXED.run, strict=True)]
    asked: list[int] = []

    def ready(stage: int) -> None:
        asked.append(stage)
        for (begin, end), of in zip(places, stages.tolist(), strict=True):
            assert torch.equal(found[begin:end], source[begin:end]) is (of < stage)

    for _ in range(2):
        found.zero_()
        copies.launch(ready)
        assert torch.equal(found[: places[-1][1]], source[: places[-1][1]])
    assert asked == [0, 1, 3] * 2
    assert sum(count for _, count in driver.launched) == (6 if branches else 0)
    copies.close()


@pytest.mark.parametrize("refused", [0, 1, 3])
def test_a_batch_that_is_refused_is_the_kernels_in_its_stage(refused: int, launched: list[int]) -> None:
    """Not what engines have copied before, and what is not ready yet is left for later. The next time it has all."""
    driver = FakeBatches()
    source = torch.randint(1, 256, (8 * MB,), dtype=torch.uint8)
    found, table = torch.zeros_like(source), rows(2 * MB, 3 * MB, MB, MB)
    engine = CudaCopyEngine(CPU, 2, [source.data_ptr()], driver)  # type: ignore[arg-type]
    copies = engine.prepare_copies(table, [source], [found], column(0, 1, 3, 3))
    ends = {0: 2 * MB, 1: 5 * MB, 3: 7 * MB}

    def ready(stage: int) -> None:
        assert not found[ends[stage] - 1]
        driver.code = NOT_SUPPORTED if stage == refused else 0

    copies.launch(ready)

    assert torch.equal(found[: 7 * MB], source[: 7 * MB])
    assert "CUDA_ERROR_NOT_SUPPORTED" in copies.fallback_reason
    copied = {0: 0, 1: 2 * MB, 3: 5 * MB}[refused]
    assert sum(launched) == 7 * MB - copied
    launched.clear()
    copies.launch(lambda _: None)
    assert sum(launched) == 7 * MB
    copies.close()


def test_what_is_not_ready_is_not_launched(launched: list[int]) -> None:
    """Whatever is raised while a stage is waited for: stages before may be there, those after are not."""
    source = torch.ones(7 * MB, dtype=torch.uint8)
    found = torch.zeros_like(source)
    copies = CudaCopyEngine(CPU).prepare_copies(MIXED, [source], [found], column(0, 0, 1, 1, 1))

    def ready(stage: int) -> None:
        if stage:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        copies.launch(ready)
    assert int(found.sum()) == 2 * MB + 5000 == sum(launched)


class Streams:
    """Stands in for torch.cuda: which stream waited for which, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: list[str] = []
        self.busy: set[str] = set()
        self.made = 0
        self.main = self.stream("main", 7)
        monkeypatch.setattr(torch.cuda, "Stream", self.branch)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: self.main)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.told.append("the device has ended"))
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())

    def stream(self, name: str, handle: int) -> Any:
        def wait_stream(other: Any) -> None:
            self.told.append(f"{name} waits for {other.name}")

        def synchronize() -> None:
            self.told.append(f"{name} has ended")

        def query() -> bool:
            return name not in self.busy

        return SimpleNamespace(
            name=name, cuda_stream=handle, wait_stream=wait_stream, synchronize=synchronize, query=query
        )

    def branch(self, _: torch.device) -> Any:
        self.made += 1
        return self.stream(f"branch {self.made}", 7 + self.made)


def test_batches_run_between_what_was_before_and_what_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last step of the server's model, and before anything reads what they wrote: also the proof."""
    streams, driver, here = Streams(monkeypatch), FakeBatches(), torch.zeros(4 * MB, dtype=torch.uint8)
    runs = split_into_runs(rows(MB, MB), column(here.data_ptr()), column(here.data_ptr() + 2 * MB))
    batch = CopyBatch(runs, 2, cast("Any", driver))
    launch = batch.launch

    def told(handles: Sequence[int], stage: int) -> None:
        streams.told.extend(f"branch {handle - 7} copies" for handle in handles)
        launch(handles, stage)

    monkeypatch.setattr(batch, "launch", told)
    kernel = cast("Any", SimpleNamespace(launch=lambda: streams.told.append("the kernel copies")))

    PeerCopies(torch.device("cuda", 0), batch, {0: kernel}, lambda: {0: kernel}, (here,)).run()

    assert streams.told[0] == "the device has ended"
    assert streams.told[-1] == "main has ended"
    assert "the kernel copies" in streams.told
    for branch in ("branch 1", "branch 2"):
        order = [f"{branch} waits for main", f"{branch} copies", f"main waits for {branch}"]
        assert [each for each in streams.told if each in order] == order


def test_nothing_is_under_way_when_a_stage_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a later part waits for did not come: what was launched has ended when that is said.

    Nor was anything launched before the server's last batch had ended.
    """
    streams, driver, here = Streams(monkeypatch), FakeBatches(), torch.zeros(4 * MB, dtype=torch.uint8)
    runs = split_into_runs(rows(MB, MB), column(here.data_ptr()), column(here.data_ptr() + 2 * MB))
    batch = CopyBatch(runs, 2, cast("Any", driver))
    kernel = cast("Any", SimpleNamespace(launch=lambda: streams.told.append("the kernel copies")))
    device = torch.device("cuda", 0)

    def ready(stage: int) -> None:
        if stage:
            raise PeerLost("trainer rank 0 is gone")

    joined = ["main waits for branch 1", "main waits for branch 2"]
    for made, expected in (
        (PeerCopies(device, batch, {0: kernel, 1: kernel}, dict, (here,)), joined),
        (StagedCopies({0: kernel, 1: kernel}, device), []),
    ):
        streams.told.clear()
        with pytest.raises(PeerLost):
            made.run(ready)
        assert streams.told[0] == "the device has ended"
        assert streams.told.count("the kernel copies") == 1
        assert streams.told[-1] == "main has ended"
        assert [each for each in streams.told if each.startswith("main waits for")] == expected


def test_a_peers_memory_follows_no_rank() -> None:
    """Its addresses are in the batch."""
    copies, _, _ = bound(FakeBatches(), 2)
    with pytest.raises(ValueError, match="bound anew"):
        copies.move_source(None)


def test_what_the_environment_may_say() -> None:
    """A number of branches, or nothing; everything else is told by its name."""
    assert copy_streams_setting({}) == copy_streams_setting({"WEIGHTBUS_WORKER_BRANCHES": ""}) == DEFAULT_COPY_STREAMS
    assert [copy_streams_setting({"WEIGHTBUS_WORKER_BRANCHES": each}) for each in ("0", "8")] == [0, 8]
    for wrong in ("-1", "33", "two", "\u0663"):
        with pytest.raises(Unsupported, match=r"WEIGHTBUS_WORKER_BRANCHES.*expected a whole number"):
            copy_streams_setting({"WEIGHTBUS_WORKER_BRANCHES": wrong})


@pytest.mark.parametrize(("busy", "expected"), [("", False), ("main", True), ("branch 2", True), ("other", False)])
def test_copies_are_busy_while_any_of_their_streams_is(
    monkeypatch: pytest.MonkeyPatch, busy: str, *, expected: bool
) -> None:
    """Kernel's or engines'; others' work is none of theirs."""
    streams, here = Streams(monkeypatch), torch.zeros(4 * MB, dtype=torch.uint8)
    runs = split_into_runs(rows(MB, MB), column(here.data_ptr()), column(here.data_ptr() + 2 * MB))
    batch = CopyBatch(runs, 2, cast("Any", FakeBatches()))
    kernel = CudaCopies(CPU, CopyTable.empty(), [], [], tiles=[])
    copies = PeerCopies(torch.device("cuda", 0), batch, {0: kernel}, dict, (here,))
    streams.busy = {busy}

    assert copies.busy is expected
    assert StagedCopies({2: copies}).busy is expected


def test_stages_of_one_stream_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are: it is asked while a paused server waits, in every look at what is to be copied next."""
    streams, asked = Streams(monkeypatch), list[str]()
    streams.main.query = lambda: asked.append("main") or True
    kernel = CudaCopies(CPU, CopyTable.empty(), [], [], tiles=[])
    here = torch.zeros(2 * MB, dtype=torch.uint8)
    runs = split_into_runs(rows(MB), column(here.data_ptr()), column(here.data_ptr() + MB))
    batch = CopyBatch(runs, 1, cast("Any", FakeBatches()))
    for made in (
        StagedCopies(dict.fromkeys(range(9), kernel)),
        PeerCopies(torch.device("cuda", 0), batch, dict.fromkeys(range(9), kernel), dict, (here,)),
    ):
        asked.clear()
        assert not made.busy
        assert asked == ["main"]
    assert not StagedCopies({}).busy


BF16, F32 = DTYPES.index("bfloat16"), DTYPES.index("float32")
MB = 2**20


@pytest.mark.parametrize("most", [2**30, 100, 7])
@given(copies())
@settings(max_examples=60, deadline=None)
def test_runs_copy_what_the_table_says(most: int, table: CopyTable) -> None:
    """Byte for byte and nothing beside it, however small the largest run."""
    if not fits(table):
        return
    source, expected, found = memory(1), memory(2), memory(2)
    TorchCopies(table, [source], [expected]).run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_batch, "MAX_RUN_BYTES", most)
        runs = split_into_runs(table, column(source.data_ptr()), column(found.data_ptr()))
    assert int(runs.nbytes.sum()) == int(table.target_bytes.sum())
    assert 0 < int(runs.nbytes.min()) <= int(runs.nbytes.max()) <= most
    for out, to, nbytes in np.stack([runs.source, runs.target, runs.nbytes], axis=1).tolist():
        ctypes.memmove(to, out, nbytes)

    assert torch.equal(found, expected)


def test_a_whole_tensor_is_several_runs() -> None:
    """So that several engines share it."""
    one, wide = column(0), np.zeros((1, 3), np.int64)
    row = CopyTable(one, one, one, one, one + BF16, one + BF16, column(50 * MB), wide + 1, wide, wide)
    runs = split_into_runs(row, column(0), column(2**40))
    assert runs.nbytes.tolist() == [32 * MB] * 3 + [4 * MB]
    assert runs.source.tolist() == [0, 32 * MB, 64 * MB, 96 * MB]
    assert runs.target.tolist() == [2**40 + at for at in runs.source.tolist()]


def test_kernel_and_copy_engines_divide_rows() -> None:
    """Long runs out of a peer's memory are the engines'; short ones, casts and the GPU's own memory the kernel's."""
    one, wide = column(1, 1, 1, 1, 1, 1), np.zeros((6, 3), np.int64)
    run = column(3 * MB, 3 * MB, 3 * MB, MB - 2, MB, 4096) // 2
    grid, step = wide + 1, wide.copy()
    grid[4:, 2], step[4:, 2] = 64, 2**21
    table = CopyTable(
        column(0, 1, 0, 0, 0, 0), one * 0, one * 0, one * 0, column(BF16, BF16, F32, BF16, BF16, BF16), one * BF16,
        run, grid, step, step,
    )  # fmt: skip

    assert rows_for_copy_engines(table, column(1, 0)).tolist() == [True, False, False, False, True, False]
    assert not rows_for_copy_engines(table, column(0, 0)).any()
    assert rows_for_copy_engines(CopyTable.empty(), column()).tolist() == []


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=400))
def test_calls_are_short_first_and_then_longer(lengths: list[int]) -> None:
    """Together they are all runs, in their order, and none is empty; a call ends within a run of its share's end."""
    nbytes = column(*lengths)
    found = split_into_batches(CopyRuns(np.arange(len(nbytes)), nbytes * 0, nbytes, nbytes * 0))
    assert np.concatenate([each.source for each in found]).tolist() == list(range(len(nbytes)))
    assert all(len(each) for each in found)
    ends = [nbytes.sum() * sum(SHARES[: at + 1]) / sum(SHARES) for at in range(len(SHARES))]
    done = 0
    for each in found:
        done += int(each.nbytes.sum())
        assert any(end - 1 <= done <= end + nbytes.max() for end in ends)


def test_calls_double_until_they_are_all_alike() -> None:
    """What is handed over while one call is copied is at most twice as much, so that nothing waits for the host."""
    found = split_into_batches(
        CopyRuns(column(*range(560)), column(*[0] * 560), column(*[7] * 560), column(*[0] * 560))
    )
    assert [len(each) for each in found] == [10, 10, 20, 40, 80, 80, 80, 80, 80, 80]


def test_a_batch_is_of_one_stage() -> None:
    """Rows that are ready first come first, and bytes are shared out as without stages."""
    nbytes = column(*[10] * 8)
    runs = CopyRuns(np.arange(8), nbytes * 0, nbytes, column(1, 0, 2, 0, 1, 2, 2, 0))

    found = split_into_batches(runs, (1, 1))

    assert [each.source.tolist() for each in found] == [[1, 3, 7], [0], [4], [2, 5, 6]]
    assert [np.unique(each.stage).tolist() for each in found] == [[0], [1], [1], [2]]
