"""Assembles buckets from the shards of many ranks: executes what gather_plan.py planned.

All ranks execute the same plan, so that none has to learn anything in a round. For each bucket a rank that holds shards
makes one batched copy and one batch of sends; the root of the bucket makes one batch of receives, most of them straight
into the bucket, and one batched copy of its own shards and of the packed messages of others. Contributions go to the
root directly: a gather over each tensor-parallel group first would move every byte twice, and give every rank data that
only the root needs.

Memory beyond the bucket itself: a rank needs at most the bytes of its contribution, the root the packed messages of the
others; both together are never more than the bucket. Parameters in pinned host memory are uploaded as they are, one
bucket ahead (host_uploads.py, two buffers); other host memory is packed in pinned memory and copied to the device once
for each bucket. Addresses of the parameters are read for every pass: trainers offload between phases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import prod
from typing import Final, Generic, TypeVar

import torch
import torch.distributed as dist

from weightbus.dataplane.memory import addresses_of
from weightbus.dataplane.tensors import ITEM_BYTES, Manifest, TensorSpec

from ..source import AssemblyFailed, LayoutMismatch
from .gather_plan import BucketPlan, GatherContribution, GatherMessage, Placement
from .host_uploads import MemoryAccess, Uploads, UploadSpans, upload_spans_of

DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in ITEM_BYTES}
"""Dtypes that may travel, by the names that manifests use."""
_ROUNDED: Final = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""Dtypes that may be cast to a served dtype."""


def unreadable_reason(tensor: torch.Tensor, *, rounded: bool) -> str:
    """Advice about a tensor whose memory is not its values; empty for a tensor that can be read.

    `rounded`: it may be served in another dtype. Values with a separate scale would lose it.
    """
    if tensor.is_meta:
        return "it has no values yet: build the source after the model was loaded"
    if rounded and tensor.dtype not in _ROUNDED:
        return "its scale would be lost: train without quantized parameters"
    return ""


def check_manifest(manifest: Manifest, served: Sequence[TensorSpec]) -> None:
    """Raise `LayoutMismatch` unless `manifest` holds exactly the tensors of `served`, in any order."""
    if len(manifest.tensors) == len(served) and set(manifest.tensors) == set(served):
        return
    odd = sorted({tensor.name for tensor in set(manifest.tensors) ^ set(served)})
    raise LayoutMismatch(
        f"the manifest and the source differ in {len(odd)} tensors ({', '.join(odd[:5])}): "
        f"make it of what the source's tensors() returns"
    )


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

    def _uploaded_views(self, index: int) -> Callable[[Placement], torch.Tensor] | None:
        """Views of the contribution's shards on the device, if they are uploaded as they lie."""
        uploaded = self._uploads.take(index) if self._uploads is not None else None
        if uploaded is None:
            return None

        def view(place: Placement) -> torch.Tensor:
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
        self, messages: Sequence[GatherMessage], memory: torch.Tensor, source: Callable[[Placement], torch.Tensor]
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

    def _source(self, place: Placement) -> torch.Tensor:
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


def _placements(messages: Sequence[GatherMessage]) -> Iterable[Placement]:
    return (place for message in messages for place in message.placements)


def _in_contribution(contribution: torch.Tensor, place: Placement) -> torch.Tensor:
    """The shard within the contribution, contiguous."""
    nbytes = prod(place.shape) * ITEM_BYTES[place.dtype]
    typed = contribution[place.contribution_offset : place.contribution_offset + nbytes].view(DTYPES[place.dtype])
    return typed.view(place.shape)


def _in_bucket(out: torch.Tensor, place: Placement) -> torch.Tensor:
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
