"""A `Source` over a module that torch's FSDP2 shards (`fully_shard`): plain, hybrid, and over tensor parallelism.

Every rank describes its own shards as pieces of the checkpoint's tensors (module_shards.py), experts by their own
names; buckets are assembled from them as from any other trainer's (assembler.py). No parameter is ever gathered: what
travels are the bytes of a bucket, to the root, once. Masters in float32 are cast where they are, before they travel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from weightbus.dataplane.tensors import Manifest, Shards, TensorSpec

from ..assembly import Assembler, BucketPlan, GatherExchange, check_manifest, plan
from ..source import SourceError
from .collective_errors import together, together_check
from .module_shards import ModuleShard, describe, device_of
from .parameter_identity import local
from .rank_group import DEFAULT_TIMEOUT_S, RankGroup
from .rank_layout import RankLayout, settle


class FSDPSource:
    """The live weights of one sharded Hugging Face module. Satisfies `Source`.

    Its parameters stay the same objects, in the same form; a publication after they were replaced is refused. Their
    memory may be another one every time, also on another device.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        model: str | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Agree with every rank of `group` (default: all) on what is served. Collective: call it on all of them.

        Args:
            module: the root module, after `fully_shard`.
            dtype: what parameters are served in; by default what they are kept in, which FSDP trainers often want not.
            model: architecture that the checkpoint's config names; by default the module's class.
            group: the ranks of one model with all of its replicas; see `MegatronSource`.
            timeout_s: how long any collective waits.

        Raises:
            SourceError: on every rank when any rank cannot serve; the first by rank is named on the others.
        """
        self._ranks = RankGroup(group, timeout_s)
        try:
            self._held, self._pieces = self._settle(module, dtype, model)
        except SourceError:
            self._ranks.close()  # every rank raises, so every rank comes here
            raise
        self._device = device_of(self._held.storages)
        self._exchange = self._open_exchange()
        self._planned: tuple[Manifest, Sequence[BucketPlan]] | None = None
        self._assembler: tuple[list[torch.Tensor], Assembler] | None = None

    @property
    def model(self) -> str:
        """Architecture as the checkpoint's config names it."""
        return self._held.model

    @property
    def root(self) -> bool:
        """The first rank of the group assembles."""
        return self._ranks.rank == 0

    @property
    def device(self) -> torch.device:
        """Where buckets are: the device of the mesh, also where shards are kept in host memory."""
        return self._device

    @property
    def head_dim(self) -> int | None:
        """Elements of one attention head: with it, Llama under tensor parallelism has predictable live digests."""
        return self._held.head_dim

    def tensors(self) -> Sequence[TensorSpec]:
        """What is served, by the names of the checkpoint."""
        return self._held.tensors

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        """Pack bucket `index` into `out` on the root. Collective; see `Source.assemble`."""
        if (out is not None) != self.root:
            raise ValueError(f"rank {self._ranks.rank}: the root, and only the root, gives a buffer")
        if index == 0:
            together_check(self._ranks, self._held.kept.check)
        if self._planned is None or (self._planned[0] is not manifest and self._planned[0] != manifest):
            check_manifest(manifest, self._held.tensors)
            self._planned = (manifest, plan(manifest, self._pieces, rank=self._ranks.rank))
            self._assembler = None
        self._current(self._planned[1]).run(index, out, self._device)

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
        return self._held.pieces.ordered(tensors)

    def memory(self) -> Sequence[torch.Tensor]:
        """This rank's shards as they are now. Collective: raises on every rank when one's were replaced."""
        together_check(self._ranks, self._held.kept.check)
        return [local(tensor) for tensor in self._held.storages]

    def collect(self, blob: bytes) -> Sequence[bytes]:
        """What every rank passed, by rank. Collective."""
        return self._ranks.gather(blob)

    def close(self) -> None:
        """Let go of the groups. Collective; the parameters are the trainer's and stay."""
        self._ranks.close()

    def _current(self, buckets: Sequence[BucketPlan]) -> Assembler:
        """An assembler over the shards as they are now: optimizers that offload put other memory under them."""
        shards = [local(tensor) for tensor in self._held.storages]
        if self._assembler is None or any(a is not b for a, b in zip(shards, self._assembler[0], strict=True)):
            self._assembler = (shards, Assembler(buckets, shards, self._ranks.rank, None, self._exchange))
        return self._assembler[1]

    def _settle(self, module: nn.Module, dtype: torch.dtype | None, model: str | None) -> tuple[ModuleShard, Shards]:
        """What is served, and from where. A rank that cannot serve says so before it raises: the others wait for it."""

        def attempt() -> tuple[RankLayout, ModuleShard]:
            own = describe(module, dtype, self._ranks.rank, model)
            return RankLayout({"model": own.model, **own.facts()}, own.pieces.encode()), own

        rosters, own = together(self._ranks, attempt)
        return own, settle(rosters, own.tensors)

    def _open_exchange(self) -> GatherExchange | None:
        """The group of the ranks that anything is read from. Collective over all ranks."""
        holders = sorted({0, *self._pieces.holder.tolist()})
        if len(holders) == 1:
            return None
        group = self._ranks.subgroup(holders, self._device)
        return None if group is None else GatherExchange(group, self._ranks.global_ranks)
