"""A `Source` over a Megatron-core GPTModel in training: any tensor, pipeline and virtual pipeline parallelism.

Owns what Megatron alone knows: how chunks are wrapped, that layer indexes are local to a chunk, which rank of which
group holds what. Names and boxes come from naming.py, movement from assembly.py. Refuses, on every rank and at
construction, whatever it cannot map: a parameter without a rule, a feature that changes what the weights mean, a model
that is not the one of the Hugging Face config.

Groups are read from the model itself, so that nothing here depends on megatron's global state (which is asked only
when a model carries no groups). Copies of a parameter - data and context parallelism, tied embeddings of two pipeline
stages, norms on every tensor rank - are read from the lowest rank that holds them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, cast

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from weightbus.dataplane.boxes import Box
from weightbus.dataplane.manifest import Manifest, TensorSpec
from weightbus.dataplane.pieces import Piece, Pieces, View

from .assembly import DTYPES, Assembler, Exchange, check_manifest
from .naming import Dense, advice_for, rule_for, served_tensors
from .parcels import plan
from .pieces import Piece as Run
from .pieces import pieces
from .ranks import Ranks
from .roster import Refusal, Roster, check, encode, settle
from .source import LayoutMismatch, SourceError, UnknownParameter, UnsupportedModel

DEFAULT_TIMEOUT_S: Final = 1800.0
"""How long a rank waits for another: longer than a round, because the leader answers for the engines meanwhile."""

_LAYER: Final = re.compile(r"^decoder\.layers\.(\d+)\.")


class _Chunk(Protocol):
    """What is read of a GPTModel."""

    config: object
    share_embeddings_and_output_weights: bool


class _LaggingWrapper(Protocol):
    """What is asked of a DistributedDataParallel with overlapped parameter gathers."""

    def start_param_sync(self, *, force_sync: bool) -> None: ...


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
        self._lagging = [lagging for chunk in _chunks_of(model_chunks) for lagging in _lagging_wrappers(chunk)]
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
        return self._model.head_dim

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
    ) -> tuple[Dense, tuple[TensorSpec, ...], Pieces]:
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
    ) -> tuple[Dense, tuple[TensorSpec, ...], Roster]:
        """Find and check every parameter of this rank."""
        unwrapped = [_unwrap(chunk) for chunk in _chunks_of(chunks)]
        if not unwrapped:
            raise UnsupportedModel("no model chunks: pass the model of this rank")
        model = Dense.parse(_read_config(hf_config))
        tp_rank, tp_ranks = _tensor_parallel(unwrapped[0])
        names: list[str] = []
        for chunk in unwrapped:
            _check_chunk(cast("_Chunk", chunk), model)
            for name, parameter in _parameters_of(chunk):
                names.append(name)
                self._parameters.append(parameter)
        served = _served_dtype(dtype, model, self._parameters)
        tensors = served_tensors(model, served)
        specs = {spec.name: spec for spec in tensors}
        rows: list[Piece] = []
        for storage, (name, parameter) in enumerate(zip(names, self._parameters, strict=True)):
            for run in pieces(name, parameter.shape, specs, model, rank=tp_rank, ranks=tp_ranks):
                rows.extend(_boxes(storage, parameter, run, specs[run.tensor]))
        described = Pieces.of(tensors, rows, self._ranks.rank)
        facts = {**msgspec.structs.asdict(model), "dtype": served, "tp": tp_ranks}
        return model, tensors, Roster({key: repr(value) for key, value in facts.items()}, described.encode())


def _boxes(storage: int, parameter: torch.Tensor, run: Run, spec: TensorSpec) -> Iterator[Piece]:
    for index in range(run.count):
        row, local = run.served_row + index * run.served_step, run.local_row + index * run.local_step
        start, stop = (row, run.column), (row + run.rows, run.column + run.columns)
        axes = len(spec.shape)
        view = View(storage, local * parameter.stride(0), tuple(parameter.stride()))
        yield Piece(spec.name, Box(start[:axes], stop[:axes]), str(parameter.dtype).removeprefix("torch."), view)


def _chunks_of(chunks: nn.Module | Sequence[nn.Module]) -> Sequence[nn.Module]:
    return [chunks] if isinstance(chunks, nn.Module) else chunks


def _layers_of(module: nn.Module) -> Iterator[nn.Module]:
    """The module, what it wraps, and so on: DistributedDataParallel and Float16Module call that `module`."""
    yield module
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
        yield module


def _unwrap(module: nn.Module) -> nn.Module:
    """The GPTModel inside its wrappers."""
    *_, innermost = _layers_of(module)
    return innermost


def _lagging_wrappers(module: nn.Module) -> list[_LaggingWrapper]:
    """The wrappers that gather new parameters as late as in the next forward pass."""
    return [
        cast("_LaggingWrapper", layer)
        for layer in _layers_of(module)
        if getattr(getattr(layer, "ddp_config", None), "overlap_param_gather", False)
    ]


def _parameters_of(chunk: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter that is served, by its global name. Raises `UnknownParameter` for any other."""
    tied = bool(getattr(chunk, "share_embeddings_and_output_weights", False))
    for local, parameter in chunk.named_parameters():
        name = _global_name(chunk, local)
        if tied and name == "output_layer.weight":
            continue  # the last stage's duplicate of the embedding, kept equal by megatron's own all-reduce
        _check_parameter(name, parameter)
        yield name, parameter
    persistent = chunk.state_dict(keep_vars=True)
    for local, buffer in chunk.named_buffers():
        if local in persistent:
            name = _global_name(chunk, local)
            raise UnknownParameter(name, buffer.shape, "a persistent buffer", advice_for(name))


def _check_parameter(name: str, parameter: torch.Tensor) -> None:
    if rule_for(name) is None:
        raise UnknownParameter(name, parameter.shape, _attributes(parameter), advice_for(name))
    if type(parameter) is not nn.Parameter:
        advice = "only plain tensors are read: train without FSDP and without quantised parameters"
        raise UnknownParameter(name, parameter.shape, f"a {type(parameter).__name__}, {_attributes(parameter)}", advice)


def _attributes(parameter: torch.Tensor) -> str:
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce", "shared")
    marks = [f"{name}={getattr(parameter, name)}" for name in names if hasattr(parameter, name)]
    return ", ".join([str(parameter.dtype), *marks])


def _global_name(chunk: nn.Module, local: str) -> str:
    """Layers are numbered from 0 in every chunk; only the layer itself knows its place in the model, counted from 1."""
    match = _LAYER.match(local)
    if match is None:
        return local
    layer = chunk.get_submodule(match[0].removesuffix("."))
    number = getattr(layer, "layer_number", None)
    if not isinstance(number, int):
        raise UnsupportedModel(
            f"{match[0]!r} ({type(layer).__name__}) has no layer_number: a Megatron-core decoder has"
        )
    return f"decoder.layers.{number - 1}.{local[match.end() :]}"


def _tensor_parallel(chunk: nn.Module) -> tuple[int, int]:
    group = getattr(getattr(chunk, "pg_collection", None), "tp", None)
    if not isinstance(group, dist.ProcessGroup):
        # Imported here: only models built before process group collections need it.
        from megatron.core import parallel_state  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

        group = cast("dist.ProcessGroup", parallel_state.get_tensor_model_parallel_group())
    return dist.get_rank(group), dist.get_world_size(group)


class _Expectation(msgspec.Struct, frozen=True):
    """A field of the trained model's config, the value it must have, and why."""

    field: str
    expected: object
    why: str


_MEANING: Final = (
    _Expectation("num_moe_experts", None, "mixtures of experts are not served yet"),
    _Expectation("multi_latent_attention", False, "latent attention is not served yet"),
    _Expectation("mtp_num_layers", None, "multi-token prediction layers are not served yet"),
    _Expectation("gated_linear_unit", True, "the served families have gated MLPs"),
    _Expectation("normalization", "RMSNorm", "the served families have RMSNorm"),
    _Expectation("layernorm_zero_centered_gamma", False, "the served norms are not centred on zero"),
    _Expectation("rotary_interleaved", False, "the served families rotate halves, not pairs"),
    _Expectation("attention_output_gate", False, "the served families have no attention output gate"),
    _Expectation("qk_l2_norm", False, "the served families have RMSNorm, if any, on q and k"),
    _Expectation("gtp_weight_remat_size", 1, "weights cut along this further axis are not read yet"),
)
"""Features that change what the weights mean, or where they are, without a trace in names and shapes."""


def _check_chunk(chunk: _Chunk, model: Dense) -> None:
    for wanted in _MEANING:
        found = getattr(chunk.config, wanted.field, wanted.expected)
        if (found or None) != (wanted.expected or None):
            raise UnsupportedModel(
                f"the trained model has {wanted.field}={found!r}, {wanted.expected!r} is expected: {wanted.why}"
            )
    agreed = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_query_groups": model.groups,
        "kv_channels": model.head_dim,
        "layernorm_epsilon": model.eps,
        "qk_layernorm": model.qk_norm,
    }
    for field, expected in agreed.items():
        if (found := getattr(chunk.config, field, expected)) != expected:
            raise LayoutMismatch(
                f"the trained model has {field}={found!r}, the Hugging Face config gives {expected!r}: "
                f"build the source with the config of the model that is being trained"
            )
    if chunk.share_embeddings_and_output_weights != model.tied:
        raise LayoutMismatch(
            f"the trained model has share_embeddings_and_output_weights={chunk.share_embeddings_and_output_weights}, "
            f"the Hugging Face config tie_word_embeddings={model.tied}: make them equal"
        )


def _served_dtype(wanted: torch.dtype | None, model: Dense, parameters: Sequence[torch.Tensor]) -> str:
    if wanted is not None:
        name = str(wanted).removeprefix("torch.")
        if name not in DTYPES:
            raise UnsupportedModel(f"dtype {wanted} cannot travel; these can: {', '.join(DTYPES)}")
        return name
    if model.dtype is not None:
        return model.dtype
    found = {str(parameter.dtype).removeprefix("torch.") for parameter in parameters}
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
