"""Copies out of a peer GPU's memory: its long runs by copy engines, and the rest by the kernel at the same time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from .copy_batch import CopyBatch
from .copy_engine import PreparedCopies
from .errors import NoCopyEngines


class PeerCopies:
    """Implements `PreparedCopies`."""

    def __init__(
        self,
        device: torch.device,
        batch: CopyBatch,
        rest: PreparedCopies,
        instead: Callable[[], PreparedCopies],
        memory: Sequence[torch.Tensor],
    ) -> None:
        """`instead` binds what `batch` copies to the kernel. `memory` is held for as long as this is."""
        self.remark = ""
        self._device = device
        self._batch: CopyBatch | None = batch
        self._kernel = [rest]
        self._instead = instead
        self._memory = tuple(memory)
        self._streams: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(len(batch))]  # type: ignore[no-untyped-call]

    def run(self) -> None:
        """Copy every row, once whatever the device still computes from the targets has ended, on any stream."""
        with self._on_device():
            torch.cuda.synchronize()
            self.launch()
            torch.cuda.current_stream().synchronize()

    def launch(self) -> None:
        """Copy every row, in the order of the current stream of this device.

        Should the driver refuse a batch, the kernel copies what it would have, from now on: `remark` says why.
        """
        with self._on_device():
            for stream in self._streams:
                stream.wait_stream(torch.cuda.current_stream(self._device))
            for each in self._kernel:
                each.launch()
            if self._batch is not None:
                try:
                    self._batch.launch(self._handles(self._batch))
                except NoCopyEngines as error:
                    self.remark, self._batch = str(error), None
                    self._kernel.append(self._instead())
                    self._kernel[-1].launch()
            for stream in self._streams:
                torch.cuda.current_stream(self._device).wait_stream(stream)

    def follow(self, source: torch.Tensor | None) -> None:
        """Raises `ValueError`: a peer's memory is opened where it is, and bound anew when it is elsewhere."""
        del source
        raise ValueError("copies out of a peer's memory are bound anew when it is elsewhere")

    def close(self) -> None:
        """Let go of the memory."""
        for stream in self._streams:
            stream.synchronize()
        for each in self._kernel:
            each.close()
        self._batch, self._kernel, self._memory, self._streams = None, [], (), []

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        """Its context is the thread's. Without a GPU there is none."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()

    def _handles(self, batch: CopyBatch) -> list[int]:
        if self._device.type != "cuda":
            return list(range(1, len(batch) + 1))
        return [int(stream.cuda_stream) for stream in self._streams]
