"""Weights in pinned host memory that are quantized on their way: two buffers, and nothing is read too early or late."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.quantize.quantize_tasks import TorchTasks
from weightbus.dataplane.quantize.schemes import SCHEMES, Scheme, fp8_block
from weightbus.dataplane.tensors.manifest import Manifest
from weightbus.dataplane.tensors.shards import Box
from weightbus.trainer_agent.assembly.assembler import MemoryAccess, UploadStream
from weightbus.trainer_agent.quantized.quantization_plan import WeightDivision
from weightbus.trainer_agent.quantized.quantized_assembly import QuantizedAssembly
from weightbus.trainer_agent.quantized.quantized_source import QuantizedSource

from ...kit.quantized_world import RANKS, SHAPES, Rank, World, cut, of, small
from ..assembly.test_host_uploads import LateUploads, far


class Offloaded(QuantizedSource):
    """Its weights are where `memory_access` says, which stands in for a GPU."""

    memory_access: MemoryAccess

    def _assembly(self, manifest: Manifest, roots: Sequence[int] | None) -> QuantizedAssembly:
        assert self._located is not None
        division = WeightDivision(manifest, self.weights, self._located.shards, roots)
        return QuantizedAssembly(division, self._source, self._located, memory_access=self.memory_access)


def sources_of(
    world: World, scheme: Scheme, streams: list[LateUploads], away: set[int] | None
) -> list[QuantizedSource]:
    def upload_stream(_device: torch.device) -> UploadStream:
        streams.append(LateUploads())
        return streams[-1]

    sources = []
    for rank in range(RANKS):
        source = Offloaded(Rank(world, rank), of(scheme))
        source.memory_access = far(LateUploads(), away)._replace(upload_stream=upload_stream)
        sources.append(source)
    return list(sources)


@settings(deadline=None, max_examples=30)
@given(st.data(), st.sampled_from(SCHEMES), st.integers(64, 12_000))
def test_what_is_uploaded_is_quantized_to_the_same_bytes(
    data: st.DataObject, scheme: Scheme, bucket_bytes: int
) -> None:
    """However weights are cut, whichever of them are on the device already, on every rank, in every pass anew."""
    world, scheme = World(), small(scheme)
    for name, shape in SHAPES.items():
        for box in cut(Box.whole(shape), data):
            world.give(data.draw(st.integers(0, RANKS - 1)), name, box)
    memory = {each.data_ptr() for storages in world.storages.values() for each in storages}
    streams: list[LateUploads] = []
    away = None if data.draw(st.booleans()) else data.draw(st.sets(st.sampled_from(sorted(memory))))

    world.check(scheme, sources_of(world, scheme, streams, away), bucket_bytes)

    assert not any(each.pending or each.reading for each in streams), "somebody still reads a buffer"
    assert all(each.settled for each in streams), "the device may still read the parameters"


def test_the_next_weights_are_on_their_way_while_one_bucket_is_quantized() -> None:
    """One bucket ahead and no further, in float32 as they lie; when the last one is there nothing is read any more."""
    world, scheme = World(), small(fp8_block((128, 128)))
    names = [name for name in SHAPES if name.endswith("_proj.weight")]
    for name, shape in SHAPES.items():
        world.give(0, name, Box.whole(shape))
    streams: list[LateUploads] = []
    root, *_ = sources_of(world, scheme, streams, None)
    manifest = Manifest.of("M", root.tensors(), 1)
    sizes = {4 * world.full[name].numel() for name in names}
    work = WeightDivision(manifest, root.weights, world.shards()).work(0)
    needing = [index for index, each in enumerate(work.buckets) if each.jobs]
    for index, bucket in enumerate(manifest.buckets):
        root.assemble(manifest, index, torch.empty(bucket.nbytes, dtype=torch.uint8))
        begun = [size for upload_stream in streams for size in upload_stream.begun if size in sizes]
        reached = sum(each <= index for each in needing)
        assert len(begun) == (min(reached + 1, len(needing)) if reached else 0)

    assert len(needing) > len(names)  # a weight and its scales may lie in two buckets
    assert all(each.settled for each in streams)


def test_a_pass_that_is_given_up_leaves_nothing_behind() -> None:
    """The next one begins with its first bucket, and uploads what the weights are by then."""
    world, scheme = World(), small(fp8_block((128, 128)))
    for name, shape in SHAPES.items():
        world.give(0, name, Box.whole(shape))
    sources = sources_of(world, scheme, [], None)
    manifest = Manifest.of("M", sources[0].tensors(), 2000)
    for source in sorted(sources, key=lambda each: each.root):
        out = torch.empty(manifest.buckets[0].nbytes, dtype=torch.uint8) if source.root else None
        source.assemble(manifest, 0, out)

    for storages in world.storages.values():
        for storage in storages:
            storage.mul_(0.5)
    world.full = {name: tensor * 0.5 for name, tensor in world.full.items()}

    world.check(scheme, sources, 2000)


def test_tasks_follow_the_buffers_of_every_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU tasks are kept from one pass to the next as addresses, and buffers are not: nothing reads an old one."""
    monkeypatch.setattr(TorchTasks, "keeps", False)
    world, scheme = World(), small(fp8_block((128, 128)))
    for name, shape in SHAPES.items():
        world.give(0, name, Box.whole(shape))
    root, *_ = sources_of(world, scheme, [], None)
    manifest = Manifest.of("M", root.tensors(), 1 << 20)
    out = torch.empty(manifest.largest_bucket, dtype=torch.uint8)  # where it was in the pass before, as a slot is
    assert len(manifest.buckets) == 1
    for _ in range(3):
        root.assemble(manifest, 0, out)
        for name, wanted in world.expected(scheme).items():
            index = [spec.name for spec in manifest.tensors].index(name)
            at = manifest.offsets_of(0)[index]
            found = out[at : at + manifest.tensors[index].nbytes]
            assert torch.equal(found, wanted.contiguous().view(-1).view(torch.uint8)), name
        for storages in world.storages.values():
            for storage in storages:
                storage.mul_(-0.5)
        world.full = {name: tensor * -0.5 for name, tensor in world.full.items()}
