"""Quantises weights where they lie: torch on a CPU, one pass of a Triton kernel on a GPU. One interface for both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from . import quantise_torch
from .quantisation import Scheme

Quantiser = Callable[[Scheme, torch.Tensor, Sequence[torch.Tensor]], None]
"""Quantises a weight (rows, columns), which lies on the scheme's grain, into its parts but ``weight_shape``, in order.

The weight is in the dtype in which it would be served; it and the outputs may be strided. On a GPU the outputs are
complete in the order of the current stream.
"""


def quantiser_for(device: torch.device) -> Quantiser:
    """What quantises on `device`."""
    if device.type == "cuda":
        from . import quantise_triton  # noqa: PLC0415  Triton is there where a GPU is

        return quantise_triton.quantise
    return quantise_torch.quantise
