"""A copy of all buckets of one version on the root rank, so that training may go on while it is published.

It is taken on the training loop's own thread, because assembling is collective: on a thread of its own its collectives
would meet the training step's, in another order on every rank. What is left to the background reads this memory alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weightbus.dataplane.tensors import Manifest, TensorSpec

from ..machine import SnapshotMemory
from ..source import Source


class Store:
    """Memory of one snapshot, allocated when it is first taken and kept until `close`."""

    def __init__(self, manifest: Manifest, device: torch.device, memory: SnapshotMemory) -> None:
        self._manifest = manifest
        self._device = device
        self._memory = memory
        self._buckets: list[torch.Tensor] = []
        self._taken: torch.cuda.Event | None = None

    def take(self, assemble: Callable[[int, torch.Tensor], None]) -> None:
        """Have every bucket assembled, one after another, and keep it. On a GPU this only enqueues."""
        if not self._buckets:
            self._buckets = [self._empty(bucket.nbytes) for bucket in self._manifest.buckets]
        direct = self._device.type != "cuda" or self._memory is SnapshotMemory.DEVICE
        scratch = [] if direct else self._scratch()
        for index, kept in enumerate(self._buckets):
            if direct:
                assemble(index, kept)
                continue
            staged = scratch[index % len(scratch)][: kept.numel()]
            assemble(index, staged)
            kept.copy_(staged, non_blocking=True)
        if self._device.type == "cuda":
            self._taken = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            self._taken.record()

    def wait(self) -> None:
        """Return when all of it is there. For the thread that reads it."""
        if self._taken is not None:
            self._taken.synchronize()

    def read(self, index: int, out: torch.Tensor) -> None:
        """Copy bucket `index` into the first bytes of `out`."""
        kept = self._buckets[index]
        out[: kept.numel()].copy_(kept, non_blocking=True)

    def close(self) -> None:
        """Give the memory back."""
        self._buckets = []

    def _empty(self, nbytes: int) -> torch.Tensor:
        if self._memory is SnapshotMemory.DEVICE:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _scratch(self) -> list[torch.Tensor]:
        count = min(2, len(self._manifest.buckets))
        return [
            torch.empty(self._manifest.largest_bucket, dtype=torch.uint8, device=self._device) for _ in range(count)
        ]


class StoredWeights:
    """A `Source` of one process over a snapshot: no rank takes part, no parameter is read."""

    def __init__(self, source: Source, store: Store) -> None:
        self._source = source
        self._store = store

    @property
    def model(self) -> str:
        """Architecture of the snapshot."""
        return self._source.model

    @property
    def root(self) -> bool:
        """There is nobody else."""
        return True

    @property
    def device(self) -> torch.device:
        """Where buckets are wanted."""
        return self._source.device

    def tensors(self) -> Sequence[TensorSpec]:
        """What the snapshot consists of."""
        return self._source.tensors()

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        """Copy a bucket of the snapshot."""
        del manifest
        if out is None:
            raise ValueError("the root gives a buffer")
        self._store.read(index, out)

    def agree(self, blob: bytes | None) -> bytes:
        """Return `blob`: the other ranks train."""
        if blob is None:
            raise ValueError("the root gives what is agreed")
        return blob
