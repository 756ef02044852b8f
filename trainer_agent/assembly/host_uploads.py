"""Uploads of parameters in pinned host memory to a GPU, by bucket in two buffers: one fills while the other is used.

    params (host, pinned) --one contiguous copy for each span--> buffer (device) --strided, cast--> bucket or message

A *span* is the shortest run of one parameter that holds everything a bucket needs of it. It is copied as it lies, in
the parameter's own dtype: the CPU packs and casts nothing, so that the bus is the limit. While bucket `i` is assembled,
digested and sent, the spans of bucket `i + 1` are copied on a stream of their own.

The parameters may change once `settle` has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Final, NamedTuple, Protocol

import torch

from .gather_plan import Placement

WASTE: Final = 1.25
"""Maximum ratio of the bytes of spans to the bytes needed; sparser contributions are packed on the host."""
_ALIGNMENT: Final = 256


class UploadSpan(NamedTuple):
    """A run of one storage, and its place in a buffer."""

    storage: int
    begin: int
    """Elements of the storage."""
    size: int
    at: int
    """Bytes from the start of the buffer."""


class UploadSpans(NamedTuple):
    """What one bucket needs of the parameters in host memory."""

    spans: Mapping[int, UploadSpan]
    """By storage."""
    nbytes: int


def upload_spans_of(placements: Iterable[Placement], item_bytes: Mapping[int, int]) -> UploadSpans | None:
    """Spans of `placements` in the storages of `item_bytes`; None if most of their bytes would be waste.

    `item_bytes` holds the bytes of an element of every storage that has to be uploaded.
    """
    ends: dict[int, tuple[int, int]] = {}
    needed = 0
    for place in placements:
        if place.storage not in item_bytes:
            continue
        last = place.offset + sum((n - 1) * step for n, step in zip(place.shape, place.strides, strict=True))
        begin, end = ends.get(place.storage, (place.offset, last + 1))
        ends[place.storage] = min(begin, place.offset), max(end, last + 1)
        needed += prod(place.shape) * item_bytes[place.storage]
    sizes = [(end - begin) * item_bytes[storage] for storage, (begin, end) in ends.items()]
    if sum(sizes) > WASTE * needed:
        return None
    starts = [*accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0)]
    spans = {
        storage: UploadSpan(storage, begin, end - begin, at)
        for (storage, (begin, end)), at in zip(ends.items(), starts, strict=False)
    }
    return UploadSpans(spans, starts[-1])


class UploadStream(Protocol):
    """Copies from host memory into one of two buffers, in the background of the caller. Used by one thread."""

    def copy(self, buffer: int, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Begin to copy into `buffer`, once all reads of it have ended."""
        ...

    def arrived(self, buffer: int) -> None:
        """Later work of the caller comes after the copies into `buffer`."""
        ...

    def used(self, buffer: int) -> None:
        """The caller's reads of `buffer` have been enqueued."""
        ...

    def settle(self) -> None:
        """Block until no copy reads host memory."""
        ...


class Uploads:
    """Uploads for passes over buckets in order, as long as all storages stay where they are.

    An abandoned pass leaves a bucket that was begun and not taken. The next pass begins with an earlier bucket, so that
    it is uploaded anew before it is taken: the weights may have changed.
    """

    def __init__(
        self,
        wanted: Sequence[UploadSpans | None],
        storages: Sequence[torch.Tensor],
        device: torch.device,
        memory_access: MemoryAccess,
    ) -> None:
        """`wanted` are the spans of each bucket; None where nothing is uploaded."""
        self._wanted, self._storages, self._device, self._memory_access = wanted, storages, device, memory_access
        self._upload_stream: UploadStream | None = None
        """Made for a pass, with the buffers."""
        self._buffers: list[torch.Tensor] = []
        self._buffer_index = 0
        self._begun: int | None = None
        """Bucket that is being copied into the next buffer."""

    def take(self, bucket: int) -> Callable[[Placement], torch.Tensor | None] | None:
        """Views of a bucket's placements on the device, None for one that is not uploaded. Ends with `used`.

        They are uploaded already, or now. None if nothing of the bucket is uploaded.
        """
        wanted = self._wanted[bucket]
        if wanted is None:
            return None
        if self._upload_stream is None:
            largest = max(each.nbytes for each in self._wanted if each is not None)
            self._upload_stream = self._memory_access.upload_stream(self._device)
            self._buffers = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(2)]
            for buffer in range(2):
                self._upload_stream.used(buffer)  # by the memory's previous owner
        if self._begun != bucket:
            self._begin(bucket, wanted, self._upload_stream)
        self._begun = None
        self._upload_stream.arrived(self._buffer_index)
        near = {span.storage: self._in_buffer(span) for span in wanted.spans.values()}

        def view(place: Placement) -> torch.Tensor | None:
            run = near.get(place.storage)
            if run is None:
                return None
            start = run.storage_offset() + place.offset - wanted.spans[place.storage].begin
            return run.as_strided(place.shape, place.strides, start)

        return view

    def used(self, bucket: int) -> None:
        """Begin the next upload: the views of `bucket` were read, in the caller's order, and its buffer is free."""
        assert self._upload_stream is not None
        self._upload_stream.used(self._buffer_index)
        self._buffer_index = 1 - self._buffer_index
        for later in range(bucket + 1, len(self._wanted)):
            if (wanted := self._wanted[later]) is not None:
                return self._begin(later, wanted, self._upload_stream)
        return None

    def settle(self) -> None:
        """End a pass: block until the parameters may change, and free the buffers."""
        if self._upload_stream is not None:
            self._upload_stream.settle()
        self._upload_stream, self._buffers, self._begun = None, [], None

    def _begin(self, bucket: int, wanted: UploadSpans, upload_stream: UploadStream) -> None:
        """Upload the spans of a bucket, each as it lies, into the next buffer."""
        storages = ((self._storages[span.storage], span) for span in wanted.spans.values())
        sources = [each.as_strided((span.size,), (1,), each.storage_offset() + span.begin) for each, span in storages]
        targets = [self._in_buffer(span) for span in wanted.spans.values()]
        upload_stream.copy(self._buffer_index, targets, sources)
        self._begun = bucket

    def _in_buffer(self, span: UploadSpan) -> torch.Tensor:
        storage = self._storages[span.storage]
        nbytes = span.size * storage.element_size()
        return self._buffers[self._buffer_index][span.at : span.at + nbytes].view(storage.dtype)


class CudaUploadStream:
    """Implements `UploadStream`: a CUDA stream of its own, and events between it and the caller's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        # torch leaves events untyped
        self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._used = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def copy(self, buffer: int, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Enqueue the copies; waiting for an event that was never recorded returns at once."""
        if targets:
            targets[0].record_stream(self._stream)  # its memory is not given to others before these copies are over
        self._stream.wait_event(self._used[buffer])
        with torch.cuda.stream(self._stream):
            copy_each(targets, sources)
        self._copied[buffer].record(self._stream)

    def arrived(self, buffer: int) -> None:
        """The current stream waits for the copies."""
        torch.cuda.current_stream(self._device).wait_event(self._copied[buffer])

    def used(self, buffer: int) -> None:
        """Record an event in the current stream."""
        self._used[buffer].record(torch.cuda.current_stream(self._device))

    def settle(self) -> None:
        """The host waits for the copies."""
        self._stream.synchronize()


class HostUploadStream:
    """Implements `UploadStream` without a GPU: every copy ends before the call returns."""

    def copy(self, buffer: int, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy."""
        del buffer
        copy_each(targets, sources)

    def arrived(self, buffer: int) -> None:
        """Return: the copies have ended."""

    def used(self, buffer: int) -> None:
        """Return: no copy waits for it."""

    def settle(self) -> None:
        """Return: no copy runs."""


def upload_stream_for(device: torch.device) -> UploadStream:
    """The upload stream of `device`."""
    return CudaUploadStream(device) if device.type == "cuda" else HostUploadStream()


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy all in one call; from pinned memory it only enqueues. torch has no public name for it."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def is_pinned(tensor: torch.Tensor) -> bool:
    """True if a GPU can read the tensor by itself, while the CPU does other work."""
    return tensor.device.type == "cpu" and tensor.is_pinned()


def is_elsewhere(tensor: torch.Tensor, device: torch.device) -> bool:
    """True if `tensor` is not on `device`, which stands for any GPU if it has no index."""
    return tensor.device.type != device.type or device not in {torch.device(device.type), tensor.device}


class MemoryAccess(NamedTuple):
    """How host memory is recognized and uploaded. Tests replace it to stand for a GPU."""

    is_elsewhere: Callable[[torch.Tensor, torch.device], bool] = is_elsewhere
    is_pinned: Callable[[torch.Tensor], bool] = is_pinned
    upload_stream: Callable[[torch.device], UploadStream] = upload_stream_for

    def to_upload(self, storages: Sequence[torch.Tensor], device: torch.device) -> dict[int, int]:
        """Storages in pinned host memory, for buckets on `device`: number, and bytes of an element."""
        return {
            number: storage.element_size()
            for number, storage in enumerate(storages)
            if self.is_elsewhere(storage, device) and self.is_pinned(storage)
        }
