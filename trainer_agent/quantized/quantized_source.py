"""A `Source` over another one that serves its weights quantized, as the served checkpoint's own config says.

    trainer memory --(cast, quantize: each rank its own whole blocks)--> arena --(gather messages)--> bucket on the root
    cut blocks -----(gather messages, as they would be served)--> raw memory on the root --(quantize)--> bucket

Half of the bytes travel, every expert is quantized once, at its owner, and everything behind this interface (digests,
staging, snapshots, transports, files) sees tensors of the quantized checkpoint and nothing else. Sources that do
not know the places of their shards are gathered whole by the root, which quantizes them alone.

Engines that copy memory themselves read what ranks quantize into memory that stays, and unquantized tensors where they
lie: shard to shard, with no bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from weightbus.control.log import get_log
from weightbus.dataplane.copy import Lanes
from weightbus.dataplane.memory import ArenaParts
from weightbus.dataplane.quantize import (
    FusedDigests,
    Quantization,
    UnknownScheme,
    quantized_tensors,
    read_quantization_config,
    tile_shape,
)
from weightbus.dataplane.tensors import Left, Manifest, Shards, TensorSpec

from ..assembly import BucketPlanCache, check_manifest
from ..checkpoints import checkpoint_folder as folders
from ..machine import UnfinishedCheckpoint
from ..settings import TrainerSettings
from ..source import PipelineSource, Source, UnsupportedModel
from .quantization_plan import QuantizedWeight, WeightDivision
from .quantized_assembly import LocatedSource, QuantizedAssembly, ReadableSource, ResidentQuantization

_log = get_log(__name__)


class QuantizedSource:
    """Another source's weights, quantized. Satisfies `Source`."""

    def __init__(
        self,
        source: Source,
        quantization: Quantization,
        stored: Mapping[str, TensorSpec] | None = None,
        served: Path | Mapping[str, Any] | None = None,
    ) -> None:
        """`stored` are the tensors of the served checkpoint, where its files are at hand; `served` is that checkpoint.

        Raises `UnknownScheme` for weights that cannot be quantized, or of which it is unknown whether they are.
        """
        self.model, self.root, self.device = source.model, source.root, source.device
        self._source = source
        self.served: Path | Mapping[str, Any] = {} if served is None else served
        """The checkpoint that engines serve: its folder, or the content of its ``config.json``."""
        self.left: Sequence[Left] = getattr(source, "left", ())
        """See `unsent_of`."""
        self._raw = tuple(source.tensors())
        schemes = [(spec, quantization.scheme_of(spec, stored)) for spec in self._raw]
        self.weights = tuple(
            QuantizedWeight(spec, scheme, scheme.parts(spec), quantized_tensors(spec, scheme))
            for spec, scheme in schemes
            if scheme
        )
        """Weights that are quantized, and what they become."""
        if not self.weights:
            why = "files leave all of them as they are" if stored else "quantization_config means none of them"
            raise UnknownScheme(
                f"none of {len(self._raw)} tensors would be quantized, and the served checkpoint says that it is: its"
                f" {why}; give the checkpoint that engines serve, or the plain one if that is it"
            )
        slow = [each for each in self.weights if tile_shape(each.scheme, each.spec.shape) is None]
        if slow and source.device.type == "cuda":
            _log.warning(
                "quantized_without_a_kernel",
                weights=len(slow),
                of=len(self.weights),
                first=slow[0].spec.name,
                scheme=slow[0].scheme.name,
                reason="one block of it fits no program: several passes of torch for each weight, many times as slow",
            )
        made = {weight.spec.name: weight.outputs for weight in self.weights}
        self._tensors = tuple(tensor for spec in self._raw for tensor in made.get(spec.name, (spec,)))
        self._located = source if isinstance(source, LocatedSource) else None
        self._planned = BucketPlanCache[QuantizedAssembly]()

    def tensors(self) -> Sequence[TensorSpec]:
        """Served tensors: in place of each quantized weight, the tensors it becomes."""
        return self._tensors

    def assemble(
        self, manifest: Manifest, index: int, out: torch.Tensor | None, roots: Sequence[int] | None = None
    ) -> None:
        """Pack bucket `index` of quantized tensors into `out` on its root. Collective; see `PipelineSource`."""
        if (out is not None) != self._is_root(index, roots):
            raise ValueError("the root of a bucket, and only its root, gives a buffer")
        self._planned.of(manifest, roots, self._assembly).run(index, out)

    def agree(self, blob: bytes | None) -> bytes:
        """Send the root's `blob` to every rank. Collective; see `Source.agree`."""
        return self._source.agree(blob)

    def _is_root(self, index: int, roots: Sequence[int] | None) -> bool:
        if roots is None or self._located is None:
            return self.root
        return self._located.rank == roots[index]

    def _assembly(self, manifest: Manifest, roots: Sequence[int] | None) -> QuantizedAssembly:
        check_manifest(manifest, self._tensors)
        if self._located is None:
            division = WeightDivision(manifest, self.weights, None)
            return QuantizedAssembly(division, self._source, None)
        division = WeightDivision(manifest, self.weights, self._located.shards, roots)
        if division.gathered:
            names = sorted(division.weights[index].spec.name for index in division.gathered)
            _log.info("gathered_to_quantize", weights=len(names), of=len(self.weights), first=names[0])
        return QuantizedAssembly(division, self._source, self._located)


class ReadableQuantizedSource(QuantizedSource):
    """A quantized source with memory that engines can read. Satisfies `PreparingSource`, too.

    Costs every rank the bytes of its quantized weights, from the first export on.
    """

    def __init__(
        self,
        source: ReadableSource,
        quantization: Quantization,
        stored: Mapping[str, TensorSpec] | None = None,
        served: Path | Mapping[str, Any] | None = None,
    ) -> None:
        """As `QuantizedSource`."""
        super().__init__(source, quantization, stored, served)
        self._readable = source

    @property
    def rank(self) -> int:
        """Rank of this process in the other source's group."""
        return self._readable.rank

    def roots(self) -> Sequence[int]:
        """Tensors of a weight are assembled where the other source would assemble the weight."""
        if not isinstance(self._readable, PipelineSource):
            return (0,) * len(self._tensors)
        raw = dict(zip(self._raw, self._readable.roots(), strict=True))
        made = {weight.spec: len(weight.outputs) for weight in self.weights}
        return tuple(raw[spec] for spec in self._raw for _ in range(made.get(spec, 1)))

    def local_shards(self, tensors: Sequence[TensorSpec]) -> Shards:
        """Shards that this rank quantizes, once in the group, and all of its unquantized shards."""
        return self._resident.shards.ordered(tensors)

    def prepare(self) -> None:
        """Begin to quantize this rank's tensors as they are now. Collective; see `PreparingSource`."""
        self._resident.prepare()

    def memory(self, *, prepared: bool = False) -> Sequence[torch.Tensor]:
        """This rank's tensors, and behind them what they are quantized into, as they are now. Collective.

        `prepared`: as of the last `prepare`.
        """
        if not prepared:
            self._resident.prepare()
        return self._resident.memory

    def summed(self, tensors: Sequence[TensorSpec]) -> FusedDigests:
        """Shards of `local_shards` whose checksums are accumulated; see `PreparingSource`."""
        resident = self._resident
        number = {spec.name: index for index, spec in enumerate(tensors)}
        of = np.array([number[name] for name in resident.sums_of], np.int64)
        return FusedDigests(resident.summed.ordered(tensors), of)

    def sums(self) -> Lanes:
        """(2, checksums of `summed`) uint64, as of the last `prepare`. Blocks until it has ended."""
        return self._resident.sums()

    def ready_parts(self) -> ArenaParts | None:
        """Parts of `memory` with ready flags; see `PreparingSource`."""
        return self._resident.parts

    def ready_round(self) -> int:
        """Value of the ready flags since the last `prepare`."""
        return self._resident.round

    def collect(self, blob: bytes) -> Sequence[bytes]:
        """Gather `blob` of every rank, by rank. Collective."""
        return self._readable.collect(blob)

    @cached_property
    def _resident(self) -> ResidentQuantization:
        manifest = Manifest.of(self.model, self.tensors())
        return ResidentQuantization(WeightDivision(manifest, self.weights, self._readable.shards), self._readable)


@runtime_checkable
class KnowsServed(Protocol):
    """A source that was told which checkpoint is served."""

    @property
    def served(self) -> Path | Mapping[str, Any]:
        """The folder of that checkpoint, or the content of its ``config.json``."""
        ...


def served_folder(source: Source, settings: TrainerSettings) -> Path | None:
    """Folder of the served checkpoint, as `settings` or the source itself say; None where neither does."""
    served = source.served if isinstance(source, KnowsServed) else None
    return settings.hf_config_dir or settings.served or (served if isinstance(served, Path) else None)


def as_served(source: Source, settings: TrainerSettings) -> Source:
    """`source`, quantized as `settings` or the source itself say; see `quantized`."""
    if settings.served is not None:
        return quantized(source, settings.served)
    beside = settings.hf_config_dir
    if beside is not None and (beside / "config.json").is_file():
        return quantized(source, beside)
    return quantized(source, source.served if isinstance(source, KnowsServed) else None)


def quantized(source: Source, served: Path | Mapping[str, Any] | None) -> Source:
    """`source` as the served checkpoint requires it: itself if that is not quantized.

    `served` is the checkpoint's folder, or the content of its ``config.json``. Also returns `source` itself if its
    tensors are those of the quantized checkpoint already. Raises `UnsupportedModel` if it cannot be quantized so.
    """
    if served is None:
        return source
    try:
        config = folders.served_config(served) if isinstance(served, Path) else served
        quantization = read_quantization_config(config)
        if quantization is None:
            if isinstance(served, Path) and (served / "hf_quant_config.json").is_file():
                raise UnsupportedModel(
                    f"{served} is quantized as its hf_quant_config.json says, which is not understood: serve a"
                    " checkpoint with a quantization_config, or the plain one"
                )
            return source
        stored = _stored(served) if isinstance(served, Path) else None
        if any(_is_quantized(spec) for spec in source.tensors()):
            return source  # a checkpoint that is published as it lies there; engines compare it with their own
        if isinstance(source, ReadableSource):
            return ReadableQuantizedSource(source, quantization, stored, served)
        return QuantizedSource(source, quantization, stored, served)
    except UnknownScheme as error:
        raise UnsupportedModel(str(error)) from error


def _is_quantized(spec: TensorSpec) -> bool:
    """True for a tensor of a quantized checkpoint. Integer dtypes are no sign: models have integer buffers."""
    return spec.dtype in {"float8_e4m3fn", "float8_e5m2"} or spec.name.endswith(".weight_packed")


def _stored(folder: Path) -> Mapping[str, TensorSpec] | None:
    """Tensors of the served checkpoint, by its files' headers; None if it has only a config.

    Raises `UnknownScheme` if files are missing: their names would be incomplete.
    """
    try:
        return {place.spec.name: place.spec for place in folders.safetensors(folder)}
    except UnfinishedCheckpoint as error:
        if not any(folder.glob("*.safetensors*")):
            _log.info("quantized_by_names", folder=str(folder), reason="its config is there, and no safetensors files")
            return None
        raise UnknownScheme(
            f"the served checkpoint is not whole ({error}), and its files say which tensors are quantized: complete"
            " them, or give a folder with its config.json alone, where names decide"
        ) from error
