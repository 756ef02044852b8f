"""Trainer pieces meet recorded copies: what one engine worker copies from whom, as a table. Pure, by column.

The plan is made once for a pair of layouts and used until either changes. Both sides make it for themselves from the
same inputs, and compare digests before a byte moves: neither trusts the other's arithmetic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from .copy_table import CopyTable
from .exports import ExportMap
from .pieces import Pieces
from .recording import Recording


class Reader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The worker that a plan is for, as far as the choice among replicas asks."""

    rank: int
    host: str
    device: str
    """``cpu``, or the uuid of its GPU."""
    peers: tuple[str, ...] = ()
    """uuids of the GPUs that it can read directly, its own left out."""


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One region that a plan reads: source region number `index` of its tables."""

    holder: int
    region: int


@dataclass(frozen=True, eq=False)
class Plan:
    """What one worker does in every round."""

    reader: Reader
    recording: str
    """Digest of the recording that it was made for."""
    sources: tuple[Source, ...]
    """The regions to open. `copies.source` and `staging.source` number these."""
    copies: CopyTable
    """Into the recording's targets."""
    staging: CopyTable
    """Whole tensors for the engine's own loader, into one packed buffer; target region 0 is that buffer."""
    staged: tuple[int, ...]
    """The tensors in it, one after another, each beginning on a multiple of 16 bytes."""
    staging_bytes: int

    def digest(self) -> str:
        """SHA-256, hexadecimal: the name of exactly these copies."""
        parts = (self.recording.encode(), msgspec.msgpack.encode((self.reader, self.sources, self.staged)))
        rows = (self.copies.encode(), self.staging.encode())
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in (*parts, *rows))).hexdigest()


def make_plan(pieces: Pieces, exports: Sequence[ExportMap], recording: Recording, reader: Reader) -> Plan:
    """The copies of one worker.

    `pieces` are those of all holders, replicas included, with `holder` naming an entry of `exports`. Every element of
    every recorded copy comes from one of them: the nearest, and among equally near ones in turn. Raises `CoverageError`
    when nobody that the reader can reach holds a part, `ManifestError` when tensors differ in name, dtype or shape.
    """
    raise NotImplementedError
