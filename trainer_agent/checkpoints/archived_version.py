"""Reads a version that a trainer kept as files, and compares its bytes with the digest table beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import torch

from weightbus.dataplane.digest import ALGORITHM, DIGEST_BYTES, check_digests
from weightbus.dataplane.errors import DigestMismatch, ManifestError
from weightbus.dataplane.tensors import DigestTable, Manifest, TensorSpec
from weightbus.dataplane.transports.disk import NOTES, Notes, SavedVersion, place_of

from ..machine import BadCheckpoint
from .checkpoint_source import Checkpoint, CorruptCheckpoint


def kept_in(save_dir: Path, channel: str, version: int) -> Path:
    """Folder of the kept `version`. Raises `BadCheckpoint`, which names the kept versions, when it is not there."""
    folder = place_of(save_dir, channel, version)
    if (folder / NOTES).is_file():
        return folder
    there = sorted(
        int(path.parent.name.rpartition("-")[2]) for path in folder.parent.glob(f"checkpoint-[0-9]*/{NOTES}")
    )
    found = f"kept there are {', '.join(map(str, there))}" if there else "no version of this channel is"
    raise BadCheckpoint(folder, f"version {version} is not kept (any more), {found}: name a folder with --checkpoint")


def check_notes(folder: Path, channel: str, version: int) -> None:
    """Raise `BadCheckpoint` when the notes in `folder` name another channel or version."""
    try:
        notes = msgspec.json.decode((folder / NOTES).read_bytes(), type=Notes)
    except FileNotFoundError:
        return
    except ValueError as error:
        raise BadCheckpoint(folder, f"its {NOTES} cannot be read ({error}), so its version is unknown") from error
    if (notes.channel, notes.version) != (channel, version):
        raise BadCheckpoint(
            folder,
            f"by its {NOTES} it is version {notes.version} of channel {notes.channel!r}, expected version {version} of"
            f" {channel!r}: name the folder that was published as that",
        )


class ArchivedVersion:
    """A checkpoint whose tensors are compared with their digest table as they are read. Satisfies `Checkpoint`."""

    def __init__(self, checkpoint: Checkpoint, kept: SavedVersion) -> None:
        """Raises `BadCheckpoint` when the table describes other tensors."""
        self._checkpoint, self._kept = checkpoint, kept
        try:
            manifest = Manifest.decode(kept.blobs[kept.notes.manifest])
            table = DigestTable.decode(kept.blobs[kept.notes.table], manifest)
        except ManifestError as error:
            raise BadCheckpoint(kept.path, f"what it is to be compared with cannot be read: {error}") from error
        if table.algorithm != ALGORITHM or set(manifest.tensors) != set(checkpoint.tensors):
            raise BadCheckpoint(kept.path, "its digest table is of other tensors than its files hold")
        starts = range(0, len(table.tensors), DIGEST_BYTES)
        self._digests = {
            spec.name: table.tensors[at : at + DIGEST_BYTES] for spec, at in zip(manifest.tensors, starts, strict=True)
        }

    @property
    def model(self) -> str:
        """Architecture that its config names."""
        return self._checkpoint.model

    @property
    def config(self) -> Mapping[str, Any]:
        """Its ``config.json``."""
        return self._checkpoint.config

    @property
    def tensors(self) -> Sequence[TensorSpec]:
        """Its tensors."""
        return self._checkpoint.tensors

    def read(self, wanted: Sequence[TensorSpec], out: torch.Tensor) -> None:
        """Pack tensors into `out`. Raises `CorruptCheckpoint` unless they are the committed ones."""
        self._checkpoint.read(wanted, out)
        names = [spec.name for spec in wanted]
        offsets = [0, *accumulate(spec.nbytes for spec in wanted)]
        try:
            check_digests(out, offsets, b"".join(self._digests[name] for name in names), names)
        except DigestMismatch as wrong:
            raise CorruptCheckpoint(
                f"{self._kept.path}: tensor {wrong.tensor!r} is not the one that was committed as version"
                f" {self._kept.notes.version} (its digest is {wrong.found}, expected {wrong.expected}): the file was"
                " changed or damaged since"
            ) from wrong

    def check(self) -> None:
        """Raise `AssemblyFailed` when a file was written to since it was opened."""
        self._checkpoint.check()

    def close(self) -> None:
        """Close the files."""
        self._checkpoint.close()
