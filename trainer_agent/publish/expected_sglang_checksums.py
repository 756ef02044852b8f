"""What SGLang must report of its parameters on a GPU, computed from the buckets where they are.

The tables of a layout are made once, per bucket; a version then costs one launch per bucket, and one small copy to the
host at its end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np
import torch

from weightbus.dataplane.digest import ParameterBox, ServedParameter, sglang_checksum as fmix
from weightbus.dataplane.tensors import Manifest


class FmixLayout:
    """Which run of which bucket goes where in which parameter, for one tensor-parallel size.

    Raises `ValueError` when a part does not begin and end on a word: such a layout has no prediction.
    """

    def __init__(self, manifest: Manifest, parameters: Sequence[ServedParameter]) -> None:
        self.manifest = manifest
        self.parameters = parameters
        self._places: dict[int, list[tuple[int, ParameterBox, int]]] = defaultdict(list)
        sizes = [self._place(at, parameter) for at, parameter in enumerate(parameters)]
        self.lanes = fmix.ChecksumLanes(sizes)
        self._tables: dict[int, fmix.Table] = {}
        self._on_device: dict[tuple[int, torch.device], torch.Tensor] = {}
        for index in range(len(manifest.buckets)):
            self._tables[index] = self._table(index)
        self._zeros = self.lanes.zeros()
        for at, (parameter, size) in enumerate(zip(parameters, sizes, strict=True)):
            words = parameter.zero_bytes // fmix.WORD_BYTES
            fmix.accumulate_zeros(words, size // fmix.WORD_BYTES - words, int(self.lanes.first[at]), self._zeros)

    def start(self) -> fmix.Words:
        """Lanes that hold the padding and nothing else."""
        return self._zeros.copy()

    def table(self, index: int) -> fmix.Table:
        """The segments of bucket `index`."""
        return self._tables[index]

    def table_on(self, index: int, device: torch.device) -> torch.Tensor:
        """The same, on `device`; copied there once."""
        found = self._on_device.get((index, device))
        if found is None:
            found = self._on_device[index, device] = torch.as_tensor(self._tables[index], device=device)
        return found

    def _place(self, at: int, parameter: ServedParameter) -> int:
        """Note where every box of a parameter goes; the parameter's bytes."""
        offset = 0
        for box in parameter.boxes:
            self._places[box.tensor].append((at, box, offset))
            offset += _box_bytes(self.manifest, box)
        return offset + parameter.zero_bytes

    def _table(self, index: int) -> fmix.Table:
        bucket, offsets = self.manifest.buckets[index], self.manifest.offsets_of(index)
        tables: list[fmix.Table] = []
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


def names_of(parameters: Sequence[ServedParameter], fed: Collection[int] | None) -> frozenset[str]:
    """The parameters that consist of the tensors `fed`, by their numbers; null: all.

    Raises `ValueError` for one that consists of them in part: a stage holds the whole of a layer, or none of it.
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


class FmixDigester:
    """The checksums of one version. Feed it every bucket once, in any order, then ask for the result."""

    def __init__(self, layout: FmixLayout) -> None:
        self._layout = layout
        self._host = layout.start()
        self._device: torch.Tensor | None = None
        self._missing = set(range(len(layout.manifest.buckets)))

    def feed(self, index: int, memory: torch.Tensor) -> None:
        """Take bucket `index`, packed in the first bytes of `memory`. On a GPU in the order of the current stream."""
        self._missing.discard(index)
        if memory.device.type != "cuda":
            fmix.accumulate(memory.numpy(), self._layout.table(index), self._host)
            return
        from weightbus.dataplane.digest import sglang_checksum_triton as fmix_triton  # noqa: PLC0415 - Triton is there where a GPU is

        if self._device is None:
            self._device = torch.zeros((self._layout.lanes.tiles, 2), dtype=torch.int32, device=memory.device)
        fmix_triton.accumulate(memory, self._layout.table_on(index, memory.device), self._device)

    def result(self, fed: Collection[int] | None = None) -> dict[str, tuple[str, ...]]:
        """Checksums by parameter and rank. Raises `ValueError` when a bucket was not fed.

        With `fed`, the numbers of tensors, of those parameters alone that consist of them.
        """
        names = names_of(self._layout.parameters, fed)
        if self._missing and fed is None:
            raise ValueError(f"buckets {sorted(self._missing)} were not fed: feed all buckets")
        lanes = self._host
        if self._device is not None:
            lanes = lanes + self._device.cpu().numpy().view(np.uint32)
        found: dict[str, list[str]] = defaultdict(list)
        for parameter, checksum in zip(self._layout.parameters, self._layout.lanes.finish(lanes), strict=True):
            if parameter.name in names:
                found[parameter.name].append(checksum)
        return {name: tuple(checksums) for name, checksums in found.items()}


def _box_bytes(manifest: Manifest, box: ParameterBox) -> int:
    _, row_bytes, _, rows = _runs(manifest, box)
    return row_bytes * rows


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
