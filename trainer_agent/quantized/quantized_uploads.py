"""Uploads of weights in pinned host memory that a rank quantizes: by bucket, in two buffers.

The weights of bucket `i + 1` are copied while those of bucket `i` are quantized, digested and sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..assembly import MemoryAccess, Placement, Uploads, UploadSpans, upload_spans_of
from .quantization_plan import QuantizeJob, RankWork


class UploadedWeights(NamedTuple):
    """Weights of one bucket on the device."""

    at: int
    """Address of their buffer."""
    views: dict[int, torch.Tensor]
    """By number of the bucket's job; a job that is missing reads its weight where it lies."""


class WeightUploads:
    """Uploads for passes over the buckets of `work`, as long as all storages stay where they are."""

    def __init__(
        self, work: RankWork, storages: Sequence[torch.Tensor], device: torch.device, memory_access: MemoryAccess
    ) -> None:
        self._work, self._storages, self._device, self._memory_access = work, storages, device, memory_access
        far = {
            number: storage.element_size()
            for number, storage in enumerate(storages)
            if memory_access.is_elsewhere(storage, device) and memory_access.is_pinned(storage)
        }
        self._spans_by_bucket = [_upload_spans(each.jobs, far) for each in work.buckets]
        self._uploads: Uploads | None = None

    def take(self, index: int) -> UploadedWeights | None:
        """Weights of bucket `index`, uploaded already or now; None if none are uploaded. Ends with `used`."""
        wanted = self._spans_by_bucket[index]
        if wanted is None:
            return None
        if self._uploads is None:
            largest = max(each.nbytes for each in self._spans_by_bucket if each is not None)
            self._uploads = Uploads(
                self._storages, self._device, self._memory_access.upload_stream(self._device), largest
            )
        view = self._uploads.take(index, wanted)
        jobs = enumerate(self._work.buckets[index].jobs)
        views = {at: view(place) for at, job in jobs if (place := _place(job)) and place.storage in wanted.spans}
        return UploadedWeights(next(iter(views.values())).untyped_storage().data_ptr(), views)

    def used(self, index: int) -> None:
        """Begin the next upload: the weights of bucket `index` were read, in stream order."""
        assert self._uploads is not None
        self._uploads.used()
        for later in range(index + 1, len(self._spans_by_bucket)):
            wanted = self._spans_by_bucket[later]
            if wanted is not None:
                return self._uploads.begin(later, wanted)
        return None

    def settle(self) -> None:
        """End a pass: block until the parameters may change, and free the buffers."""
        if self._uploads is not None:
            self._uploads.settle()
            self._uploads = None


def _upload_spans(jobs: Sequence[QuantizeJob], far: dict[int, int]) -> UploadSpans | None:
    places = [place for job in jobs if (place := _place(job)) and place.storage in far]
    return upload_spans_of(places, far) if places else None


def _place(job: QuantizeJob) -> Placement | None:
    """Where a job reads; None if it reads a gathered weight."""
    if job.held is None:
        return None
    view = job.held.view
    return Placement(
        storage=view.storage,
        dtype=job.held.dtype,
        shape=job.shape,
        offset=view.offset,
        strides=view.strides,
        contribution_offset=0,
        bucket_offset=0,
        bucket_strides=(),
    )
