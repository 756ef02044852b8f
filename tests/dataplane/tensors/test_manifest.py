"""A manifest that was read is one that can be loaded: whatever is wrong with it is found, and said."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.errors import ManifestError, TransferFailed
from weightbus.dataplane.tensors.manifest import (
    ITEM_BYTES,
    BucketSpec,
    Manifest,
    Sources,
    TensorSpec,
    cut,
    main_dtype,
)
from weightbus.dataplane.transports.distributed.broadcast_group import GroupSettings

NAMES: Final = st.from_regex("[ab_7][ab._7-]{0,3}", fullmatch=True)
SHAPES: Final = st.lists(st.integers(1, 5), max_size=3).map(tuple)
TENSORS: Final = st.builds(TensorSpec, NAMES, st.sampled_from(["float32", "bfloat16", "int8"]), SHAPES)


def manifests() -> st.SearchStrategy[Manifest]:
    """Of tensors in any order of theirs, cut anywhere."""
    return st.builds(
        Manifest.of,
        st.just("Qwen3ForCausalLM"),
        st.lists(TENSORS, min_size=1, max_size=9, unique_by=lambda each: each.name),
        st.integers(1, 200),
    )  # fmt: skip


def spoilt(manifest: Manifest) -> dict[str, Manifest]:
    """What may be wrong, and what is said of it."""
    first, *rest = manifest.tensors
    head, *tail = manifest.buckets

    def tensors(*specs: TensorSpec) -> Manifest:
        return msgspec.structs.replace(manifest, tensors=specs)

    def buckets(*cut: BucketSpec) -> Manifest:
        return msgspec.structs.replace(manifest, buckets=cut)

    return {
        "has no tensors": tensors(),
        "is not a tensor name": tensors(msgspec.structs.replace(first, name=".first"), *rest),
        r"'two\\nlines' is not a tensor name": tensors(msgspec.structs.replace(first, name="two\nlines"), *rest),
        r"'ends\\n' is not a tensor name": tensors(*rest, msgspec.structs.replace(first, name="ends\n")),
        "'' is not a tensor name": tensors(msgspec.structs.replace(first, name=""), *rest),
        f"'{'n' * 257}' is not a tensor name": tensors(msgspec.structs.replace(first, name="n" * 257), *rest),
        "has dtype 'complex64'": tensors(*rest, msgspec.structs.replace(first, dtype="complex64")),
        "one to eight positive sizes": tensors(*rest, msgspec.structs.replace(first, shape=(2, 0))),
        r"has shape \(1, 1, 1, 1, 1, 1, 1, 1, 1\)": tensors(*rest, msgspec.structs.replace(first, shape=(1,) * 9)),
        f"'{first.name}' stands twice": tensors(first, *rest, first),
        "expected to begin at 0": buckets(msgspec.structs.replace(head, first=1), *tail),
        f"expected to begin at {manifest.buckets[-1].first}": buckets(
            *manifest.buckets[:-1], msgspec.structs.replace(manifest.buckets[-1], last=len(manifest.tensors) + 1)
        ),
        f"bucket 0 says {head.nbytes + 1} bytes": buckets(msgspec.structs.replace(head, nbytes=head.nbytes + 1), *tail),
        "the buckets cover": buckets(*manifest.buckets[:-1]),
    }


@given(manifests())
@settings(max_examples=100, deadline=None)
def test_what_is_made_can_be_read(manifest: Manifest) -> None:
    """Whole, once, every tensor on a multiple of its item size."""
    assert Manifest.decode(manifest.encode()) == manifest
    for index, bucket in enumerate(manifest.buckets):
        offsets = manifest.offsets_of(index)
        for spec, offset in zip(manifest.tensors_of(index), offsets, strict=False):
            assert offset % ITEM_BYTES[spec.dtype] == 0
        assert offsets[-1] == bucket.nbytes == sum(spec.nbytes for spec in manifest.tensors_of(index))


@given(manifests())
@settings(max_examples=50, deadline=None)
def test_what_is_wrong_is_found_and_said(manifest: Manifest) -> None:
    """In whichever tensor or bucket."""
    for said, wrong in spoilt(manifest).items():
        with pytest.raises(ManifestError, match=said):
            Manifest.decode(wrong.encode())


def test_a_tensor_that_begins_between_two_items_is_found() -> None:
    """SGLang would exit for it."""
    specs = TensorSpec("odd", "int8", (3,)), TensorSpec("wide", "float32", (2,))
    with pytest.raises(ManifestError, match="'wide' begins at byte 3, not on a multiple of its item size"):
        Manifest.decode(Manifest("Qwen3ForCausalLM", specs, (BucketSpec(0, 2, 11),)).encode())
    assert [spec.name for spec in Manifest.of("Qwen3ForCausalLM", specs).tensors] == ["wide", "odd"]


# Which rank broadcasts which bucket, and that the order of broadcasts cannot end in a circle. No groups.


OWNERS = st.lists(st.integers(0, 3), min_size=1, max_size=24).map(
    lambda found: [sorted(set(found)).index(owner) for owner in found]
)
"""By tensor, its source; each source has one."""


def tensors_of(owners: Sequence[int]) -> list[TensorSpec]:
    return [TensorSpec(f"t{at}.{owner}", "float32", (1 + at % 5,)) for at, owner in enumerate(owners)]


@settings(deadline=None)
@given(OWNERS, st.integers(4, 80))
def test_every_bucket_is_of_one_source(owners: list[int], bucket_bytes: int) -> None:
    """All tensors travel once, each in a bucket of its own source, whose order they keep."""
    tensors = tensors_of(owners)
    manifest, sources = cut("M", tensors, owners, bucket_bytes)
    assert sorted(spec.name for spec in manifest.tensors) == sorted(spec.name for spec in tensors)
    for bucket, source in enumerate(sources.of):
        assert {spec.name.rpartition(".")[2] for spec in manifest.tensors_of(bucket)} == {str(source)}
    for source in range(sources.count):
        own = [spec for bucket in sources.own(source) for spec in manifest.tensors_of(bucket)]
        alone = Manifest.of("M", [spec for spec, owner in zip(tensors, owners, strict=True) if owner == source])
        assert sorted(own, key=str) == sorted(alone.tensors, key=str)
        assert [sources.place(bucket) for bucket in sources.own(source)] == list(range(len(sources.own(source))))
    assert sources.of[0] == 0, "the leader sends first: what fails before that has touched no server"


def test_one_source_changes_nothing() -> None:
    """Where one rank sends everything, the manifest and what is announced are what they have always been."""
    tensors = tensors_of([0] * 9)
    manifest, sources = cut("M", tensors, [0] * 9, 40)
    assert manifest == Manifest.of("M", tensors, 40)
    assert GroupSettings.of_sources("weightbus-c-3", sources).encode() == "weightbus-c-3"
    assert GroupSettings.decode("weightbus-c-3", len(sources.of)) == GroupSettings(("weightbus-c-3",), ())
    assert [list(row) for row in sources.rows] == [[bucket] for bucket in range(len(sources.of))]
    assert [sources.needed(row, 2) for row in sources.rows] == [
        bucket - 2 if bucket > 1 else -1 for bucket in range(len(sources.of))
    ]


def test_stages_take_turns() -> None:
    """They begin together and end together, however many buckets each has."""
    _, sources = cut("M", tensors_of([0] * 6 + [1] * 2 + [2] * 3), [0] * 6 + [1] * 2 + [2] * 3, 4)
    assert sources.of == (0, 1, 2, 0, 0, 2, 0, 1, 0, 2, 0)
    assert [list(row) for row in sources.rows] == [[0, 1, 2], [3], [4, 5], [6, 7], [8, 9], [10]]


@given(OWNERS, st.integers(1, 4))
def test_rows_cover_all_buckets_and_need_only_earlier_ones(owners: list[int], slots: int) -> None:
    """Each row has at most one bucket of a source, and waits for all that lie in its place, which came before it."""
    sources = Sources(tuple(owners))
    assert [bucket for row in sources.rows for bucket in row] == list(range(len(owners)))
    for row in sources.rows:
        assert len({sources.of[bucket] for bucket in row}) == len(row)
        assert sources.needed(row, slots) < row.start
        assert all(sources.before(bucket, slots) <= sources.needed(row, slots) for bucket in row), "one is there still"
        assert sources.row_at(row.start) == row
    for bucket in range(len(owners)):
        before = sources.before(bucket, slots)
        held = [each for each in sources.own(sources.of[bucket]) if each < bucket]
        assert before == (held[-slots] if len(held) >= slots else -1)


def test_groups_are_told_as_they_were_said() -> None:
    """Names in order, the leader's first; and which of them each bucket comes by."""
    groups = GroupSettings.of_sources("weightbus-c-3", Sources((0, 1, 2, 0)))
    assert groups.names == ("weightbus-c-3", "weightbus-c-3-source1", "weightbus-c-3-source2")
    assert GroupSettings.decode(groups.encode(), 4) == groups
    assert [groups.names[groups.source_of(bucket)] for bucket in range(4)] == [*groups.names, "weightbus-c-3"]


def test_engines_alone_find_their_groups_by_their_first_rank() -> None:
    """With every source one of their own, in which they are all but the source; else they are who they are."""
    groups = GroupSettings.of_sources("g", Sources((0, 1)), (1, 2, 4))
    assert GroupSettings.decode(groups.encode(), 2) == groups
    assert groups.of_engine(1, 8) == (("g-at1", "g-source1-at1"), 1, 2, False)
    assert groups.of_engine(2, 8) == (("g-at2", "g-source1-at2"), 1, 3, False)
    assert groups.of_engine(4, 8) == (("g-at4", "g-source1-at4"), 1, 5, False)
    for nobody in (0, 3, 8):
        with pytest.raises(TransferFailed, match=f"none at {nobody}"):
            groups.of_engine(nobody, 8)
    assert GroupSettings.of_sources("g", Sources((0,))).of_engine(2, 4) == (("g",), 2, 4, False)
    assert groups.held(3) == tuple((groups.of_engine(first, 8).names, False) for first in (1, 2, 4))
    assert GroupSettings.of_sources("g", Sources((0,))).held(2) == ((("g",), False), (("g",), False))
    one = GroupSettings.of_sources("g", Sources((0,)), (2,))
    assert GroupSettings.decode(one.encode(), 1) == one


@given(st.data(), st.lists(st.integers(1, 8), min_size=1, max_size=6), st.booleans(), st.integers(1, 3))
def test_every_rank_of_every_group_is_given_out_once(
    data: st.DataObject, workers: list[int], together: bool, sources: int
) -> None:
    """Workers or an agent in their place take part: ranks 1 and up are given out without a gap."""
    sidecars = tuple(place for place in range(len(workers)) if data.draw(st.booleans()))
    owners = Sources(tuple(range(sources)))
    groups = GroupSettings.of_sources("g", owners, tuple(workers), together=together, sidecars=sidecars)
    assert GroupSettings.decode(groups.encode(), sources) == groups
    world, first = 1 + sum(workers), 1
    taken: dict[str, list[int]] = {}
    sizes: dict[str, set[int]] = {}
    for place, count in enumerate(workers):
        part = groups.of_engine(first, world)
        assert part.by_sidecar == (place in sidecars)
        assert groups.held(len(workers))[place] == (part.names, part.by_sidecar)
        for name in part.names:
            ranks = range(part.rank_offset, part.rank_offset + (1 if part.by_sidecar else count))
            taken.setdefault(name, []).extend(ranks)
            sizes.setdefault(name, set()).add(part.world_size)
        first += count
    assert len(taken) == sources * (1 if together else len(workers))
    for name, ranks in taken.items():
        assert ranks == list(range(1, 1 + len(ranks)))
        assert sizes[name] == {1 + len(ranks)}
    assert groups.size(world) == (1 + sum(1 if place in sidecars else n for place, n in enumerate(workers)))
    assert groups.all_ours == (len(sidecars) == len(workers))


def test_what_is_told_to_older_engines_is_what_they_know() -> None:
    """Fields that they have never heard of are left out where nothing is said by them."""
    assert GroupSettings.of_sources("g", Sources((0,))).encode() == "g"
    assert GroupSettings(("g",), (), (1, 2)).encode() == '{"names":["g"],"of":[],"ranks":[1,2]}'
    assert GroupSettings(("g",), (), (1, 2), True, (1,)).encode() == (
        '{"names":["g"],"of":[],"ranks":[1,2],"together":true,"sidecars":[1]}'
    )


@pytest.mark.parametrize(
    ("word", "buckets"),
    [
        (GroupSettings(("a", "b"), (0, 1)).encode(), 3),
        (GroupSettings(("a", "b"), (0, 2)).encode(), 2),
        ('{"names": ["a"]', 1),
        ('{"names": ["a"], "of": [0], "more": 1}', 1),
        (GroupSettings(("a", "b"), (), (1, 2)).encode(), 2),
        (GroupSettings(("a",), (), (1, 0)).encode(), 2),
        (GroupSettings(("a",), (), (1, 2), True, (2,)).encode(), 1),
    ],
)
def test_groups_that_do_not_fit_are_refused(word: str, buckets: int) -> None:
    """No server is asked to join what leaves a bucket without a group."""
    with pytest.raises(TransferFailed, match="announced"):
        GroupSettings.decode(word, buckets)


# -- nobody waits in a circle -----------------------------------------------------------------------------------------

Step = tuple[str, ...]
"""("join", group), ("take", bucket) or ("fill", bucket)."""


def engine_steps(sources: Sources) -> list[Step]:
    """What an engine does, one after the other, or has its server do: as receivers go through `GroupSettings`."""
    groups = GroupSettings.of_sources("g", sources)
    joins = [("join", name) for name in groups.names]
    return [*joins, *(("take", str(bucket)) for bucket in range(len(sources.of)))]


def source_steps(sources: Sources, number: int) -> list[Step]:
    """A source's own group and buckets, as `SourceRank` and the leader have them."""
    joins = [("join", GroupSettings.of_sources("g", sources).names[number])]
    return [*joins, *(("take", str(bucket)) for bucket in sources.own(number))]


def run(sources: Sources, engines: Sequence[Sequence[Step]], slots: int, choose: st.DataObject) -> int:
    """Have everybody go on in any order until nobody can; how many are not at their end.

    A join and a broadcast happen when all who take part in it have come to it, a broadcast when its bucket was
    assembled too; a row is assembled, all its stages together, when its slots are free.
    """
    parties = [list(steps) for steps in engines]
    senders = [source_steps(sources, number) for number in range(sources.count)]
    rows, filled, taken = list(sources.rows), 0, 0
    while True:
        moves: list[tuple[str, int]] = []
        if rows and sources.needed(rows[0], slots) < taken:
            moves.append(("row", 0))
        for number, steps in enumerate(senders):
            if not steps or any(not party or party[0] != steps[0] for party in parties):
                continue
            if steps[0][0] == "join" or int(steps[0][1]) < filled:
                moves.append(("meet", number))
        if not moves:
            return sum(bool(steps) for steps in itertools.chain(parties, senders))
        kind, number = choose.draw(st.sampled_from(moves))
        if kind == "row":
            filled = rows.pop(0).stop
            continue
        step = senders[number].pop(0)
        for party in parties:
            party.pop(0)
        taken = int(step[1]) + 1 if step[0] == "take" else taken


@settings(deadline=None)
@given(OWNERS, st.integers(1, 3), st.integers(1, 4), st.data())
def test_no_interleaving_ends_in_a_circle(owners: list[int], slots: int, engines: int, data: st.DataObject) -> None:
    """Whatever is quick and whatever is slow, with several engines and several stages all come to their end."""
    sources = Sources(tuple(owners))
    assert run(sources, [engine_steps(sources)] * engines, slots, data) == 0


@settings(deadline=None)
@given(st.data())
def test_engines_that_join_in_another_order_wait_for_ever(data: st.DataObject) -> None:
    """What the order is for: two engines that come to two groups the other way round never meet."""
    sources = Sources((0, 1, 0, 1))
    right = engine_steps(sources)
    assert run(sources, [right, [right[1], right[0], *right[2:]]], 2, data) == 4


def test_a_models_dtype_is_that_of_most_elements() -> None:
    """Of elements, not of tensors; those of codes and counters do not count."""
    tensors = [TensorSpec("w", "bfloat16", (4, 4)), TensorSpec("codes", "uint8", (64, 64))]
    tensors += [TensorSpec(f"norm{index}", "float32", (4,)) for index in range(3)]
    assert main_dtype(tensors) == "bfloat16"
    assert main_dtype(tensors[1:2]) == ""
