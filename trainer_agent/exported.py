"""A `Source` over whole tensors that something else exports: Megatron-Bridge, for families without a table here.

An exporter gathers, converts and yields every tensor on every rank, so this is slower than pieces and needs memory for
whole tensors everywhere; it is for models that families.py does not know, and an oracle for those that it does.

An exporter must yield the same names, shapes and dtypes in the same order on every call and on every rank; calls are
collective. The first one, made at construction, says what is served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import nn

from weightbus.dataplane.manifest import Manifest, TensorSpec
from weightbus.dataplane.pieces import Pieces

from .assembly import DTYPES, check_manifest
from .ranks import Ranks
from .roster import Refusal, Roster, check, encode
from .source import AssemblyFailed, LayoutMismatch, SourceError, UnsupportedModel

Exporter = Callable[[], Iterator[tuple[str, torch.Tensor]]]
"""Yields (Hugging Face name, whole tensor)."""

DEFAULT_TIMEOUT_S: Final = 1800.0


class Bridge(Protocol):
    """What is asked of a Megatron-Bridge `AutoBridge`."""

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


class ExportedSource:
    """The live weights of a model as an exporter gives them. Satisfies `Source`."""

    def __init__(
        self,
        export: Exporter,
        *,
        model: str,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Export once to learn what is served. Collective over `group` (default: all ranks).

        Args:
            export: called anew for every pass over the weights.
            model: architecture as the served checkpoint's config names it.
            dtype: what is served; as it is exported by default.
            device: where buckets are; by default where the first tensor is.
            group: as in `MegatronSource`.
            timeout_s: how long any collective of ours waits.

        Raises:
            SourceError: on every rank when the ranks export different tensors, or one of them fails.
        """
        self._ranks = Ranks(group, timeout_s)
        self._export = export
        self.model: str = model
        try:
            self._tensors, found = self._learn(dtype)
        except SourceError:
            self._ranks.close()
            raise
        self._device = device or found
        self._pass: Iterator[tuple[str, torch.Tensor]] = iter(())
        self._next = 0
        self._early: dict[str, torch.Tensor] = {}

    @property
    def root(self) -> bool:
        """The first rank of the group assembles."""
        return self._ranks.rank == 0

    @property
    def device(self) -> torch.device:
        """Where the buckets are."""
        return self._device

    def tensors(self) -> Sequence[TensorSpec]:
        """What is served, in the exporter's order."""
        return self._tensors

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        """Pack bucket `index` into `out` on the root. Collective; see `Source.assemble`.

        Buckets taken in order share one pass of the exporter; any other order starts another.
        """
        check_manifest(manifest, self._tensors)
        if (out is not None) != self.root:
            raise ValueError(f"rank {self._ranks.rank}: the root, and only the root, gives a buffer")
        if index != self._next or index == 0:
            self._pass, self._early = iter(self._export()), {}
        wanted = dict(zip(manifest.tensors_of(index), manifest.offsets_of(index), strict=False))
        by_name = {spec.name: (spec, at) for spec, at in wanted.items()}
        missing = set(by_name)
        for name in missing & self._early.keys():
            missing.remove(name)
            _place(by_name[name], self._early.pop(name), out)
        while missing:
            name, tensor = self._following(missing)
            if name in missing:
                missing.remove(name)
                _place(by_name[name], tensor, out)
            elif out is not None:
                self._early[name] = tensor  # of the next bucket: a bucket's order is not quite the exporter's
        self._next = index + 1
        if self._next == len(manifest.buckets):
            for _ in self._pass:  # its last collectives
                pass
            self._next = 0

    def agree(self, blob: bytes | None) -> bytes:
        """Hand the root's `blob` to every rank. Collective; see `Source.agree`."""
        return self._ranks.broadcast(blob)

    def close(self) -> None:
        """Let go of the groups. Collective."""
        self._pass, self._early = iter(()), {}
        self._ranks.close()

    def _following(self, missing: set[str]) -> tuple[str, torch.Tensor]:
        try:
            found = next(self._pass, None)
        except RuntimeError as error:
            raise AssemblyFailed(f"the exporter failed ({error}): find the rank that failed first") from error
        if found is None:
            raise LayoutMismatch(
                f"the exporter ended without {sorted(missing)[:5]}, which it exported before: "
                f"it must yield the same tensors in the same order every time"
            )
        return found

    def _learn(self, dtype: torch.dtype | None) -> tuple[tuple[TensorSpec, ...], torch.device]:
        """What this rank exports, and that all ranks export the same."""
        try:
            tensors, device = _listed(self._export(), dtype)
        except SourceError as error:
            self._ranks.gather(encode(Refusal(f"{type(error).__name__}: {error}")))
            raise
        facts = {"model": repr(self.model), "tensors": str(len(tensors)), "layout": Pieces.of(tensors, []).digest()}
        check(self._ranks.gather(encode(Roster(facts, b""))))
        return tensors, device


def _listed(
    exported: Iterator[tuple[str, torch.Tensor]], dtype: torch.dtype | None
) -> tuple[tuple[TensorSpec, ...], torch.device]:
    tensors: list[TensorSpec] = []
    device = torch.device("cpu")
    for name, tensor in exported:
        served = str(dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype).removeprefix("torch.")
        if served not in DTYPES:
            raise UnsupportedModel(f"{name!r} is exported as {served}; these can travel: {', '.join(DTYPES)}")
        device = device if tensors else tensor.device
        tensors.append(TensorSpec(name, served, tuple(tensor.shape)))
    if not tensors:
        raise UnsupportedModel("the exporter yields no tensors: give it the model of this rank")
    return tuple(tensors), device


def _place(where: tuple[TensorSpec, int], tensor: torch.Tensor, out: torch.Tensor | None) -> None:
    spec, at = where
    if tuple(tensor.shape) != spec.shape:
        raise LayoutMismatch(f"{spec.name!r} was exported with shape {spec.shape}, and now with {tuple(tensor.shape)}")
    if out is not None:
        out[at : at + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape).copy_(tensor.detach())
