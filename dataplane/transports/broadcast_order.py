"""Which of several trainer ranks broadcasts which bucket, and in which order each member acts. Pure, no torch.

The ranks that broadcast are *sources*, one for each pipeline stage; source 0 leads. Each has a group of its own with
all engine ranks (over gloo one with each engine). Three orders are the same for all members, which
is what keeps them from waiting in a circle:

    groups    are joined in the order of their sources: a server is asked for the next one when it is in the last
    buckets   are taken in the manifest's order, in which stages take turns: while one sends, the others assemble
    slots     of a source are used in turn, and again when the bucket that was there has been taken
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple, Self

import msgspec

from ..errors import TransferFailed
from ..tensors import DEFAULT_BUCKET_BYTES, BucketSpec, Manifest, TensorSpec

_SEVERAL: Final = "{"
"""How the announcement of several groups begins; names do not."""


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
    model: str, tensors: Iterable[TensorSpec], owners: Sequence[int], bucket_bytes: int = DEFAULT_BUCKET_BYTES
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
    manifest = Manifest(model, tuple(ordered), tuple(buckets))
    manifest.check()
    return manifest, Sources(tuple(source for _, source, _ in turns))


class EnginePart(NamedTuple):
    """The groups of a session as one engine joins them."""

    names: tuple[str, ...]
    """By source."""
    rank_offset: int
    world_size: int
    """The same in each of them."""
    by_sidecar: bool = False
    """The engine's agent is the member, once, and none of its server's workers is."""


def own_group(name: str, rank_offset: int) -> str:
    """Of an engine alone: `name` is the group's of all, in which its ranks would begin at `rank_offset`."""
    return f"{name}-at{rank_offset}"


class GroupSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What receivers are told: the groups of a session, and which of them each bucket comes by."""

    names: tuple[str, ...]
    """In the order in which all join them."""
    of: tuple[int, ...]
    """By bucket; empty where there is one group."""
    ranks: tuple[int, ...] = ()
    """By engine, in the order of their ranks, how many workers it has. Empty where the workers of all engines are in a
    group together; else each engine has its own with every source, and its ranks begin at 1 there."""
    together: bool = False
    """All are in a group together though `ranks` are given."""
    sidecars: tuple[int, ...] = ()
    """Engines, by their place in `ranks`, of which the agent is the member, once, in place of their workers."""

    @classmethod
    def of_sources(
        cls,
        base: str,
        sources: Sources,
        ranks: tuple[int, ...] = (),
        *,
        together: bool = False,
        sidecars: tuple[int, ...] = (),
    ) -> Self:
        """Names of groups that begin with `base`, which is that of the leading source."""
        names = (base, *(f"{base}-source{number}" for number in range(1, sources.count)))
        return cls(names, sources.of if sources.count > 1 else (), ranks, together, sidecars)

    @property
    def members(self) -> tuple[int, ...]:
        """By engine, how many ranks of a group are its; empty as `ranks`."""
        sidecars = frozenset(self.sidecars)
        return tuple(1 if engine in sidecars else count for engine, count in enumerate(self.ranks))

    @property
    def apart(self) -> tuple[int, ...]:
        """The same where each engine has groups of its own; else empty."""
        return () if self.together else self.members

    @property
    def all_ours(self) -> bool:
        """No worker of a server is in them."""
        return bool(self.ranks) and len(self.sidecars) == len(self.ranks)

    def size(self, world_size: int) -> int:
        """Ranks of a group of all, which has `world_size` where workers are its members."""
        return 1 + sum(self.members) if self.ranks else world_size

    def of_engine(self, rank_offset: int, world_size: int) -> EnginePart:
        """What the engine joins whose first worker is rank `rank_offset` among those of all. Raises `TransferFailed`.

        `world_size` counts all workers, and the source.
        """
        if not self.ranks:
            return EnginePart(self.names, rank_offset, world_size)
        parts = self._parts()
        if rank_offset not in parts:
            raise TransferFailed(f"the sender announced groups of engines at {[*parts]}, none at {rank_offset}")
        return parts[rank_offset]

    def held(self, engines: int) -> tuple[tuple[tuple[str, ...], bool], ...]:
        """By engine, the names that `of_engine` says, and whether its agent is the member; of all of them for once."""
        if not self.ranks:
            return ((self.names, False),) * engines
        return tuple((part.names, part.by_sidecar) for part in self._parts().values())

    def _parts(self) -> dict[int, EnginePart]:
        """Where engines have `ranks`: by the rank of each one's first worker among those of all."""
        members, sidecars = self.members, frozenset(self.sidecars)
        size, parts = 1 + sum(members), dict[int, EnginePart]()
        firsts, places = accumulate(self.ranks[:-1], initial=1), accumulate(members[:-1], initial=1)
        for engine, (first, at) in enumerate(zip(firsts, places, strict=True)):
            names = self.names if self.together else tuple(own_group(name, first) for name in self.names)
            place = (at, size) if self.together else (1, 1 + members[engine])
            parts[first] = EnginePart(names, *place, engine in sidecars)
        return parts

    def source_of(self, bucket: int) -> int:
        """Which of the groups `bucket` comes by."""
        return self.of[bucket] if self.of else 0

    def encode(self) -> str:
        """As it is announced: of one group its name alone."""
        return self.names[0] if len(self.names) == 1 and not self.ranks else msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, word: str, buckets: int) -> Self:
        """Read what `encode` wrote. Raises `TransferFailed` unless every one of `buckets` buckets has a group."""
        if not word.startswith(_SEVERAL):
            return cls((word,), ())
        try:
            groups = msgspec.json.decode(word, type=cls)
        except msgspec.MsgspecError as error:
            raise TransferFailed(f"the sender announced groups that cannot be read: {error}") from error
        of = groups.of or ((0,) * buckets if len(groups.names) == 1 else ())
        fits = len(of) == buckets and set(of) <= set(range(len(groups.names)))
        if not fits or min(groups.ranks, default=1) < 1 or not set(groups.sidecars) <= set(range(len(groups.ranks))):
            raise TransferFailed(
                f"the sender announced {len(groups.names)} groups for {len(groups.of)} buckets, expected one for"
                f" each of {buckets}: give sender and receiver the same version of weightbus"
            )
        return groups
