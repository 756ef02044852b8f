"""Where the tensors of a safetensors checkpoint lie: read from its index and headers, never from weights. No torch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from ..errors import ManifestError
from .manifest import TensorSpec

STORED_DTYPES: Final[dict[str, str]] = {
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
_NAMED: Final = {stored: name for name, stored in STORED_DTYPES.items()}
_INDEX: Final = "model.safetensors.index.json"
_BESIDE: Final = ("consolidated", "adapter_")
"""Beginnings of the names of files beside a model's own: Mistral's format of the same weights, and PEFT's adapters."""
_LONGEST_HEADER: Final = 256 * 1024 * 1024


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor in a safetensors file, from byte `offset` of the file on."""

    spec: TensorSpec
    path: Path
    offset: int
    nbytes: int

    def read(self, piece_bytes: int) -> Iterator[bytes]:
        """Its bytes, in pieces. Raises OSError for a file that ends before."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            left = self.nbytes
            while left:
                part = file.read(min(left, piece_bytes))
                if not part:
                    raise OSError(f"{self.path} ends inside of {self.spec.name!r}")
                left -= len(part)
                yield part


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


def stored_files(folder: Path) -> list[Path]:
    """The files of the model's weights in `folder`: those of its index, else all that are not known to be beside it.

    Raises OSError or ValueError for an index that cannot be read.
    """
    index = folder / _INDEX
    if index.exists():
        shards = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        return [folder / name for name in sorted(set(shards.values()))]
    found = sorted(folder.glob("*.safetensors"))
    return [path for path in found if not path.name.startswith(_BESIDE)] or found


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of the checkpoint in `folder` by name; empty where it has no weights, or lacks some of its files.

    Raises `ManifestError` for files that are no safetensors files.
    """
    try:
        paths = stored_files(folder)
        if not all(path.exists() for path in paths):
            return {}
        return {each.spec.name: each for path in paths for each in tensors_in_file(path)}
    except (OSError, ValueError) as error:
        raise ManifestError(f"{folder} cannot be read as a safetensors checkpoint: {error}") from error


def tensors_in_file(path: Path) -> list[StoredTensor]:
    """The tensors of one file, by its header. A dtype that cannot travel keeps the name that safetensors has for it.

    Raises OSError, and `ManifestError` for a file that is no safetensors file.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ManifestError(f"{path} is not a safetensors file: its header would take {length} bytes")
        try:
            header = msgspec.json.decode(file.read(length), type=dict[str, _Entry])
        except ValueError as error:
            raise ManifestError(f"{path} is not a safetensors file: {error}") from error
    header.pop("__metadata__", None)
    found: list[StoredTensor] = []
    for name, each in header.items():
        spec = TensorSpec(name, _NAMED.get(each.dtype, each.dtype), each.shape)
        begin, end = each.data_offsets
        found.append(StoredTensor(spec, path, 8 + length + begin, end - begin))
    return found
