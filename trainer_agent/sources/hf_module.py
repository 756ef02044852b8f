"""Sources over a Hugging Face module: on one process, or sharded by torch's FSDP2 (`fully_shard`), hybrid and over TP.

Every rank describes its own tensors as shards of the checkpoint's tensors, experts by their own names, tied tensors
once; buckets are assembled from them as from any other trainer's (assembler.py). No parameter is ever gathered: the
bytes of a bucket travel to the root, once. Masters in float32 are cast where they are, before they travel.
"""

# torch leaves parts of DTensor untyped.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weightbus.dataplane.tensors import ITEM_BYTES, Left, LeftReason, Shards, TensorSpec, shortest_prefixes

from ..assembly import unreadable_reason
from ..source import LayoutMismatch, UnknownParameter, UnsupportedModel, check_manifestable
from .checkpoint_conversion import head_dim, slices, stored_tensors
from .collective_source import (
    DEFAULT_TIMEOUT_S,
    NOT_SHARDED,
    TENSORS,
    ParameterIdentity,
    RankGroup,
    RankShards,
    ShardedSource,
    SingleRank,
    distinct_shards,
    local_tensor,
)
from .tensor_dtypes import Served, TensorDtypes, cast_dtype
from .tensor_placement import Placement, placements_of, replica_digests
from .tensor_slices import LocalShard, runs_of, shards_of
from .wrappers import architecture, check_wrappers, unwrapped


class HFModuleSource(ShardedSource):
    """The live weights of one module on one process. Satisfies `Source`."""

    def __init__(
        self,
        module: nn.Module,
        *,
        model: str | None = None,
        dtype: torch.dtype | None = None,
        served: Served | None = None,
        trainable_only: bool = False,
    ) -> None:
        """Describe `module` as the tensors of its checkpoint.

        Args:
            module: the model; its parameters may be on any device.
            model: architecture that the checkpoint's config names; by default the module's class.
            dtype: dtype in which parameters are served; by default their own.
            served: folder of the checkpoint that engines serve, or dtypes by the names of its tensors: a tensor that
                it keeps in another dtype than most, such as float32 beside bfloat16, is served in that.
            trainable_only: leave parameters with ``requires_grad=False``: engines keep those of their launch.

        Raises:
            SourceError: for tensors of the checkpoint that are no slices of the module's, such as unmerged adapters.
        """
        super().__init__(SingleRank())
        local = describe_module(module, TensorDtypes(dtype, served), 0, model, trainable_only=trainable_only)
        _check_whole(local.parameters)
        self._serve(local, local.shards, local.parameters[0].device)


class FSDPSource(ShardedSource):
    """The live weights of one sharded Hugging Face module. Satisfies `Source`."""

    def __init__(
        self,
        module: nn.Module,
        *,
        dtype: torch.dtype | None = None,
        served: Served | None = None,
        model: str | None = None,
        trainable_only: bool = False,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Agree with every rank of `group` (default: all) on the tensors that are served. Collective over `group`.

        Args:
            module: the root module, after `fully_shard`.
            dtype: dtype in which parameters are served; by default their own, often float32 with FSDP.
            served: as in `HFModuleSource`.
            model: architecture that the checkpoint's config names; by default the module's class.
            trainable_only: leave parameters with ``requires_grad=False``: engines keep those of their launch.
            group: the ranks of one model with all of its replicas; see `MegatronSource`.
            timeout_s: seconds that any collective waits.

        Raises:
            SourceError: on every rank when any rank cannot serve; the first by rank is named on the others.
        """
        super().__init__(RankGroup(group, timeout_s))
        with self._closing_when_refused():
            layouts, local = self._exchange_layouts(
                lambda: describe_module(
                    module,
                    TensorDtypes(dtype, served),
                    self.rank,
                    model,
                    ranks=self._ranks.global_ranks,
                    trainable_only=trainable_only,
                )
            )
            distinct = distinct_shards(layouts, local.tensors)
        self._serve(local, distinct, device_of(local.parameters))


def describe_module(
    module: nn.Module,
    dtypes: TensorDtypes,
    rank: int,
    model: str | None = None,
    *,
    ranks: Sequence[int] = (0,),
    trainable_only: bool = False,
) -> RankShards:
    """Find every tensor of `module` that its checkpoint holds, and this rank's part of it. Reads no values of shards.

    `ranks` are the global ranks of the source, of which this is the one at index `rank`.
    Parameters are served as `dtypes` says; buffers that it does not name, and modules that the model itself keeps in
    float32, as they are. Raises a `SourceError` for a tensor that cannot be described.
    """
    check_wrappers(module)
    stored = stored_tensors(module)
    if not stored:
        raise UnsupportedModel(f"{type(module).__name__} has no parameters")
    placements = placements_of(module, stored, ranks)
    form = slices(module, {name: placement.shape for name, placement in placements.items()})
    frozen = {name for name, tensor in stored.items() if trainable_only and _frozen(tensor)}
    names = [each.tensor for each in form if each.source in frozen]
    form = tuple(each for each in form if each.source not in frozen)
    if not form:
        raise UnsupportedModel(
            "every parameter has requires_grad=False, and trainable_only leaves them: no tensor would be served"
        )
    left = shortest_prefixes(names, [each.tensor for each in form])
    served = served_dtypes(module, stored, dtypes)
    tensors = tuple(TensorSpec(each.tensor, dtypes.of(each.tensor, served[each.source]), each.shape) for each in form)
    check_manifestable(tensors)
    locals_ = {
        name: _local_of(name, tensor, placements[name], index) for index, (name, tensor) in enumerate(stored.items())
    }
    held = (shard for each in form if (local := locals_[each.source]) for shard in shards_of(each, local))
    name = model or architecture(module)
    return RankShards(
        model=name,
        left=tuple(Left(each, LeftReason.FROZEN) for each in left),
        tensors=tensors,
        shards=Shards.of(tensors, held, rank),
        parameters=tuple(stored.values()),
        facts=lambda: {"model": name, **dict(_facts(stored, tensors))},
        identity=ParameterIdentity(partial(stored_tensors, module)),
        head_dim=head_dim(module),
        replicas=lambda: replica_digests(stored, placements),
    )


def _check_whole(parameters: Sequence[torch.Tensor]) -> None:
    sharded = sum(local_tensor(each).numel() < each.numel() for each in parameters)
    if sharded:
        raise LayoutMismatch(
            f"{sharded} of {len(parameters)} tensors are sharded over several ranks, of which this one holds a part: "
            "build an FSDPSource, on every rank"
        )


def _frozen(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Device on which the ranks exchange `tensors`: that of the mesh, also where shards are kept in host memory."""
    sharded = next((tensor for tensor in tensors if isinstance(tensor, DTensor)), None)
    if sharded is None:
        return tensors[0].device
    kind = str(sharded.device_mesh.device_type)
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _local_of(name: str, tensor: torch.Tensor, placement: Placement, storage: int) -> LocalShard | None:
    """This rank's part of one tensor; None when it has no elements."""
    mine = local_tensor(tensor)
    dtype = str(mine.dtype).removeprefix("torch.")
    held = LocalShard(runs_of(placement.shape, placement.cuts), tuple(mine.stride()), storage, dtype)
    if not mine.numel():
        return None
    if held.shape != tuple(mine.shape):
        raise LayoutMismatch(
            f"{name!r} {tuple(tensor.shape)} should leave this rank {held.shape}, it holds {tuple(mine.shape)}: "
            "it was cut otherwise than its placements say"
        )
    return held


def served_dtypes(module: nn.Module, stored: Mapping[str, torch.Tensor], dtypes: TensorDtypes) -> dict[str, str]:
    """Dtype in which each tensor is served unless `dtypes` names it, by its name in memory."""
    module = unwrapped(module)
    served: dict[str, str] = {}
    for name, tensor in stored.items():
        own = wanted = str(tensor.dtype).removeprefix("torch.")
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            wanted = cast_dtype(module, name, own, dtypes.dtype)
        if advice := unreadable_reason(local_tensor(tensor), rounded=wanted != own):
            raise UnknownParameter(name, tensor.shape, str(tensor.dtype), advice)
        served[name] = wanted
        if served[name] not in ITEM_BYTES:
            detail, advice = f"{wanted}", f"these dtypes can travel: {', '.join(ITEM_BYTES)}"
            raise UnknownParameter(name, tensor.shape, detail, advice)
    return served


def _facts(stored: Mapping[str, torch.Tensor], tensors: Sequence[TensorSpec]) -> Iterator[tuple[str, str]]:
    """Facts that differ between two models, and between ranks with different values of a tensor that is not sharded."""
    yield TENSORS, hashlib.sha256(msgspec.msgpack.encode(tensors)).hexdigest()
    for name, tensor in stored.items():
        if not isinstance(tensor, DTensor) and isinstance(tensor, nn.Parameter):
            # A copy: numpy would fix the size of the trainer's own storage.
            data = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).numpy()
            yield f"{name} {NOT_SHARDED}", hashlib.sha256(data.tobytes()).hexdigest()[:16]
