"""Cache of what a source plans for buckets: asked for with each bucket, made when manifest or roots are new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from weightbus.dataplane.tensors import Manifest

T = TypeVar("T")


class BucketPlanCache(Generic[T]):
    """Keeps the plan of the last manifest for each choice of roots."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...] | None, tuple[Manifest, T]] = {}
        self._last: tuple[Manifest, Sequence[int] | None, T] | None = None

    def of(
        self,
        manifest: Manifest,
        roots: Sequence[int] | None,
        make: Callable[[Manifest, Sequence[int] | None], T],
    ) -> T:
        """The plan; made by `make`, whose errors are raised, if it is new.

        `roots`, one for each bucket, are not compared again while they are the same tuple.
        """
        last = self._last
        if last is not None and last[0] is manifest and last[1] is roots:
            return last[2]
        key = None if roots is None else tuple(roots)
        known = self._made.get(key)
        if known is None or (known[0] is not manifest and known[0] != manifest):
            known = self._made[key] = manifest, make(manifest, roots)
        if roots is None or isinstance(roots, tuple):  # a list may be another one at the next bucket
            self._last = manifest, roots, known[1]
        return known[1]
