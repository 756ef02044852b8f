"""Quantized weights that engines read where ranks have made them: the quantized checkpoint, shard by shard."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.copy.copy_engine import TorchCopyEngine
from weightbus.dataplane.digest import tensor_digest as integrity
from weightbus.dataplane.quantize.schemes import Scheme, fp8_block
from weightbus.dataplane.reshard.digest_shares import PASS_BYTES, ShareDigester, ShareSums, divide_digest_work
from weightbus.dataplane.tensors import coverage as cover
from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shards
from weightbus.trainer_agent.assembly.assembler import DTYPES
from weightbus.trainer_agent.export.memory_export import DerivedTensors, Exportable
from weightbus.trainer_agent.quantized.quantized_source import QuantizedSource, ReadableQuantizedSource, quantized
from weightbus.trainer_agent.sources.hf_module import HFModuleSource

from ...kit import quantizing
from ...kit.exposing import wrongly_exposed
from ...kit.quantized_world import RANKS, SHAPES, STORED, Opaque, Rank, World, cut, of, small, tensor_parallel


class Readable(Rank):
    """A rank whose memory can be read. Satisfies `Exportable`."""

    def local_shards(self, tensors: Sequence[TensorSpec]) -> Shards:
        """Replicas included."""
        return Shards.of(tensors, self.world.rows[self.rank], self.rank)

    def collect(self, blob: bytes) -> Sequence[bytes]:
        """It is not asked here."""
        raise AssertionError(blob)


def sources_of(world: World, scheme: Scheme) -> list[ReadableQuantizedSource]:
    return [ReadableQuantizedSource(Readable(world, rank), of(scheme)) for rank in range(RANKS)]


def read(sources: Sequence[ReadableQuantizedSource]) -> dict[str, torch.Tensor]:
    """Every tensor out of the memories of all ranks. The root comes last: it takes what the others send."""
    memories = {each.rank: each.memory() for each in sorted(sources, key=lambda each: each.root)}
    tensors = sources[0].tensors()
    shards = cover.drop_replicas(Shards.join([each.local_shards(tensors) for each in sources]))
    found = {spec.name: torch.zeros(spec.shape, dtype=DTYPES[spec.dtype]) for spec in tensors}
    for row in range(len(shards)):
        shard, storage = shards.at(row), memories[int(shards.rank[row])][int(shards.storage[row])]
        view = storage.as_strided(shard.box.shape, shard.view.strides, storage.storage_offset() + shard.view.offset)
        part = tuple(slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True))
        found[shard.tensor][part] = (view + shard.shift if shard.shift else view).to(found[shard.tensor].dtype)
    return found


@settings(deadline=None, max_examples=20)
@given(st.data(), st.sampled_from(STORED))
def test_any_pieces_are_read_as_the_quantized_whole(data: st.DataObject, scheme: Scheme) -> None:
    """However weights are cut and spread, and in every pass anew, without a byte being assembled."""
    world, scheme = World(), small(scheme)
    for name, shape in SHAPES.items():
        for box in cut(Box.whole(shape), data):
            for rank in data.draw(st.sets(st.integers(0, RANKS - 1), min_size=1)):
                world.give(rank, name, box)
    sources = sources_of(world, scheme)

    for _ in range(2):
        assert quantizing.differing(read(sources), world.expected(scheme)) == []
        assert not any(world.letters.values())
        for storage in (each for storages in world.storages.values() for each in storages):
            storage.mul_(0.5)
        world.full = {name: tensor * 0.5 for name, tensor in world.full.items()}


@settings(deadline=None, max_examples=20)
@given(st.data(), st.sampled_from([*map(small, STORED), fp8_block((12, 20))]))
def test_digests_are_of_the_made_weights_however_they_were_summed(data: st.DataObject, scheme: Scheme) -> None:
    """Elements with the kernel that makes them where that can be, everything else by whoever it falls to; each once."""
    world = World()
    for name, shape in SHAPES.items():
        for box in cut(Box.whole(shape), data):
            for rank in data.draw(st.sets(st.integers(0, RANKS - 1), min_size=1)):
                world.give(rank, name, box)
    sources = sources_of(world, scheme)
    tensors = sources[0].tensors()
    read(sources)
    derived = [
        DerivedTensors(each.local_shards(tensors), len(each.memory(prepared=True)), torch.device("cpu"))
        for each in sources
    ]
    division = divide_digest_work(Shards.join([each.shards for each in derived]))
    found: list[ShareSums] = []
    for source, each in zip(sources, derived, strict=True):
        memory = source.memory(prepared=True)
        each.refresh(memory)
        summed = source.summed(tensors)
        known = division.known(source.rank, summed.shards)
        share = division.share(source.rank, PASS_BYTES, known)
        assert not np.isin(share.in_place.group, known).any()
        digest = ShareDigester(share, [*memory, *each.tensors], torch.device("cpu"), TorchCopyEngine())
        sums = digest.run()
        here = np.flatnonzero(np.isin(summed.tensor, known))
        sums.lanes[:, np.searchsorted(share.tensors, summed.tensor[here])] += source.sums()[:, here]
        found.append(sums)
    expected = world.expected(scheme)
    packed = [expected[spec.name].contiguous().view(-1).view(torch.uint8) for spec in tensors]

    digests, _ = division.digests(found)
    assert digests == b"".join(integrity.digest_tensors(each, (0, len(each))) for each in packed)


def test_what_is_summed_up_is_not_read_again() -> None:
    """All elements that ranks quantize for themselves; scales and what stays as it is are read."""
    world, scheme = tensor_parallel(48), small(fp8_block((128, 128)))
    sources = sources_of(world, scheme)
    tensors = sources[0].tensors()
    division = divide_digest_work(Shards.join([each.local_shards(tensors) for each in sources]))

    for source in sources:
        summed = source.summed(tensors)
        known = division.known(source.rank, summed.shards)
        names = {tensors[index].name for index in known.tolist()}
        local = source.local_shards(tensors)
        found = map(local.at, range(len(local)))
        assert names == {shard.tensor for shard in found if shard.dtype == "float8_e4m3fn"}
        read_again = division.share(source.rank, PASS_BYTES, known).in_place
        assert not np.isin(read_again.group, known).any()


def test_what_a_rank_quantizes_is_quantized_once_and_stays() -> None:
    """Experts at their owner, rows of a tensor-parallel weight by each rank; the arena is made once."""
    world, scheme = tensor_parallel(48), small(fp8_block((128, 128)))
    sources = sources_of(world, scheme)
    before = [[each.data_ptr() for each in source.memory()] for source in sources]
    held = Shards.join([source.local_shards(sources[0].tensors()) for source in sources])

    assert [[each.data_ptr() for each in source.memory()] for source in sources] == before
    cover.check_exact_cover(held)  # nothing twice
    elements = [held.at(row) for row in range(len(held)) if held.at(row).dtype == "float8_e4m3fn"]
    places = sorted((int(held.rank[row]), held.at(row).tensor) for row in range(len(held)))
    assert (1, "e.0.up_proj.weight") in places
    assert (2, "e.1.up_proj.weight") in places
    assert sum(shard.box.size for shard in elements) == sum(
        world.full[name].numel() for name in SHAPES if name.endswith("_proj.weight")
    )


@pytest.mark.parametrize(("kind", "readable"), [(Readable, True), (Rank, False), (Opaque, False)])
def test_only_what_can_be_read_is_offered(kind: type, *, readable: bool) -> None:
    """A source that cannot say where its tensors lie is quantized all the same, and goes by buckets."""
    world = tensor_parallel(48)
    source = kind(world, True) if kind is Opaque else kind(world, 0)

    found = quantized(source, quantizing.config(16))

    assert isinstance(found, QuantizedSource)
    assert isinstance(found, Exportable) is readable


def test_what_is_exposed_is_read_and_digested_as_the_checkpoint_has_it() -> None:
    """Through the sockets and maps of an exporter, in two versions: eight bits, scales, and a norm as it is."""
    module = torch.nn.Module()
    module.q_proj = torch.nn.Linear(64, 96, dtype=torch.bfloat16)
    module.norm = torch.nn.LayerNorm(64, dtype=torch.bfloat16)
    source = HFModuleSource(module, model="Sequential")
    served = quantized(source, quantizing.config(16))

    for _ in range(2):
        plain = {spec.name: tensor for spec, tensor in zip(source.tensors(), source.memory(), strict=True)}
        expected = quantizing.whole({name: tensor.detach() for name, tensor in plain.items()}, quantizing.config(16))
        assert {each.dtype for each in expected.values()} == {torch.float8_e4m3fn, torch.float32, torch.bfloat16}
        assert wrongly_exposed(served, expected) == []
        with torch.no_grad():
            module.q_proj.weight.mul_(0.3)


def test_what_was_put_elsewhere_is_quantized_there() -> None:
    """A trainer may put other memory under a parameter, which stays the same object."""
    world, scheme = tensor_parallel(48), small(fp8_block((128, 128)))
    sources = sources_of(world, scheme)
    read(sources)

    for storage in (each for storages in world.storages.values() for each in storages):
        storage.data = storage.data * 0.5
    world.full = {name: tensor * 0.5 for name, tensor in world.full.items()}

    assert quantizing.differing(read(sources), world.expected(scheme)) == []
