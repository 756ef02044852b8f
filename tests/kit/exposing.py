"""What the ranks of a source expose, read and digested as an engine would, on real ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from weightbus.dataplane.copy.copy_engine import TorchCopyEngine
from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.memory.exports import RegionImporter
from weightbus.dataplane.processes.host_facts import host_identity
from weightbus.dataplane.reshard.load_trace import LoadTrace, NotCopiedCause, StagedTensor
from weightbus.dataplane.reshard.reshard_plan import PlanReader, make_plan, staging_layout
from weightbus.dataplane.tensors.manifest import Manifest
from weightbus.dataplane.tensors.shards import Shards
from weightbus.dataplane.transports.interface import ExportedWeights
from weightbus.trainer_agent.export.memory_export import Exportable, MemoryExport
from weightbus.trainer_agent.source import Source


def exposed_digests_and_tensors(source: Source) -> tuple[list[bytes], dict[str, torch.Tensor]]:
    """On the root: the ranks' digests by tensor, and every tensor out of their memories. Collective."""
    assert isinstance(source, Exportable)
    manifest = Manifest.of(source.model, source.tensors())
    with tempfile.TemporaryDirectory(prefix="wb-x") as folder:
        memory_export = MemoryExport(source, manifest, Path(folder), "x")
        memory_export.export()
        digests = memory_export.digests()
        assert digests is not None, memory_export.undigestible
        found = read(memory_export.current, manifest) if source.root else {}
        source.collect(b"read")  # until then nobody closes
        memory_export.close()
    return [digests[at : at + 16] for at in range(0, len(digests), 16)], found


def read(exported: ExportedWeights, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Every tensor, packed, by a plan over what is exposed."""
    everything = tuple(StagedTensor(index, NotCopiedCause.COMPUTED) for index in range(len(manifest.tensors)))
    recording = LoadTrace(0, (), Shards.of(manifest.tensors, []), loaded=everything)
    plan = make_plan(exported.shards, exported.exports, recording, PlanReader(0, host_identity(), "cpu"))
    importer = RegionImporter()
    for each in exported.exporters:
        regions = [source.region for source in plan.sources if source.rank == each.holder]
        if regions:
            importer.open(each.address, each.holder, each.generation, regions, 30.0)
    buffer = torch.zeros(plan.staging_bytes, dtype=torch.uint8)
    sources = [importer.region(source.rank, source.region) for source in plan.sources]
    TorchCopyEngine().prepare_copies(plan.staging, sources, [buffer]).run()
    importer.check()
    importer.close()
    places, _ = staging_layout(manifest.tensors, plan.staged)
    found: dict[str, torch.Tensor] = {}
    for spec, at in zip(manifest.tensors, places.storage.tolist(), strict=True):
        found[spec.name] = buffer[at : at + spec.nbytes].view(getattr(torch, spec.dtype)).view(spec.shape).clone()
    return found


def wrongly_exposed(source: Source, expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not bit for bit as `expected`, the tensors that were assembled, or digested otherwise.

    Collective; nothing to say but on the root.
    """
    digests, found = exposed_digests_and_tensors(source)
    if not source.root:
        return []
    wrong = {name for name in found.keys() | expected.keys() if name not in found or name not in expected}
    for spec, digest in zip(Manifest.of(source.model, source.tensors()).tensors, digests, strict=True):
        packed = expected[spec.name].contiguous().view(-1).view(torch.uint8)
        if not torch.equal(packed, found[spec.name].view(-1).view(torch.uint8)):
            wrong.add(spec.name)
        if integrity.digest_tensors(packed, (0, spec.nbytes)) != digest:
            wrong.add(f"digest of {spec.name}")
    return sorted(wrong)
