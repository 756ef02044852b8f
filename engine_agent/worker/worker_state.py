"""State of a worker from round to round, for one model: load trace, reshard plan, digest report, and their memory."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np
import torch

from weightbus.dataplane.copy import (
    BoxTable,
    CopyEngine,
    CopyTable,
    Lanes,
    NeededParts,
    PreparedCopies,
    ReadyFlags,
    WaitStage,
    copy_engine_for,
    copy_streams_setting,
    needed_parts_by_stage,
    ready_flags_in,
    stages_of_rows,
)
from weightbus.dataplane.errors import PeerLost, TransferFailed
from weightbus.dataplane.memory import (
    ArenaRegion,
    RegionImporter,
    bytes_of,
    device_name,
    nccl_gpu_id_here,
    readable_peers,
    sizes_of,
)
from weightbus.dataplane.processes import start_thread
from weightbus.dataplane.reshard import ConstantFill, LoadTrace
from weightbus.dataplane.tensors import DTYPES, TensorSpec
from weightbus.dataplane.transports import worker_exchange as wire
from weightbus.dataplane.transports.sends import GroupForming, warm

from .load_tracer import NamedTensors, trace_load
from .model_tensors import ModelTensors
from .receive_thread import ReceiveThread

_OPEN_S = 30.0
"""Deadline for opening all memory of one trainer rank."""

_WARM_S = 10.0
"""Longest wait for libraries that are loaded ahead."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Bound:
    """A plan, with the memory that it reads and writes."""

    exports: tuple[wire.Exports, ...]
    copies: PreparedCopies
    staging: PreparedCopies
    marks: ReadyFlags
    needs: tuple[Mapping[int, NeededParts], Mapping[int, NeededParts]]
    """Parts that each stage of copies, and of staging copies, reads and that may not be ready yet."""

    @property
    def remark(self) -> str:
        """Why it is slower than it could be; empty if it is not."""
        return self.copies.fallback_reason or self.staging.fallback_reason


class WorkerState:
    """The state for one model. Used by one thread at a time."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.busy = threading.Lock()
        """Held during a round."""
        self.touched = False
        """True once the last execution of the plan began to write."""
        self._model = model
        self._held = ModelTensors(model)
        self._device_name = device_name(self._held.device)
        self._peers = readable_peers(self._held.device)
        self._engine = copy_engine_for(self._held.device)
        self._importer = RegionImporter(self._held.device)
        self._layout = ""
        self._tensors: tuple[TensorSpec, ...] = ()
        self._trace: LoadTrace | None = None
        """The last load trace, of the model's tensors where they lie now."""
        self._constants: list[tuple[torch.Tensor, float]] = []
        self._shadowed = modules_with_shadows(model)
        self._plan: wire.InstallPlan | None = None
        self._tables: tuple[CopyTable, CopyTable] = (CopyTable.empty(), CopyTable.empty())
        self._report: DigestReport | None = None
        """For the last load trace."""
        self._bound: _Bound | None = None
        self._receive_thread: ReceiveThread | None = None
        self._forming: GroupForming | None = None
        """A group for the next receive thread."""
        self._remark = ""

    def hello(self, rank: int) -> wire.Hello:
        """Greeting to the sidecar. A model whose tensors were replaced since has neither trace nor plan."""
        if not self._held.in_place():
            self.forget()
        plan = self._plan
        return wire.Hello(
            rank=rank,
            device=self._device_name,
            peers=self._peers,
            layout=self._layout,
            recording=self._named,
            plan=plan.plan if plan else "",
            schedule=self._receive_thread.schedule
            if plan and self._receive_thread and self._receive_thread.alive
            else "",
            nccl_gpu_id=nccl_gpu_id_here(self._device_name),
        )

    @property
    def _named(self) -> str:
        """Digest of the load trace; where a plan was made of it, as the plan names it."""
        if self._plan is not None:
            return self._plan.recording
        return self._trace.digest() if self._trace is not None else ""

    def trace_load(self, message: wire.RecordTrace, rank: int) -> LoadTrace:
        """Trace the model's loader, unless that was done with these tensors and the model is as it was."""
        known, report = self._trace, self._report
        self.forget()
        trace = None
        if known is not None and known.rank == rank and known.targets == self._held.targets:
            trace = known.reordered(message.tensors)
        if trace is None:
            load = cast("Callable[[NamedTensors], object]", self._model.load_weights)
            trace = trace_load(self._model, load, message.tensors, rank)
            _log.info("weightbus: recorded %s", trace.account)
        else:
            self._report = report  # of the same memory
            _log.info("weightbus: the loader was recorded with these tensors before")
        self._trace = trace
        self._layout, self._tensors = message.layout, message.tensors
        self._constants = [(self._part(each), each.value) for each in trace.constants]
        return trace

    def prove(self, message: wire.Prove) -> DigestReport:
        """The digest report on the traced memory, bound to what `message` asks for."""
        if not self._layout:
            raise TransferFailed("a request for digests came before a load trace")
        if self._report is None or not self._report.answers(message):
            self._report = None
            names = [target.name for target in self._held.targets]
            self._report = DigestReport(message, self._held, names, self._engine)
        return self._report

    def warm(self, message: wire.Prove) -> None:
        """Load libraries and kernels that the first version would have to wait for."""
        report = self.prove(message)
        if self._held.device.type == "cuda":
            report.warm()
            if message.sent:
                start_thread(self._load_nccl, "weightbus-warm").join(_WARM_S)

    def _load_nccl(self) -> None:
        try:
            warm(self._held.device)
        except Exception as error:  # noqa: BLE001  the first group loads it then, or fails with the reason
            _log.info("weightbus: NCCL was not loaded ahead: %s", error)

    def install_plan(self, message: wire.InstallPlan) -> None:
        """Take a plan. The memory that it reads is opened at the first execution."""
        self._unbind()
        self._hang_up()
        self.prove(message.prove)
        self._tables = CopyTable.decode(message.copies), CopyTable.decode(message.staging)
        self._plan = message

    def expect(self, message: wire.Expect, rank: int) -> None:
        """Start the receive thread. It connects to the sidecar, and stays."""
        if self._plan is None:
            raise TransferFailed("a schedule came before its plan")
        self._hang_up()
        targets = [*(bytes_of(tensor) for tensor in self._held.tensors), self._buffer]
        self._receive_thread = ReceiveThread(message, rank, targets, self._held.device, self._forming)
        self._forming = None  # the thread has it now; without a thread `call_off` still finds it
        self._receive_thread.in_loader.set()

    def form_group(self, message: wire.FormGroup) -> None:
        """Begin to join a group, for a receive thread that will receive in it."""
        self.call_off()
        self._forming = GroupForming(message.group, self._held.device)

    def call_off(self) -> None:
        """The exchange is over: drop a group that no receive thread has taken."""
        forming, self._forming = self._forming, None
        if forming is not None:
            forming.discard()

    def set_in_loader(self, *, in_loader: bool) -> None:
        """Note whether the scheduler waits in the loader: only then parameters may be written to."""
        if self._receive_thread is not None:
            in_place = self._receive_thread.in_loader
            in_place.set() if in_loader else in_place.clear()

    def swap(self) -> wire.PlanExecuted:
        """Swap in the received tensors, load those that are no copies, and digest the live parameters."""
        plan, thread = self._plan, self._receive_thread
        if plan is None or thread is None:
            raise TransferFailed("there is no plan by which anything was sent")
        began = time.perf_counter()
        self.touched = True
        thread.swap()
        self._finish(plan)
        return self._proven(began)

    def execute_plan(self, message: wire.ExecutePlan, called_off: Callable[[], bool]) -> wire.PlanExecuted:
        """Copy, load the tensors that are no copies, and digest the live parameters.

        Raises `PeerLost` when it is `called_off` while it waits for a part that is not ready.
        """
        plan = self._plan
        if plan is None:
            raise TransferFailed("there is no plan to replay")
        self.touched = False
        began = time.perf_counter()
        bound = self._bind(plan, message.exports)
        rounds = zip(message.exports, message.rounds, strict=bool(message.rounds))
        bound.marks.begin({each.holder: number for each, number in rounds}, message.within_s, _wanted(called_off))
        bound.copies.run(self._ready(bound.copies, bound.needs[0], bound.marks))
        if plan.staged:
            bound.staging.run(self._ready(bound.staging, bound.needs[1], bound.marks))
        self.touched = True
        if bound.remark != self._remark:
            self._remark = bound.remark
            _log.warning("weightbus: %s", bound.remark or "copies are as fast as they can be again")
        self._finish(plan)
        self._importer.check()
        return self._proven(began, bound.marks.seconds)

    def _ready(self, copies: PreparedCopies, needs: Mapping[int, NeededParts], marks: ReadyFlags) -> WaitStage:
        """A wait for the parts that a stage of `copies` reads; after it the model is written to."""

        def ready(stage: int) -> None:
            marks.wait(needs.get(stage, ()), lambda: copies.busy)
            self.touched = True

        return ready

    def _finish(self, plan: wire.InstallPlan) -> None:
        """Fill padding, give staged tensors to the engine's own loader, and bring copies that it keeps up to date."""
        for view, value in self._constants:
            view.fill_(value)
        if plan.staged:
            cast("Callable[[NamedTensors], object]", self._model.load_weights)(self._staged(plan.staged))
        refresh_shadows(self._shadowed)

    def _proven(self, began: float, waited_s: float = 0.0) -> wire.PlanExecuted:
        if self._report is None:
            raise TransferFailed("there is no plan to prove")
        copied = time.perf_counter()
        lanes, odd = self._report.found()
        return wire.PlanExecuted(
            lanes=lanes,
            odd=odd,
            copy_s=copied - began - waited_s,
            wait_s=waited_s,
            verify_s=time.perf_counter() - copied,
            remark=self._bound.remark if self._bound is not None else "",
        )

    def release(self) -> None:
        """Close the memory of a trainer that is gone: memory of a GPU is not free before that."""
        if not self._importer.alive():
            self._unbind()
            self._importer.close()

    def forget(self) -> None:
        """Close the trainer's memory, and drop everything that refers to tensors which may have been replaced."""
        self._unbind()
        self._hang_up()
        self._importer.close()
        self._layout, self._plan, self._report, self._trace = "", None, None, None
        self._held = ModelTensors(self._model)

    # -- memory -------------------------------------------------------------------------------------------------------

    def _bind(self, plan: wire.InstallPlan, exports: tuple[wire.Exports, ...]) -> _Bound:
        """Open the memory that the plan reads, unless it is open. A generation that has grown is opened anew."""
        # A trainer that began anew may have the address and the generation of the one before it: its memory is another.
        if self._bound is not None and self._bound.exports == exports and self._importer.alive():
            return self._bound
        self._unbind()
        self._importer.keep({each.holder for each in exports})
        for each in exports:
            self._importer.open(each.address, each.holder, each.generation, each.regions, _OPEN_S)
        sources = [self._importer.region(holder, region) for holder, region in plan.sources]
        targets = [bytes_of(tensor) for tensor in self._held.tensors]
        copies, staging = self._tables
        remote = [
            source.data_ptr()
            for source, (holder, region) in zip(sources, plan.sources, strict=True)
            if self._importer.remote(holder, region)
        ]
        reader = copy_engine_for(self._held.device, copy_streams_setting(os.environ), remote)
        copies.check(sizes_of(sources), sizes_of(targets))
        staging.check(sizes_of(sources), sizes_of([self._buffer]))
        made = _made(plan, exports)
        marks = {holder: ready_flags_in(sources[number], each) for number, (holder, each) in made.items()}
        tables = (copies, staging)
        stages = [stages_of_rows(table, {number: each for number, (_, each) in made.items()}) for table in tables]
        holders = {number: holder for number, (holder, _) in made.items()}
        needs = [needed_parts_by_stage(table, each, holders) for table, each in zip(tables, stages, strict=True)]
        self._bound = _Bound(
            exports,
            reader.prepare_copies(copies, sources, targets, stages[0] if needs[0] else None),
            reader.prepare_copies(staging, sources, [self._buffer], stages[1] if needs[1] else None),
            ReadyFlags(marks, self._importer.check),
            (needs[0], needs[1]),
        )
        return self._bound

    def _staged(self, staged: Sequence[int]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors in the staging buffer, as reshard_plan.py lays them out: copies, one at a time.

        A loader may change or keep a tensor; the buffer is digested afterwards, and written in every round.
        """
        at = 0
        for index in staged:
            spec = self._tensors[index]
            flat = self._buffer[at : at + spec.nbytes]
            yield spec.name, flat.view(getattr(torch, spec.dtype)).view(spec.shape).clone()
            at += -(-spec.nbytes // 16) * 16

    @property
    def _buffer(self) -> torch.Tensor:
        if self._report is None:
            raise TransferFailed("nothing is staged before there is a plan")
        return self._report.buffer

    def _part(self, constant: ConstantFill) -> torch.Tensor:
        cut = tuple(slice(a, b) for a, b in zip(constant.box.start, constant.box.stop, strict=True))
        part: torch.Tensor = self._held.tensors[constant.target][cut]
        return part

    def _hang_up(self) -> None:
        if self._receive_thread is not None:
            self._receive_thread.close()
            self._receive_thread = None

    def _unbind(self) -> None:
        if self._bound is not None:
            self._bound.copies.close()
            self._bound.staging.close()
            self._bound.marks.close()
            self._bound = None


_SHADOW: Final = "_weight_fp32"
"""Buffer that a router of GLM's MoE models makes of its `weight` in the first forward pass, and computes with from then
on (SGLang up to 0.5.22): no loader writes to it, so an update that goes by loaders alone leaves the routers as they
were."""


def modules_with_shadows(model: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Modules that keep a copy of their weight in float32, or will."""
    return tuple([each for each in model.modules() if _SHADOW in each._buffers and hasattr(each, "weight")])  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def refresh_shadows(modules: Sequence[torch.nn.Module]) -> None:
    """Bring the copies up to date where they are: captured graphs read their memory."""
    pairs = [(shadow, each.weight) for each in modules if (shadow := getattr(each, _SHADOW)) is not None]
    if pairs:
        shadows, weights = zip(*pairs, strict=True)
        torch._foreach_copy_(list(shadows), [each.detach() for each in weights])  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def _wanted(called_off: Callable[[], bool]) -> Callable[[], None]:
    def check() -> None:
        if called_off():
            raise PeerLost("the sidecar hung up, or gave up, while what it wants copied was still made")

    return check


def _made(plan: wire.InstallPlan, exports: Sequence[wire.Exports]) -> dict[int, tuple[int, ArenaRegion]]:
    """The rank that makes a source part by part, and its region, by the source's number."""
    made = {(each.holder, each.made.region): each.made for each in exports if each.made is not None}
    return {number: (at[0], made[at]) for number, at in enumerate(plan.sources) if at in made}


class DigestReport:
    """The digest report on one model's live parameters: tables bound to its memory, which outlive plans and versions.

    Binding takes a while on a GPU, and the first digest of a process longer still: its kernels are loaded. Both depend
    on the load trace alone, and are done ahead of the first version where there is time for it (prerecording.py).
    """

    def __init__(self, asked: wire.Prove, held: ModelTensors, names: Sequence[str], engine: CopyEngine) -> None:
        """`names` are those of the tensors that `held` has. Raises `ManifestError`."""
        device = held.device
        self.of = _named(asked)
        """The request; an equal one need not be bound anew."""
        self.buffer = torch.empty(asked.staging_bytes, dtype=torch.uint8, device=device)
        """Staging buffer of tensors that are given whole to the model's loader."""
        self._odd_buffer = torch.empty(asked.odd_bytes, dtype=torch.uint8, device=device)
        proof, odd = BoxTable.decode(asked.proof, groups=asked.groups), CopyTable.decode(asked.odd)
        memory = [*(bytes_of(tensor) for tensor in held.tensors), self.buffer]
        sizes = sizes_of(memory)
        proof.check(sizes)
        odd.check(sizes, sizes_of([self._odd_buffer]))
        self.proof = engine.prepare_digest(proof, memory)
        self._odd = engine.prepare_copies(odd, memory, [self._odd_buffer])
        self._casts = _cast_checks(odd, memory, [*names, "staging"])

    def answers(self, asked: wire.Prove) -> bool:
        """Whether the report answers the request `asked`."""
        return self.of == _named(asked)

    def found(self) -> tuple[bytes, bytes]:
        """Sums of its groups as little-endian uint64, and the bytes that are read back. Raises `TransferFailed`."""
        lanes: Lanes = self.proof.run()
        if len(self._odd_buffer):  # else it would only wait for the device
            self._odd.run()
        for name, survives in self._casts:
            if not survives():
                raise TransferFailed(
                    f"{name!r} is stored in a wider dtype, and holds values that its own does not have"
                )
        return np.ascontiguousarray(lanes).astype("<u8").tobytes(), self._odd_buffer.cpu().numpy().tobytes()

    def warm(self) -> None:
        """Digest once, so that the device has loaded its kernels; the result is dropped."""
        self.proof.run()
        self._odd.run()


def _named(asked: wire.Prove) -> tuple[bytes, int, bytes, int, int]:
    return asked.proof, asked.groups, asked.odd, asked.odd_bytes, asked.staging_bytes


def _cast_checks(
    odd: CopyTable, regions: Sequence[torch.Tensor], names: Sequence[str]
) -> list[tuple[str, Callable[[], bool]]]:
    """For rows that are read back in a narrower dtype: do the live values survive it? Regions have these names."""
    found: list[tuple[str, Callable[[], bool]]] = []
    for row in np.flatnonzero(odd.casts).tolist():
        stored: torch.dtype = getattr(torch, DTYPES[int(odd.source_dtype[row])])
        served: torch.dtype = getattr(torch, DTYPES[int(odd.target_dtype[row])])
        region = regions[int(odd.source[row])]
        strides = (*(step // stored.itemsize for step in odd.source_step[row].tolist()), 1)
        begin = (int(region.storage_offset()) + int(odd.source_at[row])) // stored.itemsize
        shape = (*odd.grid[row].tolist(), int(odd.run[row]))
        view = torch.empty(0, dtype=stored, device=region.device).set_(region.untyped_storage(), begin, shape, strides)

        def survives(view: torch.Tensor = view, served: torch.dtype = served) -> bool:
            again = view.to(served).to(view.dtype)
            return torch.equal(again.view(torch.uint8), view.contiguous().view(torch.uint8))

        found.append((names[int(odd.source[row])], survives))
    return found
