"""Sources over whole tensors, which an exporter such as Megatron-Bridge yields, or which FSDP gathers.

Both are slower than a source of shards and need memory for whole tensors. `ExportedSource` is for models that
model_families.py does not know, and an oracle for the others. `FullTensorSource` is for models whose checkpoint
tensors are no slices of the tensors in memory, so that `FSDPSource` refuses them; and to compare with.

An exporter must yield the same names, shapes and dtypes in the same order on every call and on every rank; calls are
collective. The first pass, made at construction, defines the tensors that are served, and every later pass is compared
with it: otherwise tensors could be cast, left out or served twice, and engines would verify the wrong result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set as AbstractSet
from typing import Final, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weightbus.dataplane.tensors import ITEM_BYTES, Manifest, Shards, TensorSpec

from ..assembly import DTYPES, check_manifest, has_plain_memory, unreadable_reason
from ..source import (
    AssemblyFailed,
    LayoutMismatch,
    SourceError,
    UnknownParameter,
    UnsupportedModel,
    check_manifestable,
)
from .checkpoint_conversion import head_dim, revert, stored_tensors
from .collective_source import (
    DEFAULT_TIMEOUT_S,
    TENSORS,
    CollectiveSource,
    RankGroup,
    RankLayout,
    SingleRank,
    local_tensor,
    named,
    on_all_ranks,
)
from .hf_module import device_of, served_dtypes
from .tensor_dtypes import Served, TensorDtypes, cast_dtype, transformers_class
from .tensor_placement import placements_of, replica_digests
from .wrappers import architecture, check_wrappers

Exporter = Callable[[], Iterator[tuple[str, torch.Tensor]]]
"""Yields (Hugging Face name, whole tensor)."""

_EIGHT_BITS: Final = "float8_"
_VOCABULARY: Final = re.compile(
    r"(^|\.)(embed_tokens|word_embeddings|wte|tok_embeddings|embed_in|lm_head|embed_out|output_layer)\.(weight|bias)$"
    r"|(^|\.)(backbone|model)\.embeddings\.weight$"
)
"""Names of tensors with a row for each token, in the checkpoints that transformers writes."""
_ALIKE: Final = "it must yield the same tensors every time, or the source be built again"


class Bridge(Protocol):
    """The method of a Megatron-Bridge `AutoBridge` that is called."""

    def export_hf_weights(
        self, model: Sequence[nn.Module], *, cpu: bool, show_progress: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the checkpoint, on every rank. Collective."""
        ...


def bridge_exporter(bridge: Bridge, model_chunks: Sequence[nn.Module]) -> Exporter:
    """Export through Megatron-Bridge: `bridge` is the `AutoBridge` of the served checkpoint."""

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        yield from bridge.export_hf_weights(model_chunks, cpu=False, show_progress=False)

    return export


class ExportedSource(CollectiveSource):
    """The live weights of a model as an exporter yields them. Satisfies `Source`."""

    def __init__(
        self,
        export: Exporter,
        *,
        model: str,
        dtype: torch.dtype | None = None,
        served: Served | None = None,
        device: torch.device | None = None,
        vocab_size: int | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Export once to learn the tensors that are served. Collective over `group` (default: all ranks).

        Args:
            export: called anew for every pass over the weights.
            model: architecture as the checkpoint's config names it.
            dtype: dtype in which floating-point tensors are served; by default as they are exported.
            served: as in `HFModuleSource`.
            device: device of the buckets; by default that of the first tensor.
            vocab_size: rows of the embedding and of the output layer that the checkpoint has; further ones, with which
                trainers pad the vocabulary, are cut off. By default all rows are served.
            group: as in `MegatronSource`.
            timeout_s: seconds that any collective of the source waits; the exporter's have their own timeout.

        Raises:
            SourceError: on every rank when the ranks export different tensors, or one of them fails.
        """
        super().__init__(RankGroup(group, timeout_s))
        self._export = export if vocab_size is None else lambda: _cut_vocabulary(export(), vocab_size)
        self.model: str = model
        """Architecture as the checkpoint's config names it."""
        with self._closing_when_refused():
            _, self._listing = on_all_ranks(
                self._ranks, lambda: self._describe(TensorDtypes(dtype, served)), lambda own: own.tensors
            )
        self.device: torch.device = device or self._listing.device
        """Device of the buckets."""
        self._pass: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._next = 0
        self._early: dict[str, torch.Tensor] = {}
        """Tensors of the next bucket: a bucket's order differs a little from the exporter's."""

    def tensors(self) -> Sequence[TensorSpec]:
        """Tensors that are served, in the exporter's order."""
        return self._listing.tensors

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        """Pack bucket `index` into `out` on the root. Collective; see `Source.assemble`.

        Buckets taken in order share one pass of the exporter; any other order starts another.
        """
        check_manifest(manifest, self._listing.tensors)
        self._check_root(out)
        if index != self._next or index == 0:
            self._pass, self._early = _compared(self._export, self._listing), {}
        offsets = zip(manifest.tensors_of(index), manifest.offsets_of(index), strict=False)
        missing = {spec.name: (spec, at) for spec, at in offsets}
        for name in missing.keys() & self._early.keys():
            _place(missing.pop(name), self._early.pop(name), out)
        while missing:
            found = next(self._pass, None)
            if found is None:
                raise LayoutMismatch(
                    f"the exporter ended without {sorted(missing)[:5]}, which it exported before: {_ALIKE}"
                )
            name, tensor = found
            if name in missing:
                _place(missing.pop(name), tensor, out)
            elif out is not None:
                self._early[name] = tensor
        self._next = index + 1
        if self._next == len(manifest.buckets):
            for _ in self._pass:  # to its end: last collectives included, and nothing may come that is not listed
                pass
            self._next = 0

    def close(self) -> None:
        """Release the groups, and tensors of an unfinished pass. Collective."""
        self._pass, self._early = iter(()), {}
        super().close()

    def _describe(self, dtypes: TensorDtypes) -> tuple[RankLayout, _Listing]:
        found = _listed(self._export(), dtypes, self.model)
        facts = {"model": repr(self.model), TENSORS: Shards.of(found.tensors, []).digest()}
        return RankLayout(facts, b""), found


def _readable(tensor: torch.Tensor, *, values: bool = True) -> torch.Tensor:
    """`tensor` with plain memory, dequantized by its own class where that is what is lacking.

    Without `values` a tensor of its shape and dtype stands for it. The values are those that the trainer computes with,
    rounded once to the dtype that the quantized tensor stands for.
    """
    mine = local_tensor(tensor)
    if has_plain_memory(mine) or type(mine).dequantize is torch.Tensor.dequantize:
        return tensor
    with torch.no_grad():
        plain = mine.dequantize() if values else torch.empty(mine.shape, dtype=mine.dtype, device=mine.device)
        if isinstance(tensor, DTensor):
            shape, stride = tensor.shape, tensor.stride()
            plain = DTensor.from_local(
                plain, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
            )
    return nn.Parameter(plain, requires_grad=False) if isinstance(tensor, nn.Parameter) else plain


def _place(where: tuple[TensorSpec, int], tensor: torch.Tensor, out: torch.Tensor | None) -> None:
    spec, at = where
    if out is not None:
        out[at : at + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape).copy_(tensor.detach())


class _Listing(NamedTuple):
    """Tensors of the first pass."""

    tensors: tuple[TensorSpec, ...]
    exported: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """Shape and dtype of each tensor as exported, before any cast."""
    device: torch.device
    """Device of the first tensor."""


def _listed(exported: Iterable[tuple[str, torch.Tensor]], dtypes: TensorDtypes, model: str) -> _Listing:
    """Read one pass. Raises a `SourceError` for a tensor that cannot be served."""
    tensors: list[TensorSpec] = []
    forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    device = torch.device("cpu")
    for name, found in exported:
        tensor = _readable(found)
        if name in forms:
            raise LayoutMismatch(f"{name!r} was exported twice in one pass: a tensor has one name, and goes once")
        served = _served(name, tensor, dtypes, model)
        device = device if tensors else tensor.device
        tensors.append(TensorSpec(name, served, tuple(tensor.shape)))
        forms[name] = tuple(tensor.shape), tensor.dtype
    if not tensors:
        raise UnsupportedModel("the exporter yields no tensors: give it the model of this rank")
    check_manifestable(tensors)
    return _Listing(tuple(tensors), forms, device)


def _compared(export: Exporter, listing: _Listing) -> Iterator[tuple[str, torch.Tensor]]:
    """One pass over the weights, compared with the first.

    Errors of `export` become `AssemblyFailed`, because its collectives broke off with it.
    """
    seen: set[str] = set()
    try:
        for name, found in export():
            tensor = _readable(found)
            _check_alike(name, tensor, listing, seen)
            seen.add(name)
            yield name, tensor
    except SourceError:
        raise
    except Exception as error:
        raise AssemblyFailed(
            f"the exporter failed ({type(error).__name__}: {error}): find the rank that failed first"
        ) from error


def _cut_vocabulary(exported: Iterable[tuple[str, torch.Tensor]], rows: int) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors, of those with a row for each token the first `rows` rows.

    Raises `LayoutMismatch` where none has a row for each token, and where one has fewer, or another padding.
    """
    padded: dict[int, str] = {}
    for name, tensor in exported:
        if _VOCABULARY.search(name) and tensor.ndim:
            padded.setdefault(tensor.shape[0], name)
            if tensor.shape[0] < rows:
                raise LayoutMismatch(
                    f"{name!r} has {tensor.shape[0]} rows, fewer than vocab_size={rows}: give the rows "
                    "that the served checkpoint has"
                )
            yield name, tensor[:rows]
        else:
            yield name, tensor
    if len(padded) != 1:
        found = ", ".join(f"{name!r} of {size} rows" for size, name in padded.items()) or "no embedding"
        raise LayoutMismatch(
            f"vocab_size={rows} cuts the padding of one vocabulary, the exporter yields {found}: cut it in the exporter"
        )


def _check_alike(name: str, tensor: torch.Tensor, listing: _Listing, seen: AbstractSet[str]) -> None:
    if name not in listing.exported:
        raise LayoutMismatch(f"{name!r} was not exported before, and is now: {_ALIKE}")
    if name in seen:
        raise LayoutMismatch(f"{name!r} was exported twice in one pass: {_ALIKE}")
    shape, dtype = listing.exported[name]
    if tuple(tensor.shape) != shape:
        raise LayoutMismatch(f"{name!r} was exported with shape {shape}, and now with {tuple(tensor.shape)}: {_ALIKE}")
    if tensor.dtype != dtype:
        raise LayoutMismatch(f"{name!r} was exported as {dtype}, and now as {tensor.dtype}: {_ALIKE}")
    if advice := unreadable_reason(tensor, rounded=False):
        raise UnknownParameter(name, shape, str(dtype), advice)


def _served(name: str, tensor: torch.Tensor, dtypes: TensorDtypes, model: str) -> str:
    exported = wanted = _name(tensor.dtype)
    if tensor.is_floating_point():
        wanted = cast_dtype(transformers_class(model), name, exported, dtypes.dtype)
    if advice := unreadable_reason(tensor, rounded=False):
        raise UnknownParameter(name, tensor.shape, exported, advice)
    if exported.startswith(_EIGHT_BITS):
        advice = "its scale is not part of it: export in 16 bits or more, and let servers quantize"
        raise UnknownParameter(name, tensor.shape, exported, advice)
    if exported not in ITEM_BYTES:
        raise UnsupportedModel(f"{name!r} is exported as {exported}; these can travel: {', '.join(ITEM_BYTES)}")
    return dtypes.of(name, wanted)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class FullTensorSource(CollectiveSource):
    """The live weights of one sharded Hugging Face module, gathered whole. Satisfies `Source`."""

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        served: Served | None = None,
        model: str | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Arguments and errors as those of `FSDPSource`. Collective."""
        super().__init__(RankGroup(group, timeout_s) if dist.is_initialized() else SingleRank())
        self._module = module
        self._model = model or architecture(module)
        with self._closing_when_refused():
            _, (device, self._dtypes, self._tensors) = on_all_ranks(
                self._ranks, lambda: self._describe(TensorDtypes(dtype, served)), lambda own: own[2]
            )
        self.device: torch.device = device
        """Device of the buckets."""
        self._whole: dict[str, torch.Tensor] = {}

    @property
    def model(self) -> str:
        """Architecture as the checkpoint's config names it. Raises `UnsupportedModel` where the module has no name."""
        return named(self._model)

    @property
    def head_dim(self) -> int | None:
        """Elements of one attention head: with it, Llama under tensor parallelism has predictable live digests."""
        return head_dim(self._module)

    def tensors(self) -> Sequence[TensorSpec]:
        """Tensors that are served, by the names of the checkpoint."""
        return self._tensors

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        """Pack bucket `index` into `out` on the root; with the first bucket, gather everything. Collective."""
        self._check_root(out)
        if index == 0:
            check_manifest(manifest, self._tensors)
            self._gather()
        if out is None:
            return
        for where in zip(manifest.tensors_of(index), manifest.offsets_of(index), strict=False):
            _place(where, self._whole[where[0].name], out)
        if index == len(manifest.buckets) - 1:
            self._whole = {}

    def _describe(
        self, dtypes: TensorDtypes
    ) -> tuple[RankLayout, tuple[torch.device, Mapping[str, str], tuple[TensorSpec, ...]]]:
        """Tensors that this rank would serve. All ranks must gather the same ones, in the same order."""
        check_wrappers(self._module)
        stored = {name: _readable(tensor, values=False) for name, tensor in stored_tensors(self._module).items()}
        if not stored:
            raise UnsupportedModel(f"{type(self._module).__name__} has no parameters")
        placements = placements_of(self._module, stored, self._ranks.global_ranks)
        if parted := [name for name, placement in placements.items() if placement.shape != tuple(stored[name].shape)]:
            raise UnsupportedModel(
                f"{parted[0]!r} holds the experts of one expert-parallel rank, and only the ranks of its mesh can be "
                "gathered: use FSDPSource, which assembles all experts"
            )
        served = served_dtypes(self._module, stored, dtypes)
        blank = {
            name: torch.empty(tuple(tensor.shape), dtype=DTYPES[served[name]], device="meta")
            for name, tensor in stored.items()
        }
        tensors = tuple(
            TensorSpec(name, dtypes.of(name, _name(tensor.dtype)), tuple(tensor.shape))
            for name, tensor in revert(self._module, blank).items()
        )
        if dtypes:  # tensors of one parameter may be served in several dtypes: each is cast once it is cut out
            served = {name: _name(tensor.dtype) for name, tensor in stored.items()}
        check_manifestable(tensors)
        facts = {"model": self._model, TENSORS: Manifest.of(self._model, tensors).digest()}
        layout = RankLayout(facts, b"", replicas=replica_digests(stored, placements))
        return layout, (device_of(list(stored.values())), served, tensors)

    @torch.no_grad()
    def _gather(self) -> None:
        whole: dict[str, torch.Tensor] = {}
        for name, tensor in stored_tensors(self._module).items():
            try:
                plain = _readable(tensor)
                full = plain.full_tensor() if isinstance(plain, DTensor) else plain
            except RuntimeError as error:  # what torch raises for a lost peer and for a timeout
                raise AssemblyFailed(f"{name!r} could not be gathered ({error}): find the rank that failed") from error
            if self.root:
                whole[name] = full.to("cpu", DTYPES[self._dtypes[name]], copy=True)
        self._whole = revert(self._module, whole) if self.root else {}
