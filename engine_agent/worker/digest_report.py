"""The digest report of a worker on its live parameters: tables bound to its memory, which outlive plans and versions.

Binding takes a while on a GPU, and the first digest of a process longer still: its kernels are loaded. Both depend on
the load trace alone, and are done ahead of the first version where there is time for it (prerecording.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from weightbus.dataplane.copy import BoxTable, CopyEngine, CopyTable, Lanes
from weightbus.dataplane.errors import TransferFailed
from weightbus.dataplane.memory import bytes_of, sizes_of
from weightbus.dataplane.tensors import DTYPES
from weightbus.dataplane.transports import worker_messages as wire

from .model_tensors import ModelTensors


class DigestReport:
    """The report on one model, for as long as its tensors stay where they are."""

    def __init__(self, asked: wire.Prove, held: ModelTensors, names: Sequence[str], engine: CopyEngine) -> None:
        """`names` are those of the tensors that `held` has. Raises `ManifestError`."""
        device = held.device
        self.of = _named(asked)
        """The request; an equal one need not be bound anew."""
        self.buffer = torch.empty(asked.staging_bytes, dtype=torch.uint8, device=device)
        """Staging buffer of tensors that are given whole to the model's loader."""
        self._odd_buffer = torch.empty(asked.odd_bytes, dtype=torch.uint8, device=device)
        proof, odd = BoxTable.decode(asked.proof, asked.groups), CopyTable.decode(asked.odd)
        memory = [*(bytes_of(tensor) for tensor in held.tensors), self.buffer]
        sizes = sizes_of(memory)
        proof.check(sizes)
        odd.check(sizes, sizes_of([self._odd_buffer]))
        self.proof = engine.prepare_digest(proof, memory)
        self._odd = engine.prepare_copies(odd, memory, [self._odd_buffer])
        self._casts = _cast_checks(odd, memory, [*names, "staging"])

    def answers(self, asked: wire.Prove) -> bool:
        """Whether the report answers the request `asked`."""
        return self.of == _named(asked)

    def found(self) -> tuple[bytes, bytes]:
        """Sums of its groups as little-endian uint64, and the bytes that are read back. Raises `TransferFailed`."""
        lanes: Lanes = self.proof.run()
        if len(self._odd_buffer):  # else it would only wait for the device
            self._odd.run()
        for name, survives in self._casts:
            if not survives():
                raise TransferFailed(
                    f"{name!r} is stored in a wider dtype, and holds values that its own does not have"
                )
        return np.ascontiguousarray(lanes).astype("<u8").tobytes(), self._odd_buffer.cpu().numpy().tobytes()

    def warm(self) -> None:
        """Digest once, so that the device has loaded its kernels; the result is dropped."""
        self.proof.run()
        self._odd.run()


def _named(asked: wire.Prove) -> tuple[bytes, int, bytes, int, int]:
    return asked.proof, asked.groups, asked.odd, asked.odd_bytes, asked.staging_bytes


def _cast_checks(
    odd: CopyTable, regions: Sequence[torch.Tensor], names: Sequence[str]
) -> list[tuple[str, Callable[[], bool]]]:
    """For rows that are read back in a narrower dtype: do the live values survive it? Regions have these names."""
    found: list[tuple[str, Callable[[], bool]]] = []
    for row in np.flatnonzero(odd.casts).tolist():
        stored: torch.dtype = getattr(torch, DTYPES[int(odd.source_dtype[row])])
        served: torch.dtype = getattr(torch, DTYPES[int(odd.target_dtype[row])])
        region = regions[int(odd.source[row])]
        strides = (*(step // stored.itemsize for step in odd.source_step[row].tolist()), 1)
        begin = (int(region.storage_offset()) + int(odd.source_at[row])) // stored.itemsize
        shape = (*odd.grid[row].tolist(), int(odd.run[row]))
        view = torch.empty(0, dtype=stored, device=region.device).set_(region.untyped_storage(), begin, shape, strides)

        def survives(view: torch.Tensor = view, served: torch.dtype = served) -> bool:
            again = view.to(served).to(view.dtype)
            return torch.equal(again.view(torch.uint8), view.contiguous().view(torch.uint8))

        found.append((names[int(odd.source[row])], survives))
    return found
