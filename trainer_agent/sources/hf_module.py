"""A `Source` over a plain Hugging Face module on one process: what a single-GPU trainer has, and what tests need.

By the names of its checkpoint: tied tensors once, buffers that belong to it, experts one by one
(checkpoint_conversion.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from weightbus.dataplane.tensors import Manifest, Shards, TensorSpec

from ..assembly import Assembler, check_manifest, plan
from .module_shards import describe


class HFModuleSource:
    """The live weights of one module. Satisfies `Source`.

    Its parameters stay the same objects, in the same form; a publication after they were replaced is refused. Their
    memory may be another one every time, also on another device.
    """

    def __init__(self, module: nn.Module, *, model: str | None = None, dtype: torch.dtype | None = None) -> None:
        """`model` is the architecture, by default the module's class; `dtype` what parameters are served in.

        By default they are served as they are. Raises a `SourceError` for what the checkpoint's tensors are not
        slices of, such as adapters that were not merged.
        """
        self._held = describe(module, dtype, 0, model)
        self._device = self._held.storages[0].device
        self._planned: tuple[Manifest, Assembler] | None = None

    @property
    def model(self) -> str:
        """Architecture as the checkpoint's config names it."""
        return self._held.model

    @property
    def root(self) -> bool:
        """One process: it is the root."""
        return True

    @property
    def device(self) -> torch.device:
        """Where the parameters were when the source was built; from there they may be moved, and buckets stay."""
        return self._device

    @property
    def head_dim(self) -> int | None:
        """Elements of one attention head: with it, Llama under tensor parallelism has predictable live digests."""
        return self._held.head_dim

    def tensors(self) -> Sequence[TensorSpec]:
        """What is served, by the names of the checkpoint."""
        return self._held.tensors

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        """Pack bucket `index` into `out`."""
        if out is None:
            raise ValueError("the root gives a buffer")
        if index == 0:
            self._held.kept.check()
        if self._planned is None or self._planned[0] is not manifest:
            check_manifest(manifest, self._held.tensors)
            buckets = plan(manifest, self._held.pieces, rank=0)
            self._planned = (manifest, Assembler(buckets, self._held.storages, 0, None, None))
        self._planned[1].run(index, out, self.device)

    @property
    def rank(self) -> int:
        """One process."""
        return 0

    @property
    def pieces(self) -> Shards:
        """Every element, where it lies; `storage` numbers what `memory` gives."""
        return self._held.pieces

    @property
    def exchange(self) -> None:
        """Nothing travels."""
        return

    def held(self, tensors: Sequence[TensorSpec]) -> Shards:
        """All of each of `tensors`, where it lies."""
        return self._held.pieces.ordered(tensors)

    def memory(self) -> Sequence[torch.Tensor]:
        """The module's tensors. Raises `LayoutMismatch` when they were replaced since the source was built."""
        self._held.kept.check()
        return self._held.storages

    def collect(self, blob: bytes) -> Sequence[bytes]:
        """There is nobody else."""
        return (blob,)

    def agree(self, blob: bytes | None) -> bytes:
        """Return `blob`: there is nobody else."""
        if blob is None:
            raise ValueError("the root gives what is agreed")
        return blob
