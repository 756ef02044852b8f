"""Hugging Face checkpoints, written bucket by bucket: complete and durable by one rename, or not there at all.

    <target>.tmp    being written
    <target>        shards, their index, weightbus.json, and what lies beside the weights of another checkpoint, with
                    the tensors of it that the version does not send

A shard is a safetensors file: eight bytes of header length, a JSON header, and the packed tensors, exactly the bytes of
a bucket. Its header is a function of the manifest, so a reader compares it byte by byte and trusts nothing.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from msgspec import structs

from ...errors import ManifestError, TransferFailed
from ...tensors import STORED_DTYPES, Manifest, StoredTensor, stored_tensors, tensors_in_file

DTYPES: Final = STORED_DTYPES
"""By the names of manifests, what safetensors calls them."""
_PIECE_BYTES: Final = 64 * 1024 * 1024
"""How much of a GPU's bucket is on the host at a time."""


def shard_name(manifest: Manifest, index: int) -> str:
    """The name Hugging Face gives shard `index`."""
    return f"model-{index + 1:05d}-of-{len(manifest.buckets):05d}.safetensors"


def shard_header(manifest: Manifest, index: int) -> bytes:
    """Everything in the file before the tensors; its length is a multiple of eight."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor, (start, end) in zip(manifest.tensors_of(index), pairwise(manifest.offsets_of(index)), strict=True):
        entries[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    return _framed(entries)


def _framed(entries: Mapping[str, object]) -> bytes:
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_shard(path: Path, manifest: Manifest, index: int, memory: torch.Tensor) -> None:
    """Write bucket `index` and wait until the disk has it. A GPU's bucket passes through the host piece by piece."""
    nbytes = manifest.buckets[index].nbytes
    with path.open("xb") as file:
        file.write(shard_header(manifest, index))
        for start in range(0, nbytes, _PIECE_BYTES):
            piece = memory[start : min(nbytes, start + _PIECE_BYTES)].cpu()
            file.write(piece.numpy().data)
        file.flush()
        os.fsync(file.fileno())


def read_shard(path: Path, manifest: Manifest, index: int) -> torch.Tensor:
    """Map the tensors of bucket `index` for reading. Raises `TransferFailed` unless the file is what `write` writes."""
    expected = shard_header(manifest, index)
    size = len(expected) + manifest.buckets[index].nbytes
    try:
        with path.open("rb") as file:
            found_size = os.fstat(file.fileno()).st_size
            if found_size != size or file.read(len(expected)) != expected:
                raise TransferFailed(
                    f"{path} with {found_size} bytes is not bucket {index} of this manifest ({size} bytes)"
                )
            # Private and writable, because torch has no read-only tensors; it is never written to.
            mapped = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        raise TransferFailed(f"{path} cannot be read: {error.strerror}") from error
    return torch.from_numpy(np.frombuffer(mapped, dtype=np.uint8)[len(expected) :])  # pyright: ignore[reportUnknownMemberType]


LEFT: Final = "model-left.safetensors"
"""The shard of what a version does not send: what it leaves, from the config's checkpoint, and copies."""
NOTES: Final = "weightbus.json"
"""Says which bits the checkpoint holds."""
_OURS: Final = "weightbus"
"""Files of another version that begin like this are not taken over."""

_WEIGHTS: Final = re.compile(r"(\.safetensors|\.bin|\.pt|\.pth|\.gguf|\.index\.json)$")


_NOTHING: Final[Mapping[str, bytes]] = {}


class Notes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which bits a checkpoint holds; also stands inside it as weightbus.json."""

    channel: str
    epoch: int
    version: int
    manifest: str
    table: str


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
        path = self.writing / shard_name(self._manifest, index)
        write_shard(path, self._manifest, index, memory)

    def finish(self, notes: Notes, beside: Mapping[str, bytes] = _NOTHING) -> None:
        """Complete it, and give it its name."""
        self.complete(notes, beside)
        self.reveal()

    def complete(self, notes: Notes, beside: Mapping[str, bytes] = _NOTHING) -> None:
        """Write what belongs beside the shards, and make everything durable. `beside` are further files, by name."""
        manifest = self._manifest
        weight_map = {
            tensor.name: shard_name(manifest, index)
            for index in range(len(manifest.buckets))
            for tensor in manifest.tensors_of(index)
        }
        left = self._unsent(weight_map)
        if left:
            _write_left(self.writing / LEFT, left)
        weight_map |= {each.spec.name: LEFT for each in left}
        total = manifest.nbytes + sum(each.nbytes for each in left)
        index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_durably(self.writing / "model.safetensors.index.json", msgspec.json.encode(index_file))
        _write_durably(self.writing / NOTES, msgspec.json.encode(notes))
        for name, data in beside.items():
            _write_durably(self.writing / name, data)
        for source in sorted(self._config_dir.iterdir()) if self._config_dir else ():
            if source.is_file() and not _WEIGHTS.search(source.name) and not source.name.startswith(_OURS):
                _write_durably(self.writing / source.name, source.read_bytes())
        _sync_folder(self.writing)

    def _unsent(self, places: Mapping[str, str]) -> list[StoredTensor]:
        """Tensors of the config's checkpoint that the version does not send: with them the folder is complete.

        Tensors that the version leaves lie there; copies lie in the shards that were written, by `places`.
        """
        manifest = self._manifest
        try:
            stored = stored_tensors(self._config_dir) if manifest.left and self._config_dir is not None else {}
            shards = {places[of] for of in manifest.copied.values()}
            sent = {each.spec.name: each for shard in shards for each in tensors_in_file(self.writing / shard)}
        except ManifestError as error:
            raise OSError(str(error)) from error
        copies = [
            structs.replace(sent[of], spec=structs.replace(sent[of].spec, name=name))
            for name, of in manifest.copied.items()
        ]
        return [*(each for name, each in stored.items() if manifest.leaves(name)), *copies]

    def reveal(self) -> None:
        """Give it its name, which nothing has."""
        self.writing.rename(self.target)
        _sync_folder(self.target.parent)

    def discard(self) -> None:
        """Give up what is not complete."""
        shutil.rmtree(self.writing, ignore_errors=True)


def _write_left(path: Path, left: Sequence[StoredTensor]) -> None:
    """Copy tensors of another checkpoint into a shard of their own: a link would bring what lies beside them."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    ends = list(accumulate((each.nbytes for each in left), initial=0))
    for each, (start, end) in zip(left, pairwise(ends), strict=True):
        dtype = DTYPES.get(each.spec.dtype, each.spec.dtype)
        entries[each.spec.name] = {"dtype": dtype, "shape": each.spec.shape, "data_offsets": (start, end)}
    with path.open("xb") as file:
        file.write(_framed(entries))
        for each in left:
            for part in each.read(_PIECE_BYTES):
                file.write(part)
        file.flush()
        os.fsync(file.fileno())


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
