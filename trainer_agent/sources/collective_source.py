"""The core of every source: the ranks of its group, what they agree on, and errors that all of them raise together.

`CollectiveSource` owns the group. `ShardedSource` adds bucket assembly from shards that stay where the trainer keeps
them: each rank describes its shards once (`RankShards`), all ranks conclude who is read (`distinct_shards`), and every
bucket is gathered by an `Assembler`. A concrete source states only how its shards are found.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import torch

from weightbus.dataplane.tensors import Manifest, Shards, TensorSpec

from ..assembly import Assembler, BucketPlan, BucketPlanCache, GatherExchange, check_manifest, plan
from ..source import SourceError
from .parameter_identity import ParameterIdentity, local_tensors
from .rank_group import RankGroup, SingleRank
from .rank_layout import LayoutRefusal, PipelineStage, RankLayout, check_layouts, encode

Own = TypeVar("Own")


def on_all_ranks(
    ranks: RankGroup | SingleRank, attempt: Callable[[], tuple[RankLayout, Own]]
) -> tuple[tuple[RankLayout, ...], Own]:
    """Run `attempt` on every rank and return all layouts, with this rank's own result. Collective.

    A rank whose attempt fails tells the others before it raises; without that they would wait until their timeout.
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
    return check_layouts(ranks.gather(encode(layout))), own


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


class CollectiveSource:
    """The part of a `Source` that all sources share: one group of ranks, of which rank 0 assembles."""

    def __init__(self, ranks: RankGroup | SingleRank) -> None:
        self._ranks = ranks

    @property
    def rank(self) -> int:
        """Rank of this process in the source's group."""
        return self._ranks.rank

    @property
    def root(self) -> bool:
        """True on rank 0 of the group, which assembles the buckets."""
        return self._ranks.rank == 0

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
        if (out is not None) != (self._ranks.rank == root):
            raise ValueError(
                f"rank {self._ranks.rank}: rank {root} is the root of this bucket, and only the root gives a buffer"
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

    def _exchange_layouts(self, describe: Callable[[], RankShards]) -> tuple[tuple[RankLayout, ...], RankShards]:
        """Run `describe` on every rank; the layouts of all ranks, and this rank's shards. Collective."""

        def attempt() -> tuple[RankLayout, RankShards]:
            own = describe()
            return RankLayout(own.facts(), own.shards.encode(), own.stages), own

        return on_all_ranks(self._ranks, attempt)

    def _serve(self, local: RankShards, distinct: Shards, device: torch.device, roots: Sequence[int] = ()) -> None:
        """Take over what the ranks agreed on. Collective.

        Args:
            local: this rank's shards.
            distinct: every element once, the same on every rank; buckets are assembled from it.
            device: where buckets are.
            roots: further ranks that may assemble, beside rank 0.
        """
        self._local, self._distinct, self._device = local, distinct, device
        holders = sorted({0, *roots, *distinct.rank.tolist()})
        group = self._ranks.subgroup(holders, device) if len(holders) > 1 else None
        self._exchange = None if group is None else GatherExchange(group, self._ranks.global_ranks)
        self._planned = BucketPlanCache[_Planned]()

    @property
    def model(self) -> str:
        """Architecture as the checkpoint's config names it."""
        return self._local.model

    @property
    def device(self) -> torch.device:
        """Device of the buckets."""
        return self._device

    @property
    def head_dim(self) -> int | None:
        """Elements of one attention head: with it, Llama under tensor parallelism has predictable live digests."""
        return self._local.head_dim

    def tensors(self) -> Sequence[TensorSpec]:
        """Tensors that are served, by the names and in the order of the checkpoint."""
        return self._local.tensors

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        """Pack bucket `index` into `out` on the root. Collective; see `Source.assemble`."""
        self._assemble(manifest, index, out, None)

    @property
    def shards(self) -> Shards:
        """Every element once, as buckets are assembled from; `storage` is an index of `memory`."""
        return self._distinct

    @property
    def exchange(self) -> GatherExchange | None:
        """Group of the ranks that are read; None on other ranks, and where one rank holds everything."""
        return self._exchange

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

    def _assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None, roots: Sequence[int] | None) -> None:
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
        return _Planned(plan(manifest, self._distinct, rank=self._ranks.rank, roots=roots), roots)

    def _assembler(self, planned: _Planned) -> Assembler:
        """An assembler over the shards as they are now: optimizers that offload put other memory under them."""
        memory, assembler = local_tensors(self._local.parameters), planned.assembler
        if assembler is None or any(a is not b for a, b in zip(memory, planned.memory, strict=True)):
            assembler = Assembler(planned.buckets, memory, self._ranks.rank, planned.roots, self._exchange)
            planned.memory, planned.assembler = memory, assembler
        return assembler
