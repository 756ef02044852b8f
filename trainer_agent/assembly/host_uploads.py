"""Parameters in pinned host memory on their way to a GPU: by bucket, in two buffers, the next while this one is used.

    params (host, pinned) --one contiguous copy for each span--> buffer (device) --strided, cast--> bucket or parcel

A *span* is the shortest run of one parameter that holds everything a bucket needs of it. It travels as it lies there,
in the parameter's own dtype: nothing is packed or cast by the CPU, so that the bus is what limits it. While bucket `i`
is assembled, digested and sent, the spans of bucket `i + 1` are copied on a stream of their own.

Whoever owns the parameters may change them once `settle` has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Final, NamedTuple, Protocol

import torch

from .gather_plan import Placement

WASTE: Final = 1.25
"""Spans may be so many times what is needed of them; sparser ones are packed on the host first."""
_ALIGNMENT: Final = 256


class UploadSpan(NamedTuple):
    """A run of one storage, and where it lies in a buffer."""

    storage: int
    begin: int
    """Elements of the storage."""
    size: int
    at: int
    """Bytes in the buffer."""


class UploadSpans(NamedTuple):
    """What one bucket needs of the parameters in host memory."""

    spans: Mapping[int, UploadSpan]
    """By storage."""
    nbytes: int


def upload_spans_of(placements: Iterable[Placement], item_bytes: Mapping[int, int]) -> UploadSpans | None:
    """The spans of `placements`, those of the storages in `item_bytes`; None if they would be mostly waste.

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
    """Copies from host memory into one of two buffers, behind the caller's back. Used by one thread."""

    def copy(self, turn: int, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Begin to copy into buffer `turn`, once everything that reads it has been read."""
        ...

    def arrived(self, turn: int) -> None:
        """What the caller does from now on comes after the copies into buffer `turn`."""
        ...

    def used(self, turn: int) -> None:
        """The caller reads nothing more of what is in buffer `turn`."""
        ...

    def settle(self) -> None:
        """Return when no copy reads host memory any more."""
        ...


class Uploads:
    """The buffers of one assembler, for passes over its buckets in order.

    A pass that was given up leaves a bucket behind that was begun and not taken. The next pass begins with an earlier
    one, so that it is uploaded anew before it is taken: the weights may have changed.
    """

    def __init__(
        self, storages: Sequence[torch.Tensor], device: torch.device, upload_stream: UploadStream, nbytes: int
    ) -> None:
        """`nbytes` are those of the largest cargo."""
        self._storages = storages
        self._upload_stream = upload_stream
        self._buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        for turn in range(2):
            upload_stream.used(turn)  # by whoever had this memory before
        self._turn = 0
        self._begun: tuple[int, UploadSpans] | None = None
        """Bucket and cargo that are on their way into the buffer whose turn it is."""

    def begin(self, bucket: int, wanted: UploadSpans) -> None:
        """Upload `wanted` into the buffer whose turn is next."""
        targets = [self._in_buffer(span) for span in wanted.spans.values()]
        sources = [self._flat(span) for span in wanted.spans.values()]
        self._upload_stream.copy(self._turn, targets, sources)
        self._begun = bucket, wanted

    def take(self, bucket: int, wanted: UploadSpans) -> Callable[[Placement], torch.Tensor]:
        """Where placements of `wanted` lie on the device; begun already, or now. Ends with `used`."""
        if self._begun is None or self._begun[0] != bucket:
            self.begin(bucket, wanted)
        self._begun = None
        self._upload_stream.arrived(self._turn)
        near = {span.storage: self._in_buffer(span) for span in wanted.spans.values()}

        def view(place: Placement) -> torch.Tensor:
            run = near[place.storage]
            start = run.storage_offset() + place.offset - wanted.spans[place.storage].begin
            return run.as_strided(place.shape, place.strides, start)

        return view

    def used(self) -> None:
        """What was taken has been read, in the caller's order: its buffer is free after that."""
        self._upload_stream.used(self._turn)
        self._turn = 1 - self._turn

    def settle(self) -> None:
        """Return when the parameters may be changed."""
        self._upload_stream.settle()

    def _in_buffer(self, span: UploadSpan) -> torch.Tensor:
        storage = self._storages[span.storage]
        nbytes = span.size * storage.element_size()
        return self._buffers[self._turn][span.at : span.at + nbytes].view(storage.dtype)

    def _flat(self, span: UploadSpan) -> torch.Tensor:
        storage = self._storages[span.storage]
        return storage.as_strided((span.size,), (1,), storage.storage_offset() + span.begin)


class CudaUploadStream:
    """Implements `UploadStream`: a stream of its own, and events between it and the caller's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._copied = [_event() for _ in range(2)]
        self._used = [_event() for _ in range(2)]

    def copy(self, turn: int, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Enqueue; on a GPU an event that was never recorded is over."""
        if targets:
            targets[0].record_stream(self._stream)  # its memory is not given to others before these copies are over
        self._stream.wait_event(self._used[turn])
        with torch.cuda.stream(self._stream):
            copy_each(targets, sources)
        self._copied[turn].record(self._stream)

    def arrived(self, turn: int) -> None:
        """The current stream waits."""
        torch.cuda.current_stream(self._device).wait_event(self._copied[turn])

    def used(self, turn: int) -> None:
        """As far as the current stream has been filled."""
        self._used[turn].record(torch.cuda.current_stream(self._device))

    def settle(self) -> None:
        """The host waits."""
        self._stream.synchronize()


class HostUploadStream:
    """Implements `UploadStream` without a GPU: every copy is over when it was asked for."""

    def copy(self, turn: int, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy."""
        del turn
        copy_each(targets, sources)

    def arrived(self, turn: int) -> None:
        """They have."""

    def used(self, turn: int) -> None:
        """Nothing waits for it."""

    def settle(self) -> None:
        """Nothing is on its way."""


def upload_stream_for(device: torch.device) -> UploadStream:
    """What uploads to `device`."""
    return CudaUploadStream(device) if device.type == "cuda" else HostUploadStream()


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """One call for all; from pinned memory it only enqueues. torch has no public name for it."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources), non_blocking=True)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def is_pinned(tensor: torch.Tensor) -> bool:
    """A GPU can read it by itself, while the CPU does something else."""
    return tensor.device.type == "cpu" and tensor.is_pinned()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
