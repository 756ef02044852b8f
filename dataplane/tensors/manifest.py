"""What a version consists of: tensors, their order, their division into buckets. Pure data, no torch.

A `Manifest` describes a *layout*; it stays the same from round to round, and its digest names it. A `DigestTable`
belongs to one version of that layout and holds a digest for every tensor. Both travel as content-addressed blobs
through the coordinator, which does not read them.

A bucket is a packed run of bytes: its tensors one after another in the manifest's order, without padding. Tensors are
ordered by item size, largest first, inside a bucket, so that every tensor starts on a multiple of its item size (SGLang
exits on a misaligned bucket).
"""

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Final, Self, TypeVar

import msgspec

from ..errors import ManifestError
from .left_tensors import Copy, Left, check_copies, check_left, covering

DEFAULT_BUCKET_BYTES: Final = 512 * 1024 * 1024

ITEM_BYTES: Final[dict[str, int]] = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of an element of each dtype that may travel, by torch's names."""

FLOAT_DTYPES: Final = ("bfloat16", "float16", "float32", "float64")
"""Those of them to which a parameter can be cast. Integers lose fractions, eight bits lack a scale."""

MAX_TENSORS: Final = 1_000_000
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,255}")
_NAMES: Final = re.compile(rf"(?:{_NAME.pattern}\n)*{_NAME.pattern}")


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """Name, dtype and shape of one tensor; the name is Hugging Face's."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, packed."""
        count = ITEM_BYTES[self.dtype]
        for size in self.shape:
            count *= size
        return count


def main_dtype(tensors: Iterable[TensorSpec]) -> str:
    """The dtype of most elements, of those in `FLOAT_DTYPES`: a model's own. Empty where no tensor has one."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        if tensor.dtype in FLOAT_DTYPES:
            sizes[tensor.dtype] += prod(tensor.shape)
    return max(sizes, key=lambda dtype: sizes[dtype], default="")


class BucketSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of tensors, `first` to `last` exclusive, that travels as `nbytes` packed bytes."""

    first: int
    last: int
    nbytes: int


class Manifest(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True, omit_defaults=True):
    """The layout of every version of one model: what travels, in what order, in which buckets, and what is left."""

    model: str
    """Architecture as the served checkpoint's config names it, for example ``Qwen3ForCausalLM``."""
    tensors: tuple[TensorSpec, ...]
    buckets: tuple[BucketSpec, ...]
    left: tuple[Left, ...] = ()
    """Tensors of the served checkpoint that do not travel: engines keep the values of their launch."""
    copies: tuple[Copy, ...] = ()
    """Tensors of the served checkpoint that do not travel, also among `left`: they follow tensors that are sent."""

    @classmethod
    def of(
        cls,
        model: str,
        tensors: Iterable[TensorSpec],
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        left: Iterable[Left] = (),
        copies: Iterable[Copy] = (),
    ) -> Self:
        """Cut `tensors` into buckets of at most `bucket_bytes`; a larger tensor gets a bucket of its own.

        Raises `ManifestError` when a name, dtype or shape cannot travel, or a name stands twice.
        """
        ordered: list[TensorSpec] = []
        buckets: list[BucketSpec] = []
        pending: list[TensorSpec] = []

        def close() -> None:
            if pending:
                pending.sort(key=lambda t: -ITEM_BYTES[t.dtype])
                first = len(ordered)
                ordered.extend(pending)
                buckets.append(BucketSpec(first, len(ordered), sum(t.nbytes for t in pending)))
                pending.clear()

        size = 0
        for tensor in tensors:
            _check_tensor(tensor)
            if pending and size + tensor.nbytes > bucket_bytes:
                close()
                size = 0
            pending.append(tensor)
            size += tensor.nbytes
        close()
        manifest = cls(model, tuple(ordered), tuple(buckets), _ordered(left), _ordered(copies))
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raise `ManifestError` unless every tensor is well formed, named once and in exactly one bucket."""
        if not self.tensors:
            raise ManifestError("the manifest has no tensors: publish at least one")
        if len(self.tensors) > MAX_TENSORS:
            raise ManifestError(f"{len(self.tensors)} tensors, at most {MAX_TENSORS} can travel")
        sizes = _check_tensors(self.tensors)
        check_left(self.left, (tensor.name for tensor in self.tensors))
        if self.copies:
            check_copies(self.copies, {tensor.name for tensor in self.tensors})
        at = 0
        for index, bucket in enumerate(self.buckets):
            if bucket.first != at or bucket.last <= bucket.first or bucket.last > len(self.tensors):
                raise ManifestError(
                    f"bucket {index} covers tensors {bucket.first}..{bucket.last}, expected to begin at {at}"
                )
            self._check_packing(index, bucket, sizes[bucket.first : bucket.last])
            at = bucket.last
        if at != len(self.tensors):
            raise ManifestError(f"the buckets cover {at} tensors of {len(self.tensors)}")

    def _check_packing(self, index: int, bucket: BucketSpec, sizes: Sequence[int]) -> None:
        *offsets, end = accumulate(sizes, initial=0)
        for tensor, offset in zip(self.tensors[bucket.first : bucket.last], offsets, strict=True):
            if offset % ITEM_BYTES[tensor.dtype]:
                raise ManifestError(f"{tensor.name!r} begins at byte {offset}, not on a multiple of its item size")
        if end != bucket.nbytes:
            raise ManifestError(f"bucket {index} says {bucket.nbytes} bytes, its tensors take {end}")

    @property
    def nbytes(self) -> int:
        """Bytes of one version."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def largest_bucket(self) -> int:
        """Bytes of the largest bucket: the size of a staging buffer."""
        return max(bucket.nbytes for bucket in self.buckets)

    def leaves(self, name: str) -> bool:
        """Whether the tensor `name` is left to the engine. A copy is not: it follows a tensor that is sent."""
        return bool(self.left) and name not in self.copied and bool(covering(self.left_names, name))

    @cached_property
    def left_names(self) -> frozenset[str]:
        """Names and prefixes of `left`."""
        return frozenset(each.name for each in self.left)

    @cached_property
    def copied(self) -> dict[str, str]:
        """By the name of each of `copies`, the tensor that it follows."""
        return {each.name: each.of for each in self.copies}

    def tensors_of(self, index: int) -> tuple[TensorSpec, ...]:
        """The tensors of bucket `index`, in packing order."""
        bucket = self.buckets[index]
        return self.tensors[bucket.first : bucket.last]

    def offsets_of(self, index: int) -> tuple[int, ...]:
        """Bytes at which each tensor of bucket `index` begins, and at which the last one ends."""
        return (0, *accumulate(tensor.nbytes for tensor in self.tensors_of(index)))

    def encode(self) -> bytes:
        """Canonical bytes: equal manifests have equal bytes."""
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, blob: bytes) -> "Manifest":
        """The manifest that `encode` wrote, checked. Raises `ManifestError` on anything else."""
        manifest = _decode(blob, Manifest)
        manifest.check()
        return manifest

    def digest(self) -> str:
        """SHA-256 of the canonical bytes, hexadecimal: the name of this layout. Computed once."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return blob_digest(self.encode())


class LiveDigests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The checksums that a server with `tp` ranks must report of its live parameters after the load."""

    algorithm: str
    """Matches `EngineInfo.live_digest`; ``sglang-sha256-8`` is SGLang's weights_checker on CPU tensors."""
    tp: int
    parameters: dict[str, tuple[str, ...]]
    """Engine parameter name -> digest by rank."""


class DigestTable(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """Digests of one version, with which a receiver compares the bytes that arrived."""

    manifest: str
    version: int
    algorithm: str
    """``mix64x2`` (tensor_digest.py)."""
    tensors: bytes
    """16 bytes per tensor, in the manifest's order."""
    live: tuple[LiveDigests, ...] = ()

    def of_bucket(self, bucket: BucketSpec) -> bytes:
        """The digests of one bucket's tensors, concatenated."""
        return self.tensors[bucket.first * 16 : bucket.last * 16]

    def encode(self) -> bytes:
        """Canonical bytes: equal tables have equal bytes."""
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, blob: bytes, manifest: Manifest) -> "DigestTable":
        """The table that `encode` wrote. Raises `ManifestError` unless it belongs to `manifest` and is complete."""
        table = _decode(blob, DigestTable)
        if table.manifest != manifest.digest():
            raise ManifestError(
                f"the digest table is for manifest {table.manifest[:12]}, expected {manifest.digest()[:12]}"
            )
        if len(table.tensors) != 16 * len(manifest.tensors):
            raise ManifestError(
                f"the digest table holds {len(table.tensors)} bytes,"
                f" expected 16 for each of {len(manifest.tensors)} tensors"
            )
        return table

    def digest(self) -> str:
        """SHA-256 of the canonical bytes, hexadecimal: the name of exactly these bits. Computed once."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return blob_digest(self.encode())


def blob_digest(blob: bytes) -> str:
    """Name of a blob: its SHA-256, hexadecimal."""
    return hashlib.sha256(blob).hexdigest()


_ENCODER: Final = msgspec.msgpack.Encoder(order="deterministic")


_T = TypeVar("_T")


def _decode(blob: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(blob, type=kind)
    except (ValueError, RecursionError) as error:  # msgspec raises UnicodeDecodeError, a ValueError, on bad UTF-8
        raise ManifestError(f"not a {kind.__name__}: {error}") from error


class Sources(msgspec.Struct, frozen=True, dict=True):
    """The rank that broadcasts each bucket."""

    of: tuple[int, ...]
    """By bucket, the number of its source."""

    @classmethod
    def one(cls, buckets: int) -> Self:
        """A single source for all `buckets`."""
        return cls((0,) * buckets)

    @property
    def count(self) -> int:
        """How many there are; each has a bucket."""
        return len(self._own)

    @property
    def largest_share(self) -> int:
        """The most buckets that one source has."""
        return max(len(own) for own in self._own)

    def own(self, source: int) -> tuple[int, ...]:
        """The buckets of `source`, in order."""
        return self._own[source]

    def place(self, bucket: int) -> int:
        """How many buckets its source has in front of it."""
        return bisect_left(self._own[self.of[bucket]], bucket)

    def before(self, bucket: int, slots: int) -> int:
        """The bucket that lay where `bucket` goes, on a source with `slots` slots; -1 for none."""
        place = self.place(bucket)
        return self._own[self.of[bucket]][place - slots] if place >= slots else -1

    def needed(self, row: range, slots: int) -> int:
        """The last bucket that has to be taken before all of `row` can be assembled; -1 for none."""
        return max(self.before(bucket, slots) for bucket in row)

    @cached_property
    def rows(self) -> tuple[range, ...]:
        """Runs of buckets, as long as can be, in which each has another source: they are assembled at the same time."""
        rows: list[range] = []
        first = 0
        seen: set[int] = set()
        for bucket, source in enumerate(self.of):
            if source in seen:
                rows.append(range(first, bucket))
                first = bucket
                seen.clear()
            seen.add(source)
        return (*rows, range(first, len(self.of)))

    def row_at(self, bucket: int) -> range:
        """The row that begins with `bucket`, or what is left of the one that it is in."""
        row = self.rows[bisect_right(self.rows, bucket, key=lambda row: row.start) - 1]
        return range(bucket, row.stop)

    @cached_property
    def _own(self) -> tuple[tuple[int, ...], ...]:
        own: list[list[int]] = [[] for _ in range(max(self.of) + 1)]
        for bucket, source in enumerate(self.of):
            own[source].append(bucket)
        return tuple(tuple(each) for each in own)


def cut(
    model: str,
    tensors: Iterable[TensorSpec],
    owners: Sequence[int],
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    left: Iterable[Left] = (),
    *,
    copies: Iterable[Copy] = (),
) -> tuple[Manifest, Sources]:
    """A manifest whose buckets each belong to one source. `owners` is, by tensor, its source: 0 and up, each with one.

    With a single source that is `Manifest.of`. Stages take turns so that they end together: the n-th of k buckets of
    each lies n/k of the way through the version.
    """
    listed = tuple(tensors)
    shares = [
        Manifest.of(model, [spec for spec, owner in zip(listed, owners, strict=True) if owner == source], bucket_bytes)
        for source in range(max(owners) + 1)
    ]
    turns = sorted(
        (place / len(share.buckets), source, place)
        for source, share in enumerate(shares)
        for place in range(len(share.buckets))
    )
    ordered: list[TensorSpec] = []
    buckets: list[BucketSpec] = []
    for _, source, place in turns:
        first = len(ordered)
        ordered.extend(shares[source].tensors_of(place))
        buckets.append(BucketSpec(first, len(ordered), shares[source].buckets[place].nbytes))
    manifest = Manifest(model, tuple(ordered), tuple(buckets), _ordered(left), _ordered(copies))
    manifest.check()
    return manifest, Sources(tuple(source for _, source, _ in turns))


_Unsent = TypeVar("_Unsent", Left, Copy)


def _ordered(unsent: Iterable[_Unsent]) -> tuple[_Unsent, ...]:
    """Sorted by name: equal sets make equal manifests."""
    return tuple(sorted(unsent, key=lambda each: each.name))


def _check_tensors(tensors: Sequence[TensorSpec]) -> list[int]:
    """Bytes of each tensor. Raises `ManifestError` for one that cannot travel, or a name that stands twice.

    A server may be paused meanwhile: names are checked together, dtypes and shapes once for all tensors of a kind.
    """
    names = [tensor.name for tensor in tensors]
    together = "\n".join(names)
    if together.count("\n") != len(names) - 1 or not _NAMES.fullmatch(together):
        for tensor in tensors:
            _check_tensor(tensor)
    kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    for tensor, kind in zip(tensors, kinds, strict=True):
        if kind not in sizes:
            _check_tensor(tensor)
            sizes[kind] = tensor.nbytes
    if len(set(names)) < len(names):
        raise ManifestError(f"{Counter(names).most_common(1)[0][0]!r} stands twice in the manifest")
    return [sizes[kind] for kind in kinds]


def _check_tensor(tensor: TensorSpec) -> None:
    if not _NAME.fullmatch(tensor.name):
        raise ManifestError(f"{tensor.name!r} is not a tensor name (letters, digits, '_', '-', '.', at most 256)")
    if tensor.dtype not in ITEM_BYTES:
        raise ManifestError(f"{tensor.name!r} has dtype {tensor.dtype!r}; these can travel: {', '.join(ITEM_BYTES)}")
    if len(tensor.shape) > 8 or any(size < 1 for size in tensor.shape):
        raise ManifestError(f"{tensor.name!r} has shape {tensor.shape}: one to eight positive sizes are expected")
