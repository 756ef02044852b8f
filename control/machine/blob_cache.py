"""Manifests and digest tables in memory, by the SHA-256 of their bytes. Pure, bounded, and blind to their contents.

Blobs arrive and leave in pages. The blobs of the current version and of the running round are pinned; others are
evicted when room is needed, the least recently used first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Final

from ..protocol import MAX_PAGE_BYTES, MAX_PAGES, InvariantBroken, RefusalCode
from .reply_cache import YES, Decision

MAX_BLOBS: Final = 4096
MAX_UPLOADS: Final = 128
"""Most unfinished uploads; `MAX_BLOBS` are whole. Bytes alone bound neither, because pages may be empty."""


class BlobCache:
    """A content-addressed store of at most `limit_bytes`, unfinished uploads included."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._whole: dict[str, bytes] = {}
        self._partial: dict[str, dict[int, bytes]] = {}
        self._pages: dict[str, int] = {}
        self._pinned: frozenset[str] = frozenset()
        self._held_bytes = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._whole

    @property
    def held_bytes(self) -> int:
        """Bytes of blobs and unfinished uploads."""
        return self._held_bytes

    def put(self, digest: str, page: int, pages: int, data: bytes) -> Decision:
        """Take one page. The last one to arrive completes the blob, which must hash to `digest`."""
        if digest in self._whole:
            self._touch(digest)
            return YES
        if refused := self._refusal(digest, page, pages, data):
            return refused
        if digest not in self._partial and len(self._partial) >= MAX_UPLOADS:
            self._forget_partial(next(iter(self._partial)))
        parts = self._partial.setdefault(digest, {})
        self._pages[digest] = pages
        if page not in parts:
            parts[page] = data
            self._held_bytes += len(data)
        if len(parts) < pages:
            return YES
        blob = b"".join(parts[index] for index in range(pages))
        self._forget_partial(digest)
        found = hashlib.sha256(blob).hexdigest()
        if found != digest:
            return Decision(
                RefusalCode.BAD_BLOB, f"the {pages} pages hash to {found}, sent under {digest}; send all again"
            )
        if len(self._whole) >= MAX_BLOBS and (oldest := next(filter(self._is_free, self._whole), None)):
            self._held_bytes -= len(self._whole.pop(oldest))
        self._whole[digest] = blob
        self._held_bytes += len(blob)
        return YES

    def page(self, digest: str, page: int) -> tuple[bytes, int] | None:
        """Page `page` of a blob and its number of pages; None if blob or page is missing."""
        blob = self._whole.get(digest)
        if blob is None:
            return None
        pages = max(1, -(-len(blob) // MAX_PAGE_BYTES))
        if page >= pages:
            return None
        self._touch(digest)
        return blob[page * MAX_PAGE_BYTES : (page + 1) * MAX_PAGE_BYTES], pages

    def pin(self, digests: Iterable[str]) -> None:
        """Keep exactly these blobs; any other may be evicted."""
        self._pinned = frozenset(digests)

    def _refusal(self, digest: str, page: int, pages: int, data: bytes) -> Decision | None:
        if not 1 <= pages <= MAX_PAGES or page >= pages:
            return Decision(RefusalCode.BAD_BLOB, f"page {page} of {pages}: pages count from 0, at most {MAX_PAGES}")
        if len(data) > MAX_PAGE_BYTES:
            return Decision(
                RefusalCode.BAD_BLOB, f"page {page} has {len(data)} bytes, at most {MAX_PAGE_BYTES} are allowed"
            )
        if self._pages.get(digest, pages) != pages:
            self._forget_partial(digest)  # a publisher with another page size begins anew
        if not self._room_for(len(data), digest):
            reason = f"the store holds {self._held_bytes} of {self._limit_bytes} bytes, all of them in use"
            return Decision(RefusalCode.NOT_ALLOWED, f"{reason}; raise blob_bytes", 5.0)
        return None

    def _room_for(self, size: int, digest: str) -> bool:
        for other in list(filter(self._is_free, self._whole)):
            if self._held_bytes + size <= self._limit_bytes:
                return True
            self._held_bytes -= len(self._whole.pop(other))
        for other in [name for name in self._partial if name != digest]:
            if self._held_bytes + size <= self._limit_bytes:
                return True
            self._forget_partial(other)
        return self._held_bytes + size <= self._limit_bytes

    def _is_free(self, digest: str) -> bool:
        return digest not in self._pinned

    def _forget_partial(self, digest: str) -> None:
        self._held_bytes -= sum(len(part) for part in self._partial.pop(digest, {}).values())
        self._pages.pop(digest, None)

    def _touch(self, digest: str) -> None:
        self._whole[digest] = self._whole.pop(digest)  # moved to the end: the dict is ordered by last use

    def check(self) -> None:
        """Raise `InvariantBroken` unless the byte count is right and the bounds are kept."""
        whole = sum(len(blob) for blob in self._whole.values())
        partial = sum(len(part) for parts in self._partial.values() for part in parts.values())
        if whole + partial != self._held_bytes:
            raise InvariantBroken(f"blobs take {whole} + {partial} bytes, counted as {self._held_bytes}")
        if self._held_bytes > self._limit_bytes:
            raise InvariantBroken(f"blobs take {self._held_bytes} bytes, at most {self._limit_bytes} are allowed")
        if len(self._whole) > MAX_BLOBS + len(self._pinned) or len(self._partial) > MAX_UPLOADS:
            raise InvariantBroken(f"{len(self._whole)} blobs and {len(self._partial)} uploads are kept")
