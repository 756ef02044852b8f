"""Buckets assembled from the parts of many ranks, in one process: every byte where the manifest says."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.tensors import coverage as cover
from weightbus.dataplane.tensors.manifest import Manifest, TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shard, Shards, ShardView, contiguous_strides
from weightbus.trainer_agent.assembly.assembler import (
    DTYPES,
    Assembler,
    BucketPlanCache,
    MemoryAccess,
    check_manifest,
    is_elsewhere,
)
from weightbus.trainer_agent.assembly.gather_plan import BucketPlan, plan
from weightbus.trainer_agent.source import LayoutMismatch

from ...kit.exporting import tensors_in

CPU = torch.device("cpu")
HERE = MemoryAccess()
SHAPES: dict[str, tuple[int, ...]] = {"a": (12, 6), "b": (7,), "c": (4, 3, 2), "d": (6, 12), "e": (16, 3), "f": (1,)}


class Post:
    """Carries gather messages between assemblers of one process: senders run first."""

    def __init__(self, rank: int, letters: dict[int, list[torch.Tensor]]) -> None:
        self.rank = rank
        self.letters = letters

    def send(self, messages: Sequence[torch.Tensor], root: int) -> None:
        self.letters[self.rank].extend(message.clone() for message in messages)
        self.letters[~self.rank].extend(torch.tensor(root) for _ in messages)

    def receive(self, messages: Sequence[tuple[int, torch.Tensor]], meanwhile: Callable[[], None]) -> None:
        meanwhile()
        for rank, memory in messages:
            memory.copy_(self.letters[rank].pop(0))
            assert int(self.letters[~rank].pop(0)) == self.rank, "it was sent to somebody else"


class World:
    """Ranks that hold known tensors in pieces, each piece in memory of its own with a margin around it."""

    def __init__(self, dtype: str, trained: str = "float32") -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = tuple(TensorSpec(name, dtype, shape) for name, shape in SHAPES.items())
        self.full = {
            name: torch.randn(shape, generator=generator).to(DTYPES[trained]) for name, shape in SHAPES.items()
        }
        self.rows: dict[int, list[Shard]] = defaultdict(list)
        self.storages: dict[int, list[torch.Tensor]] = defaultdict(list)
        self.trained = trained

    def give(self, rank: int, name: str, box: Box, *, shared: bool = False, shift: int = 0) -> None:
        """Let `rank` hold `box`: in a local tensor of its own, or in the whole tensor among what it does not hold."""
        whole = self.full[name]
        part = whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] - shift
        if shared:
            storage = torch.full_like(whole, 77.0)
            storage[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))] = part
            strides = contiguous_strides(whole.shape)
            offset = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
        else:
            storage = torch.cat([torch.full((3,), 77.0, dtype=whole.dtype), part.reshape(-1), torch.full((2,), 77.0)])
            storage = storage.to(whole.dtype)
            strides, offset = contiguous_strides(box.shape), 3
        view = ShardView(len(self.storages[rank]), offset, strides)
        self.storages[rank].append(storage)
        self.rows[rank].append(Shard(name, box, self.trained, view, shift))

    def shards(self) -> Shards:
        return cover.drop_replicas(
            Shards.join([Shards.of(self.tensors, rows, rank) for rank, rows in self.rows.items()])
        )

    def check(
        self,
        manifest: Manifest,
        plans: dict[int, tuple[BucketPlan, ...]],
        memory_access: MemoryAccess = HERE,
        roots: Sequence[int] | None = None,
    ) -> dict[int, Assembler]:
        """Assemble every bucket and compare it with the tensors that were cut."""
        letters: dict[int, list[torch.Tensor]] = defaultdict(list)
        assemblers = {
            rank: Assembler(plans[rank], self.storages[rank], rank, roots, Post(rank, letters), memory_access)
            for rank in plans
        }
        self.run(manifest, assemblers, letters, roots)
        return assemblers

    def run(
        self,
        manifest: Manifest,
        assemblers: dict[int, Assembler],
        letters: dict[int, list[torch.Tensor]],
        roots: Sequence[int] | None = None,
    ) -> None:
        """One pass."""
        for index, bucket in enumerate(manifest.buckets):
            root = 0 if roots is None else roots[index]
            out = torch.full((bucket.nbytes + 8,), 0xA5, dtype=torch.uint8)
            for rank in sorted(assemblers, key=lambda rank: (rank == root, rank)):
                assemblers[rank].run(index, out if rank == root else None, CPU)
            assert not any(letters.values()), "somebody sent what nobody asked for"
            assert (out[bucket.nbytes :] == 0xA5).all()
            for name, found in tensors_in(manifest, index, out).items():
                assert torch.equal(found, self.full[name].to(found.dtype)), name


def cut(box: Box, random: "st.DataObject") -> list[Box]:
    """Any disjoint parts of a box."""
    axes = [axis for axis, extent in enumerate(box.shape) if extent > 1]
    if not axes or random.draw(st.integers(0, 2)) == 0:
        return [box]
    axis = random.draw(st.sampled_from(axes))
    at = random.draw(st.integers(box.start[axis] + 1, box.stop[axis] - 1))
    left = Box(box.start, (*box.stop[:axis], at, *box.stop[axis + 1 :]))
    right = Box((*box.start[:axis], at, *box.start[axis + 1 :]), box.stop)
    return [*cut(left, random), *cut(right, random)]


@settings(deadline=None, max_examples=80)
@given(st.data(), st.sampled_from(["float32", "bfloat16"]), st.integers(1, 1200), st.sampled_from([1, 40, 1 << 20]))
def test_any_pieces_and_any_buckets_give_the_same_bytes(
    data: st.DataObject, dtype: str, bucket_bytes: int, zero_copy_bytes: int
) -> None:
    """However tensors are cut and spread, whatever goes straight, buckets hold the tensors and nothing beyond them."""
    world = World(dtype, data.draw(st.sampled_from(["float32", "bfloat16"])))
    for name, shape in SHAPES.items():
        for box in cut(Box.whole(shape), data):
            for rank in data.draw(st.sets(st.integers(0, 3), min_size=1)):
                world.give(rank, name, box, shared=data.draw(st.booleans()))
    shards = world.shards()
    manifest = Manifest.of("M", world.tensors, bucket_bytes)
    ranks = range(4)
    roots = data.draw(st.none() | st.lists(st.integers(0, 3), min_size=(n := len(manifest.buckets)), max_size=n))
    plans = {r: plan(manifest, shards, rank=r, roots=roots, zero_copy_bytes=zero_copy_bytes) for r in ranks}
    world.check(manifest, plans, roots=roots)


def test_a_rank_that_holds_nothing_of_a_bucket_has_nothing_to_do_with_it() -> None:
    """Stages work beside each other: where each assembles its own buckets, nothing travels between them."""
    world = World("float32")
    for at, (name, shape) in enumerate(SHAPES.items()):
        world.give(at % 2, name, Box.whole(shape))
    owners = {name: at % 2 for at, name in enumerate(SHAPES)}
    manifest = Manifest.of("M", world.tensors, 1)
    roots = [owners[manifest.tensors_of(index)[0].name] for index in range(len(manifest.buckets))]
    for rank in range(2):
        for index, bucket in enumerate(plan(manifest, world.shards(), rank=rank, roots=roots)):
            assert set(bucket) == ({rank} if roots[index] == rank else set())


def test_nothing_is_planned_where_no_rank_sends_anything() -> None:
    """As where the only rank quantizes every tensor of a bucket in place: no row says how many axes tensors have."""
    tensors = (TensorSpec("weight", "float32", (4, 6)),)
    manifest = Manifest.of("tiny", tensors, 1 << 20)
    assert plan(manifest, Shards.of(tensors, []), rank=0) == ({},)


@pytest.mark.parametrize("bucket_bytes", [1, 400, 1 << 20])
def test_parameters_that_were_moved_to_another_device_are_read_there(
    monkeypatch: pytest.MonkeyPatch, bucket_bytes: int
) -> None:
    """Some of them, or all, between one version and the next: nothing is sent from where the buckets are not.

    There is one device here, so which parameters are elsewhere is said by the test; the bytes are what is shown.
    """
    world = World("bfloat16", "bfloat16")
    for index, (name, shape) in enumerate(SHAPES.items()):
        world.give(index % 3, name, Box.whole(shape))
    manifest = Manifest.of("M", world.tensors, bucket_bytes)
    plans = {rank: plan(manifest, world.shards(), rank=rank, zero_copy_bytes=1) for rank in range(3)}
    moved: set[int] = set()
    asked: set[int] = set()

    def elsewhere(tensor: torch.Tensor, device: torch.device) -> bool:
        assert device == CPU
        asked.add(id(tensor))
        return id(tensor) in moved

    memory_access = MemoryAccess(is_elsewhere=elsewhere)
    copied: list[int] = []
    usual = Assembler._pack
    monkeypatch.setattr(
        Assembler,
        "_pack",
        lambda self, messages, *rest: (copied.append(len(messages)), usual(self, messages, *rest))[1],
    )
    world.check(manifest, plans, memory_access)
    assert not any(copied), "what lies as it is served was packed before it was sent"
    moved |= {id(world.storages[1][1])}
    world.check(manifest, plans, memory_access)
    assert any(copied), "what is elsewhere was sent from there"
    moved |= asked
    world.check(manifest, plans, memory_access)


@pytest.mark.parametrize(("device", "there"), [("cpu", False), ("cuda", True), ("cuda:1", True), ("meta", True)])
def test_any_gpu_is_meant_by_a_device_without_an_index(device: str, there: bool) -> None:
    """What is on the host is elsewhere for every GPU, and at home on the host."""
    assert is_elsewhere(torch.zeros(1), torch.device(device)) is there


def groups(world: World, places: Sequence[int]) -> None:
    """Rank 1 holds a tensor in 8 blocks of 2 rows, which lie at rows `places` of one fused local tensor."""
    storage = torch.full((max(places) + 2, 3), 77.0)
    for block, place in enumerate(places):
        storage[place : place + 2] = world.full["e"][block * 2 : block * 2 + 2]
        view = ShardView(len(world.storages[1]), place * 3, (3, 1))
        world.rows[1].append(Shard("e", Box((block * 2, 0), (block * 2 + 2, 3)), "float32", view))
    world.storages[1].append(storage)


def everything_else(world: World) -> None:
    for name, shape in SHAPES.items():
        if name != "e":
            world.give(0, name, Box.whole(shape))


@pytest.mark.parametrize(
    ("places", "shapes"),
    [
        ((1, 7, 13, 19, 25, 31, 37, 43), [(8, 2, 3)]),
        ((0, 4, 8, 15, 22, 29, 36, 40), [(3, 2, 3), (4, 2, 3), (2, 3)]),
        ((21, 18, 15, 12, 9, 6, 3, 0), [(2, 3)] * 8),
    ],
)
def test_equal_steps_become_one_copy(places: Sequence[int], shapes: list[tuple[int, ...]]) -> None:
    """The groups of a fused parameter are one strided copy, not one for every group; but only equal steps forward."""
    world = World("float32")
    groups(world, places)
    everything_else(world)
    manifest = Manifest.of("M", world.tensors)
    plans = {rank: plan(manifest, world.shards(), rank=rank) for rank in range(2)}
    (message,) = plans[1][0][1].messages
    assert [place.shape for place in message.placements] == shapes
    world.check(manifest, plans)


def test_long_runs_are_received_where_they_belong() -> None:
    """Rows follow each other in the bucket: no loose bytes, no second copy; one whole tensor is not even packed."""
    world = World("float32")
    world.give(0, "a", Box((0, 0), (6, 6)))
    world.give(1, "a", Box((6, 0), (12, 6)))
    for name in ("b", "c", "e", "f"):
        world.give(1, name, Box.whole(SHAPES[name]))
    world.give(2, "d", Box((0, 0), (6, 6)))
    world.give(2, "d", Box((0, 6), (6, 12)))
    manifest = Manifest.of("M", world.tensors)
    plans = {rank: plan(manifest, world.shards(), rank=rank, zero_copy_bytes=24) for rank in range(3)}
    (bucket,) = plans[0]
    assert bucket[1].packed_bytes == 0
    assert [message.bucket_offset for message in bucket[1].messages] == [144, 700]
    assert bucket[2].packed_bytes == 6 * 12 * 4, "columns are taken apart"
    world.check(manifest, plans)
    alone = World("float32")
    everything_else(alone)
    alone.give(1, "e", Box.whole(SHAPES["e"]))
    (bucket,) = plan(manifest, alone.shards(), rank=1, zero_copy_bytes=24)
    assert bucket[1].staged_bytes == 0


def test_what_is_added_is_added_before_the_cast() -> None:
    """A norm that is trained around zero is served around one, exactly as the trainer computes with it."""
    world = World("bfloat16")
    world.give(0, "b", Box.whole(SHAPES["b"]), shift=1)
    for name in SHAPES.keys() - {"b"}:
        world.give(1, name, Box.whole(SHAPES[name]), shift=1)
    world.full = {name: (tensor - 1) + 1 for name, tensor in world.full.items()}
    manifest = Manifest.of("M", world.tensors, 300)
    world.check(manifest, {rank: plan(manifest, world.shards(), rank=rank, zero_copy_bytes=24) for rank in range(2)})


def test_parameters_are_read_at_the_moment_of_the_call() -> None:
    """An optimizer that puts new storage under a parameter, as offloading does, is followed."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    spec = TensorSpec("a", "float32", (4,))
    manifest = Manifest.of("M", [spec])
    shards = Shards.of([spec], [Shard("a", Box.whole((4,)), "float32", ShardView(0, 0, (1,)))])
    assembler = Assembler(plan(manifest, shards, rank=0), [parameter], 0, None, None)
    out = torch.empty(16, dtype=torch.uint8)
    for value in (1.0, 2.0):
        parameter.data = torch.full((4,), value)
        assembler.run(0, out, CPU)
        assert (out.view(torch.float32) == value).all()


def test_memory_is_bounded_and_given_back() -> None:
    """A rank needs at most its part of a bucket, and nothing between rounds."""
    world = World("float32")
    for name, shape in SHAPES.items():
        for rank, box in enumerate(_halves(shape)):
            world.give(rank, name, box)
    shards = world.shards()
    manifest = Manifest.of("M", world.tensors, 400)
    plans = {rank: plan(manifest, shards, rank=rank, zero_copy_bytes=24) for rank in range(2)}
    for bucket, spec in zip(plans[0], manifest.buckets, strict=True):
        assert spec.nbytes <= sum(contribution.nbytes for contribution in bucket.values()) <= spec.nbytes + 16 * 12
    letters: dict[int, list[torch.Tensor]] = defaultdict(list)
    sender = Assembler(plans[1], world.storages[1], 1, None, Post(1, letters))
    for index in range(len(manifest.buckets)):
        sender.run(index, None, CPU)
        last = index == len(manifest.buckets) - 1
        held = 0 if sender._scratch is None else sender._scratch.numel()
        assert held <= manifest.largest_bucket
        assert (held == 0) == last


def _halves(shape: tuple[int, ...]) -> list[Box]:
    if shape[-1] == 1:
        return [Box.whole(shape)]
    middle = shape[-1] // 2
    ends = shape[:-1]
    zeros = (0,) * len(ends)
    return [Box((*zeros, 0), (*ends, middle)), Box((*zeros, middle), (*ends, shape[-1]))]


def test_every_rank_plans_the_same() -> None:
    """A rank plans its own contributions only, and they are those that the root expects."""
    world = World("bfloat16")
    for name, shape in SHAPES.items():
        for rank, box in enumerate(_halves(shape)):
            world.give(rank, name, box)
    manifest = Manifest.of("M", world.tensors, 200)
    everybody = plan(manifest, world.shards(), rank=0, zero_copy_bytes=24)
    own = plan(manifest, world.shards(), rank=1, zero_copy_bytes=24)
    assert [bucket.get(1) for bucket in everybody] == [bucket.get(1) for bucket in own]


TENSORS = tuple(TensorSpec(name, "float32", shape) for name, shape in SHAPES.items())


@pytest.mark.parametrize(
    "tensors",
    [
        TENSORS[1:],
        (*TENSORS, TensorSpec("more", "float32", (1,))),
        (*TENSORS[:-1], TensorSpec("f", "bfloat16", (1,))),
    ],
)
def test_a_manifest_of_other_tensors_is_refused(tensors: tuple[TensorSpec, ...]) -> None:
    """A manifest that leaves something out, adds something or names another dtype would serve a mixture."""
    with pytest.raises(LayoutMismatch, match="differ in"):
        check_manifest(Manifest.of("M", tensors), TENSORS)


def test_the_order_of_a_manifest_is_its_own() -> None:
    """Buckets may order tensors as they like."""
    check_manifest(Manifest.of("M", tuple(reversed(TENSORS))), TENSORS)


# Plans of buckets: made when the manifest or the roots are new, and found again without reading either.


ONE, SAME, OTHER = (Manifest.of("toy", [TensorSpec("t", "bfloat16", (size,))]) for size in (1, 1, 2))


class Counted(tuple[int, ...]):  # noqa: SLOT001  it counts
    """Roots that know how often they are read."""

    reads = 0

    def __iter__(self) -> Iterator[int]:
        self.reads += 1
        return super().__iter__()


@pytest.fixture
def made() -> list[tuple[Manifest, Sequence[int] | None]]:
    return []


def test_roots_are_read_once_in_a_pass(made: list[tuple[Manifest, Sequence[int] | None]]) -> None:
    """There is one for each bucket: read for every bucket they would be read as often as there are pairs of them."""
    planned, roots = BucketPlanCache[int](), Counted((0, 1, 0))
    for _ in range(3):
        assert planned.of(ONE, roots, lambda *of: made.append(of) or len(made)) == 1
    assert roots.reads == 1


def test_what_is_new_is_planned_anew(made: list[tuple[Manifest, Sequence[int] | None]]) -> None:
    """Another manifest, other roots, or a list of roots that became others; what is equal is not."""
    planned, roots = BucketPlanCache[int](), [0, 1]

    def of(manifest: Manifest, roots: Sequence[int] | None) -> int:
        return planned.of(manifest, roots, lambda *new: made.append(new) or len(made))

    assert [of(ONE, None), of(SAME, None), of(ONE, (0,)), of(ONE, None), of(SAME, (0,))] == [1, 1, 2, 1, 2]
    assert [of(OTHER, None), of(OTHER, None), of(ONE, None)] == [3, 3, 4]
    assert of(ONE, roots) == 5
    roots[0] = 1
    assert [of(ONE, roots), of(ONE, (0, 1))] == [6, 5]


def test_what_cannot_be_planned_is_not_kept(made: list[tuple[Manifest, Sequence[int] | None]]) -> None:
    """A second call is answered again."""
    planned = BucketPlanCache[int]()

    def fail(*_: object) -> int:
        raise ValueError("no plan")

    for _ in range(2):
        with pytest.raises(ValueError, match="no plan"):
            planned.of(ONE, None, fail)
    assert planned.of(ONE, None, lambda *of: made.append(of) or len(made)) == 1
