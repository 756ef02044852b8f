"""Lets the PyPI build of torchvision, made for CUDA, import beside a CPU torch. On PYTHONPATH of CPU servers only.

torchvision registers a fake kernel for its operator ``nms`` while it is imported; its compiled half, which declares
the operator, cannot load without CUDA. Declaring the operator just before the import is all that is missing.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _DeclareOperators(importlib.abc.MetaPathFinder):
    """Finds nothing; acts once, when torchvision is about to be found by another finder."""

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch  # noqa: PLC0415 - every python process on this path would pay for it

            for operator in ("nms", "qnms"):
                if not hasattr(torch.ops.torchvision, operator):
                    torch.library.define(f"torchvision::{operator}", _SCHEMA)
        return None


sys.meta_path.insert(0, _DeclareOperators())
