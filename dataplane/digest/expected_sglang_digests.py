"""Digests that SGLang must report of its parameters after a load, computed while buckets are in the staging buffers.

SGLang's weights_checker on CPU tensors gives the first 8 bytes of the SHA-256 of each parameter's bytes, per rank. The
parameter is fused and cut (dataplane/digest/sglang_checksum.py), and its parts may be in several buckets: a hash runs
on as soon as its next part is there, and parts that come too early are kept. On a GPU it gives a checksum of its own,
whose parts may come in any order: tables per bucket are made once, and a version costs one launch per bucket and one
small copy to the host at its end.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ..tensors import LiveDigests, Manifest
from . import sglang_checksum as fmix
from .sglang_checksum import ParameterBox, ServedParameter, served_layout

_LOG: Final = logging.getLogger(__name__)

SHA256: Final = "sglang-sha256-8"
"""Value of `EngineInfo.live_digest` of servers on a CPU."""
_DIGEST_DIGITS: Final = 16

EngineKind = tuple[str, int]
"""An algorithm and a tensor-parallel size."""
_Bytes = npt.NDArray[np.uint8]


class GpuChecksumPlan:
    """Which run of which bucket goes where in which parameter, for one tensor-parallel size.

    Raises `ValueError` if a part does not begin and end on a word: such a layout has no prediction.
    """

    def __init__(self, manifest: Manifest, parameters: Sequence[ServedParameter]) -> None:
        self.manifest = manifest
        self.parameters = parameters
        self._places: dict[int, list[tuple[int, ParameterBox, int]]] = defaultdict(list)
        sizes = [self._place(at, parameter) for at, parameter in enumerate(parameters)]
        self.lanes = fmix.ChecksumLanes(sizes)
        self.tables = [self._table(index) for index in range(len(manifest.buckets))]
        """Segments of each bucket."""
        self._on_device: dict[tuple[int, torch.device], torch.Tensor] = {}
        self.padding = self.lanes.zeros()
        """Lanes that hold the padding and nothing else."""
        for at, (parameter, size) in enumerate(zip(parameters, sizes, strict=True)):
            words = parameter.zero_bytes // fmix.WORD_BYTES
            fmix.accumulate_zeros(words, size // fmix.WORD_BYTES - words, int(self.lanes.first[at]), self.padding)

    def table_on(self, index: int, device: torch.device) -> torch.Tensor:
        """Segments of bucket `index` on `device`; copied there once."""
        found = self._on_device.get((index, device))
        if found is None:
            found = self._on_device[index, device] = torch.as_tensor(self.tables[index], device=device)
        return found

    def _place(self, at: int, parameter: ServedParameter) -> int:
        """Note where every box of a parameter goes; returns the parameter's bytes."""
        offset = 0
        for box in parameter.boxes:
            self._places[box.tensor].append((at, box, offset))
            _, row_bytes, _, rows = _runs(self.manifest, box)
            offset += row_bytes * rows
        return offset + parameter.zero_bytes

    def _table(self, index: int) -> fmix.SegmentTable:
        bucket, offsets = self.manifest.buckets[index], self.manifest.offsets_of(index)
        tables: list[fmix.SegmentTable] = []
        for tensor in range(bucket.first, bucket.last):
            for at, box, offset in self._places[tensor]:
                source, row_bytes, stride, rows = _runs(self.manifest, box)
                source += offsets[tensor - bucket.first]
                if any(value % fmix.WORD_BYTES for value in (source, row_bytes, stride, offset)):
                    raise ValueError(f"a part of {self.parameters[at].name} does not begin or end on a word")
                tile = int(self.lanes.first[at])
                word = offset // fmix.WORD_BYTES
                tables.append(fmix.segments(source, row_bytes, stride, rows, word=word, tile=tile))
        return fmix.join(tables)


def parameters_of(parameters: Sequence[ServedParameter], fed: Collection[int] | None) -> frozenset[str]:
    """Names of the parameters that consist of the tensors `fed`, by their numbers; None: all.

    Raises `ValueError` for a parameter that consists of them in part: a stage holds the whole of a layer, or none of
    it.
    """
    if fed is None:
        return frozenset(parameter.name for parameter in parameters)
    parts: dict[str, set[bool]] = defaultdict(set)
    for parameter in parameters:
        parts[parameter.name].update(box.tensor in fed for box in parameter.boxes)
    torn = sorted(name for name, found in parts.items() if len(found) > 1)
    if torn:
        raise ValueError(f"{torn[0]} lacks a part that was not fed: feed all of its tensors, or none")
    return frozenset(name for name, found in parts.items() if True in found)


class GpuChecksumDigester:
    """Checksums of one version. Feed it every bucket once, in any order, then ask for the result."""

    def __init__(self, layout: GpuChecksumPlan) -> None:
        self._layout = layout
        self._host = layout.padding.copy()
        self._device: torch.Tensor | None = None
        self._missing = set(range(len(layout.manifest.buckets)))

    def feed(self, index: int, memory: torch.Tensor) -> None:
        """Take bucket `index`, packed in the first bytes of `memory`. On a GPU in the order of the current stream."""
        self._missing.discard(index)
        if memory.device.type != "cuda":
            fmix.accumulate(memory.numpy(), self._layout.tables[index], self._host)
            return
        from . import digest_triton as fmix_triton  # noqa: PLC0415 - Triton is there where a GPU is

        if self._device is None:
            self._device = torch.zeros((self._layout.lanes.tiles, 2), dtype=torch.int32, device=memory.device)
        fmix_triton.sum_checksums(memory, self._layout.table_on(index, memory.device), self._device)

    def result(self, fed: Collection[int] | None = None) -> dict[str, tuple[str, ...]]:
        """Checksums by parameter and rank. Raises `ValueError` if a bucket was not fed.

        With `fed`, numbers of tensors, only of the parameters that consist of them.
        """
        names = parameters_of(self._layout.parameters, fed)
        if self._missing and fed is None:
            raise ValueError(f"buckets {sorted(self._missing)} were not fed: feed all buckets")
        lanes = self._host
        if self._device is not None:
            lanes = lanes + self._device.cpu().numpy().view(np.uint32)
        checksums = zip(self._layout.parameters, self._layout.lanes.finish(lanes), strict=True)
        return _by_rank((parameter.name, checksum) for parameter, checksum in checksums if parameter.name in names)


def _runs(manifest: Manifest, box: ParameterBox) -> tuple[int, int, int, int]:
    """A box as (first byte in its tensor, bytes of a run, bytes between runs, runs). Layouts cut dimensions 0 and 1."""
    spec = manifest.tensors[box.tensor]
    if not box.start:
        return 0, spec.nbytes, spec.nbytes, 1
    stride = spec.nbytes // spec.shape[0]
    if len(box.start) == 1:
        return box.start[0] * stride, box.size[0] * stride, box.size[0] * stride, 1
    column = stride // spec.shape[1]
    return box.start[0] * stride + box.start[1] * column, box.size[1] * column, stride, box.size[0]


class SglangDigestPlan:
    """Which part of which tensor goes into which hash. Made once for a manifest and a set of kinds of engine."""

    def __init__(self, manifest: Manifest, wanted: Iterable[EngineKind], head_dim: int | None = None) -> None:
        self.manifest = manifest
        self.head_dim = head_dim
        self.wanted = frozenset(wanted)
        """Kinds that were asked for. Kinds without a known layout are missing in `layouts` and `on_gpu`."""
        self.layouts: dict[int, tuple[ServedParameter, ...]] = {}
        self.on_gpu: dict[int, GpuChecksumPlan] = {}
        self.uses: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        """Tensor -> (tensor-parallel size, parameter, position of the box in it), for `layouts`."""
        for algorithm, size in sorted(self.wanted):
            layout = served_layout(manifest.model, manifest.tensors, size, head_dim)
            if layout is None:
                continue
            if algorithm == SHA256:
                self.layouts[size] = layout
                for at, parameter in enumerate(layout):
                    for position, box in enumerate(parameter.boxes):
                        self.uses[box.tensor].append((size, at, position))
                continue
            try:
                self.on_gpu[size] = GpuChecksumPlan(manifest, layout)
            except ValueError as error:
                _LOG.warning("no live digests at tp %d: %s", size, error)

    def of_kinds(self, wanted: frozenset[EngineKind]) -> SglangDigestPlan:
        """The plan of the same manifest for the kinds `wanted`: this one if it is of them."""
        return self if wanted == self.wanted else SglangDigestPlan(self.manifest, wanted, self.head_dim)


class SglangDigester:
    """Hashes of one version. Feed it every bucket once, in any order, then ask for the result."""

    def __init__(self, plan: SglangDigestPlan) -> None:
        self._plan = plan
        self._running = {size: [_Running(parameter) for parameter in layout] for size, layout in plan.layouts.items()}
        self._on_gpu = {size: GpuChecksumDigester(layout) for size, layout in plan.on_gpu.items()}
        self._fed: set[int] = set()

    def feed(self, index: int, memory: torch.Tensor) -> None:
        """Take bucket `index`, packed in the first bytes of `memory`. Only parts that come too early are copied."""
        self._fed.add(index)
        for digester in self._on_gpu.values():
            digester.feed(index, memory)
        if self._running:
            self._feed_hashes(index, memory)

    def _feed_hashes(self, index: int, memory: torch.Tensor) -> None:
        manifest = self._plan.manifest
        bucket = manifest.buckets[index]
        data: _Bytes = memory[: bucket.nbytes].cpu().numpy()
        offsets = manifest.offsets_of(index)
        for tensor in range(bucket.first, bucket.last):
            whole = data[offsets[tensor - bucket.first] :]
            for size, at, position in self._plan.uses[tensor]:
                running = self._running[size][at]
                start, row_bytes, stride, rows = _runs(manifest, running.parameter.boxes[position])
                part = np.lib.stride_tricks.as_strided(whole[start:], (rows, row_bytes), (stride, 1))
                running.take(position, np.ascontiguousarray(part).reshape(-1))

    def result(self, *, partial: bool = False) -> tuple[LiveDigests, ...]:
        """Digests that engines of each kind must report. Raises `ValueError` if a bucket was not fed.

        With `partial`, only of parameters whose buckets were fed; all others are taken to be of another pipeline stage.
        """
        buckets = [self._plan.manifest.buckets[index] for index in self._fed]
        tensors = frozenset(tensor for bucket in buckets for tensor in range(bucket.first, bucket.last))
        fed = tensors if partial else None
        found: list[LiveDigests] = []
        for size, running in sorted(self._running.items()):
            names = parameters_of(self._plan.layouts[size], fed)
            digests = ((each.parameter.name, each.digest()) for each in running if each.parameter.name in names)
            found.append(LiveDigests(SHA256, size, _by_rank(digests)))
        mixed = (LiveDigests(fmix.ALGORITHM, size, each.result(fed)) for size, each in sorted(self._on_gpu.items()))
        return (*found, *mixed)


def merge_live_digests(parts: Sequence[tuple[LiveDigests, ...]]) -> tuple[LiveDigests, ...]:
    """Join the predictions of pipeline stages, each of its own parameters, in the order in which kinds first occur."""
    found: dict[tuple[str, int], dict[str, tuple[str, ...]]] = {}
    for each in (each for part in parts for each in part):
        found.setdefault((each.algorithm, each.tp), {}).update(each.parameters)
    return tuple(LiveDigests(algorithm, tp, parameters) for (algorithm, tp), parameters in found.items())


class _Running:
    """Hash of one parameter on one rank."""

    def __init__(self, parameter: ServedParameter) -> None:
        self.parameter = parameter
        self._hash = hashlib.sha256()
        self._next = 0
        self._early: dict[int, _Bytes] = {}

    def take(self, position: int, part: _Bytes) -> None:
        if position != self._next:
            self._early[position] = part.copy()
            return
        self._hash.update(part.data)
        self._next += 1
        while self._next in self._early:
            self._hash.update(self._early.pop(self._next).data)
            self._next += 1

    def digest(self) -> str:
        missing = len(self.parameter.boxes) - self._next
        if missing:
            raise ValueError(
                f"{self.parameter.name} of rank {self.parameter.rank} lacks {missing} parts: feed all buckets"
            )
        final = self._hash.copy()
        final.update(bytes(self.parameter.zero_bytes))
        return final.hexdigest()[:_DIGEST_DIGITS]


def _by_rank(digests: Iterable[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """Digests by parameter, in the order of ranks, in which layouts list the ranks of a parameter."""
    found: dict[str, list[str]] = defaultdict(list)
    for name, digest in digests:
        found[name].append(digest)
    return {name: tuple(digests) for name, digests in found.items()}
