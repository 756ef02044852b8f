"""Known tensors, pieces of them in the memory of some ranks of one process, and what quantizing them whole gives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from hypothesis import strategies as st

from weightbus.dataplane.quantize import quantize_tasks as quantize_torch
from weightbus.dataplane.quantize.schemes import (
    SCHEMES,
    Quantization,
    QuantizationRule,
    Scheme,
    fp8_tensor,
    quantized_tensors,
)
from weightbus.dataplane.tensors import coverage as cover
from weightbus.dataplane.tensors.manifest import Manifest, TensorSpec, cut as cut_buckets
from weightbus.dataplane.tensors.shards import Box, Shard, Shards, ShardView, contiguous_strides
from weightbus.trainer_agent.assembly.assembler import DTYPES
from weightbus.trainer_agent.quantized.quantized_source import QuantizedSource

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (24, 32),
    "a.q_proj.weight": (96, 64),
    "a.q_proj.bias": (96,),
    "a.o_proj.weight": (64, 96),
    "a.norm.weight": (7,),
    "e.0.up_proj.weight": (32, 64),
    "e.1.up_proj.weight": (40, 64),
}
RANKS = 3
STORED = (*SCHEMES, msgspec.structs.replace(fp8_tensor(), flat=()))
"""Every scheme, also as older checkpoints have it."""


class Post:
    """Carries gather messages between the ranks of one process: senders run first."""

    def __init__(self, rank: int, letters: dict[int, list[torch.Tensor]]) -> None:
        self.rank = rank
        self.letters = letters

    def send(self, messages: Sequence[torch.Tensor], _root: int) -> None:
        self.letters[self.rank].extend(message.clone() for message in messages)

    def receive(self, messages: Sequence[tuple[int, torch.Tensor]], meanwhile: Callable[[], None]) -> None:
        meanwhile()
        for rank, memory in messages:
            memory.copy_(self.letters[rank].pop(0))


class Rank:
    """A source that describes what it holds. Satisfies `Source` and `LocatedSource`."""

    model = "M"
    device = torch.device("cpu")

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.root = rank == 0
        self.exchange: Any = Post(rank, world.letters)

    def tensors(self) -> Sequence[TensorSpec]:
        return self.world.tensors

    @property
    def shards(self) -> Shards:
        return self.world.shards()

    def memory(self) -> Sequence[torch.Tensor]:
        self.world.settled.append(self.rank)
        return self.world.storages[self.rank]

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        raise AssertionError(f"pieces are known, and bucket {index} of {manifest} was asked for: {out}")

    def agree(self, blob: bytes | None) -> bytes:
        return blob or b""


class Opaque:
    """A source that only assembles. Satisfies `Source`."""

    model = "M"
    device = torch.device("cpu")

    def __init__(self, world: World, root: bool) -> None:
        self.world, self.root = world, root
        self.asked: list[int] = []

    def tensors(self) -> Sequence[TensorSpec]:
        return self.world.tensors

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        assert set(manifest.tensors) == set(self.world.tensors)
        self.asked.append(index)
        if out is not None:
            for spec, at in zip(manifest.tensors_of(index), manifest.offsets_of(index), strict=False):
                target = out[at : at + spec.nbytes].view(DTYPES[spec.dtype]).view(spec.shape)
                target.copy_(self.world.full[spec.name])

    def agree(self, blob: bytes | None) -> bytes:
        return blob or b""


class World:
    """Known tensors, and pieces of them in the memory of some ranks."""

    def __init__(self, trained: str = "float32") -> None:
        generator = torch.Generator().manual_seed(0)
        self.trained = trained
        self.tensors = tuple(TensorSpec(name, "bfloat16", shape) for name, shape in SHAPES.items())
        self.full = {
            name: torch.randn(shape, generator=generator).to(DTYPES[trained]) for name, shape in SHAPES.items()
        }
        self.rows: dict[int, list[Shard]] = defaultdict(list)
        self.storages: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.letters: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.settled: list[int] = []

    def give(self, rank: int, name: str, box: Box, shift: int = 0) -> None:
        part = self.full[name][tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] - shift
        storage = torch.cat([torch.full((3,), 77.0, dtype=part.dtype), part.reshape(-1)])
        view = ShardView(len(self.storages[rank]), 3, contiguous_strides(box.shape))
        self.storages[rank].append(storage)
        self.rows[rank].append(Shard(name, box, self.trained, view, shift))

    def shards(self) -> Shards:
        return cover.drop_replicas(
            Shards.join([Shards.of(self.tensors, self.rows[rank], rank) for rank in range(RANKS)])
        )

    def check(
        self,
        scheme: Scheme,
        sources: Sequence[QuantizedSource],
        bucket_bytes: int,
        passes: int = 2,
        owners: Mapping[str, int] | None = None,
    ) -> None:
        """Every bucket holds what quantizing whole tensors gives; with `owners` on the rank of its raw tensors."""
        wanted = self.expected(scheme)
        manifest = Manifest.of("M", sources[0].tensors(), bucket_bytes)
        roots: Sequence[int] | None = None
        if owners is not None:
            made = {spec.name: owners[each.spec.name] for each in sources[0].weights for spec in each.outputs}
            by_tensor = [made.get(spec.name, owners.get(spec.name, 0)) for spec in sources[0].tensors()]
            ranks = sorted(set(by_tensor))
            manifest, shares = cut_buckets(
                "M", sources[0].tensors(), [ranks.index(rank) for rank in by_tensor], bucket_bytes
            )
            roots = [ranks[share] for share in shares.of]
        assert {spec.name for spec in manifest.tensors} == set(wanted)
        for _ in range(passes):
            for index, bucket in enumerate(manifest.buckets):
                out = torch.full((bucket.nbytes + 16,), 0xA5, dtype=torch.uint8)
                root = 0 if roots is None else roots[index]
                for at in sorted(range(len(sources)), key=lambda at: at == root):
                    sources[at].assemble(manifest, index, out if at == root else None, roots)
                assert not any(self.letters.values())
                assert (out[bucket.nbytes :] == 0xA5).all()
                for spec, at in zip(manifest.tensors_of(index), manifest.offsets_of(index), strict=False):
                    found = out[at : at + spec.nbytes]
                    assert torch.equal(found, wanted[spec.name].contiguous().view(-1).view(torch.uint8)), spec.name
            for storages in self.storages.values():
                for storage in storages:
                    storage.mul_(0.5)
            self.full = {name: tensor * 0.5 for name, tensor in self.full.items()}
            wanted = self.expected(scheme)

    def expected(self, scheme: Scheme) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for spec in self.tensors:
            tensor = self.full[spec.name].bfloat16()
            if not spec.name.endswith("_proj.weight"):
                found[spec.name] = tensor
                continue
            made = quantized_tensors(spec, scheme)
            tensors = {each.name: torch.empty(each.shape, dtype=DTYPES[each.dtype]) for each in made}
            if made[-1].name.endswith("weight_shape"):
                tensors[made[-1].name].copy_(torch.tensor(spec.shape))
            computed = [tensors[each.name] for each in made if not each.name.endswith("weight_shape")]
            quantize_torch.quantize(scheme, tensor, computed)
            found |= tensors
        return found


def small(scheme: Scheme) -> Scheme:
    return msgspec.structs.replace(scheme, block=tuple(min(each, 16) for each in scheme.block))


def of(scheme: Scheme) -> Quantization:
    return Quantization("fp8", (QuantizationRule(("Linear",), scheme),), ())


def cut(box: Box, random: st.DataObject) -> list[Box]:
    """Any disjoint parts of a box, at multiples of 8 most of the time."""
    axes = [axis for axis, extent in enumerate(box.shape) if extent > 8]
    if not axes or random.draw(st.integers(0, 2)) == 0:
        return [box]
    axis = random.draw(st.sampled_from(axes))
    at = random.draw(st.integers(box.start[axis] + 1, box.stop[axis] - 1))
    if random.draw(st.integers(0, 3)):
        at = min(max(at // 16 * 16, box.start[axis] + 8), box.stop[axis] - 1)
    left = Box(box.start, (*box.stop[:axis], at, *box.stop[axis + 1 :]))
    right = Box((*box.start[:axis], at, *box.start[axis + 1 :]), box.stop)
    return [*cut(left, random), *cut(right, random)]


def tensor_parallel(rows: int) -> World:
    """The first projection is cut at `rows`, experts lie whole on ranks of their own, the root has the rest."""
    world = World()
    for name, shape in SHAPES.items():
        if name == "a.q_proj.weight":
            world.give(0, name, Box((0, 0), (rows, 64)))
            world.give(1, name, Box((rows, 0), (96, 64)))
        else:
            world.give({"e.0": 1, "e.1": 2}.get(name[:3], 0), name, Box.whole(shape))
    return world
