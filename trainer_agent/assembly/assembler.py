"""Assembles buckets from the shards of many ranks: executes what gather_plan.py planned.

All ranks execute the same plan, so that none has to learn anything in a round. For each bucket a rank that holds shards
makes one batched copy and one batch of sends; the root of the bucket makes one batch of receives, most of them straight
into the bucket, and one batched copy of its own shards and of the packed messages of others. Contributions go to the
root directly: a gather over each tensor-parallel group first would move every byte twice, and give every rank data that
only the root needs.

Memory beyond the bucket itself: a rank needs at most the bytes of its contribution, the root the packed messages of the
others; both together are never more than the bucket. Parameters in pinned host memory are uploaded as they are, one
bucket ahead (assembler.py, two buffers); other host memory is packed in pinned memory and copied to the device once
for each bucket. Addresses of the parameters are read for every pass: trainers offload between phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weightbus.dataplane.memory import addresses_of
from weightbus.dataplane.tensors import ITEM_BYTES, Manifest, TensorSpec

from ..source import AssemblyFailed, LayoutMismatch
from .gather_plan import BucketPlan, GatherContribution, GatherMessage, StridedCopy

DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in ITEM_BYTES}
"""Dtypes that may travel, by the names that manifests use."""
_ROUNDED: Final = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""Dtypes that may be cast to a served dtype."""


def unreadable_reason(tensor: torch.Tensor, *, rounded: bool) -> str:
    """Advice about a tensor whose memory is not its values; empty for a tensor that can be read.

    `rounded`: it may be served in another dtype. Values with a separate scale would lose it.
    """
    if not has_plain_memory(tensor):
        kind = f"{type(tensor).__module__.split('.')[0]}'s {type(tensor).__name__}"
        if isinstance(tensor, DTensor):
            return "a DTensor is one rank's part: export its full_tensor()"
        if type(tensor).dequantize is not torch.Tensor.dequantize:
            return (
                f"it is {kind}, quantized, and its memory is no weight without its scales: FullTensorSource serves it "
                "dequantized, and so does Megatron-Bridge (ExportedSource); or train without quantized parameters "
                "(fp8_param, fp8_param_gather)"
            )
        return (
            f"it is {kind}, a kind of tensor whose memory need not be its values: train with plain parameters, or "
            "export them in 16 bits or more (ExportedSource)"
        )
    if tensor.is_meta:
        return (
            "it has no values yet: build the source after the model was loaded, into memory (what accelerate offloads "
            "has values while it computes only)"
        )
    if rounded and tensor.dtype not in _ROUNDED:
        return "its scale would be lost: train without quantized parameters"
    return ""


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """True for a tensor whose memory is its values: no class of its own answers for it.

    Libraries keep quantized parameters as subclasses that look as if they were in 16 bits: Transformer Engine's
    `QuantizedTensor` (FP8, MXFP8, blocks), torchao's, bitsandbytes' packed `Params4bit`.
    """
    kind: Any = type(tensor)
    if kind is torch.Tensor or kind is nn.Parameter:
        return True
    plain: Any = torch.Tensor
    answers = kind.__torch_dispatch__ is not plain.__torch_dispatch__
    return not answers and bool(kind.dequantize is plain.dequantize and tensor.is_floating_point())


def check_manifest(manifest: Manifest, served: Sequence[TensorSpec]) -> None:
    """Raise `LayoutMismatch` unless `manifest` holds exactly the tensors of `served`, in any order."""
    if len(manifest.tensors) == len(served) and set(manifest.tensors) == set(served):
        return
    odd = sorted({tensor.name for tensor in set(manifest.tensors) ^ set(served)})
    raise LayoutMismatch(
        f"the manifest and the source differ in {len(odd)} tensors ({', '.join(odd[:5])}): "
        f"make it of what the source's tensors() returns"
    )


# -- uploads of parameters in pinned host memory to a GPU, by bucket in two buffers: one fills while the other is used
#
#     params (host, pinned) --one contiguous copy for each span--> buffer (device) --strided, cast--> bucket or message
#
# A *span* is the shortest run of one parameter that holds everything a bucket needs of it. It is copied as it lies,
# in the parameter's own dtype: the CPU packs and casts nothing, so that the bus is the limit. While bucket `i` is
# assembled, digested and sent, the spans of bucket `i + 1` are copied on a stream of their own.
#
# The parameters may change once `settle` has returned.


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


def upload_spans_of(placements: Iterable[StridedCopy], item_bytes: Mapping[int, int]) -> UploadSpans | None:
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

    def take(self, bucket: int) -> Callable[[StridedCopy], torch.Tensor | None] | None:
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

        def view(place: StridedCopy) -> torch.Tensor | None:
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


# -- the buckets themselves


class GatherExchange:
    """The process group in which gather messages travel. Knows nothing of tensors but their bytes."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        """`ranks` are global ranks by rank of the source's group."""
        self._group = group
        self._ranks = tuple(ranks)

    def send(self, messages: Sequence[torch.Tensor], root: int) -> None:
        """Send `messages` to rank `root`; they may be written again afterwards (on a GPU: in stream order)."""
        self._run([dist.P2POp(dist.isend, message, self._ranks[root], self._group) for message in messages])

    def receive(self, messages: Sequence[tuple[int, torch.Tensor]], meanwhile: Callable[[], None]) -> None:
        """Receive into each tensor from its rank; several of one rank in the order in which it sends them.

        `meanwhile` is called while they are on their way.
        """
        operations = [dist.P2POp(dist.irecv, memory, self._ranks[rank], self._group) for rank, memory in messages]
        self._run(operations, meanwhile)

    def _run(self, operations: list[dist.P2POp], meanwhile: Callable[[], None] = lambda: None) -> None:
        try:
            works = dist.batch_isend_irecv(operations)
            meanwhile()
            for work in works:
                work.wait()
        except RuntimeError as error:  # what torch raises for a lost peer, a timeout and an aborted communicator
            raise AssemblyFailed(
                f"a peer failed or was too slow while a bucket was gathered ({error}): "
                f"find the rank that failed first, then start the trainer again"
            ) from error


class Assembler:
    """Executes the plan of one manifest on one rank."""

    def __init__(  # noqa: PLR0917  the first five say which plan, the last one only differs in tests
        self,
        buckets: Sequence[BucketPlan],
        storages: Sequence[torch.Tensor],
        rank: int,
        roots: Sequence[int] | None,
        exchange: GatherExchange | None,
        memory_access: MemoryAccess = MemoryAccess(),  # noqa: B008  immutable
    ) -> None:
        """`storages` are what shards number; `exchange` may be None where this rank neither sends nor receives.

        `roots` as `buckets` were planned with.
        """
        self._buckets = tuple(buckets)
        self._storages = tuple(storages)
        self._rank = rank
        self._roots = tuple(roots) if roots is not None else (0,) * len(self._buckets)
        self._exchange = exchange
        self._memory_access = memory_access
        self._scratch: torch.Tensor | None = None
        self._pinned: PinnedStaging | None = None
        self._uploads: Uploads | None = None
        """Uploads this rank's contributions as they lie; None before the first pass, or if nothing is uploaded."""
        self._elsewhere: set[int] = set()
        """Storages that are not where the buckets are: on a GPU and in host memory, or the reverse."""
        self._places: list[int] = []
        """Addresses of all storages at that time: each may be moved, to another device too."""

    @torch.no_grad()
    def run(self, index: int, out: torch.Tensor | None, device: torch.device) -> None:
        """Take part in bucket `index`; `out` is given on its root. `device` is where buckets are, on every rank."""
        if index == 0 or not self._places:
            self._begin_pass(device)
        bucket = self._buckets[index]
        if out is not None:
            self._gather(index, out)
        elif self._rank in bucket:
            self._send_contribution(index, device)
        if index == len(self._buckets) - 1:  # a round is over: the memory is the trainer's again
            if self._uploads is not None:
                self._uploads.settle()
            self._scratch = self._pinned = None

    def _begin_pass(self, device: torch.device) -> None:
        """Recompute upload spans if parameters have moved since the last pass."""
        places = addresses_of(self._storages)
        if places == self._places:
            return
        self._places, self._uploads = places, None
        every = enumerate(self._storages)
        self._elsewhere = {number for number, each in every if self._memory_access.is_elsewhere(each, device)}
        far = self._memory_access.to_upload(self._storages, device)
        if far:
            mine = (bucket.get(self._rank) for bucket in self._buckets)
            wanted = [self._upload_spans(each, far) if each else None for each in mine]
            self._uploads = Uploads(wanted, self._storages, device, self._memory_access)

    def _upload_spans(self, contribution: GatherContribution, far: dict[int, int]) -> UploadSpans | None:
        """Spans to upload; None if there are none, or if some of the contribution has to be packed on the host."""
        storages = {place.storage for place in _placements(contribution.messages)}
        if not storages & far.keys() or (storages - far.keys()) & self._elsewhere:
            return None
        return upload_spans_of(_placements(contribution.messages), far)

    def _uploaded_views(self, index: int) -> Callable[[StridedCopy], torch.Tensor] | None:
        """Views of the contribution's shards on the device, if they are uploaded as they lie."""
        uploaded = self._uploads.take(index) if self._uploads is not None else None
        if uploaded is None:
            return None

        def view(place: StridedCopy) -> torch.Tensor:
            found = uploaded(place)
            return self._source(place) if found is None else found

        return view

    def _send_contribution(self, index: int, device: torch.device) -> None:
        contribution = self._buckets[index][self._rank]
        on_other_device = self._on_other_device(contribution)
        packed = [message for message in contribution.messages if message.staged or on_other_device]
        memory = self._memory(index, device, on_other_device=on_other_device)
        near = self._uploaded_views(index)
        if near is not None and self._uploads is not None:
            self._pack(packed, memory, near)
            self._uploads.used(index)
        elif on_other_device and device.type == "cuda":
            self._upload(contribution, memory)
        else:
            self._pack(packed, memory, self._source)
        sent: list[torch.Tensor] = []
        for message in contribution.messages:
            if message.staged or on_other_device:
                sent.append(memory[message.offset : message.offset + message.nbytes])
            else:
                (place,) = message.placements
                sent.append(self._source(place).contiguous().view(-1).view(torch.uint8))
        assert self._exchange is not None, "the plan gives a contribution to a rank outside the exchange"
        self._exchange.send(sent, self._roots[index])

    def _gather(self, index: int, out: torch.Tensor) -> None:
        bucket = self._buckets[index]
        peers = {rank: contribution for rank, contribution in bucket.items() if rank != self._rank}
        memory = self._memory(index, out.device, on_other_device=False)
        starts = accumulate((contribution.packed_bytes for contribution in peers.values()), initial=0)
        received: list[tuple[int, torch.Tensor]] = []
        copies = _CopyBatch()
        for (rank, contribution), start in zip(peers.items(), starts, strict=False):
            for message in contribution.messages:
                if message.bucket_offset is not None:
                    received.append((rank, out[message.bucket_offset : message.bucket_offset + message.nbytes]))
                    continue
                packed = memory[start : start + message.nbytes]
                received.append((rank, packed))
                for place in message.placements:
                    copies.add(_in_bucket(out, place), _in_contribution(packed, place))
        own = bucket.get(self._rank)

        def fill() -> None:
            if own is not None:
                self._fill(index, own, out)

        if received:
            assert self._exchange is not None, "the plan gives contributions to a rank outside the exchange"
            self._exchange.receive(received, fill)
        else:
            fill()
        copies.run()

    def _fill(self, index: int, contribution: GatherContribution, out: torch.Tensor) -> None:
        """Copy the root's own shards into the bucket."""
        copies = _CopyBatch()
        near = self._uploaded_views(index)
        if near is not None and self._uploads is not None:
            for place in _placements(contribution.messages):
                copies.add(_in_bucket(out, place), near(place), place.shift)
            copies.run()
            return self._uploads.used(index)
        if out.device.type != "cuda" or not self._on_other_device(contribution):
            for place in _placements(contribution.messages):
                copies.add(_in_bucket(out, place), self._source(place), place.shift)
        else:
            uploaded = torch.empty(contribution.nbytes, dtype=torch.uint8, device=out.device)
            self._upload(contribution, uploaded)
            for place in _placements(contribution.messages):
                copies.add(_in_bucket(out, place), _in_contribution(uploaded, place))
        copies.run()
        return None

    def _pack(
        self, messages: Sequence[GatherMessage], memory: torch.Tensor, source: Callable[[StridedCopy], torch.Tensor]
    ) -> None:
        """Copy the shards of `messages`, one after another, into `memory`."""
        copies = _CopyBatch()
        for place in _placements(messages):
            copies.add(_in_contribution(memory, place), source(place), place.shift)
        copies.run()

    def _upload(self, contribution: GatherContribution, memory: torch.Tensor) -> None:
        """Pack the whole contribution in pinned host memory and copy it to `memory` on a GPU, in stream order."""
        if self._pinned is None:
            largest = max(bucket[self._rank].nbytes for bucket in self._buckets if self._rank in bucket)
            self._pinned = PinnedStaging(largest)
        near = self._pinned.take(contribution.nbytes)
        self._pack(contribution.messages, near, self._source)
        memory[: contribution.nbytes].copy_(near, non_blocking=True)
        self._pinned.sent(memory.device)

    def _source(self, place: StridedCopy) -> torch.Tensor:
        storage = self._storages[place.storage]
        return storage.as_strided(place.shape, place.strides, storage.storage_offset() + place.offset)

    def _on_other_device(self, contribution: GatherContribution) -> bool:
        """True if some parameters are not where the buckets are."""
        return any(place.storage in self._elsewhere for place in _placements(contribution.messages))

    def _memory(self, index: int, device: torch.device, *, on_other_device: bool) -> torch.Tensor:
        """Memory for the messages of bucket `index`; allocated for the largest bucket of a pass."""
        nbytes = self._scratch_bytes(index, on_other_device=on_other_device)
        if self._scratch is None or self._scratch.numel() < nbytes:
            every = (self._scratch_bytes(at, on_other_device=on_other_device) for at in range(len(self._buckets)))
            self._scratch = torch.empty(max(every), dtype=torch.uint8, device=device)
        return self._scratch[:nbytes]

    def _scratch_bytes(self, index: int, *, on_other_device: bool) -> int:
        bucket = self._buckets[index]
        if self._rank == self._roots[index]:
            return sum(contribution.packed_bytes for rank, contribution in bucket.items() if rank != self._rank)
        contribution = bucket.get(self._rank)
        if contribution is None:
            return 0
        return contribution.nbytes if on_other_device else contribution.staged_bytes


class PinnedStaging:
    """Two pinned buffers, used alternately: one is packed while the other is copied to a GPU."""

    def __init__(self, nbytes: int) -> None:
        self._memory = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._events: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Memory that may be written now; blocks until its last copy has ended."""
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()
        return self._memory[self._turn][:nbytes]

    def sent(self, device: torch.device) -> None:
        """The buffer that was taken is being copied, in the current stream of `device`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        event.record(torch.cuda.current_stream(device))
        self._events[self._turn] = event
        self._turn = 1 - self._turn


class _CopyBatch:
    """Copies that are made in one call, cast where dtypes differ."""

    def __init__(self) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []

    def add(self, target: torch.Tensor, source: torch.Tensor, shift: int = 0) -> None:
        """Copy `source` plus `shift` to `target`."""
        self._targets.append(target)
        self._sources.append(source + shift if shift else source)

    def run(self) -> None:
        """Make the copies; torch has no public name for it."""
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def _placements(messages: Sequence[GatherMessage]) -> Iterable[StridedCopy]:
    return (place for message in messages for place in message.placements)


def _in_contribution(contribution: torch.Tensor, place: StridedCopy) -> torch.Tensor:
    """The shard within the contribution, contiguous."""
    nbytes = prod(place.shape) * ITEM_BYTES[place.dtype]
    typed = contribution[place.contribution_offset : place.contribution_offset + nbytes].view(DTYPES[place.dtype])
    return typed.view(place.shape)


def _in_bucket(out: torch.Tensor, place: StridedCopy) -> torch.Tensor:
    """The shard within its served tensor, inside the bucket."""
    item = ITEM_BYTES[place.dtype]
    typed = out[: out.numel() // item * item].view(DTYPES[place.dtype])
    return typed.as_strided(place.shape, place.bucket_strides, typed.storage_offset() + place.bucket_offset // item)


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
