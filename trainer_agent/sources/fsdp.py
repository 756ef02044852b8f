"""A `Source` over a module that torch's FSDP2 shards (`fully_shard`): plain, hybrid, and over tensor parallelism.

Every rank describes its own shards as shards of the checkpoint's tensors (module_shards.py), experts by their own
names; buckets are assembled from them as from any other trainer's (assembler.py). No parameter is ever gathered: the
bytes of a bucket travel to the root, once. Masters in float32 are cast where they are, before they travel.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from .collective_source import ShardedSource
from .module_shards import describe_module, device_of
from .rank_group import DEFAULT_TIMEOUT_S, RankGroup
from .rank_layout import distinct_shards


class FSDPSource(ShardedSource):
    """The live weights of one sharded Hugging Face module. Satisfies `Source`."""

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        model: str | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Agree with every rank of `group` (default: all) on the tensors that are served. Collective over `group`.

        Args:
            module: the root module, after `fully_shard`.
            dtype: dtype in which parameters are served; by default their own, often float32 with FSDP.
            model: architecture that the checkpoint's config names; by default the module's class.
            group: the ranks of one model with all of its replicas; see `MegatronSource`.
            timeout_s: seconds that any collective waits.

        Raises:
            SourceError: on every rank when any rank cannot serve; the first by rank is named on the others.
        """
        super().__init__(RankGroup(group, timeout_s))
        with self._closing_when_refused():
            layouts, local = self._exchange_layouts(lambda: describe_module(module, dtype, self.rank, model))
            distinct = distinct_shards(layouts, local.tensors)
        self._serve(local, distinct, device_of(local.parameters))
