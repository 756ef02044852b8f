"""The weights of a fake SGLang server: takes payloads apart by code of its own, loads as carelessly as the real one.

What SGLang dies of, dies here (`ServerDied`); what it swallows, is swallowed: unknown names, half of a model, casts.
"""

from __future__ import annotations

import base64
import hashlib
import io
import pickle  # noqa: TID251 - a fake server must read what the real one reads
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

TORCH_HEADER_BYTES = 64
"""What torch's reference-counted shared memory puts before the data."""
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
CUT_BY_COLUMN = ("o_proj", "down_proj")


class ServerDied(Exception):
    """The real server would have exited."""


class Metadata(NamedTuple):
    """SGLang's FlattenedTensorMetadata."""

    name: str
    shape: Any
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


def _host_storage(_kind: object, manager: bytes, handle: bytes, nbytes: int) -> bytes:
    assert manager
    with Path("/dev/shm", handle.decode().lstrip("/")).open("rb") as file:
        file.seek(TORCH_HEADER_BYTES)
        return file.read(nbytes)


def _tensor(_kind: object, storage: bytes, where: tuple[int, Any, tuple[int, ...], bool]) -> torch.Tensor:
    offset, size, stride, requires_grad = where
    assert (offset, tuple(stride), requires_grad) == (0, (1,), False)
    return torch.frombuffer(bytearray(storage), dtype=torch.uint8)[: next(iter(size))].clone()


def _typed(storage: bytes, dtype: torch.dtype) -> bytes:
    assert dtype is torch.uint8
    return storage


_REDUCTIONS = "torch.multiprocessing.reductions"
ALLOWED: dict[tuple[str, str], Any] = {
    ("sglang.srt.weight_sync.tensor_bucket", "FlattenedTensorMetadata"): Metadata,
    ("torch", "Size"): tuple,
    ("torch", "Tensor"): torch.Tensor,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    (_REDUCTIONS, "rebuild_storage_filename"): _host_storage,
    (_REDUCTIONS, "rebuild_typed_storage"): _typed,
    (_REDUCTIONS, "rebuild_tensor"): _tensor,
    **{("torch", name): getattr(torch, name) for name in ("uint8", "bfloat16", "float16", "float32", "int64")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise ServerDied(f"Blocked unsafe global ({module}.{name}) during pickle deserialization")
        return ALLOWED[module, name]


def decode(payload: str) -> list[tuple[str, torch.Tensor]]:
    """The named tensors of one ``flattened_bucket`` payload."""
    try:
        content = _Unpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()
        flat, metadata = content["flattened_tensor"], content["metadata"]
        return [
            (each.name, flat[each.start_idx : each.end_idx].view(each.dtype).reshape(each.shape)) for each in metadata
        ]
    except Exception as error:
        raise ServerDied(f"{type(error).__name__}: {error}") from error


class FakeWeights:
    """Full tensors by Hugging Face name; what ranks would hold is computed when it is asked for."""

    def __init__(self, checkpoint: Path, tp: int) -> None:
        self.tensors = read(checkpoint)
        self._digest = b""
        self._whole = threading.RLock()
        """Loads and generations are threads: what was computed of the old weights must not be kept for the new."""
        self.tp = tp

    def load(self, named: list[tuple[str, torch.Tensor]]) -> None:
        """As load_weights does: names it does not know are skipped, other dtypes cast, other shapes deadly."""
        with self._whole:
            self._digest = b""
            for name, tensor in named:
                mine = self.tensors.get(name)
                if mine is None:
                    continue
                if mine.shape != tensor.shape:
                    raise ServerDied(f"shape mismatch for {name}")
                self.tensors[name] = tensor.to(mine.dtype).clone()

    def digest(self) -> bytes:
        """Of everything: what a generation depends on."""
        with self._whole:
            if not self._digest:
                whole = hashlib.sha256()
                for name in sorted(self.tensors):
                    whole.update(_bytes(self.tensors[name]))
                self._digest = whole.digest()
            return self._digest

    def undefine(self) -> None:
        """As memory that was given back comes back: other contents in every tensor."""
        with self._whole:
            self.tensors = {name: torch.full_like(tensor, 7) for name, tensor in self.tensors.items()}
            self._digest = b""

    def spoil(self) -> None:
        """One bit of difference in one tensor."""
        with self._whole:
            name = next(iter(self.tensors))
            self.tensors[name] = self.tensors[name] + 1
            self._digest = b""

    def checksums(self, rank: int) -> dict[str, str]:
        """What weights_checker reports of one rank, by SGLang's names."""
        return {name: hashlib.sha256(_bytes(tensor)).hexdigest()[:16] for name, tensor in self._parameters(rank)}

    def _parameters(self, rank: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            fused = next(((new, parts) for new, parts in FUSED.items() if any(f".{p}." in name for p in parts)), None)
            if fused is None:
                yield name, self._cut(name, tensor, rank)
            elif f".{fused[1][0]}." in name:
                parts = [name.replace(fused[1][0], part) for part in fused[1]]
                whole = torch.cat([self._cut(part, self.tensors[part], rank) for part in parts])
                yield name.replace(fused[1][0], fused[0]), whole

    def _cut(self, name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        if self.tp == 1 or tensor.dim() == 1:
            return tensor
        column = any(f".{part}." in name for part in CUT_BY_COLUMN)
        return tensor.chunk(self.tp, dim=1 if column else 0)[rank].contiguous()


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint folder."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
