"""All tensors of a source, through its buckets, and what differs between two of them."""

from __future__ import annotations

import torch

from weightbus.dataplane.tensors.manifest import Manifest
from weightbus.trainer_agent.assembly.assembler import DTYPES
from weightbus.trainer_agent.source import Source


def tensors_in(manifest: Manifest, index: int, out: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a bucket, as views of its memory."""
    places = zip(manifest.tensors_of(index), manifest.offsets_of(index), strict=False)
    return {spec.name: out[at : at + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape) for spec, at in places}


def export(source: Source, bucket_bytes: int) -> dict[str, torch.Tensor]:
    """Every served tensor on the root, nothing elsewhere. Collective."""
    manifest = Manifest.of(source.model, source.tensors(), bucket_bytes)
    tensors: dict[str, torch.Tensor] = {}
    for index, bucket in enumerate(manifest.buckets):
        out = torch.full((bucket.nbytes,), 0xA5, dtype=torch.uint8) if source.root else None
        source.assemble(manifest, index, out)
        if out is not None:
            tensors |= tensors_in(manifest, index, out)
    return tensors


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names that are not in both, or not bit for bit the same."""
    return sorted(
        name
        for name in found.keys() | expected.keys()
        if name not in found or name not in expected or not torch.equal(found[name], expected[name])
    )
