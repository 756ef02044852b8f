"""Where this rank's part of a parameter lies in the whole tensor: DTensors, and experts on expert-parallel ranks.

A DTensor says how the ranks of its own mesh share it. Where that mesh is a part of the source's ranks, the others hold
either replicas or other experts: the number of experts in the config tells the latter, and an axis of the mesh's
root tells which. Replicas are compared by value, a sample of each tensor, when the source is built.
"""

# torch leaves parts of DTensor untyped.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard as ShardPlacement

from ..source import LayoutMismatch, UnknownParameter, UnsupportedModel
from .collective_source import local_tensor
from .tensor_slices import DTensorCut
from .wrappers import unwrapped

_EXPERTS: Final = re.compile(r"(^|\.)experts\.[A-Za-z_]\w*$")
"""Name of a tensor with all experts of a layer, along its first dimension."""
_COUNTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_EXPERT_AXIS: Final = re.compile(r"(^|_)(ep|expert|experts)(_|$)")
_SAMPLE: Final = 1 << 16
"""Elements of a tensor, evenly spread, by which replicas are compared."""


class Placement(NamedTuple):
    """This rank's part of one tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    cuts: tuple[DTensorCut, ...]
    """The cuts by which ranks share it, in the order in which they were made."""
    apart: bool
    """True for a DTensor whose mesh leaves out ranks of the source, which hold what its mesh does not say."""


def placements_of(module: nn.Module, stored: Mapping[str, torch.Tensor], ranks: Sequence[int]) -> dict[str, Placement]:
    """The placement of each tensor among `ranks`, global ones. Raises a `SourceError` for one that is not read."""
    experts = _experts_in(getattr(unwrapped(module), "config", None))
    world = set(ranks)
    return {name: _placed(name, tensor, experts, world) for name, tensor in stored.items()}


def replica_digests(stored: Mapping[str, torch.Tensor], placements: Mapping[str, Placement]) -> dict[str, str]:
    """Digests of samples of the tensors that lie on several meshes, by their place: one for each shape and place."""
    names: dict[tuple[object, ...], list[str]] = {}
    for name, placement in placements.items():
        if placement.apart:
            names.setdefault((placement.shape, placement.cuts), []).append(name)
    told: dict[str, str] = {}
    for (shape, cuts), alike in names.items():
        digest = hashlib.sha256()
        for name in alike:
            flat = local_tensor(stored[name]).detach().reshape(-1)
            sample = flat[:: max(1, len(flat) // _SAMPLE)].cpu().contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
        parts = ", ".join(f"part {cut.index} of {cut.parts}" for cut in cast("Iterable[DTensorCut]", cuts))
        more = f" and {len(alike) - 1} others" if len(alike) > 1 else ""
        told[f"{alike[0]!r}{more} {shape}{f', {parts}' if parts else ''}"] = digest.hexdigest()[:16]
    return told


def _placed(name: str, tensor: torch.Tensor, experts: int | None, world: set[int]) -> Placement:
    shape, cuts, apart = tuple(tensor.shape), _cuts(name, tensor), False
    if isinstance(tensor, DTensor):
        apart = not world <= set(tensor.device_mesh.mesh.flatten().tolist())
    if not experts or len(shape) < 2 or not _EXPERTS.search(name) or shape[0] >= experts or experts % shape[0]:
        return Placement(shape, cuts, apart)
    parts = experts // shape[0]
    at = _expert_rank(tensor.device_mesh, parts) if isinstance(tensor, DTensor) and apart else None
    if at is None:
        raise UnsupportedModel(
            f"{name!r} {shape} holds {shape[0]} experts of the config's {experts}, and nothing tells which: make it a "
            f"DTensor whose mesh, or its mesh's root, has an axis of {parts} for the experts "
            f"(init_device_mesh(..., mesh_dim_names=('ep', 'fsdp'))), or give all of them through ExportedSource"
        )
    return Placement((experts, *shape[1:]), (DTensorCut(0, parts, at), *cuts), apart)


def _expert_rank(mesh: DeviceMesh, parts: int) -> int | None:
    """Index of a mesh along the axis of `parts` of its root that it is cut from; None when that is not one axis."""
    find = getattr(mesh, "_get_root_mesh", None)  # torch has no public name for it
    root = cast("DeviceMesh", find() if callable(find) else mesh)
    grid, mine = root.mesh, torch.isin(root.mesh, mesh.mesh)
    fixed = [set(axis.tolist()) for axis in mine.nonzero(as_tuple=True)]
    found = [axis for axis, at in enumerate(fixed) if len(at) == 1 and grid.shape[axis] == parts]
    if len(found) > 1:
        names = root.mesh_dim_names or ()
        found = [axis for axis in found if axis < len(names) and _EXPERT_AXIS.search(names[axis])]
    return fixed[found[0]].pop() if len(found) == 1 else None


def _experts_in(config: object) -> int | None:
    """Experts of a layer by a config and its sections; None when they say none, or several numbers."""
    found: set[int] = set()
    sections, seen = [config], 0
    while sections and seen < 16:
        section, seen = sections.pop(), seen + 1
        found |= {count for key in _COUNTS if isinstance(count := getattr(section, key, None), int) and count > 1}
        named = cast("Mapping[str, object]", getattr(section, "__dict__", {}))
        sections += [value for key, value in named.items() if key.endswith("_config") and hasattr(value, "__dict__")]
    return found.pop() if len(found) == 1 else None


def _cuts(name: str, tensor: torch.Tensor) -> tuple[DTensorCut, ...]:
    """The cuts by which the ranks of its mesh share a tensor, in the order of the mesh."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutMismatch(f"{name!r} is spread over a mesh that this rank is not part of: {mesh}")
    cuts: list[DTensorCut] = []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        # FSDP over tensor parallelism; a kind of Shard in some versions of torch, and in some not.
        strided = type(placement).__name__ == "_StridedShard"
        if not strided and type(placement) is not ShardPlacement:
            advice = "only replicated and sharded parameters are read"
            raise UnknownParameter(name, tensor.shape, f"placed as {placement!r}", advice)
        after = int(getattr(placement, "split_factor")) if strided else 1  # noqa: B009  # the class is private
        dim = int(getattr(placement, "dim"))  # noqa: B009
        cuts.append(DTensorCut(dim, mesh.size(axis), coordinate[axis], after))
    return tuple(cuts)
