"""A `Source` over another one that serves its weights quantised, as the served checkpoint's own config says.

    trainer's memory --(cast, quantise: each rank its own whole blocks)--> arena --(parcels)--> bucket on the root
    cut blocks -----(parcels, as they would be served)--> raw memory on the root --(quantise)--> bucket

So half of the bytes travel, every expert is quantised once, at its owner, and everything behind this seam (digests,
staging, snapshots, transports, files) sees tensors of the quantised checkpoint and nothing else. Sources that cannot
say where their tensors lie are gathered whole by the root, which quantises them alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

import torch

from weightbus.control.log import get_log
from weightbus.dataplane.manifest import ITEM_BYTES, Manifest, TensorSpec
from weightbus.dataplane.pieces import DTYPES as DTYPE_NAMES
from weightbus.dataplane.pieces import Pieces
from weightbus.dataplane.quantisation import UnknownScheme
from weightbus.dataplane.quantisation_config import Quantisation, outputs, read
from weightbus.dataplane.quantise import PreparedTasks, Task, prepare

from . import checkpoint_folder as folders
from .assembly import DTYPES, Assembler, Exchange, check_manifest
from .errors import UnfinishedCheckpoint
from .parcels import plan
from .quantised_plan import Division, Job, Place, Weight, Work
from .settings import TrainerSettings
from .source import Source, UnsupportedModel

_ELSEWHERE: Final = -1
"""The rank of all but the root, where only the root has anything to do."""

_log = get_log(__name__)


@runtime_checkable
class Described(Protocol):
    """A source that says where what it serves lies, on every rank."""

    @property
    def rank(self) -> int:
        """Of this process, in the source's group."""
        ...

    @property
    def pieces(self) -> Pieces:
        """Every element of every tensor once, the same on every rank; `storage` numbers what `memory` gives."""
        ...

    @property
    def exchange(self) -> Exchange | None:
        """How parcels travel between the ranks that `pieces` names; None where nothing does."""
        ...

    def memory(self) -> Sequence[torch.Tensor]:
        """This rank's own tensors as they are now. Collective."""
        ...


class QuantisedSource:
    """Another source's weights, quantised. Satisfies `Source`."""

    def __init__(
        self,
        source: Source,
        quantisation: Quantisation,
        stored: Mapping[str, TensorSpec] | None = None,
        served: Path | Mapping[str, Any] | None = None,
    ) -> None:
        """`stored` are the tensors of the served checkpoint, where its files are at hand; `served` is that checkpoint.

        Raises `UnknownScheme` for weights of which it cannot be told whether they are quantised, or that cannot be.
        """
        self._source = source
        self.served: Path | Mapping[str, Any] = {} if served is None else served
        """The checkpoint that engines serve: its folder, or the content of its ``config.json``."""
        self._raw = tuple(source.tensors())
        schemes = [(spec, quantisation.scheme_of(spec, stored)) for spec in self._raw]
        self.weights = tuple(
            Weight(spec, scheme, scheme.parts(spec), outputs(spec, scheme)) for spec, scheme in schemes if scheme
        )
        """What is quantised, and into what."""
        made = {weight.spec.name: weight.outputs for weight in self.weights}
        self._tensors = tuple(tensor for spec in self._raw for tensor in made.get(spec.name, (spec,)))
        self._described = source if isinstance(source, Described) else None
        self._planned: tuple[Manifest, _Assembly] | None = None

    @property
    def model(self) -> str:
        """Architecture as the config names it."""
        return self._source.model

    @property
    def root(self) -> bool:
        """The other source's."""
        return self._source.root

    @property
    def device(self) -> torch.device:
        """Where the buckets are."""
        return self._source.device

    def tensors(self) -> Sequence[TensorSpec]:
        """What is served: in place of each weight that is quantised, what it becomes."""
        return self._tensors

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        """Pack bucket `index` of quantised tensors into `out` on the root. Collective; see `Source.assemble`."""
        if (out is not None) != self.root:
            raise ValueError("the root, and only the root, gives a buffer")
        if self._planned is None or (self._planned[0] is not manifest and self._planned[0] != manifest):
            check_manifest(manifest, self._tensors)
            self._planned = (manifest, self._assembly(manifest))
        self._planned[1].run(index, out)

    def agree(self, blob: bytes | None) -> bytes:
        """Hand the root's `blob` to every rank. Collective; see `Source.agree`."""
        return self._source.agree(blob)

    def _assembly(self, manifest: Manifest) -> _Assembly:
        if self._described is None:
            division = Division.of(manifest, self.weights, None)
            return _Assembly(division, self._source, None)
        division = Division.of(manifest, self.weights, self._described.pieces)
        if division.gathered:
            names = sorted(division.weights[index].spec.name for index in division.gathered)
            _log.info("gathered_to_quantise", weights=len(names), of=len(self.weights), first=names[0])
        return _Assembly(division, self._source, self._described)


@dataclass
class _Bound:
    """The jobs of one bucket, bound to memory."""

    at: tuple[int, ...]
    """Where all of that is."""
    tasks: PreparedTasks


class _Assembly:
    """Carries out one rank's work for one manifest."""

    def __init__(self, division: Division, source: Source, described: Described | None) -> None:
        self._source = source
        self._described = described
        self._manifest = division.manifest
        self._weights = division.weights
        rank = described.rank if described else (division.root if source.root else _ELSEWHERE)
        self._work: Work = division.work(rank)
        self._travelling = plan(division.manifest, division.travelling(), rank=rank) if described else ()
        raw_pieces = division.raw_pieces()
        raw = division.raw if raw_pieces is not None else None
        self._raw_plan = plan(raw, raw_pieces, rank=rank) if raw and raw_pieces is not None else ()
        self._rank = rank
        self._storages: list[torch.Tensor] | None = None
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._assembler: Assembler | None = None
        self._gatherer: Assembler | None = None
        self._kept: dict[int, torch.Tensor | None] = {}
        self._bound: dict[int, _Bound] = {}
        self._constants: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.no_grad()
    def run(self, index: int, out: torch.Tensor | None) -> None:
        """Take part in bucket `index`."""
        if index == 0 or (self._described is not None and self._storages is None):
            self._begin()
        self._take_memory()
        work = self._work.buckets[index]
        for number in work.raws:
            if number not in self._kept:
                self._kept[number] = self._gather(number)
        self._quantise(index, out)
        if out is not None:
            for copy in work.copies:
                number, at = copy.raw
                _view(out, copy.target).copy_(_typed(self._raw(number), at, copy.target))
            for shape in work.shapes:
                _view(out, shape.target).copy_(self._numbers(shape.numbers))
        if self._assembler is not None:
            self._assembler.run(index, out, self._source.device)
        self._let_go(index)

    def _begin(self) -> None:
        """A pass begins: the source's tensors may have been put elsewhere."""
        self._kept = {}
        if self._described is None:
            return
        storages = list(self._described.memory())[: self._work.base]
        if self._storages is not None and all(map(_same, storages, self._storages)):
            return
        self._storages = storages
        self._bound = {}
        self._assembler = None

    def _quantise(self, index: int, out: torch.Tensor | None) -> None:
        """This rank's jobs; bound once for as long as all memory stays where it is."""
        work = self._work.buckets[index]
        if not work.jobs:
            return
        gathered = [memory for number in work.raws if (memory := self._kept[number]) is not None]
        at = tuple(each.data_ptr() for each in (self._arena, *gathered, *(() if out is None else (out,))))
        bound = self._bound.get(index)
        if bound is None or bound.at != at or self._away:
            tasks = [self._task(job, out) for job in work.jobs]
            bound = self._bound[index] = _Bound(at, prepare(tasks, self._source.device))
        bound.tasks.run()

    def _take_memory(self) -> None:
        """The arena, and who reads from it and from the source's tensors."""
        if self._arena.numel() < self._work.arena_bytes:
            self._arena = torch.empty(self._work.arena_bytes, dtype=torch.uint8, device=self._source.device)
            self._assembler = None
        if self._described is None or self._assembler is not None:
            return
        assert self._storages is not None
        views = [_whole_items(self._arena, name) for name in DTYPE_NAMES]
        exchange = self._described.exchange
        self._assembler = Assembler(self._travelling, [*self._storages, *views], self._rank, 0, exchange)
        self._gatherer = Assembler(self._raw_plan, self._storages, self._rank, 0, exchange)

    def _task(self, job: Job, out: torch.Tensor | None) -> Task:
        weight = self._weights[job.weight]
        outs = tuple(_view(self._arena if each.arena else _given(out), each) for each in job.targets)
        return Task(weight.scheme, self._source_of(job, weight), DTYPES[weight.spec.dtype], outs)

    def _source_of(self, job: Job, weight: Weight) -> torch.Tensor:
        if job.held is None:
            number, at = job.raw
            nbytes = weight.spec.nbytes
            return self._raw(number)[at : at + nbytes].view(DTYPES[weight.spec.dtype]).view(weight.spec.shape)
        assert self._storages is not None
        storage, view = self._storages[job.held.view.storage], job.held.view
        part = storage.as_strided(job.shape, view.strides, storage.storage_offset() + view.offset)
        return part.to(self._source.device)

    def _numbers(self, numbers: tuple[int, ...]) -> torch.Tensor:
        """On the device of the buckets; models have few different shapes."""
        if numbers not in self._constants:
            self._constants[numbers] = torch.tensor(numbers, device=self._source.device)
        return self._constants[numbers]

    @property
    def _away(self) -> bool:
        """Parameters are in host memory and buckets are not: what was uploaded for a task was of another version."""
        return any(each.device.type != self._source.device.type for each in (self._storages or ())[:1])

    def _gather(self, number: int) -> torch.Tensor | None:
        """A raw bucket in memory of the root; None on the other ranks, which give their parts of it."""
        raw = self._raw_manifest
        memory: torch.Tensor | None = None
        if self._source.root:
            memory = torch.empty(raw.buckets[number].nbytes, dtype=torch.uint8, device=self._source.device)
        if self._described is None:
            self._source.assemble(raw, number, memory)
        else:
            assert self._gatherer is not None
            self._gatherer.run(number, memory, self._source.device)
        return memory

    @property
    def _raw_manifest(self) -> Manifest:
        assert self._work.raw is not None, "nothing is gathered, and something was asked for"
        return self._work.raw

    def _raw(self, number: int) -> torch.Tensor:
        memory = self._kept[number]
        assert memory is not None, "only the root has what was gathered"
        return memory

    def _let_go(self, index: int) -> None:
        """Of what no later bucket needs; after the last one of everything: the memory is the trainer's again."""
        later = {number for work in self._work.buckets[index + 1 :] for number in work.raws}
        self._kept = {number: memory for number, memory in self._kept.items() if number in later}
        if index == len(self._work.buckets) - 1:
            self._kept = {}
            if self._source.device.type == "cpu":
                self._bound = {}  # holds the memory itself, and costs nothing to make again
            self._arena = torch.empty(0, dtype=torch.uint8)
            self._assembler = self._gatherer = None


@runtime_checkable
class KnowsServed(Protocol):
    """A source that was told which checkpoint is served."""

    @property
    def served(self) -> Path | Mapping[str, Any]:
        """The folder of that checkpoint, or the content of its ``config.json``."""
        ...


def as_served(source: Source, settings: TrainerSettings) -> Source:
    """`source`, quantised as `settings` or the source itself say; see `quantised`."""
    if settings.served is not None:
        return quantised(source, settings.served)
    beside = settings.hf_config_dir
    if beside is not None and (beside / "config.json").is_file():
        return quantised(source, beside)
    return quantised(source, source.served if isinstance(source, KnowsServed) else None)


def quantised(source: Source, served: Path | Mapping[str, Any] | None) -> Source:
    """`source` as the served checkpoint wants it: itself where that is not quantised.

    `served` is the checkpoint's folder, or the content of its ``config.json``. Also returns `source` itself when its
    tensors are those of the quantised checkpoint already. Raises `UnsupportedModel` when it cannot be done.
    """
    if served is None:
        return source
    try:
        config = folders.read_config(served, None) if isinstance(served, Path) else served
        quantisation = read(config)
        if quantisation is None:
            _check_no_other(served)
            return source
        stored = _stored(served) if isinstance(served, Path) else None
        if any(spec.dtype in ("float8_e4m3fn", "float8_e5m2", "int32") for spec in source.tensors()):
            return source  # a checkpoint that is published as it lies there; engines compare it with their own
        return QuantisedSource(source, quantisation, stored, served)
    except UnknownScheme as error:
        raise UnsupportedModel(str(error)) from error


def _check_no_other(served: Path | Mapping[str, Any]) -> None:
    """Raise `UnknownScheme` for a quantisation that stands elsewhere than in the config."""
    if isinstance(served, Path) and (served / "hf_quant_config.json").is_file():
        raise UnknownScheme(
            f"{served} is quantised as its hf_quant_config.json says, which is not understood: serve a checkpoint with"
            " a quantization_config, or the plain one"
        )


def _stored(folder: Path) -> Mapping[str, TensorSpec] | None:
    """The tensors of the served checkpoint, by its files' headers; None where only its config is."""
    try:
        return {place.spec.name: place.spec for place in folders.safetensors(folder)}
    except UnfinishedCheckpoint:
        return None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same memory, seen in the same way."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def _given(out: torch.Tensor | None) -> torch.Tensor:
    assert out is not None, "only the root writes into a bucket"
    return out


def _whole_items(memory: torch.Tensor, dtype: str) -> torch.Tensor:
    return memory[: memory.numel() // ITEM_BYTES[dtype] * ITEM_BYTES[dtype]].view(DTYPES[dtype])


def _view(memory: torch.Tensor, place: Place) -> torch.Tensor:
    typed = _whole_items(memory, place.dtype)
    begin = typed.storage_offset() + place.offset // ITEM_BYTES[place.dtype]
    return typed.as_strided(place.shape, place.strides, begin)


def _typed(memory: torch.Tensor, at: int, place: Place) -> torch.Tensor:
    """The gathered tensor, of the same dtype and shape as where it goes."""
    count = ITEM_BYTES[place.dtype]
    for extent in place.shape:
        count *= extent
    return memory[at : at + count].view(DTYPES[place.dtype]).view(place.shape)
