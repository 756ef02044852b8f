"""A quantized parameter as Transformer Engine's `Float8Tensor` is one: the interface alone, not the package.

A subclass of `torch.Tensor` that looks as if it were in 16 bits, and holds bytes of FP8 and the inverse of a scale;
`dequantize()` gives the values. Transformer Engine for torch is built from source with CUDA and cannot run on a CPU.
"""

from __future__ import annotations

from typing import Any, Self

import torch


class Float8Tensor(torch.Tensor):
    """FP8 bytes with one scale, under a nominal dtype."""

    def __new__(cls, values: torch.Tensor) -> Self:
        """Quantize `values`."""
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype, device=values.device)
        made._scale_inv = values.detach().abs().max().float() / 448
        made._data = (values.detach().float() / made._scale_inv).to(torch.float8_e4m3fn)
        return made

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values, in the nominal dtype unless another is given."""
        return (self._data.float() * self._scale_inv).to(dtype or self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keep the class under `detach`; compute anything else on dequantized values."""
        del types
        if func is torch.ops.aten.detach.default:
            made = torch.Tensor._make_wrapper_subclass(cls, args[0].shape, dtype=args[0].dtype, device=args[0].device)
            made._data, made._scale_inv = args[0]._data, args[0]._scale_inv
            return made
        plain = [each.dequantize() if isinstance(each, cls) else each for each in args]
        return func(*plain, **(kwargs or {}))
