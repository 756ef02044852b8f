"""Lets engines read the live weights of this process where they are: what the direct transport offers.

One process for now: `Exposable` is for sources whose weights are all here. A source that is spread over ranks exposes
itself when every rank runs an exporter of its own and the root knows all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from weightbus.dataplane.direct import Exposed
from weightbus.dataplane.direct_wire import Exporting
from weightbus.dataplane.exporter import RegionExporter
from weightbus.dataplane.manifest import Manifest, TensorSpec
from weightbus.dataplane.pieces import Pieces


@runtime_checkable
class Exposable(Protocol):
    """A source whose tensors can be read by other processes."""

    def local(self, tensors: Sequence[TensorSpec]) -> tuple[Sequence[torch.Tensor], Pieces]:
        """This process's own tensors as they are now, and what they hold of `tensors`; `storage` numbers them."""
        ...


class Exposure:
    """Exports a source's tensors for as long as it lives; called at each offer, it says what there is."""

    def __init__(self, source: Exposable, manifest: Manifest, runtime_dir: Path, channel: str) -> None:
        self._source = source
        self._manifest = manifest
        self._exporter = RegionExporter(runtime_dir, channel, 0)

    def __call__(self) -> Exposed:
        """The memory as it is now. Raises `NotExportable` with advice."""
        tensors, pieces = self._source.local(self._manifest.tensors)
        exports = self._exporter.export(tensors)
        address, generation = self._exporter.address().address, self._exporter.generation
        return Exposed(pieces, (exports,), (Exporting(holder=0, address=address, generation=generation),))

    def close(self) -> None:
        """Share no more. Engines notice before they read again."""
        self._exporter.close()
