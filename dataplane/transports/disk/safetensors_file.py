"""One packed bucket as one safetensors file, written and read without a copy of it in memory.

A safetensors file is eight bytes of header length, a JSON header, and the packed tensors: exactly the bytes of a
bucket. The header of a bucket is a function of the manifest, so a reader compares it byte by byte and trusts
nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

from ...errors import TransferFailed
from ...tensors import Manifest

DTYPES: Final[dict[str, str]] = {
    "float64": "F64",
    "int64": "I64",
    "float32": "F32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int16": "I16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""By the names of manifests, what safetensors calls them."""
_PIECE_BYTES: Final = 64 * 1024 * 1024
"""How much of a GPU's bucket is on the host at a time."""


def file_name(manifest: Manifest, index: int) -> str:
    """The name Hugging Face gives shard `index`."""
    return f"model-{index + 1:05d}-of-{len(manifest.buckets):05d}.safetensors"


def header(manifest: Manifest, index: int) -> bytes:
    """Everything in the file before the tensors; its length is a multiple of eight."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor, (start, end) in zip(manifest.tensors_of(index), pairwise(manifest.offsets_of(index)), strict=True):
        entries[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write(path: Path, manifest: Manifest, index: int, memory: torch.Tensor) -> None:
    """Write bucket `index` and wait until the disk has it. A GPU's bucket passes through the host piece by piece."""
    nbytes = manifest.buckets[index].nbytes
    with path.open("xb") as file:
        file.write(header(manifest, index))
        for start in range(0, nbytes, _PIECE_BYTES):
            piece = memory[start : min(nbytes, start + _PIECE_BYTES)].cpu()
            file.write(piece.numpy().data)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path, manifest: Manifest, index: int) -> torch.Tensor:
    """Map the tensors of bucket `index` for reading. Raises `TransferFailed` unless the file is what `write` writes."""
    expected = header(manifest, index)
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
