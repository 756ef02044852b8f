"""What a worker keeps from round to round for one model: its recording, its plan, and the memory that both speak of."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from weightbus.dataplane.copy import (
    CopyTable,
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
from weightbus.dataplane.processes import torch_threads
from weightbus.dataplane.reshard import ConstantFill, LoadTrace
from weightbus.dataplane.tensors import TensorSpec
from weightbus.dataplane.transports import worker_messages as wire
from weightbus.dataplane.transports.sends import GroupForming, warm

from .digest_report import DigestReport
from .load_tracer import NamedTensors, record
from .model_tensors import ModelTensors
from .receive_thread import ReceiveThread

_OPEN_S = 30.0
"""For all memory of one trainer rank."""

_WARM_S = 10.0
"""What may be warmed holds nobody up for longer."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Bound:
    """A plan, with the memory that it reads and writes."""

    exports: tuple[wire.Exports, ...]
    copies: PreparedCopies
    staging: PreparedCopies
    marks: ReadyFlags
    needs: tuple[Mapping[int, NeededParts], Mapping[int, NeededParts]]
    """Of both: what each stage reads that may still be made."""

    @property
    def remark(self) -> str:
        """Why it is slower than it could be."""
        return self.copies.fallback_reason or self.staging.fallback_reason


class WorkerState:
    """Used by one thread at a time."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.busy = threading.Lock()
        """Held during a round."""
        self.touched = False
        """The last replay began to write."""
        self._model = model
        self._held = ModelTensors(model)
        self._device_name = device_name(self._held.device)
        self._peers = readable_peers(self._held.device)
        self._engine = copy_engine_for(self._held.device)
        self._importer = RegionImporter(self._held.device)
        self._layout = ""
        self._tensors: tuple[TensorSpec, ...] = ()
        self._recording: LoadTrace | None = None
        """The last one, of the tensors of the model as they lie."""
        self._constants: list[tuple[torch.Tensor, float]] = []
        self._plan: wire.InstallPlan | None = None
        self._tables: tuple[CopyTable, CopyTable] = (CopyTable.empty(), CopyTable.empty())
        self._evidence: DigestReport | None = None
        """Of the last recording."""
        self._bound: _Bound | None = None
        self._taker: ReceiveThread | None = None
        self._forming: GroupForming | None = None
        """A group for the next one."""
        self._remark = ""

    def hello(self, rank: int) -> wire.Hello:
        """Who this is. A model whose tensors were replaced since has nothing."""
        if not self._held.in_place():
            self._forget()
        plan = self._plan
        return wire.Hello(
            rank=rank,
            device=self._device_name,
            peers=self._peers,
            layout=self._layout,
            recording=self._named,
            plan=plan.plan if plan else "",
            schedule=self._taker.schedule if plan and self._taker and self._taker.alive else "",
            seat=nccl_gpu_id_here(self._device_name),
        )

    @property
    def _named(self) -> str:
        """The digest of what was recorded; where a plan was made of it, as that names it."""
        if self._plan is not None:
            return self._plan.recording
        return self._recording.digest() if self._recording is not None else ""

    def record(self, message: wire.RecordTrace, rank: int) -> LoadTrace:
        """Run the model's loader once; not where that was done with these tensors, and the model is as it was."""
        known, evidence = self._recording, self._evidence
        self._forget()
        recording = None
        if known is not None and known.rank == rank and known.targets == self._held.targets:
            recording = known.reordered(message.tensors)
        if recording is None:
            load = cast("Callable[[NamedTensors], object]", self._model.load_weights)
            recording = record(self._model, load, message.tensors, rank)
            _log.info("weightbus: recorded %s", recording.account)
        else:
            self._evidence = evidence  # of the same memory
            _log.info("weightbus: the loader was recorded with these tensors before")
        self._recording = recording
        self._layout, self._tensors = message.layout, message.tensors
        self._constants = [(self._part(each), each.value) for each in recording.constants]
        return recording

    def prove(self, message: wire.Prove) -> DigestReport:
        """Bind what will be reported of the memory that was recorded, unless it is bound."""
        if not self._layout:
            raise TransferFailed("a proof came before a recording")
        if self._evidence is None or not self._evidence.answers(message):
            self._evidence = None
            names = [target.name for target in self._held.targets]
            self._evidence = DigestReport(message, self._held, names, self._engine)
        return self._evidence

    def warm(self, message: wire.Prove) -> None:
        """Do what the first version would take longer for."""
        evidence = self.prove(message)
        if self._held.device.type == "cuda":
            evidence.warm()
            if message.sent:
                torch_threads.start(partial(_warmed, self._held.device), "weightbus-warm").join(_WARM_S)

    def adopt(self, message: wire.InstallPlan) -> None:
        """Take a plan. What it reads is opened at the first replay."""
        self._unbind()
        self._hang_up()
        self.prove(message.prove)
        self._tables = CopyTable.decode(message.copies), CopyTable.decode(message.staging)
        self._plan = message

    def expect(self, message: wire.Expect, rank: int) -> None:
        """Start the thread that takes what is sent. It connects to the sidecar, and stays."""
        if self._plan is None:
            raise TransferFailed("a schedule came before its plan")
        self._hang_up()
        targets = [*(bytes_of(tensor) for tensor in self._held.tensors), self._buffer]
        self._taker = ReceiveThread(message, rank, targets, self._held.device, self._forming)
        self._forming = None  # whose it is now; if there is no thread, `call_off` finds it still
        self._taker.standing.set()

    def form(self, message: wire.Form) -> None:
        """Begin to join a group, for the thread that will be told to take something in it."""
        self.call_off()
        self._forming = GroupForming(message.group, self._held.device)

    def call_off(self) -> None:
        """The exchange is over: nobody comes for a group that was not taken along."""
        forming, self._forming = self._forming, None
        if forming is not None:
            forming.discard()

    def stand(self, *, standing: bool) -> None:
        """Whether the scheduler stands in the loader: what is sent goes into its parameters only then."""
        if self._taker is not None:
            self._taker.standing.set() if standing else self._taker.standing.clear()

    def flip(self) -> wire.PlanExecuted:
        """Put what was sent into place, load what is no copy, and say what the model holds now."""
        plan, taker = self._plan, self._taker
        if plan is None or taker is None:
            raise TransferFailed("there is no plan by which anything was sent")
        began = time.perf_counter()
        self.touched = True
        taker.flip()
        self._finish(plan)
        return self._proven(began)

    def replay(self, message: wire.ExecutePlan, called_off: Callable[[], bool]) -> wire.PlanExecuted:
        """Copy, load what is no copy, and say what the model holds now.

        Raises `PeerLost` when it is `called_off` while something that it reads is still made.
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
        """Wait for what a stage of `copies` reads; behind that, the model is written to."""

        def ready(stage: int) -> None:
            marks.wait(needs.get(stage, ()), lambda: copies.busy)
            self.touched = True

        return ready

    def _finish(self, plan: wire.InstallPlan) -> None:
        """What is not a copy: padding, and tensors for the engine's own loader."""
        for view, value in self._constants:
            view.fill_(value)
        if plan.staged:
            cast("Callable[[NamedTensors], object]", self._model.load_weights)(self._staged(plan.staged))

    def _proven(self, began: float, waited_s: float = 0.0) -> wire.PlanExecuted:
        if self._evidence is None:
            raise TransferFailed("there is no plan to prove")
        copied = time.perf_counter()
        lanes, odd = self._evidence.found()
        return wire.PlanExecuted(
            lanes=lanes,
            odd=odd,
            copy_s=copied - began - waited_s,
            wait_s=waited_s,
            verify_s=time.perf_counter() - copied,
            remark=self._bound.remark if self._bound is not None else "",
        )

    def release(self) -> None:
        """Let go of the memory of a trainer that is gone: a GPU's is not free again before that."""
        if not self._importer.alive():
            self._unbind()
            self._importer.close()

    def close(self) -> None:
        """Let go of the trainer's memory, and of every plan."""
        self._forget()

    # -- memory -------------------------------------------------------------------------------------------------------

    def _bind(self, plan: wire.InstallPlan, exports: tuple[wire.Exports, ...]) -> _Bound:
        """Open what the plan reads, unless it is open. A generation that has grown is opened anew."""
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

        A loader may change what it is given, or keep it; the buffer is proven afterwards, and written in every round.
        """
        at = 0
        for index in staged:
            spec = self._tensors[index]
            flat = self._buffer[at : at + spec.nbytes]
            yield spec.name, flat.view(getattr(torch, spec.dtype)).view(spec.shape).clone()
            at += -(-spec.nbytes // 16) * 16

    @property
    def _buffer(self) -> torch.Tensor:
        if self._evidence is None:
            raise TransferFailed("nothing is staged before there is a plan")
        return self._evidence.buffer

    def _part(self, constant: ConstantFill) -> torch.Tensor:
        cut = tuple(slice(a, b) for a, b in zip(constant.box.start, constant.box.stop, strict=True))
        part: torch.Tensor = self._held.tensors[constant.target][cut]
        return part

    def _hang_up(self) -> None:
        if self._taker is not None:
            self._taker.close()
            self._taker = None

    def _unbind(self) -> None:
        if self._bound is not None:
            self._bound.copies.close()
            self._bound.staging.close()
            self._bound.marks.close()
            self._bound = None

    def _forget(self) -> None:
        """Everything that speaks of tensors which may have been replaced."""
        self._unbind()
        self._hang_up()
        self._importer.close()
        self._layout, self._plan, self._evidence, self._recording = "", None, None, None
        self._held = ModelTensors(self._model)


def _wanted(called_off: Callable[[], bool]) -> Callable[[], None]:
    def check() -> None:
        if called_off():
            raise PeerLost("the sidecar hung up, or gave up, while what it wants copied was still made")

    return check


def _warmed(device: torch.device) -> None:
    try:
        warm(device)
    except Exception as error:  # noqa: BLE001  the first group does it then, or says what is wrong
        _log.info("weightbus: NCCL was not loaded ahead: %s", error)


def _made(plan: wire.InstallPlan, exports: Sequence[wire.Exports]) -> dict[int, tuple[int, ArenaRegion]]:
    """By number of the source: who makes it part by part."""
    made = {(each.holder, each.made.region): each.made for each in exports if each.made is not None}
    return {number: (at[0], made[at]) for number, at in enumerate(plan.sources) if at in made}
