"""A `Source` over whole tensors that something else exports: Megatron-Bridge, for families without a table here.

An exporter gathers, converts and yields every tensor on every rank, so this is slower than pieces and needs memory for
whole tensors everywhere; it is for models that model_families.py does not know, and an oracle for those that it does.

An exporter must yield the same names, shapes and dtypes in the same order on every call and on every rank; calls are
collective. The first one, made at construction, says what is served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import nn

from weightbus.dataplane.tensors import Manifest, Shards, TensorSpec

from ..assembly import DTYPES, check_manifest
from ..source import SourceError
from .collective_errors import together
from .export_passes import ExportPass, Listing, guarded, listed
from .rank_group import RankGroup
from .rank_layout import RankLayout

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
        self._ranks = RankGroup(group, timeout_s)
        self._export = export
        self.model: str = model
        try:
            self._listing = self._learn(dtype)
        except SourceError:
            self._ranks.close()
            raise
        self._device = device or self._listing.device
        self._pass = ExportPass((), self._listing)
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
        return self._listing.tensors

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        """Pack bucket `index` into `out` on the root. Collective; see `Source.assemble`.

        Buckets taken in order share one pass of the exporter; any other order starts another.
        """
        check_manifest(manifest, self._listing.tensors)
        if (out is not None) != self.root:
            raise ValueError(f"rank {self._ranks.rank}: the root, and only the root, gives a buffer")
        if index != self._next or index == 0:
            self._pass, self._early = ExportPass(guarded(self._export), self._listing), {}
        wanted = dict(zip(manifest.tensors_of(index), manifest.offsets_of(index), strict=False))
        by_name = {spec.name: (spec, at) for spec, at in wanted.items()}
        missing = set(by_name)
        for name in missing & self._early.keys():
            missing.remove(name)
            _place(by_name[name], self._early.pop(name), out)
        while missing:
            name, tensor = self._pass.following(missing)
            if name in missing:
                missing.remove(name)
                _place(by_name[name], tensor, out)
            elif out is not None:
                self._early[name] = tensor  # of the next bucket: a bucket's order is not quite the exporter's
        self._next = index + 1
        if self._next == len(manifest.buckets):
            self._pass.finish()
            self._next = 0

    def agree(self, blob: bytes | None) -> bytes:
        """Hand the root's `blob` to every rank. Collective; see `Source.agree`."""
        return self._ranks.broadcast(blob)

    def close(self) -> None:
        """Let go of the groups. Collective."""
        self._pass, self._early = ExportPass((), self._listing), {}
        self._ranks.close()

    def _learn(self, dtype: torch.dtype | None) -> Listing:
        """What this rank exports, and that all ranks export the same."""

        def attempt() -> tuple[RankLayout, Listing]:
            found = listed(self._export(), dtype)
            layout = Shards.of(found.tensors, []).digest()
            return RankLayout(
                {"model": repr(self.model), "tensors": str(len(found.tensors)), "layout": layout}, b""
            ), found

        return together(self._ranks, attempt)[1]


def _place(where: tuple[TensorSpec, int], tensor: torch.Tensor, out: torch.Tensor | None) -> None:
    spec, at = where
    if out is not None:
        out[at : at + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape).copy_(tensor.detach())
