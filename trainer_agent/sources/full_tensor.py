"""A `Source` that gathers whole parameters, as RL trainers on FSDP do it: `full_tensor()`, one after another.

It is slow, and the root keeps the whole model in host memory while a version is assembled. It is for models whose
checkpoint tensors are no slices of the tensors in memory, so that `FSDPSource` refuses them; and to compare with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weightbus.dataplane.tensors import Manifest, TensorSpec

from ..assembly import DTYPES, check_manifest
from ..source import AssemblyFailed, UnsupportedModel, check_manifestable
from .checkpoint_conversion import architecture, head_dim, revert, stored_tensors
from .collective_source import CollectiveSource, on_all_ranks
from .module_shards import device_of, served_dtypes
from .rank_group import DEFAULT_TIMEOUT_S, RankGroup
from .rank_layout import RankLayout


class FullTensorSource(CollectiveSource):
    """The live weights of one sharded Hugging Face module, gathered whole. Satisfies `Source`."""

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        model: str | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Arguments and errors as those of `FSDPSource`. Collective."""
        super().__init__(RankGroup(group, timeout_s))
        self._module = module
        self.model: str = model or architecture(module)
        """Architecture as the checkpoint's config names it."""
        with self._closing_when_refused():
            _, (self._device, self._dtypes, self._tensors) = on_all_ranks(self._ranks, lambda: self._describe(dtype))
        self._whole: dict[str, torch.Tensor] = {}

    @property
    def device(self) -> torch.device:
        """Device of the buckets."""
        return self._device

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
        for spec, at in zip(manifest.tensors_of(index), manifest.offsets_of(index), strict=False):
            target = out[at : at + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape)
            target.copy_(self._whole[spec.name])
        if index == len(manifest.buckets) - 1:
            self._whole = {}

    def _describe(
        self, dtype: torch.dtype | None
    ) -> tuple[RankLayout, tuple[torch.device, Mapping[str, str], tuple[TensorSpec, ...]]]:
        """Tensors that this rank would serve. All ranks must gather the same ones, in the same order."""
        stored = stored_tensors(self._module)
        if not stored:
            raise UnsupportedModel(f"{type(self._module).__name__} has no parameters")
        dtypes = served_dtypes(self._module, stored, dtype)
        blank = {
            name: torch.empty(tuple(tensor.shape), dtype=DTYPES[dtypes[name]], device="meta")
            for name, tensor in stored.items()
        }
        tensors = tuple(
            TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in revert(self._module, blank).items()
        )
        check_manifestable(tensors)
        facts = {"model": self.model, "tensors": Manifest.of(self.model, tensors).digest()}
        return RankLayout(facts, b""), (device_of(list(stored.values())), dtypes, tensors)

    @torch.no_grad()
    def _gather(self) -> None:
        whole: dict[str, torch.Tensor] = {}
        for name, tensor in stored_tensors(self._module).items():
            try:
                full = _whole(tensor)
            except RuntimeError as error:  # what torch raises for a lost peer and for a timeout
                raise AssemblyFailed(f"{name!r} could not be gathered ({error}): find the rank that failed") from error
            if self.root:
                whole[name] = full.to("cpu", DTYPES[self._dtypes[name]], copy=True)
        self._whole = revert(self._module, whole) if self.root else {}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
