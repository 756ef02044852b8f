"""A `Source` over a Megatron-core model in training: tensor, expert, pipeline and virtual pipeline parallelism.

Refuses, on every rank and at construction, whatever it cannot map: a parameter without a rule, two of one rank for one
served tensor, an axis that is not understood, a setting of the TransformerConfig that changes what the weights mean and
is not as the Hugging Face config has it. Tables in megatron_checks and megatron_computing name these settings; what a
trainer does outside of that config (its own modules, the rotation of grouped attention) leaves nothing to compare.

    families, blocks, rules     what served models consist of, as tables
    served                      one served model: sizes, layers, tensors
    megatron_names              where a parameter belongs
    megatron_checks, -_computing   whether trained and served model are one: what they are, and how they compute
    megatron_chunks             what a rank holds, -_description as pieces of the served model
    parcels, assembly           how it gets into buckets

Copies of a parameter - data, context and expert data parallelism, tied embeddings of two pipeline stages, norms on
every tensor rank - are read from the lowest rank that holds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from weightbus.dataplane.tensors import Manifest, Shards, TensorSpec

from ...assembly import Assembler, BucketPlanCache, GatherExchange, check_manifest, plan
from ...source import SourceError
from ..collective_errors import together, together_check
from ..rank_group import RankGroup
from ..rank_layout import RankLayout, settle
from .layer_order import check_order, roots_of
from .local_shards import Description, describe, folder_of
from .model_chunks import chunks_of, lagging_wrappers

DEFAULT_TIMEOUT_S: Final = 1800.0
"""How long a rank waits for another: longer than a round, because the leader answers for the engines meanwhile."""


class MegatronSource:
    """The live weights of one Megatron-core model. Satisfies `Source`.

    Its parameters stay the same objects, in the same form; a publication after they were replaced is refused. Their
    memory may be another one every time, also on another device.
    """

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
        """Agree with every rank of `group` (default: all) on what is served. Collective: call it on all of them.

        Args:
            model_chunks: this rank's model, or its virtual pipeline chunks, wrapped or not.
            hf_config: the served checkpoint's config: a folder, a ``config.json`` or its content.
            dtype: what is served; the config's dtype by default, the parameters' own if it names none.
            device: where buckets are; by default where the parameters are. A GPU for parameters that the trainer keeps
                in host memory: they are packed there and uploaded by bucket.
            vocab_divisible_by: the trainer's ``make_vocab_size_divisible_by``, needed only where it is more than 128:
                rows of the embedding beyond the config's ``vocab_size`` are padding, and more than such a setting
                explains are refused. Where it is given, the padding must be exactly what it gives.
            group: the ranks of one model with all of its replicas. Of a part of the world it is used as it is, so
                it must carry CPU tensors (and CUDA tensors where the model is) and have a timeout of its own.
            timeout_s: how long any collective waits.

        Raises:
            SourceError: on every rank when any rank cannot serve; the first by rank is named on the others.
        """
        self._ranks = RankGroup(group, timeout_s)
        try:
            self._own, self._pieces, self._roots = self._settle(model_chunks, hf_config, dtype, vocab_divisible_by)
        except SourceError:
            self._ranks.close()  # every rank raises, so every rank comes here
            raise
        self._lagging = [lagging for chunk in chunks_of(model_chunks) for lagging in lagging_wrappers(chunk)]
        self._device = device or self._own.parameters[0].device
        self.served: Path | Mapping[str, Any] = hf_config if isinstance(hf_config, Mapping) else folder_of(hf_config)
        """The checkpoint that engines serve: its folder, or the content of its ``config.json``."""
        self._exchange = self._open_exchange()
        self._planned = BucketPlanCache[Assembler]()

    @property
    def model(self) -> str:
        """Architecture as the Hugging Face config names it."""
        return self._own.model.architecture

    @property
    def root(self) -> bool:
        """The first rank of the group assembles."""
        return self._ranks.rank == 0

    @property
    def device(self) -> torch.device:
        """Where the buckets are."""
        return self._device

    @property
    def head_dim(self) -> int:
        """Elements of one attention head: with it, Llama under tensor parallelism has predictable live digests."""
        return self._own.model.sizes["head_dim"]

    def tensors(self) -> Sequence[TensorSpec]:
        """What is served, in checkpoint order."""
        return self._own.tensors

    def roots(self) -> Sequence[int]:
        """By tensor: the first rank of the pipeline stage that it is read from; see `Staged.roots`."""
        return self._roots

    def assemble(
        self, manifest: Manifest, index: int, out: torch.Tensor | None, roots: Sequence[int] | None = None
    ) -> None:
        """Pack bucket `index` into `out` on its root. Collective; see `Staged.assemble`."""
        nbytes = manifest.buckets[index].nbytes
        if (out is not None) != (self._ranks.rank == (0 if roots is None else roots[index])):
            raise ValueError(f"rank {self._ranks.rank}: the root of a bucket, and only its root, gives a buffer")
        if out is not None and (out.dtype != torch.uint8 or out.numel() < nbytes or out.device != self.device):
            raise ValueError(
                f"the buffer is {out.dtype} [{out.numel()}] on {out.device}, "
                f"bucket {index} takes {nbytes} bytes (uint8) on {self.device}"
            )
        if index == 0:
            self._settle_parameters()
        self._planned.of(manifest, roots, self._assembler).run(index, out, self.device)

    def agree(self, blob: bytes | None) -> bytes:
        """Hand the root's `blob` to every rank. Collective; see `Source.agree`."""
        return self._ranks.broadcast(blob)

    @property
    def rank(self) -> int:
        """Of this process, in the group."""
        return self._ranks.rank

    @property
    def pieces(self) -> Shards:
        """Every element once, as buckets are assembled from; `storage` numbers what `memory` gives."""
        return self._pieces

    @property
    def exchange(self) -> GatherExchange | None:
        """Between the ranks that anything is read from; None on the others, and where there is one."""
        return self._exchange

    def held(self, tensors: Sequence[TensorSpec]) -> Shards:
        """All that this rank holds of `tensors`, replicas included; `storage` numbers what `memory` gives."""
        return self._own.pieces.ordered(tensors)

    def memory(self) -> Sequence[torch.Tensor]:
        """This rank's parameters, once what the optimizer left to the next forward pass is done. Collective."""
        self._settle_parameters()
        return self._own.parameters

    def collect(self, blob: bytes) -> Sequence[bytes]:
        """What every rank passed, by rank. Collective."""
        return self._ranks.gather(blob)

    def close(self) -> None:
        """Let go of the groups. Collective; the parameters are the trainer's and stay."""
        self._ranks.close()

    def _settle_parameters(self) -> None:
        """Finish what the optimizer left to the next forward pass, of the parameters that were there. Collective.

        Raises a `SourceError` on every rank when one's parameters were replaced since the source was built. With
        overlapped parameter gathers a replica holds, after a step, only its own share of the new parameters.
        """
        together_check(self._ranks, self._own.kept.check)
        for wrapper in self._lagging:
            wrapper.start_param_sync(force_sync=True)

    def _assembler(self, manifest: Manifest, roots: Sequence[int] | None) -> Assembler:
        check_manifest(manifest, self._own.tensors)
        buckets, rank = plan(manifest, self._pieces, rank=self._ranks.rank, roots=roots), self._ranks.rank
        return Assembler(buckets, self._own.parameters, rank, roots, self._exchange)

    def _open_exchange(self) -> GatherExchange | None:
        """The group of the ranks that anything is read from. Collective over all ranks."""
        holders = sorted({0, *self._roots, *self._pieces.holder.tolist()})
        if len(holders) == 1:
            return None
        group = self._ranks.subgroup(holders, self.device)
        return None if group is None else GatherExchange(group, self._ranks.global_ranks)

    def _settle(
        self,
        chunks: nn.Module | Sequence[nn.Module],
        hf_config: Path | str | Mapping[str, object],
        dtype: torch.dtype | None,
        vocab_divisible_by: int | None,
    ) -> tuple[Description, Shards, tuple[int, ...]]:
        """What is served, from where, and by whom it is assembled.

        A rank that cannot serve says so before it raises: the others wait for it.
        """

        def attempt() -> tuple[RankLayout, Description]:
            own = describe(chunks, hf_config, dtype, self._ranks.rank, vocab_divisible_by=vocab_divisible_by)
            return RankLayout(own.facts, own.pieces.encode(), own.stages), own

        rosters, own = together(self._ranks, attempt)
        check_order(rosters)
        pieces = settle(rosters, own.tensors)
        return own, pieces, roots_of(rosters, pieces)
