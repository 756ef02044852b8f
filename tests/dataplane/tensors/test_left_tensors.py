"""What is sent and what is left are disjoint, each name is covered once, and the shortest entries say so."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, strategies as st

from weightbus.dataplane.errors import ManifestError
from weightbus.dataplane.tensors import Copy, Left, LeftReason, Manifest, TensorSpec, covering, shortest_prefixes

NAMES = st.sets(st.from_regex(r"[ab]{1,2}(\.[ab]{1,2}){0,3}", fullmatch=True), min_size=1, max_size=12)
ENTRIES = st.sets(st.from_regex(r"[ab](\.[ab]){0,2}\.?", fullmatch=True), max_size=5)


def manifest(sent: set[str], left: set[str]) -> Manifest:
    """Of one element a tensor."""
    return Manifest.of("M", [TensorSpec(name, "int8", (1,)) for name in sorted(sent)], left=map(Left, left))


def covers(entry: str, name: str) -> bool:
    """The rule, by its words: a tensor by its name, or all whose names begin with a prefix that ends in a dot."""
    return entry == name or (entry.endswith(".") and name.startswith(entry))


@given(NAMES, ENTRIES)
def test_an_entry_covers_what_its_words_say(names: set[str], entries: set[str]) -> None:
    """Compared with the rule applied to every pair of entry and name."""
    for name in names:
        found = covering(entries, name)
        assert bool(found) == any(covers(entry, name) for entry in entries)
        assert not found or (found in entries and covers(found, name))


@given(NAMES, ENTRIES)
def test_a_manifest_is_refused_exactly_where_a_name_is_covered_twice(sent: set[str], left: set[str]) -> None:
    """Sent and left at a time, or left by two entries: both are mistakes, and no third thing is one."""
    twice = any(covers(entry, name) for entry in left for name in sent)
    twice |= any(covers(one, other) for one in left for other in left - {one})
    if twice:
        with pytest.raises(ManifestError, match=r"^left: "):
            manifest(sent, left)
    else:
        found = manifest(sent, left)
        assert not any(found.leaves(name) for name in sent)
        assert Manifest.decode(found.encode()) == found


@given(NAMES, NAMES)
def test_shortest_prefixes_cover_all_that_is_left_and_nothing_that_is_sent(left: set[str], sent: set[str]) -> None:
    """And none of them could be shorter."""
    left -= sent
    entries = shortest_prefixes(left, sent)
    assert all(any(covers(entry, name) for entry in entries) for name in left)
    assert not any(covers(entry, name) for entry in entries for name in sent)
    for entry in entries:
        above = [entry[: at + 1] for at, letter in enumerate(entry[:-1]) if letter == "."]
        assert all(any(covers(prefix, name) for name in sent) for prefix in above)


def test_a_manifest_that_leaves_nothing_has_the_bytes_it_always_had() -> None:
    """A field with its default is not sent (N44): older agents read it, and its digest is what it was."""
    whole = manifest({"a"}, set())
    assert msgspec.msgpack.decode(whole.encode()).keys() == {"model", "tensors", "buckets"}
    assert msgspec.msgpack.decode(manifest({"a"}, {"b."}).encode()).keys() == {"model", "tensors", "buckets", "left"}


def test_what_is_left_is_part_of_the_digest() -> None:
    """A signature names the manifest's digest, so that no coordinator changes what is left (G8); order is no part."""
    found = {manifest({"a"}, left).digest() for left in (set[str](), {"b."}, {"b"}, {"c."})}
    assert len(found) == 4
    tensors = [TensorSpec("a", "int8", (1,))]
    frozen = Manifest.of("M", tensors, left=[Left("b.", LeftReason.FROZEN)])
    assert frozen.digest() not in found
    one, other = (Manifest.of("M", tensors, left=map(Left, names)) for names in (("b.", "c."), ("c.", "b.")))
    assert one.digest() == other.digest()


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ((".b",), "'.b' is not a tensor's name"),
        (("",), "'' is not a tensor's name"),
        (("b", "b"), "an entry stands twice"),
        (("b.", "b.c."), "'b.c.' is covered by 'b.', too"),
        (("a.",), r"1 tensors that are sent are covered too: a.w \(by 'a.'\)"),
    ],
)
def test_a_bad_entry_is_refused_with_its_name(left: tuple[str, ...], said: str) -> None:
    """Also one that came over the wire."""
    with pytest.raises(ManifestError, match=said):
        Manifest.of("M", [TensorSpec("a.w", "int8", (1,))], left=map(Left, left))
    plain = Manifest.of("M", [TensorSpec("a.w", "int8", (1,))])
    with pytest.raises(ManifestError, match=said):
        Manifest.decode(msgspec.structs.replace(plain, left=tuple(map(Left, left))).encode())


def test_copies_are_no_part_of_what_is_left() -> None:
    """Also below a prefix that is left: engines keep no launch value of a tensor that follows another one (N64)."""
    tensors, left = [TensorSpec("a.w", "int8", (1,))], [Left("b.")]
    plain = Manifest.of("M", tensors, left=left)
    found = Manifest.of("M", tensors, left=left, copies=[Copy("b.w", "a.w")])
    assert [plain.leaves(name) for name in ("b.w", "b.v")] == [True, True]
    assert [found.leaves(name) for name in ("b.w", "b.v")] == [False, True]
    assert Manifest.decode(found.encode()) == found
    assert found.digest() != plain.digest()
    assert b"copies" not in plain.encode(), "a manifest without any is what it was before there were copies"


@pytest.mark.parametrize(
    ("copies", "words"),
    [
        ([Copy("a.w", "a.v")], "is sent"),
        ([Copy("b.w", "c.w")], "which is not sent"),
        ([Copy("b.", "a.w")], "not a tensor's name"),
        ([Copy("b.w", "a.w"), Copy("b.w", "a.v")], "twice"),
    ],
)
def test_a_copy_follows_one_tensor_that_is_sent(copies: list[Copy], words: str) -> None:
    """And is not sent itself (N64)."""
    tensors = [TensorSpec(name, "int8", (1,)) for name in ("a.w", "a.v")]
    with pytest.raises(ManifestError, match=words):
        Manifest.of("M", tensors, copies=copies)
