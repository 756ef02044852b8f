"""How the pieces that many ranks hold become one bucket on the root: a plan as pure data, and its execution.

`plan` runs once per manifest, on every rank, from what all ranks said they hold; no rank learns anything later that
another does not know. For each bucket it gives every rank one *parcel*: its pieces one after another, in the
served dtype, at agreed offsets. A steady round is then, per bucket, one batched copy and one send on a rank that holds
something, and one batch of receives and two batched copies on the root, which writes straight into the bucket.
Parcels go to the root directly: a gather over each tensor-parallel group first would move every byte twice.

Memory beyond the bucket itself: the rank's own parcel; on the root the parcels of the others, together no more than
the bucket.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Final

import msgspec
import torch
import torch.distributed as dist

from weightbus.dataplane.manifest import ITEM_BYTES, Manifest, TensorSpec

from .pieces import Piece
from .source import AssemblyFailed, LayoutMismatch, RanksDisagree

DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in ITEM_BYTES}
"""The dtypes that may travel, by the names that manifests use."""

_ALIGNMENT: Final = 16


class Placement(msgspec.Struct, frozen=True):
    """One piece on its way from `parameter` (an index on its rank) through a parcel into a bucket."""

    parameter: int
    piece: Piece
    target: TensorSpec
    parcel_offset: int
    """Bytes from the start of the rank's parcel."""
    bucket_offset: int
    """Bytes from the start of the bucket to the start of the served tensor."""


class BucketPlan(msgspec.Struct, frozen=True):
    """Who contributes what to one bucket."""

    parcels: dict[int, tuple[Placement, ...]]
    """By group rank; ranks that contribute nothing are absent."""
    parcel_bytes: dict[int, int]
    """By group rank, rounded up so that parcels may lie side by side."""


Holdings = Mapping[int, Sequence[tuple[int, Piece]]]
"""What is read from each group rank: index of a local parameter, and a piece of it."""


def plan(manifest: Manifest, holdings: Holdings) -> tuple[BucketPlan, ...]:
    """Lay out every bucket of `manifest`. Raises `RanksDisagree` unless every tensor is held completely."""
    check_coverage(manifest.tensors, holdings)
    held: dict[str, list[tuple[int, int, Piece]]] = {}
    for rank in sorted(holdings):
        for parameter, piece in holdings[rank]:
            held.setdefault(piece.tensor, []).append((rank, parameter, piece))
    buckets: list[BucketPlan] = []
    for index in range(len(manifest.buckets)):
        parcels: dict[int, list[Placement]] = {}
        sizes: dict[int, int] = {}
        for target, at in zip(manifest.tensors_of(index), manifest.offsets_of(index), strict=False):
            for rank, parameter, piece in held[target.name]:
                start = sizes.get(rank, 0)
                parcels.setdefault(rank, []).append(Placement(parameter, piece, target, start, at))
                sizes[rank] = start + piece.size * ITEM_BYTES[target.dtype]
        padded = {rank: -(-size // _ALIGNMENT) * _ALIGNMENT for rank, size in sizes.items()}
        buckets.append(BucketPlan({rank: tuple(parcel) for rank, parcel in parcels.items()}, padded))
    return tuple(buckets)


def check_coverage(served: Sequence[TensorSpec], holdings: Holdings) -> None:
    """Raise `RanksDisagree` unless what is read has as many elements of each served tensor as the tensor has.

    Shards of one parameter never overlap (pieces.py) and each is read from one rank, so the numbers prove it.
    """
    found: dict[str, int] = {}
    for pieces in holdings.values():
        for _, piece in pieces:
            found[piece.tensor] = found.get(piece.tensor, 0) + piece.size
    for spec in served:
        if found.get(spec.name, 0) != prod(spec.shape):
            raise RanksDisagree(
                f"the ranks hold {found.get(spec.name, 0)} elements of {spec.name!r}, {prod(spec.shape)} are served: "
                f"build the source on every rank, with all of its model chunks"
            )


def check_manifest(manifest: Manifest, served: Sequence[TensorSpec]) -> None:
    """Raise `LayoutMismatch` unless `manifest` holds exactly the tensors of `served`, in whatever order."""
    if len(manifest.tensors) == len(served) and set(manifest.tensors) == set(served):
        return
    odd = sorted({tensor.name for tensor in set(manifest.tensors) ^ set(served)})
    raise LayoutMismatch(
        f"the manifest and the source differ in {len(odd)} tensors ({', '.join(odd[:5])}): "
        f"make it of what the source's tensors() returns"
    )


class Exchange:
    """The group in which parcels travel. Knows nothing of tensors but their bytes."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], root: int) -> None:
        """`ranks` are global ranks by rank of the source's group, `root` a rank of that group."""
        self._group = group
        self._ranks = tuple(ranks)
        self._root = root

    def send(self, parcel: torch.Tensor) -> None:
        """Hand `parcel` to the root; it may be written again afterwards (on a GPU: in stream order)."""
        self._run([dist.P2POp(dist.isend, parcel, self._ranks[self._root], self._group)])

    def receive(self, parcels: Mapping[int, torch.Tensor]) -> None:
        """Fill each parcel with what its rank sends."""
        self._run(
            [dist.P2POp(dist.irecv, parcel, self._ranks[rank], self._group) for rank, parcel in sorted(parcels.items())]
        )

    def _run(self, operations: list[dist.P2POp]) -> None:
        try:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        except RuntimeError as error:  # what torch raises for a lost peer, a timeout and an aborted communicator
            raise AssemblyFailed(
                f"a peer failed or was too slow while a bucket was gathered ({error}): "
                f"find the rank that failed first, then start the trainer again"
            ) from error


class Assembler:
    """Executes the plan of one manifest on one rank."""

    def __init__(
        self,
        buckets: Sequence[BucketPlan],
        parameters: Sequence[torch.Tensor],
        rank: int,
        root: int,
        exchange: Exchange | None,
    ) -> None:
        """`exchange` may be None where this rank neither sends nor receives."""
        self._buckets = tuple(buckets)
        self._parameters = tuple(parameters)
        self._rank = rank
        self._root = root
        self._exchange = exchange
        self._scratch: torch.Tensor | None = None

    @torch.no_grad()
    def run(self, index: int, out: torch.Tensor | None, device: torch.device) -> None:
        """Take part in bucket `index`; `out` is given on the root."""
        bucket = self._buckets[index]
        if out is not None:
            self._gather(bucket, out, device)
        elif self._rank in bucket.parcels:
            self._contribute(bucket.parcels[self._rank], bucket.parcel_bytes[self._rank], device)
        if index == len(self._buckets) - 1:
            self._scratch = None  # a round is over: the memory is the trainer's again

    def _contribute(self, parcel: Sequence[Placement], nbytes: int, device: torch.device) -> None:
        memory = self._memory(nbytes, device)
        _copy_all([_in_parcel(memory, place) for place in parcel], self._in_parameters(parcel))
        self._link().send(memory)

    def _gather(self, bucket: BucketPlan, out: torch.Tensor, device: torch.device) -> None:
        peers = {rank: size for rank, size in bucket.parcel_bytes.items() if rank != self._root}
        memory = self._memory(sum(peers.values()), device)
        starts = accumulate(peers.values(), initial=0)
        parcels = {rank: memory[start : start + peers[rank]] for rank, start in zip(peers, starts, strict=False)}
        if parcels:
            self._link().receive(parcels)
        own = bucket.parcels.get(self._root, ())
        sources = self._in_parameters(own)
        targets = [_in_bucket(out, place) for place in own]
        for rank, parcel in parcels.items():
            sources.extend(_in_parcel(parcel, place) for place in bucket.parcels[rank])
            targets.extend(_in_bucket(out, place) for place in bucket.parcels[rank])
        _copy_all(targets, sources)

    def _in_parameters(self, parcel: Sequence[Placement]) -> list[torch.Tensor]:
        return [_blocks(self._parameters[place.parameter], place.piece) for place in parcel]

    def _link(self) -> Exchange:
        assert self._exchange is not None, "the plan gives parcels to a rank outside the exchange"
        return self._exchange

    def _memory(self, nbytes: int, device: torch.device) -> torch.Tensor:
        if self._scratch is None or self._scratch.numel() < nbytes:
            largest = max((self._scratch_bytes(bucket) for bucket in self._buckets), default=0)
            self._scratch = torch.empty(largest, dtype=torch.uint8, device=device)
        return self._scratch[:nbytes]

    def _scratch_bytes(self, bucket: BucketPlan) -> int:
        if self._rank != self._root:
            return bucket.parcel_bytes.get(self._rank, 0)
        return sum(size for rank, size in bucket.parcel_bytes.items() if rank != self._root)


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy, and cast where dtypes differ, in one call; torch has no public name for it."""
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def _blocks(parameter: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The piece within its parameter: (blocks, rows, columns)."""
    row = parameter.stride(0)
    column = parameter.stride(1) if parameter.dim() == 2 else 1
    return parameter.as_strided(
        (piece.count, piece.rows, piece.columns),
        (piece.local_step * row, row, column),
        parameter.storage_offset() + piece.local_row * row,
    )


def _in_parcel(parcel: torch.Tensor, place: Placement) -> torch.Tensor:
    """The piece within its rank's parcel, contiguous."""
    piece = place.piece
    nbytes = piece.size * ITEM_BYTES[place.target.dtype]
    typed = parcel[place.parcel_offset : place.parcel_offset + nbytes].view(DTYPES[place.target.dtype])
    return typed.view(piece.count, piece.rows, piece.columns)


def _in_bucket(out: torch.Tensor, place: Placement) -> torch.Tensor:
    """The piece within its served tensor, inside the bucket."""
    piece, target = place.piece, place.target
    typed = out[place.bucket_offset : place.bucket_offset + target.nbytes].view(DTYPES[target.dtype])
    width = prod(target.shape[1:])
    return typed.as_strided(
        (piece.count, piece.rows, piece.columns),
        (piece.served_step * width, width, 1),
        typed.storage_offset() + piece.served_row * width + piece.column,
    )
