"""Copies out of a peer GPU's memory: its long runs by copy engines, and the rest by the kernel at the same time.

Stage by stage: what a stage waits for holds up neither what was launched before, nor the engines at its end.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch

from ..errors import CopyEnginesUnavailable
from .copy_engine import PreparedCopies, WaitStage, no_wait
from .memcpy_batch import CopyBatch


class PeerCopies:
    """Implements `PreparedCopies`."""

    def __init__(
        self,
        device: torch.device,
        batch: CopyBatch,
        rest: Mapping[int, PreparedCopies],
        instead: Callable[[], Mapping[int, PreparedCopies]],
        memory: Sequence[torch.Tensor],
    ) -> None:
        """`rest` is the kernel's, by stage; `instead` binds what `batch` copies to it. `memory` is held meanwhile."""
        self.fallback_reason = ""
        self._device = device
        self._batch: CopyBatch | None = batch
        self._stages = sorted({*batch.stages, *rest})
        self._kernel: dict[int, list[PreparedCopies]] = defaultdict(list)
        for stage, copies in rest.items():
            self._kernel[stage].append(copies)
        self._instead = instead
        self._memory = tuple(memory)
        self._streams: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(len(batch))]  # type: ignore[no-untyped-call]

    @property
    def busy(self) -> bool:
        """Something that was launched is under way."""
        kernel = next((copies.busy for stage in self._kernel.values() for copies in stage), False)  # all on one stream
        return kernel or not all(stream.query() for stream in self._streams)

    def run(self, ready: WaitStage = no_wait) -> None:
        """Copy every row, once whatever the device still computes from the targets has ended, on any stream."""
        with self._on_device():
            torch.cuda.synchronize()
            try:
                self.launch(ready)
            finally:
                torch.cuda.current_stream().synchronize()

    def launch(self, ready: WaitStage = no_wait) -> None:
        """Copy every row, in the order of the current stream of this device.

        Should the driver refuse a batch, the kernel copies what it would have, from now on: `fallback_reason` says why.
        """
        with self._on_device():
            for stream in self._streams:
                stream.wait_stream(torch.cuda.current_stream(self._device))
            try:
                for stage in self._stages:
                    ready(stage)
                    for each in self._kernel[stage]:
                        each.launch()
                    self._launch_batch(stage)
            finally:
                for stream in self._streams:
                    torch.cuda.current_stream(self._device).wait_stream(stream)

    def _launch_batch(self, stage: int) -> None:
        """What the copy engines do of a stage."""
        if self._batch is None:
            return
        try:
            self._batch.launch(self._handles(self._batch), stage)
        except CopyEnginesUnavailable as error:
            self.fallback_reason, self._batch = str(error), None
            for of, copies in self._instead().items():
                self._kernel[of].append(copies)
                if of == stage:  # a batch that was not refused is carried out
                    copies.launch()

    def move_source(self, source: torch.Tensor | None) -> None:
        """Raises `ValueError`: a peer's memory is opened where it is, and bound anew when it is elsewhere."""
        del source
        raise ValueError("copies out of a peer's memory are bound anew when it is elsewhere")

    def close(self) -> None:
        """Let go of the memory."""
        for stream in self._streams:
            stream.synchronize()
        for copies in self._kernel.values():
            for each in copies:
                each.close()
        self._batch, self._memory, self._streams = None, (), []
        self._kernel.clear()
        self._stages = []

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        """Its context is the thread's. Without a GPU there is none."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()

    def _handles(self, batch: CopyBatch) -> list[int]:
        if self._device.type != "cuda":
            return list(range(1, len(batch) + 1))
        return [int(stream.cuda_stream) for stream in self._streams]
