"""Copies out of a peer GPU's memory: long runs by copy engines, the rest by the kernel at the same time.

A stage that waits for its sources delays neither earlier stages nor the engines that execute them.
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
    """`PreparedCopies` by copy engines and kernel."""

    def __init__(
        self,
        device: torch.device,
        batch: CopyBatch,
        rest: Mapping[int, PreparedCopies],
        instead: Callable[[], Mapping[int, PreparedCopies]],
        memory: Sequence[torch.Tensor],
    ) -> None:
        """`rest` are the kernel's copies, by stage; `instead` binds the rows of `batch` to it.

        `memory` is kept alive.
        """
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
        """True while launched copies are running."""
        kernel = next((copies.busy for stage in self._kernel.values() for copies in stage), False)  # all on one stream
        return kernel or not all(stream.query() for stream in self._streams)

    def run(self, ready: WaitStage = no_wait) -> None:
        """Copy every row, after all streams of the device have ended; blocks until done."""
        with self._on_device():
            torch.cuda.synchronize()
            try:
                self.launch(ready)
            finally:
                torch.cuda.current_stream().synchronize()

    def launch(self, ready: WaitStage = no_wait) -> None:
        """Copy every row, on the current stream of this device.

        When the driver refuses a batch, the kernel copies its rows from then on, and `fallback_reason` says why.
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
        """Submit the copy engines' rows of a stage."""
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
        """Raise `ValueError`: a peer's memory has its address in the batch, and is bound anew when it moves."""
        del source
        raise ValueError("copies out of a peer's memory are bound anew when it is elsewhere")

    def close(self) -> None:
        """Release the memory."""
        for stream in self._streams:
            stream.synchronize()
        for copies in self._kernel.values():
            for each in copies:
                each.close()
        self._batch, self._memory, self._streams = None, (), []
        self._kernel.clear()
        self._stages = []

    def _on_device(self) -> contextlib.AbstractContextManager[None]:
        """The device's context for this thread; none without a GPU."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()

    def _handles(self, batch: CopyBatch) -> list[int]:
        if self._device.type != "cuda":
            return list(range(1, len(batch) + 1))
        return [int(stream.cuda_stream) for stream in self._streams]
