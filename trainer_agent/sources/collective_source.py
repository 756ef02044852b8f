"""The core of every source: the group of its ranks, what they agree on, and buckets from the shards that each holds.

`RankGroup` carries small messages on gloo, wherever the weights are; messages are bytes, not pickles. Over the whole
world a source opens groups of its own, so that its collectives cannot interleave with the training loop's, and every
wait ends after the timeout. Over a part of the world it cannot: torch needs every rank of the world for a new group,
and without them (`use_local_synchronization`) it names the group after the number of groups a rank is in already, which
differs between ranks. There the caller's group is used, with the caller's timeout.

When a source is built, every rank sends one `RankLayout`, or a `LayoutRefusal` when it cannot serve its part, and all
ranks compute the same result from all messages: the same error everywhere, or the rank that each shard is read from.

Once per publication `ParameterIdentity` checks that the model still holds the parameters that its source was built on.
Trainers replace them: `load_state_dict(assign=True)`, a new `nn.Parameter`, a conversion of the whole module. A source
would then read tensors that are no longer trained, or with the strides of others, and no digest can tell. New memory
under a parameter of the same form is allowed, also on another device, because trainers offload between phases.
"""

# torch leaves Tensor.stride partly untyped.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Final, NamedTuple, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from weightbus.dataplane.errors import ManifestError
from weightbus.dataplane.memory import Driver
from weightbus.dataplane.tensors import Left, Manifest, Shards, TensorSpec, coverage as cover

from ..assembly import Assembler, BucketPlan, BucketPlanCache, GatherExchange, check_manifest, plan
from ..source import AssemblyFailed, LayoutMismatch, RanksDisagree, SourceError, UnsupportedModel

DEFAULT_TIMEOUT_S: Final = 1800.0
"""Seconds that a rank waits for another: longer than a round, in which rank 0 waits for the engines."""
_SHOWN: Final = 3
"""Differences between two ranks that an error names."""
TENSORS: Final = "tensors"
"""Fact with the digest of all names, dtypes and shapes that a rank lists."""
NOT_SHARDED: Final = "(not sharded)"
"""Behind the name of a tensor whose values are a fact: every rank should hold them whole."""
_APART: Final = (
    "experts of an expert-parallel rank must be DTensors whose mesh, or whose mesh's root, has the axis of the experts"
)
_HEADER_BYTES: Final = 8
_PAGE_BYTES: Final = 1024
"""Largest message, header included, that is broadcast in one call."""


class RankGroup:
    """All ranks of a source; rank 0 is the root."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        """Open a control group over the world, or take `group` for it. Collective."""
        self._timeout = dt.timedelta(seconds=timeout_s)
        self._groups: list[dist.ProcessGroup] = []
        self.global_ranks: tuple[int, ...] = tuple(
            range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)
        )
        if dist.get_rank() not in self.global_ranks:
            raise ValueError(f"rank {dist.get_rank()} is not in the group {self.global_ranks} of the source it builds")
        self.rank: int = self.global_ranks.index(dist.get_rank())
        self._own = len(self.global_ranks) == dist.get_world_size()
        if group is not None and not self._own:
            if "cpu:gloo" not in (backends := dist.get_backend_config(group)):
                raise ValueError(
                    f"a group of a part of the world must carry CPU tensors too, this one is {backends!r}: "
                    f"make it with backend='cpu:gloo,cuda:nccl', or 'gloo' for a model on the CPU"
                )
            self._control = group
        else:
            self._control = self._open(self.global_ranks, "gloo")

    def gather(self, blob: bytes) -> list[bytes]:
        """Blobs of all ranks, by rank. Collective."""
        size = torch.tensor([len(blob)])
        sizes = [torch.zeros_like(size) for _ in self.global_ranks]
        try:
            dist.all_gather(sizes, size, group=self._control)
            lengths = [int(each) for each in sizes]
            page = torch.zeros(max(1, *lengths), dtype=torch.uint8)
            page[: len(blob)] = _tensor(blob)
            pages = [torch.zeros_like(page) for _ in lengths]
            dist.all_gather(pages, page, group=self._control)
        except RuntimeError as error:
            raise self._broken("every rank to describe its part of the model", error) from error
        return [_bytes(each[:length]) for each, length in zip(pages, lengths, strict=True)]

    def broadcast(self, blob: bytes | None) -> bytes:
        """Return the root's `blob` on every rank; the others pass None. Collective."""
        if (blob is not None) != (self.rank == 0):
            raise ValueError(f"rank {self.rank}: the root, and only the root, gives what is agreed")
        page = torch.zeros(_PAGE_BYTES, dtype=torch.uint8)
        if blob is not None:
            head = len(blob).to_bytes(_HEADER_BYTES, "little") + blob[: _PAGE_BYTES - _HEADER_BYTES]
            page[: len(head)] = _tensor(head)
        try:
            dist.broadcast(page, src=self.global_ranks[0], group=self._control)
            size = int.from_bytes(_bytes(page[:_HEADER_BYTES]), "little")
            first = _bytes(page[_HEADER_BYTES : _HEADER_BYTES + size])
            if len(first) == size:
                return first
            rest = torch.zeros(size - len(first), dtype=torch.uint8)
            if blob is not None:
                rest.copy_(_tensor(blob[len(first) :]))
            dist.broadcast(rest, src=self.global_ranks[0], group=self._control)
        except RuntimeError as error:
            raise self._broken("the root's decision", error) from error
        return first + _bytes(rest)

    def subgroup(self, ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup | None:
        """A group in which `ranks` exchange tensors of `device`; None on the others. Collective over all ranks."""
        member = self.rank in ranks
        if device.type != "cuda":
            return self._control if member else None
        group = self._open([self.global_ranks[rank] for rank in ranks], "nccl") if self._own else self._control
        if member or not self._own:
            # NCCL connects at the first call, which every member must make; a bucket concerns only some of them.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        return group if member else None

    def close(self) -> None:
        """Destroy the groups that this one opened. Collective."""
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups.clear()

    def _open(self, members: Sequence[int], backend: str) -> dist.ProcessGroup:
        """Open a group for `members`. Called by every rank of the world, in the same order."""
        group = dist.new_group(list(members), timeout=self._timeout, backend=backend)
        if dist.get_rank() in members:
            self._groups.append(cast("dist.ProcessGroup", group))
        return cast("dist.ProcessGroup", group)  # elsewhere torch's NON_GROUP_MEMBER, an int

    def _broken(self, waiting_for: str, error: RuntimeError) -> AssemblyFailed:
        return AssemblyFailed(
            f"rank {self.rank} waited for {waiting_for}, and a peer failed or took more than "
            f"{self._timeout.total_seconds():.0f} s ({error}): find the rank that failed first"
        )


class SingleRank:
    """The group of a source on one process, which needs no process group of torch."""

    rank: Final = 0
    global_ranks: Final = (0,)

    def gather(self, blob: bytes) -> list[bytes]:
        """`blob`, as the list of one rank."""
        return [blob]

    def broadcast(self, blob: bytes | None) -> bytes:
        """Return `blob`. Raises `ValueError` for None."""
        if blob is None:
            raise ValueError("rank 0: the root, and only the root, gives what is agreed")
        return blob

    def subgroup(self, ranks: Sequence[int], device: torch.device) -> None:
        """None: no tensors are exchanged."""
        del ranks, device

    def close(self) -> None:
        """Do nothing."""


def _tensor(blob: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8) if blob else torch.zeros(0, dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


class PipelineStage(msgspec.Struct, frozen=True):
    """Layers of a pipelined model that one chunk of a rank holds: `count` consecutive ones, by `layer_number`."""

    chunk: int
    """Index of the chunk in its rank's virtual pipeline."""
    pipeline_rank: int = msgspec.field(name="place")
    """Index of the rank's pipeline stage."""
    first: int
    """`layer_number` of its first layer, counted from 1."""
    count: int


class RankLayout(msgspec.Struct, frozen=True, tag="Roster"):
    """The part of a model that one rank holds."""

    facts: dict[str, str]
    """Readable values that must be the same on every rank: config, dtype, sizes of groups."""
    shards: bytes = msgspec.field(name="pieces")
    """`Shards.encode()`, with the rank as their holder."""
    stages: tuple[PipelineStage, ...] = ()
    replicas: dict[str, str] = {}
    """Digests of what this rank holds apart from some others, by its place: equal on every rank that has the place."""


class LayoutRefusal(msgspec.Struct, frozen=True, tag="Refusal"):
    """The reason why a rank cannot serve its part."""

    reason: str


def encode(statement: RankLayout | LayoutRefusal) -> bytes:
    """The bytes that a rank sends."""
    return msgspec.msgpack.encode(statement)


def decode_layouts(statements: Sequence[bytes]) -> list[RankLayout]:
    """The layouts of all ranks. Raises `RanksDisagree` for a rank that cannot serve its part."""
    layouts: list[RankLayout] = []
    for rank, blob in enumerate(statements):
        statement = msgspec.msgpack.decode(blob, type=RankLayout | LayoutRefusal)
        if isinstance(statement, LayoutRefusal):
            raise RanksDisagree(f"rank {rank} cannot serve its part: {statement.reason}")
        layouts.append(statement)
    return layouts


def check_layouts(statements: Sequence[bytes]) -> tuple[RankLayout, ...]:
    """Decode the layouts of all ranks. Raises `RanksDisagree` unless every rank serves its part of the same model."""
    layouts = decode_layouts(statements)
    first = layouts[0].facts
    for rank, layout in enumerate(layouts):
        found = layout.facts
        keys = {**first, **found}
        odd = [f"{key}={found.get(key)} (rank 0: {first.get(key)})" for key in keys if found.get(key) != first.get(key)]
        if odd:
            more = f" and {len(odd) - _SHOWN} others" if len(odd) > _SHOWN else ""
            advice = "give every rank the same model, config and dtype"
            if all(NOT_SHARDED in each for each in odd):
                advice = f"broadcast replicas that drifted apart; {_APART}"
            raise RanksDisagree(f"rank {rank} has {', '.join(odd[:_SHOWN])}{more}: {advice}")
    _check_replicas(layouts)
    return tuple(layouts)


def _check_replicas(layouts: Sequence[RankLayout]) -> None:
    seen: dict[str, tuple[int, str]] = {}
    for rank, layout in enumerate(layouts):
        for place, digest in layout.replicas.items():
            first, known = seen.setdefault(place, (rank, digest))
            if known != digest:
                raise RanksDisagree(
                    f"rank {rank} and rank {first}, of two meshes that do not know each other, hold different values "
                    f"of {place}, and neither is the whole model's: {_APART}"
                )


def _check_listings(
    ranks: RankGroup | SingleRank, layouts: Sequence[RankLayout], listing: Sequence[TensorSpec]
) -> None:
    """Raise `RanksDisagree`, with names, where ranks list different tensors. Collective, and only then sends lists."""
    if len({layout.facts.get(TENSORS) for layout in layouts}) == 1:
        return
    mine = {spec.name: f"{spec.dtype} {spec.shape}" for spec in listing}
    root = ranks.broadcast(msgspec.msgpack.encode(mine) if ranks.rank == 0 else None)
    told = _difference(mine, msgspec.msgpack.decode(root, type=dict[str, str]))
    found = [blob.decode() for blob in ranks.gather(told.encode())]
    rank = next(rank for rank, text in enumerate(found) if text)
    raise RanksDisagree(
        f"rank {rank} was built differently from rank 0: it {found[rank]}: give every rank the same model, config and "
        "dtype"
    )


def _difference(mine: Mapping[str, str], root: Mapping[str, str]) -> str:
    """What this rank lists otherwise than rank 0, the first names; empty for the same tensors in the same order."""
    lacks = [repr(name) for name in root if name not in mine]
    further = [repr(name) for name in mine if name not in root]
    other = [
        f"{name!r} in {mine[name]} (rank 0: {root[name]})" for name in mine if root.get(name, mine[name]) != mine[name]
    ]
    parts = [
        f"{verb} {', '.join(odd[:_SHOWN])}{f' and {len(odd) - _SHOWN} others' if len(odd) > _SHOWN else ''}"
        for verb, odd in (("lacks", lacks), ("has", further), ("holds", other))
        if odd
    ]
    reordered = not parts and list(mine) != list(root)
    return "lists the same tensors in another order" if reordered else "; ".join(parts)


def distinct_shards(layouts: Sequence[RankLayout], tensors: Sequence[TensorSpec]) -> Shards:
    """Every element of every tensor once, with the rank that it is read from: of replicas, the lowest rank's.

    Raises `RanksDisagree` when the ranks together do not hold all of `tensors`.
    """
    try:
        shards = cover.drop_replicas(Shards.decode([layout.shards for layout in layouts], tensors))
        cover.check_exact_cover(shards)
    except ManifestError as error:
        raise RanksDisagree(
            f"{error}; build the source on every rank, with all of its model chunks and the config that is trained"
        ) from error
    return shards


Own = TypeVar("Own")


def on_all_ranks(
    ranks: RankGroup | SingleRank,
    attempt: Callable[[], tuple[RankLayout, Own]],
    listing: Callable[[Own], Sequence[TensorSpec]] | None = None,
) -> tuple[tuple[RankLayout, ...], Own]:
    """Run `attempt` on every rank and return all layouts, with this rank's own result. Collective.

    A rank whose attempt fails tells the others before it raises; without that they would wait until their timeout.
    Where layouts have the fact `TENSORS`, `listing` gives what it is the digest of, so that an error has names.
    Raises a `SourceError` on every rank when any attempt raised anything, and `RanksDisagree` when facts differ.
    """
    try:
        layout, own = attempt()
    except Exception as error:
        refused = error if isinstance(error, SourceError) else _wrapped(ranks.rank, error)
        ranks.gather(encode(LayoutRefusal(f"{type(refused).__name__}: {refused}")))
        if refused is error:
            raise
        raise refused from error
    statements = ranks.gather(encode(layout))
    layouts = decode_layouts(statements)
    if listing is not None:
        _check_listings(ranks, layouts, listing(own))
    return check_layouts(statements), own


def check_on_all_ranks(ranks: RankGroup | SingleRank, check: Callable[[], None]) -> None:
    """Run `check` on every rank. Raises a `SourceError` on all ranks when it raises on any. Collective."""

    def attempt() -> tuple[RankLayout, None]:
        check()
        return RankLayout({}, b""), None

    on_all_ranks(ranks, attempt)


def _wrapped(rank: int, error: Exception) -> SourceError:
    """An unforeseen error: a module of another kind, a config with holes, an exporter's own error."""
    return SourceError(
        f"what rank {rank} was given cannot be read ({type(error).__name__}: {error}): "
        f"give every rank its part of the model, and the config that belongs to it"
    )


Reader = Callable[[], Mapping[str, torch.Tensor]]
"""Returns the tensors of a model as they are now, by their names in memory. Reads no values, calls no other rank."""
_ADVICE = "build the source again after replacing parameters"
_OFFLOADED = (
    "it was offloaded, or its torch_memory_saver region is paused: load it back, or resume the region, before"
    " publishing; or move it to host memory with `.data = .data.cpu()`, where it is read, too"
)


def named(model: str) -> str:
    """`model`. Raises `UnsupportedModel` for none."""
    if not model:
        raise UnsupportedModel(
            "the module is one of torch's own containers, which the config of no checkpoint names: build the source "
            "with model=, the class under 'architectures' of the served config.json"
        )
    return model


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of `tensor`, not copied: the whole tensor when it is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def local_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`local_tensor` of each."""
    with torch.no_grad():
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


class ParameterIdentity:
    """The parameters of one rank's model as they were when its source was built."""

    def __init__(self, read: Reader) -> None:
        self._read = read
        # The tensors themselves, not their ids: an id is given again when its object is gone.
        self._then = {name: (tensor, _Form.of(tensor)) for name, tensor in read().items()}

    def check(self) -> None:
        """Raise `LayoutMismatch` unless the model holds the same parameters, in the same form, with memory."""
        now = self._read()
        for name, (tensor, form) in self._then.items():
            found = now.get(name)
            if found is None:
                raise LayoutMismatch(f"{name!r} ({form}) is not in the model any more: {_ADVICE}")
            new = _Form.of(found)
            if new != form:
                raise LayoutMismatch(f"{name!r} is now {new}, the source was built when it was {form}: {_ADVICE}")
            if found is not tensor:
                raise LayoutMismatch(
                    f"{name!r} ({new}) is another tensor now, the source was built on the one before: {_ADVICE}"
                )
            if not _has_memory(found):
                raise LayoutMismatch(
                    f"{name!r} ({new} on {local_tensor(found).device}) has no memory now: {_OFFLOADED}"
                )
        for name in now.keys() - self._then.keys():
            raise LayoutMismatch(f"{name!r} ({_Form.of(now[name])}) was not in the model before: {_ADVICE}")


def _has_memory(tensor: torch.Tensor) -> bool:
    """False for an offloaded parameter: it keeps its shape over an emptied storage or unmapped memory."""
    mine = local_tensor(tensor)
    if not mine.numel():
        return True
    steps = zip(mine.shape, mine.stride(), strict=True)
    end = mine.storage_offset() + 1 + sum((size - 1) * stride for size, stride in steps)
    if mine.is_meta or mine.untyped_storage().nbytes() < end * mine.element_size():
        return False
    return mine.device.type != "cuda" or _driver().mapped(mine.data_ptr())


_driver = cache(Driver)


class _Form(NamedTuple):
    """The properties of a tensor that its shards depend on, all but its address."""

    whole: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of this rank's part."""
    strides: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[object, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Form:
        mine = local_tensor(tensor)
        placements = tuple(tensor.placements) if isinstance(tensor, DTensor) else ()
        whole, shape, strides = tuple(tensor.shape), tuple(mine.shape), tuple(mine.stride())
        return cls(whole, shape, strides, mine.dtype, placements)

    def __str__(self) -> str:
        part = f" of {self.whole} {self.placements}" if self.placements else ""
        return f"{self.shape}{part} with strides {self.strides}, {self.dtype}"


class CollectiveSource:
    """The part of a `Source` that all sources share: one group of ranks, of which rank 0 assembles."""

    def __init__(self, ranks: RankGroup | SingleRank) -> None:
        self._ranks = ranks
        self.rank: int = ranks.rank
        """Rank of this process in the source's group."""
        self.root = ranks.rank == 0
        """True on rank 0 of the group, which assembles the buckets."""

    def agree(self, blob: bytes | None) -> bytes:
        """Hand rank 0's `blob` to every rank. Collective; see `Source.agree`."""
        return self._ranks.broadcast(blob)

    def collect(self, blob: bytes) -> Sequence[bytes]:
        """Blobs of all ranks, by rank. Collective."""
        return self._ranks.gather(blob)

    def close(self) -> None:
        """Release the groups. Collective; the parameters are the trainer's and stay."""
        self._ranks.close()

    @contextmanager
    def _closing_when_refused(self) -> Generator[None]:
        """Release the groups when the block raises a `SourceError`: it does so on every rank."""
        try:
            yield
        except SourceError:
            self._ranks.close()
            raise

    def _check_root(self, out: torch.Tensor | None, root: int = 0) -> None:
        """Raise `ValueError` unless rank `root`, and no other rank, gives a buffer."""
        if (out is not None) != (self.rank == root):
            raise ValueError(
                f"rank {self.rank}: rank {root} is the root of this bucket, and only the root gives a buffer"
            )


class RankShards(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a model that one rank holds."""

    model: str
    """Architecture as the checkpoint's config names it."""
    tensors: tuple[TensorSpec, ...]
    """Tensors of the Hugging Face checkpoint: the same on every rank."""
    shards: Shards
    """What this rank holds of `tensors`, replicas included; a storage is an index of `parameters`."""
    parameters: tuple[torch.Tensor, ...]
    """The trainer's own tensors; `local_tensors` gives this rank's parts."""
    facts: Callable[[], dict[str, str]]
    """Readable values that must be the same on every rank. May read values of tensors that are not sharded."""
    identity: ParameterIdentity
    """Checks that the model still holds `parameters`."""
    head_dim: int | None
    """Elements of one attention head; None when unknown."""
    stages: tuple[PipelineStage, ...] = ()
    """Layers that this rank holds, one entry for each chunk of a virtual pipeline."""
    replicas: Callable[[], dict[str, str]] = dict
    """`RankLayout.replicas`. May read values."""
    left: tuple[Left, ...] = ()
    """Tensors of the checkpoint that are not among `tensors`, because engines have them already; see `unsent_of`."""


class _Planned:
    """The bucket plans of one manifest, and the assembler over the memory that was current last."""

    def __init__(self, buckets: Sequence[BucketPlan], roots: Sequence[int] | None) -> None:
        self.buckets = buckets
        self.roots = roots
        self.memory: Sequence[torch.Tensor] = ()
        self.assembler: Assembler | None = None


class ShardedSource(CollectiveSource):
    """A source that assembles buckets from shards in the trainer's memory. Satisfies `Source` and `Exportable`.

    Parameters stay the same objects, in the same form; a publication after they were replaced is refused. Their memory
    may differ from publication to publication, also by device.
    """

    @property
    def model(self) -> str:
        """Architecture as the checkpoint's config names it. Raises `UnsupportedModel` where the module has no name."""
        return named(self._local.model)

    def _exchange_layouts(self, describe: Callable[[], RankShards]) -> tuple[tuple[RankLayout, ...], RankShards]:
        """Run `describe` on every rank; the layouts of all ranks, and this rank's shards. Collective."""

        def attempt() -> tuple[RankLayout, RankShards]:
            own = describe()
            return RankLayout(own.facts(), own.shards.encode(), own.stages, own.replicas()), own

        return on_all_ranks(self._ranks, attempt, lambda own: own.tensors)

    def _serve(self, local: RankShards, distinct: Shards, device: torch.device, roots: Sequence[int] = ()) -> None:
        """Take over what the ranks agreed on. Collective.

        Args:
            local: this rank's shards.
            distinct: every element once, the same on every rank; buckets are assembled from it.
            device: where buckets are.
            roots: further ranks that may assemble, beside rank 0.
        """
        self._local = local
        self.device = device
        """Device of the buckets."""
        self.left = local.left
        """Tensors of the checkpoint that are not served, because engines have them already."""
        self.head_dim = local.head_dim
        """Elements of one attention head: with it, Llama under tensor parallelism has predictable live digests."""
        self.shards = distinct
        """Every element once, as buckets are assembled from; `storage` is an index of `memory`."""
        holders = sorted({0, *roots, *distinct.rank.tolist()})
        group = self._ranks.subgroup(holders, device) if len(holders) > 1 else None
        self.exchange = None if group is None else GatherExchange(group, self._ranks.global_ranks)
        """Group of the ranks that are read; None on other ranks, and where one rank holds everything."""
        self._planned = BucketPlanCache[_Planned]()

    def tensors(self) -> Sequence[TensorSpec]:
        """Tensors that are served, by the names and in the order of the checkpoint."""
        return self._local.tensors

    def local_shards(self, tensors: Sequence[TensorSpec]) -> Shards:
        """All that this rank holds of `tensors`, replicas included; `storage` is an index of `memory`."""
        return self._local.shards.ordered(tensors)

    def memory(self) -> Sequence[torch.Tensor]:
        """This rank's shards as they are now. Collective: raises on every rank when one's were replaced."""
        self._settle_parameters()
        return local_tensors(self._local.parameters)

    def _settle_parameters(self) -> None:
        """Make the parameters readable. Raises a `SourceError` on every rank when one's were replaced. Collective."""
        check_on_all_ranks(self._ranks, self._local.identity.check)

    def assemble(
        self, manifest: Manifest, index: int, out: torch.Tensor | None, roots: Sequence[int] | None = None
    ) -> None:
        """Pack bucket `index` into `out` on its root. Collective; see `PipelineSource.assemble`."""
        self._check_root(out, 0 if roots is None else roots[index])
        nbytes = manifest.buckets[index].nbytes
        if out is not None and (out.dtype != torch.uint8 or out.numel() < nbytes or out.device != self.device):
            raise ValueError(
                f"the buffer is {out.dtype} [{out.numel()}] on {out.device}, "
                f"bucket {index} takes {nbytes} bytes (uint8) on {self.device}"
            )
        if index == 0:
            self._settle_parameters()
        planned = self._planned.of(manifest, roots, self._plan)
        assembler = planned.assembler
        if assembler is None or index == 0:
            assembler = self._assembler(planned)
        assembler.run(index, out, self.device)

    def _plan(self, manifest: Manifest, roots: Sequence[int] | None) -> _Planned:
        check_manifest(manifest, self._local.tensors)
        return _Planned(plan(manifest, self.shards, rank=self.rank, roots=roots), roots)

    def _assembler(self, planned: _Planned) -> Assembler:
        """An assembler over the shards as they are now: optimizers that offload put other memory under them."""
        memory, assembler = local_tensors(self._local.parameters), planned.assembler
        if assembler is None or any(a is not b for a, b in zip(memory, planned.memory, strict=True)):
            assembler = Assembler(planned.buckets, memory, self.rank, planned.roots, self.exchange)
            planned.memory, planned.assembler = memory, assembler
        return assembler
