"""A `Source` over a Megatron-core model in training: tensor, expert, pipeline and virtual pipeline parallelism.

Refuses, on every rank and at construction, whatever it cannot map: a parameter without a rule, a feature that changes
what the weights mean, an axis that is not understood, a model that is not the one of the Hugging Face config.

    families, blocks, rules     what served models consist of, as tables
    served                      one served model: sizes, layers, tensors
    megatron_names, -_checks    where a parameter belongs; whether trained and served model are one
    megatron_chunks             what a rank holds
    parcels, assembly           how it gets into buckets

Copies of a parameter - data, context and expert data parallelism, tied embeddings of two pipeline stages, norms on
every tensor rank - are read from the lowest rank that holds them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, cast

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from weightbus.dataplane.manifest import Manifest, TensorSpec
from weightbus.dataplane.pieces import Piece, Pieces

from .assembly import DTYPES, Assembler, Exchange, check_manifest
from .megatron_chunks import Chunk, chunks_of, lagging_wrappers
from .megatron_names import Found
from .parcels import plan
from .ranks import Ranks
from .roster import Refusal, Roster, check, encode, settle
from .rules import Local, pieces_of
from .served import Model, served_tensors
from .source import LayoutMismatch, SourceError, UnsupportedModel

DEFAULT_TIMEOUT_S: Final = 1800.0
"""How long a rank waits for another: longer than a round, because the leader answers for the engines meanwhile."""


class MegatronSource:
    """The live weights of one Megatron-core model. Satisfies `Source`."""

    def __init__(
        self,
        model_chunks: nn.Module | Sequence[nn.Module],
        *,
        hf_config: Path | str | Mapping[str, object],
        dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Agree with every rank of `group` (default: all) on what is served. Collective: call it on all of them.

        Args:
            model_chunks: this rank's model, or its virtual pipeline chunks, wrapped or not.
            hf_config: the served checkpoint's config: a folder, a ``config.json`` or its content.
            dtype: what is served; the config's dtype by default, the parameters' own if it names none.
            group: the ranks of one model with all of its replicas. Of a part of the world it is used as it is, so
                it must carry CPU tensors (and CUDA tensors where the model is) and have a timeout of its own.
            timeout_s: how long any collective waits.

        Raises:
            SourceError: on every rank when any rank cannot serve; the first by rank is named on the others.
        """
        self._ranks = Ranks(group, timeout_s)
        self._parameters: list[torch.Tensor] = []
        self._lagging = [lagging for chunk in chunks_of(model_chunks) for lagging in lagging_wrappers(chunk)]
        try:
            self._model, self._tensors, self._pieces = self._settle(model_chunks, hf_config, dtype)
        except SourceError:
            self._ranks.close()  # every rank raises, so every rank comes here
            raise
        self._exchange = self._open_exchange()
        self._planned: tuple[Manifest, Assembler] | None = None

    @property
    def model(self) -> str:
        """Architecture as the Hugging Face config names it."""
        return self._model.architecture

    @property
    def root(self) -> bool:
        """The first rank of the group assembles."""
        return self._ranks.rank == 0

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._parameters[0].device

    @property
    def head_dim(self) -> int:
        """Elements of one attention head: with it, Llama under tensor parallelism has predictable live digests."""
        return self._model.sizes["head_dim"]

    def tensors(self) -> Sequence[TensorSpec]:
        """What is served, in checkpoint order."""
        return self._tensors

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        """Pack bucket `index` into `out` on the root. Collective; see `Source.assemble`."""
        nbytes = manifest.buckets[index].nbytes
        if (out is not None) != self.root:
            raise ValueError(f"rank {self._ranks.rank}: the root, and only the root, gives a buffer")
        if out is not None and (out.dtype != torch.uint8 or out.numel() < nbytes or out.device != self.device):
            raise ValueError(
                f"the buffer is {out.dtype} [{out.numel()}] on {out.device}, "
                f"bucket {index} takes {nbytes} bytes (uint8) on {self.device}"
            )
        if index == 0:
            self._settle_parameters()
        self._assembler(manifest).run(index, out, self.device)

    def agree(self, blob: bytes | None) -> bytes:
        """Hand the root's `blob` to every rank. Collective; see `Source.agree`."""
        return self._ranks.broadcast(blob)

    def close(self) -> None:
        """Let go of the groups. Collective; the parameters are the trainer's and stay."""
        self._ranks.close()

    def _settle_parameters(self) -> None:
        """Finish what the optimizer left to the next forward pass. Collective over the replicas.

        With overlapped parameter gathers a replica holds, after a step, only its own share of the new parameters.
        """
        for wrapper in self._lagging:
            wrapper.start_param_sync(force_sync=True)

    def _assembler(self, manifest: Manifest) -> Assembler:
        if self._planned is None or (self._planned[0] is not manifest and self._planned[0] != manifest):
            check_manifest(manifest, self._tensors)
            buckets = plan(manifest, self._pieces, rank=self._ranks.rank)
            self._planned = (manifest, Assembler(buckets, self._parameters, self._ranks.rank, 0, self._exchange))
        return self._planned[1]

    def _open_exchange(self) -> Exchange | None:
        """The group of the ranks that anything is read from. Collective over all ranks."""
        holders = sorted({0, *self._pieces.holder.tolist()})
        if len(holders) == 1:
            return None
        group = self._ranks.subgroup(holders, self.device)
        return None if group is None else Exchange(group, self._ranks.global_ranks, 0)

    def _settle(
        self,
        chunks: nn.Module | Sequence[nn.Module],
        hf_config: Path | str | Mapping[str, object],
        dtype: torch.dtype | None,
    ) -> tuple[Model, tuple[TensorSpec, ...], Pieces]:
        """What is served, and from where. A rank that cannot serve says so before it raises: the others wait for it."""
        try:
            model, tensors, own = self._describe(chunks, hf_config, dtype)
        except SourceError as error:
            self._ranks.gather(encode(Refusal(f"{type(error).__name__}: {error}")))
            raise
        rosters = check(self._ranks.gather(encode(own)))
        return model, tensors, settle(rosters, tensors)

    def _describe(
        self,
        chunks: nn.Module | Sequence[nn.Module],
        hf_config: Path | str | Mapping[str, object],
        dtype: torch.dtype | None,
    ) -> tuple[Model, tuple[TensorSpec, ...], Roster]:
        """Find and check every parameter of this rank."""
        described = Model.parse(_read_config(hf_config))
        read = [Chunk(chunk, described) for chunk in chunks_of(chunks)]
        if not read:
            raise UnsupportedModel("no model chunks: pass the model of this rank")
        model = read[0].model
        found: list[tuple[Chunk, Found]] = []
        for chunk in read:
            for place, parameter in chunk.parameters():
                found.append((chunk, place))
                self._parameters.append(parameter)
        served = _served_dtype(dtype, model, self._parameters)
        tensors = served_tensors(model, served)
        rows: list[Piece] = []
        for storage, ((chunk, place), parameter) in enumerate(zip(found, self._parameters, strict=True)):
            rows.extend(_pieces(chunk, place, _local(place.name, storage, parameter), served))
        groups = read[0].groups
        facts = {
            **msgspec.structs.asdict(model),
            "dtype": served,
            "tp": groups.tensor.ranks,
            "etp": groups.expert_tensor.ranks,
            "ep": groups.expert.ranks,
        }
        own = Pieces.of(tensors, rows, self._ranks.rank)
        return model, tensors, Roster({key: repr(value) for key, value in facts.items()}, own.encode())


def _pieces(chunk: Chunk, place: Found, local: Local, dtype: str) -> list[Piece]:
    """What one parameter of a chunk holds of the served tensors."""
    model = chunk.model
    targets = place.rule.served
    specs = [model.spec(target, place.prefix, dtype, place.expert) for target in targets]
    shifts = [model.shift_of(target, zero_centred=chunk.zero_centred) for target in targets]
    share = chunk.groups.tensor if place.expert is None else chunk.groups.expert_tensor
    return list(pieces_of(place.rule, local, specs, shifts, heads=model.heads, share=share))


def _local(name: str, storage: int, parameter: torch.Tensor) -> Local:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return Local(name, storage, tuple(parameter.shape), tuple(parameter.stride()), dtype)


def _served_dtype(wanted: torch.dtype | None, model: Model, parameters: Sequence[torch.Tensor]) -> str:
    if wanted is not None:
        name = str(wanted).removeprefix("torch.")
        if name not in DTYPES:
            raise UnsupportedModel(f"dtype {wanted} cannot travel; these can: {', '.join(DTYPES)}")
        return name
    if model.dtype is not None:
        return model.dtype
    found = {str(each.dtype).removeprefix("torch.") for each in parameters if isinstance(each, nn.Parameter)}
    if len(found) != 1:
        raise LayoutMismatch(f"the parameters have dtypes {sorted(found)} and the config names none: pass dtype=")
    return found.pop()


def _read_config(source: Path | str | Mapping[str, object]) -> Mapping[str, object]:
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        content: object = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LayoutMismatch(f"{path}: no Hugging Face config can be read there: {error}") from error
    if not isinstance(content, dict):
        raise LayoutMismatch(f"{path}: a JSON object is expected, found {type(content).__name__}")
    return cast("dict[str, object]", content)
