"""Writes a Hugging Face checkpoint bucket by bucket: it appears complete and durable, by one rename, or not at all.

<target>.tmp    being written
<target>        shards, their index, weightbus.json, and whatever lies beside the weights of another checkpoint
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import torch

from ...tensors import Manifest
from . import safetensors_file
from .checkpoint_locks import Notes

NOTES: Final = "weightbus.json"
"""Says which bits the checkpoint holds."""
_OURS: Final = "weightbus"
"""Files of another version that begin like this are not taken over."""

_WEIGHTS: Final = re.compile(r"(\.safetensors|\.bin|\.pt|\.pth|\.gguf|\.index\.json)$")


_NOTHING: Final[Mapping[str, bytes]] = {}


class CheckpointWriter:
    """One checkpoint. Methods raise OSError as it comes."""

    def __init__(self, target: Path, manifest: Manifest, config_dir: Path | None) -> None:
        """Config and tokenizer files come from `config_dir`, if given."""
        self.target = target
        self._manifest = manifest
        self._config_dir = config_dir

    @property
    def writing(self) -> Path:
        """Where it lies until it is complete."""
        return self.target.with_name(self.target.name + ".tmp")

    def begin(self) -> None:
        """Make an empty folder; one that was begun before is given up."""
        self.discard()
        self.writing.mkdir(parents=True)

    def add(self, index: int, memory: torch.Tensor) -> None:
        """Write bucket `index` as a shard; returns when it is on the disk."""
        path = self.writing / safetensors_file.file_name(self._manifest, index)
        safetensors_file.write(path, self._manifest, index, memory)

    def finish(self, notes: Notes, beside: Mapping[str, bytes] = _NOTHING) -> None:
        """Complete it, and give it its name."""
        self.complete(notes, beside)
        self.reveal()

    def complete(self, notes: Notes, beside: Mapping[str, bytes] = _NOTHING) -> None:
        """Write what belongs beside the shards, and make everything durable. `beside` are further files, by name."""
        manifest = self._manifest
        weight_map = {
            tensor.name: safetensors_file.file_name(manifest, index)
            for index in range(len(manifest.buckets))
            for tensor in manifest.tensors_of(index)
        }
        index_file = {"metadata": {"total_size": manifest.nbytes}, "weight_map": weight_map}
        _write_durably(self.writing / "model.safetensors.index.json", msgspec.json.encode(index_file))
        _write_durably(self.writing / NOTES, msgspec.json.encode(notes))
        for name, data in beside.items():
            _write_durably(self.writing / name, data)
        for source in sorted(self._config_dir.iterdir()) if self._config_dir else ():
            if source.is_file() and not _WEIGHTS.search(source.name) and not source.name.startswith(_OURS):
                _write_durably(self.writing / source.name, source.read_bytes())
        _sync_folder(self.writing)

    def reveal(self) -> None:
        """Give it its name, which nothing has."""
        self.writing.rename(self.target)
        _sync_folder(self.target.parent)

    def discard(self) -> None:
        """Give up what is not complete."""
        shutil.rmtree(self.writing, ignore_errors=True)


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
