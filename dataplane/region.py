"""Both ends of exported memory: `Exporter` in a trainer rank, `Importer` in an engine's worker. Protocols.

Order, exporter:  export -> (serve readers in its own thread) -> renew, when storages were replaced -> close
Order, importer:  open -> (read, round after round) -> close, or open again with a newer generation

An exporter's death ends the importer's lease: its pidfd becomes readable and `check` raises `PeerLost`. A reader's
death ends its lease at the exporter. Memory that is still leased is kept alive by the exporter, whatever the trainer
frees.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from .exports import ExportMap
from .transport import Address


class Exporter(Protocol):
    """One rank's side. `export` and `close` are called by the rank's thread; readers are served in the background."""

    @property
    def generation(self) -> int:
        """Grows with every `export` that changed a region."""
        ...

    def export(self, tensors: Sequence[torch.Tensor]) -> ExportMap:
        """Make the storages of `tensors` readable; `ExportMap.places` follows their order.

        Storages that are exported already keep their regions. Raises `NotExportable` with advice for memory that cannot
        be opened by others.
        """
        ...

    def address(self) -> Address:
        """Where readers of this generation connect: a Unix socket that serves this user only."""
        ...

    def close(self) -> None:
        """Refuse new readers and hang up on the present ones, who notice before they read again.

        Called between publications, when nobody reads. Memory that a reader still maps is kept until it has let go: by
        the kernel where it is host memory, and by the exporter where it is a GPU's.
        """
        ...


class Importer(Protocol):
    """One worker's side."""

    def open(self, address: Address, holder: int, generation: int, regions: Sequence[int], deadline_s: float) -> None:
        """Open these regions of `holder`, each once. Raises `StaleSession` for another generation, `PeerLost`."""
        ...

    def region(self, holder: int, region: int) -> torch.Tensor:
        """1-D uint8 tensor over an open region, to be read only."""
        ...

    def keep(self, holders: Collection[int]) -> None:
        """Let go of the regions of all others."""
        ...

    def check(self) -> None:
        """Raise `PeerLost` when the process behind an open region has died. Takes microseconds."""
        ...

    def close(self) -> None:
        """Close every region and tell the exporters."""
        ...
