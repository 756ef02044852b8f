"""Stands for the CPU build of SGLang's kernels, of which PyPI has no wheel. On PYTHONPATH of CPU servers only.

SGLang imports many names from here. The plain path (bf16 model, dense or of experts, ``torch_native`` attention, no
speculation) calls one of them, which is implemented; every other name imports and raises when it is called.
"""

from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.0.0+cpu"


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    _pool_len: int,
) -> None:
    """Write each request's freshly allocated cache slots into its row of the token table."""
    taken = 0
    columns = torch.stack([req_pool_indices.long(), start_offset.long(), end_offset.long()], dim=1)
    spans: list[list[int]] = columns.tolist()  # type: ignore[no-untyped-call, unused-ignore]
    for row, start, end in spans:
        slots = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = slots.to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in: only plain bf16 models run without a GPU")

    missing.__name__ = name
    return missing
