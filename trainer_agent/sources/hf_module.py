"""A `Source` over a plain Hugging Face module on one process, as single-GPU trainers and tests have it.

Tensors go by the names of the checkpoint: tied tensors once, buffers that belong to it, experts one by one
(checkpoint_conversion.py).
"""

from __future__ import annotations

import torch
from torch import nn

from .collective_source import ShardedSource
from .module_shards import describe_module
from .rank_group import SingleRank


class HFModuleSource(ShardedSource):
    """The live weights of one module on one process. Satisfies `Source`."""

    def __init__(self, module: nn.Module, *, model: str | None = None, dtype: torch.dtype | None = None) -> None:
        """Describe `module` as the tensors of its checkpoint.

        Args:
            module: the model; its parameters may be on any device.
            model: architecture that the checkpoint's config names; by default the module's class.
            dtype: dtype in which parameters are served; by default their own.

        Raises:
            SourceError: for tensors of the checkpoint that are no slices of the module's, such as unmerged adapters.
        """
        super().__init__(SingleRank())
        local = describe_module(module, dtype, 0, model)
        self._serve(local, local.shards, local.parameters[0].device)
