"""Blobs: by their digest, in pages, within bounds."""

from __future__ import annotations

import hashlib

from hypothesis import given, strategies as st

from weightbus.control.machine.coordinator import MAX_BLOBS, BlobCache
from weightbus.control.protocol.messages import MAX_PAGE_BYTES, MAX_PAGES, RefusalCode


def name(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()


@given(st.binary(max_size=2000), st.integers(1, 5), st.randoms())
def test_pages_in_any_order_make_the_blob(blob: bytes, pages: int, order: object) -> None:
    """However a blob is cut and in whatever order its pages come, repeated ones too, it is there when all are."""
    blobs = BlobCache(10_000)
    size = -(-len(blob) // pages) or 1
    cut = [(index, blob[index * size : (index + 1) * size]) for index in range(pages)] * 2
    order.shuffle(cut)  # type: ignore[attr-defined]
    for index, data in cut:
        assert blobs.put(name(blob), index, pages, data).ok
        blobs.check()
    assert blobs.page(name(blob), 0) == (blob, 1)
    assert blobs.held_bytes == len(blob)


def test_large_blob_is_read_page_by_page() -> None:
    """Pages are cut at `MAX_PAGE_BYTES`, and there is none after the last."""
    blob = b"x" * (MAX_PAGE_BYTES + 1)
    blobs = BlobCache(10**7)
    blobs.put(name(blob), 0, 2, blob[:MAX_PAGE_BYTES])
    blobs.put(name(blob), 1, 2, blob[MAX_PAGE_BYTES:])
    assert [blobs.page(name(blob), page) for page in range(3)] == [(blob[:-1], 2), (b"x", 2), None]


def test_wrong_bytes_are_refused_and_forgotten() -> None:
    """A blob that does not hash to its name is not kept, not even in part."""
    blobs = BlobCache(1000)
    verdict = blobs.put(name(b"right"), 0, 1, b"wrong")
    assert verdict.code is RefusalCode.BAD_BLOB
    assert (name(b"right") in blobs, blobs.held_bytes) == (False, 0)
    assert blobs.put(name(b"right"), 0, 1, b"right").ok


def test_a_blob_that_is_cut_otherwise_begins_anew() -> None:
    """Another life of a publisher, or of its release: pages of two cuts are no blob, and none of the first is kept."""
    blob = bytes(range(12))
    blobs = BlobCache(1000)
    for page in (2, 0):
        assert blobs.put(name(blob), page, 3, blob[4 * page : 4 * page + 4]).ok
    for page in (0, 1):
        assert blobs.put(name(blob), page, 2, blob[6 * page : 6 * page + 6]).ok
        blobs.check()
    assert blobs.page(name(blob), 0) == (blob, 1)
    assert blobs.held_bytes == len(blob)


def test_pages_out_of_bounds_are_refused() -> None:
    """Page numbers, page counts and page sizes have limits."""
    blobs = BlobCache(10**7)
    for page, pages, data in ((1, 1, b""), (0, 0, b""), (0, MAX_PAGES + 1, b""), (0, 1, b"x" * (MAX_PAGE_BYTES + 1))):
        assert blobs.put(name(data), page, pages, data).code is RefusalCode.BAD_BLOB
    assert blobs.held_bytes == 0


def test_room_is_made_from_unpinned_blobs() -> None:
    """Pinned blobs stay; the longest unused other one goes first; when all is pinned the newcomer is refused."""
    blobs = BlobCache(30)
    old, used, pinned = (bytes([letter]) * 10 for letter in b"abc")
    for blob in (old, used, pinned):
        blobs.put(name(blob), 0, 1, blob)
    blobs.pin([name(pinned)])
    blobs.page(name(used), 0)
    assert blobs.put(name(b"d" * 10), 0, 1, b"d" * 10).ok
    assert [name(blob) in blobs for blob in (old, used, pinned)] == [False, True, True]
    blobs.pin([name(blob) for blob in (used, pinned, b"d" * 10)])
    assert blobs.put(name(b"e" * 10), 0, 1, b"e" * 10).code is RefusalCode.NOT_ALLOWED
    blobs.check()


def test_uploads_that_never_end_do_not_fill_the_store() -> None:
    """Unfinished uploads count, and give way to others."""
    blobs = BlobCache(30)
    for start in range(10):
        blobs.put(name(bytes([start])), 0, 2, b"x" * 15)
        blobs.check()
    assert blobs.put(name(b"d" * 10), 0, 1, b"d" * 10).ok


def test_empty_pages_do_not_collect() -> None:
    """Pages without a byte take memory too: uploads, and small blobs, are bounded in number. The newest stay."""
    blobs = BlobCache(10**7)
    kept = b"pinned"
    blobs.put(name(kept), 0, 1, kept)
    blobs.pin([name(kept)])
    for number in range(2 * MAX_BLOBS):
        small = b"%d" % number
        assert blobs.put(name(small), 0, 1, small).ok
        assert blobs.put(name(b"never whole" + small), 0, 2, b"").ok
    blobs.check()
    there = [name(b"%d" % number) in blobs for number in range(2 * MAX_BLOBS)]
    assert (name(kept) in blobs, sum(there), there[-1]) == (True, MAX_BLOBS - 1, True)
    last = b"never whole%d" % (2 * MAX_BLOBS - 1)
    assert blobs.put(name(last), 1, 2, last).ok
    assert name(last) in blobs
