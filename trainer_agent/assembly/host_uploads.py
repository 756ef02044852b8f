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
    starts = [*accumulate((_aligned(size) for size in sizes), initial=0)]
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
    """Upload buffers of one assembler, for passes over its buckets in order.

    An abandoned pass leaves a bucket that was begun and not taken. The next pass begins with an earlier bucket, so that
    it is uploaded anew before it is taken: the weights may have changed.
    """

    def __init__(
        self, storages: Sequence[torch.Tensor], device: torch.device, upload_stream: UploadStream, nbytes: int
    ) -> None:
        """`nbytes` are the bytes of the largest bucket's spans."""
        self._storages = storages
        self._upload_stream = upload_stream
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        for buffer in range(2):
            upload_stream.used(buffer)  # by the memory's previous owner
        self._buffer_index = 0
        self._begun: tuple[int, UploadSpans] | None = None
        """Bucket and spans that are being copied into the next buffer."""

    def begin(self, bucket: int, wanted: UploadSpans) -> None:
        """Upload the spans of a bucket into the next buffer."""
        targets = [self._in_buffer(span) for span in wanted.spans.values()]
        sources = [self._flat(span) for span in wanted.spans.values()]
        self._upload_stream.copy(self._buffer_index, targets, sources)
        self._begun = bucket, wanted

    def take(self, bucket: int, wanted: UploadSpans) -> Callable[[Placement], torch.Tensor]:
        """Views of a bucket's placements on the device; uploaded already, or now. Ends with `used`."""
        if self._begun is None or self._begun[0] != bucket:
            self.begin(bucket, wanted)
        self._begun = None
        self._upload_stream.arrived(self._buffer_index)
        near = {span.storage: self._in_buffer(span) for span in wanted.spans.values()}

        def view(place: Placement) -> torch.Tensor:
            run = near[place.storage]
            start = run.storage_offset() + place.offset - wanted.spans[place.storage].begin
            return run.as_strided(place.shape, place.strides, start)

        return view

    def used(self) -> None:
        """The views of the last `take` were read, in the caller's order: the buffer is free after that."""
        self._upload_stream.used(self._buffer_index)
        self._buffer_index = 1 - self._buffer_index

    def settle(self) -> None:
        """Block until the parameters may change."""
        self._upload_stream.settle()

    def _in_buffer(self, span: UploadSpan) -> torch.Tensor:
        storage = self._storages[span.storage]
        nbytes = span.size * storage.element_size()
        return self._buffers[self._buffer_index][span.at : span.at + nbytes].view(storage.dtype)

    def _flat(self, span: UploadSpan) -> torch.Tensor:
        storage = self._storages[span.storage]
        return storage.as_strided((span.size,), (1,), storage.storage_offset() + span.begin)


class CudaUploadStream:
    """Implements `UploadStream`: a CUDA stream of its own, and events between it and the caller's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._copied = [_event() for _ in range(2)]
        self._used = [_event() for _ in range(2)]

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


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
