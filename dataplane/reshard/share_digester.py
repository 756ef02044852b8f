"""Executes one rank's digest share: reads its own memory once, and gives its sums by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from ..copy import CopyEngine, Lanes, PreparedCopies, PreparedDigest
from ..memory import bytes_of, sizes_of
from .digest_shares import DigestShare

PASS_BYTES: Final = 256 * 1024 * 1024
"""Bytes of the buffer into which masters of another dtype are cast, a part at a time."""


@dataclass(frozen=True, eq=False)
class _Bound:
    copies: PreparedCopies
    digest: PreparedDigest


class ShareDigester:
    """One rank's share bound to its memory, which must not move."""

    def __init__(
        self, share: DigestShare, tensors: Sequence[torch.Tensor], device: torch.device, engine: CopyEngine
    ) -> None:
        """`tensors` are numbered as `storage` in shards."""
        regions = [bytes_of(tensor) for tensor in tensors]
        sizes = sizes_of(regions)
        self._tensors = share.tensors
        self._buffer = torch.empty(
            max((each.nbytes for each in share.passes), default=0), dtype=torch.uint8, device=device
        )
        self._odd = torch.empty(share.odd.nbytes, dtype=torch.uint8, device=device)
        buffers = sizes_of([self._buffer])
        share.in_place.check(sizes)
        share.odd.copies.check(sizes, sizes_of([self._odd]))
        self._in_place = engine.prepare_digest(share.in_place, regions)
        self._pack_odd = engine.prepare_copies(share.odd.copies, regions, [self._odd])
        self._passes: list[_Bound] = []
        for each in share.passes:
            each.copies.check(sizes, buffers)
            each.boxes.check(buffers)
            copies = engine.prepare_copies(each.copies, regions, [self._buffer])
            self._passes.append(_Bound(copies, engine.prepare_digest(each.boxes, [self._buffer])))

    def begin(self) -> None:
        """Start to read the memory, on the current stream. Asynchronous on a GPU.

        Writes on other streams must have ended.
        """
        self._in_place.launch()
        for each in self._passes:  # they share the buffer: the stream keeps them apart
            each.copies.launch()
            each.digest.launch()
        self._pack_odd.launch()

    def result(self) -> tuple[Lanes, bytes]:
        """(2, tensors of the share) uint64, and the odd boxes' bytes, of the last `begin`.

        Blocks until they are there.
        """
        lanes = self._in_place.lanes()
        for each in self._passes:
            lanes = lanes + each.digest.lanes()
        found: Lanes = np.ascontiguousarray(lanes[:, self._tensors])
        return found, self._odd.cpu().numpy().tobytes()

    def run(self) -> tuple[Lanes, bytes]:
        """`begin` and `result`."""
        self.begin()
        return self.result()

    def close(self) -> None:
        """Release the memory."""
        for each in self._passes:
            each.copies.close()
            each.digest.close()
        self._passes = []
        self._pack_odd.close()
        self._in_place.close()
