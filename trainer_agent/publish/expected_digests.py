"""What engines must report of their live parameters after a load, computed while the buckets are at hand.

SGLang's weights_checker on CPU tensors gives the first 8 bytes of the SHA-256 of each parameter's bytes, per rank. The
parameter is fused and cut (dataplane/digest/sglang_layout.py), and its parts may come in several buckets: a hash runs
on as soon as its next part is there, and parts that come too early are kept. On a GPU it gives a checksum of its own,
whose parts may come in any order (expected_sglang_checksums.py).
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from weightbus.control.log import get_log
from weightbus.control.protocol import EngineInfo
from weightbus.dataplane.digest import ParameterBox, ServedParameter, served_layout, sglang_checksum as fmix
from weightbus.dataplane.tensors import LiveDigests, Manifest, TensorSpec

from .expected_sglang_checksums import FmixDigester, FmixLayout, names_of

SHA256: Final = "sglang-sha256-8"
"""Of `EngineInfo.live_digest`: servers on a CPU."""

Want = tuple[str, int]
"""An algorithm and a tensor-parallel size."""

_log = get_log(__name__)

_DIGEST_DIGITS: Final = 16

_Bytes = npt.NDArray[np.uint8]


def layouts_wanted(engines: Mapping[str, EngineInfo]) -> frozenset[Want]:
    """The kinds of engine among `engines` for which a prediction can be compared."""
    return frozenset(
        (info.live_digest, info.tp)
        for info in engines.values()
        if info.live_digest in (SHA256, fmix.ALGORITHM) and info.pp == 1 and info.dp == 1
    )


class LivePlan:
    """Which part of which tensor goes into which hash. Made once for a manifest and a set of kinds of engine."""

    def __init__(self, manifest: Manifest, wanted: Iterable[Want], head_dim: int | None = None) -> None:
        self.manifest = manifest
        self.wanted = frozenset(wanted)
        """What was asked for. Kinds without a known layout are left out of `layouts` and `on_gpu`."""
        self.layouts: dict[int, tuple[ServedParameter, ...]] = {}
        self.on_gpu: dict[int, FmixLayout] = {}
        self.uses: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        """Tensor -> (tensor-parallel size, parameter, position of the box in it), for `layouts`."""
        for algorithm, size in sorted(self.wanted):
            layout = served_layout(manifest.model, manifest.tensors, size, head_dim)
            if layout is None:
                continue
            if algorithm == SHA256:
                self._note(size, layout)
                continue
            try:
                self.on_gpu[size] = FmixLayout(manifest, layout)
            except ValueError as error:
                _log.warning("no_live_digests", tp=size, reason=str(error))

    def _note(self, size: int, layout: tuple[ServedParameter, ...]) -> None:
        self.layouts[size] = layout
        for at, parameter in enumerate(layout):
            for position, box in enumerate(parameter.boxes):
                self.uses[box.tensor].append((size, at, position))


class LiveDigester:
    """The hashes of one version. Feed it every bucket once, in any order, then ask for the result."""

    def __init__(self, plan: LivePlan) -> None:
        self._plan = plan
        self._running = {size: [_Running(parameter) for parameter in layout] for size, layout in plan.layouts.items()}
        self._on_gpu = {size: FmixDigester(layout) for size, layout in plan.on_gpu.items()}
        self._fed: set[int] = set()

    def feed(self, index: int, memory: torch.Tensor) -> None:
        """Take bucket `index`, packed in the first bytes of `memory`. Nothing of it is kept but parts out of turn."""
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
            start = offsets[tensor - bucket.first]
            spec = manifest.tensors[tensor]
            whole = data[start : start + spec.nbytes]
            for size, at, position in self._plan.uses[tensor]:
                running = self._running[size][at]
                running.take(position, _part(whole, spec, running.parameter.boxes[position]))

    def result(self, *, partial: bool = False) -> tuple[LiveDigests, ...]:
        """What engines of each kind must report. Raises `ValueError` when a bucket was not fed.

        With `partial` of those parameters of which a bucket was fed, and as if all others were of another stage.
        """
        fed = self._tensors() if partial else None
        hashed = (
            LiveDigests(SHA256, size, _by_parameter(_touched(self._plan.layouts[size], running, fed)))
            for size, running in sorted(self._running.items())
        )
        mixed = (LiveDigests(fmix.ALGORITHM, size, each.result(fed)) for size, each in sorted(self._on_gpu.items()))
        return (*hashed, *mixed)

    def _tensors(self) -> frozenset[int]:
        """Those that were fed."""
        buckets = [self._plan.manifest.buckets[index] for index in self._fed]
        return frozenset(tensor for bucket in buckets for tensor in range(bucket.first, bucket.last))


def joined(parts: Sequence[tuple[LiveDigests, ...]]) -> tuple[LiveDigests, ...]:
    """What stages have predicted, each of its own parameters; kinds in the order in which the first has them."""
    found: dict[tuple[str, int], dict[str, tuple[str, ...]]] = {}
    for each in (each for part in parts for each in part):
        found.setdefault((each.algorithm, each.tp), {}).update(each.parameters)
    return tuple(LiveDigests(algorithm, tp, parameters) for (algorithm, tp), parameters in found.items())


class _Running:
    """The hash of one parameter on one rank."""

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


def _part(whole: _Bytes, spec: TensorSpec, box: ParameterBox) -> _Bytes:
    """The bytes of `box`; a view when they are contiguous. Layouts cut dimensions 0 and 1 only."""
    dims = len(spec.shape)
    if dims == 0:
        return whole
    row_bytes = spec.nbytes // spec.shape[0]
    column_bytes = row_bytes // spec.shape[1] if dims > 1 else row_bytes
    first = box.start[1] * column_bytes if dims > 1 else 0
    width = box.size[1] * column_bytes if dims > 1 else row_bytes
    table = whole.reshape(spec.shape[0], row_bytes)
    part = table[box.start[0] : box.start[0] + box.size[0], first : first + width]
    return np.ascontiguousarray(part).reshape(-1)


def _touched(
    layout: Sequence[ServedParameter], running: Sequence[_Running], fed: Collection[int] | None
) -> Iterable[_Running]:
    names = names_of(layout, fed)
    return (each for each in running if each.parameter.name in names)


def _by_parameter(running: Iterable[_Running]) -> dict[str, tuple[str, ...]]:
    """Digests by rank. Layouts list the ranks of a parameter in order."""
    found: dict[str, list[str]] = defaultdict(list)
    for each in running:
        found[each.parameter.name].append(each.digest())
    return {name: tuple(digests) for name, digests in found.items()}
