"""A trainer whose ranks share one process: their Megatron-core models stand side by side on one GPU.

NCCL gives a GPU to one rank only. Where trainer and engine are to share a single GPU, the ranks of a layout are built
one after another under torch's fake process group; what they hold, how it is cut and how it is read is the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from weightbus.dataplane.tensors.left_tensors import Left
from weightbus.dataplane.tensors.manifest import Manifest, TensorSpec
from weightbus.dataplane.tensors.shards import Shards
from weightbus.trainer_agent.assembly.assembler import Assembler, check_manifest
from weightbus.trainer_agent.assembly.gather_plan import plan
from weightbus.trainer_agent.sources.collective_source import (
    RankLayout,
    RankShards,
    check_layouts,
    distinct_shards,
    encode,
)
from weightbus.trainer_agent.sources.megatron.megatron_source import describe_chunks

import rig  # isort: skip


class LayoutShards:
    """Satisfies `Source`, `LocatedSource` and `Exportable` for all ranks of a layout at once."""

    def __init__(
        self, hf: Mapping[str, Any], device: torch.device, world: int, *, predictions: bool = True, **layout: int | None
    ) -> None:
        """Without `predictions` the trainer has none of the prediction layers that `hf` names, and leaves them."""
        self._cut = (layout.get("tp") or 1) > 1
        self._routers = (hf.get("num_experts"), hf["hidden_size"])
        self._ranks = [self._describe(hf, device, (rank, world), predictions, layout) for rank in range(world)]
        rosters = check_layouts([encode(RankLayout(each.facts(), each.shards.encode())) for each in self._ranks])
        first = np.cumsum([0, *(len(each.parameters) for each in self._ranks)])
        self._first = {rank: int(first[rank]) for rank in range(world)}
        self._pieces = self._together(distinct_shards(rosters, self._ranks[0].tensors))
        self._held = self._together(Shards.join([each.shards for each in self._ranks]))
        self.parameters = [parameter.detach() for each in self._ranks for parameter in each.parameters]
        self._device = device
        self._planned: tuple[Manifest, Assembler] | None = None

    @staticmethod
    def _describe(
        hf: Mapping[str, Any],
        device: torch.device,
        place: tuple[int, int],
        predictions: bool,
        layout: Mapping[str, int | None],
    ) -> RankShards:
        """Of one rank; `place` is its number and that of all."""
        import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers the backend "fake"
        from megatron.core import parallel_state

        rank, world = place
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world)
        try:
            return describe_chunks(rig.build(hf, device.type, predictions=predictions, **layout), hf, None, rank)
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()

    def _together(self, shards: Shards) -> Shards:
        """The shards of all ranks as those of one holder."""
        first = np.array([self._first[rank] for rank in sorted(self._first)], np.int64)
        return replace(shards, storage=shards.storage + first[shards.rank], rank=shards.rank * 0)

    @property
    def model(self) -> str:
        return self._ranks[0].model

    @property
    def root(self) -> bool:
        return True

    @property
    def rank(self) -> int:
        return 0

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def head_dim(self) -> int:
        return self._ranks[0].head_dim

    @property
    def left(self) -> Sequence[Left]:
        return self._ranks[0].left

    def tensors(self) -> Sequence[TensorSpec]:
        return self._ranks[0].tensors

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        if self._planned is None or self._planned[0] != manifest:
            check_manifest(manifest, self.tensors())
            self._planned = manifest, Assembler(plan(manifest, self._pieces, rank=0), self.parameters, 0, None, None)
        self._planned[1].run(index, out, self._device)

    @property
    def shards(self) -> Shards:
        return self._pieces

    @property
    def exchange(self) -> None:
        return None

    def agree(self, blob: bytes | None) -> bytes:
        assert blob is not None
        return blob

    def local_shards(self, tensors: Sequence[TensorSpec]) -> Shards:
        return self._held.ordered(tensors)

    def memory(self) -> Sequence[torch.Tensor]:
        return self.parameters

    def collect(self, blob: bytes) -> Sequence[bytes]:
        return [blob]

    def refill(self, seed: int, experts: float = 0.02, routers: float = 0.02) -> None:
        """New weights: of copies, all alike; of shards, each its own. `experts` and `routers` are deviations.

        As in a model, norms are about 1 and matrices about 0. Matrices of mean 1 would make every token's residual
        stream the same, and so large that bfloat16 loses what experts add.
        """
        generator = torch.Generator(self._device).manual_seed(seed)
        for rank, each in enumerate(self._ranks):
            copied = torch.Generator(self._device).manual_seed(1000 * seed + 999)
            generator.manual_seed(1000 * seed + rank)
            for parameter in each.parameters:
                expert = not getattr(parameter, "allreduce", True)
                cut = expert or (self._cut and getattr(parameter, "tensor_model_parallel", False))
                mean = 1.0 if not cut and parameter.dim() == 1 else 0.0
                deviation = experts if expert else routers if parameter.shape == self._routers else 0.02
                parameter.detach().normal_(mean, deviation, generator=generator if cut else copied)

    def close(self) -> None:
        """Free the weights."""
        self._ranks, self.parameters, self._planned = [], [], None
