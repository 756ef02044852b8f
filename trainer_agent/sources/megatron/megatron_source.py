"""A `Source` over a Megatron-core model in training: tensor, expert, pipeline and virtual pipeline parallelism.

Construction raises on every rank for any of these: a parameter without a mapping rule, two parameters of one rank for
one Hugging Face tensor, an unknown axis of parallelism, a setting of the TransformerConfig that changes the meaning of
the weights and differs from the Hugging Face config (config_checks.py). Code of a trainer outside of that config (its
own modules, the rotation of grouped attention) leaves nothing to compare.

    model_families, layer_blocks, parameter_mapping   mapping rules of each family, as tables
    hf_model                                          one Hugging Face model: sizes, layers, tensors
    parameter_names                                   the rule of a parameter, by its name
    config_checks, layer_order                        checks that the trained model is the configured one
    model_chunks, local_shards                        one rank's parameters, as shards of Hugging Face tensors

Copies of a parameter (data, context and expert data parallelism, tied embeddings of two pipeline stages, norms on every
tensor rank) are read from the lowest rank that holds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weightbus.dataplane.tensors import Manifest

from ..collective_source import ShardedSource
from ..rank_group import DEFAULT_TIMEOUT_S, RankGroup
from ..rank_layout import distinct_shards
from .layer_order import check_order, roots_of
from .local_shards import describe_chunks, folder_of
from .model_chunks import chunks_of, lagging_wrappers


class MegatronSource(ShardedSource):
    """The live weights of one Megatron-core model. Satisfies `PipelineSource`."""

    def __init__(
        self,
        model_chunks: nn.Module | Sequence[nn.Module],
        *,
        hf_config: Path | str | Mapping[str, object],
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        vocab_divisible_by: int | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Agree with every rank of `group` (default: all) on the tensors that are served. Collective over `group`.

        Args:
            model_chunks: this rank's model, or its virtual pipeline chunks, wrapped or not.
            hf_config: the served checkpoint's config: a folder, a ``config.json`` or its content.
            dtype: dtype that is served; by default the config's, or the parameters' own if it names none.
            device: device of the buckets; by default that of the parameters. A GPU for parameters that the trainer
                keeps in host memory: they are packed there and uploaded by bucket.
            vocab_divisible_by: the trainer's ``make_vocab_size_divisible_by``, needed only where it is more than 128:
                rows of the embedding beyond the config's ``vocab_size`` are padding, and more than such a setting
                explains are refused. Where it is given, the padding must be exactly what it gives.
            group: the ranks of one model with all of its replicas. Of a part of the world it is used as it is, so
                it must carry CPU tensors (and CUDA tensors where the model is) and have a timeout of its own.
            timeout_s: seconds that any collective waits.

        Raises:
            SourceError: on every rank when any rank cannot serve; the first by rank is named on the others.
        """
        super().__init__(RankGroup(group, timeout_s))
        with self._closing_when_refused():
            layouts, local = self._exchange_layouts(
                lambda: describe_chunks(
                    model_chunks, hf_config, dtype, self.rank, vocab_divisible_by=vocab_divisible_by
                )
            )
            check_order(layouts)
            distinct = distinct_shards(layouts, local.tensors)
            self._roots = roots_of(layouts, distinct)
        self._lagging = [lagging for chunk in chunks_of(model_chunks) for lagging in lagging_wrappers(chunk)]
        self.served: Path | Mapping[str, Any] = hf_config if isinstance(hf_config, Mapping) else folder_of(hf_config)
        """The checkpoint that engines serve: its folder, or the content of its ``config.json``."""
        self._serve(local, distinct, device or local.parameters[0].device, self._roots)

    def roots(self) -> Sequence[int]:
        """First rank of the pipeline stage that each tensor is read from; see `PipelineSource.roots`."""
        return self._roots

    def assemble(
        self, manifest: Manifest, index: int, out: torch.Tensor | None, roots: Sequence[int] | None = None
    ) -> None:
        """Pack bucket `index` into `out` on its root. Collective; see `PipelineSource.assemble`."""
        self._assemble(manifest, index, out, roots)

    def _settle_parameters(self) -> None:
        """Check the parameters, then gather what the optimizer left to the next forward pass. Collective.

        With overlapped parameter gathers a replica holds, after a step, only its own share of the new parameters.
        """
        super()._settle_parameters()
        for wrapper in self._lagging:
            wrapper.start_param_sync(force_sync=True)
