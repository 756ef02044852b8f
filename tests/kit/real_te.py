"""The tensor classes of Transformer Engine itself, from its wheel for any platform, on a CPU.

    pip download --no-deps --dest wheels transformer_engine
    python -m zipfile -e wheels/transformer_engine-*.whl FOLDER     # and WEIGHTBUS_TE_OVERLAY=FOLDER

The wheel has the package's Python; kernels are in a library of another wheel, which needs CUDA. So what they are called
through is stood in for by a module whose functions fail; `Float8Tensor` dequantizes on a CPU without them.
"""

from __future__ import annotations

import enum
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

_DTYPES = "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1"


class _Nothing(ModuleType):
    """Has every name, each of them good for no call."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(f"{self.__name__}.{name}")

    def __int__(self) -> int:
        return 0

    def __or__(self, other: object) -> object:
        return object


def tensor_classes(folder: Path, patched: pytest.MonkeyPatch) -> Any:
    """``transformer_engine.pytorch.tensor`` of the wheel unpacked in `folder`, imported until `patched` is undone."""
    kernels = _Nothing("transformer_engine_torch")
    kernels.DType = enum.IntEnum("DType", _DTYPES, start=0)
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        patched.delitem(sys.modules, name)
    patched.setitem(sys.modules, "transformer_engine_torch", kernels)
    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.common"):
        made = _Nothing(name) if name.endswith("common") else ModuleType(name)
        made.__path__ = [str(folder.joinpath(*name.split(".")))]
        patched.setitem(sys.modules, name, made)
    return importlib.import_module("transformer_engine.pytorch.tensor")


def float8(classes: Any, values: torch.Tensor) -> Any:
    """`values` in FP8 with one scale, as a parameter of ``fp8_param`` is kept."""
    scale = (values.abs().max().float() / 448).reshape(1)
    return classes.Float8Tensor(
        shape=values.shape,
        dtype=torch.bfloat16,
        data=(values.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8),
        fp8_scale_inv=scale,
        fp8_dtype=sys.modules["transformer_engine_torch"].DType.kFloat8E4M3,
        quantizer=None,
        device=torch.device("cpu"),
    )
