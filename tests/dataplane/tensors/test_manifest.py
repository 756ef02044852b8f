"""A manifest that was read is one that can be loaded: whatever is wrong with it is found, and said."""

from __future__ import annotations

from typing import Final

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.errors import ManifestError
from weightbus.dataplane.tensors.manifest import ITEM_BYTES, BucketSpec, Manifest, TensorSpec

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
