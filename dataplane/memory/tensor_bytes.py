"""The memory of tensors as bytes, in which copy tables and box tables count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from ..tensors import Column


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """1-D uint8 over a tensor's memory, from its first element to its last one. Not a copy."""
    item = tensor.element_size()
    reach = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), int(tensor.storage_offset()) * item, (int(reach) * item,), (1,))


def addresses_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Addresses of the first elements.

    A steady round asks thousands of tensors for this alone, without a Python loop.
    """
    return list(map(torch.Tensor.data_ptr, tensors))


def sizes_of(regions: Sequence[torch.Tensor]) -> Column:
    """(regions,): bytes of each."""
    return np.array([region.numel() for region in regions], np.int64)
