"""A `Source` over a Megatron-core model in training: tensor, expert, pipeline and virtual pipeline parallelism.

Construction raises on every rank for any of these: a parameter without a mapping rule, two parameters of one rank for
one Hugging Face tensor, an unknown axis of parallelism, layers out of order, a setting of the TransformerConfig that
changes the meaning of the weights and differs from the Hugging Face config (config_checks.py). Code of a trainer
outside of that config (its own modules, the rotation of grouped attention) leaves nothing to compare.

Only a layer's `layer_number` gives its position in the model; names count from 0 in every chunk. A layer with a wrong
number would be served as another one of the same shape, and no check of coverage could tell. But Megatron numbers the
layers of a chunk one after another, and chunks follow the pipeline in order: first all ranks' first chunks, then all
their second ones.

Copies of a parameter (data, context and expert data parallelism, tied embeddings of two pipeline stages, norms on every
tensor rank) are read from the lowest rank that holds them. Groups are read from the model itself; Megatron's global
state is read only for a model that carries no groups.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Protocol, Self, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weightbus.dataplane.errors import ManifestError
from weightbus.dataplane.tensors import Shard, Shards, stored_tensors

from ...assembly import DTYPES, unreadable_reason
from ...source import LayoutMismatch, RanksDisagree, SourceError, UnknownParameter, UnsupportedModel, check_dtype
from ..collective_source import (
    DEFAULT_TIMEOUT_S,
    ParameterIdentity,
    PipelineStage,
    RankGroup,
    RankLayout,
    RankShards,
    ShardedSource,
    distinct_shards,
)
from ..tensor_dtypes import TensorDtypes, has_files
from .bridge_mode import BridgedSource
from .config_checks import check_axes, check_config, check_padding, check_tied
from .hf_model import (
    TRAINING_ONLY,
    HFModel,
    ParameterMatch,
    advice_for,
    hf_tensors,
    match_parameter,
    named_architecture,
    untrained,
)
from .model_families import FAMILIES
from .parameter_mapping import Fusion, LocalParameter, ParallelRank, shards_of


class MegatronSource(ShardedSource):
    """The live weights of one Megatron-core model. Satisfies `PipelineSource`.

    Of a family without a table it is a `BridgedSource` (bridge_mode.py), which satisfies `Source` alone.
    """

    def __new__(
        cls,
        model_chunks: nn.Module | Sequence[nn.Module],
        *,
        hf_config: Path | str | Mapping[str, object],
        vocab_divisible_by: int | None = None,
        **options: Any,
    ) -> Self:
        """Choose by the family. Arguments are those of `__init__`, which is called for a family with a table."""
        del vocab_divisible_by  # Megatron-Bridge cuts the padding by the config
        architecture = _without_table(hf_config)
        if architecture is None:
            return super().__new__(cls)
        source = BridgedSource(chunks_of(model_chunks), architecture=architecture, served=_served(hf_config), **options)
        return cast("Self", source)  # to its callers a source like any other

    def __init__(  # pyright: ignore[reportInconsistentConstructor]  # it names the options of __new__
        self,
        model_chunks: nn.Module | Sequence[nn.Module],
        *,
        hf_config: Path | str | Mapping[str, object],
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        vocab_divisible_by: int | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Agree with every rank of `group` (default: all) on the tensors that are served. Collective over `group`.

        Args:
            model_chunks: this rank's model, or its virtual pipeline chunks, wrapped or not.
            hf_config: the served checkpoint's config: a folder, a ``config.json`` or its content.
            dtype: dtype that is served; by default the config's, or the parameters' own if it names none. Tensors that
                the safetensors files beside the config keep in another dtype than most are served in that.
            device: device of the buckets; by default that of the parameters. A GPU for parameters that the trainer
                keeps in host memory: they are packed there and uploaded by bucket.
            vocab_divisible_by: the trainer's ``make_vocab_size_divisible_by``, needed only where it is more than 128:
                rows of the embedding beyond the config's ``vocab_size`` are padding, and more than such a setting
                explains are refused. Where it is given, the padding must be exactly what it gives.
            group: the ranks of one model with all of its replicas. Of a part of the world it is used as it is, so
                it must carry CPU tensors (and CUDA tensors where the model is) and have a timeout of its own.
            timeout_s: seconds that any collective waits.

        Raises:
            SourceError: on every rank when any rank cannot serve; the first by rank is named on the others.
        """
        super().__init__(RankGroup(group, timeout_s))
        with self._closing_when_refused():
            layouts, local = self._exchange_layouts(
                lambda: describe_chunks(
                    model_chunks, hf_config, dtype, self.rank, vocab_divisible_by=vocab_divisible_by
                )
            )
            check_order(layouts)
            distinct = distinct_shards(layouts, local.tensors)
            self._roots = roots_of(layouts, distinct)
        self._lagging = [lagging for chunk in chunks_of(model_chunks) for lagging in lagging_wrappers(chunk)]
        self.served: Path | Mapping[str, Any] = _served(hf_config)
        """The checkpoint that engines serve: its folder, or the content of its ``config.json``."""
        self._serve(local, distinct, device or local.parameters[0].device, self._roots)

    def roots(self) -> Sequence[int]:
        """First rank of the pipeline stage that each tensor is read from; see `PipelineSource.roots`."""
        return self._roots

    def _settle_parameters(self) -> None:
        """Check the parameters, then gather what the optimizer left to the next forward pass. Collective.

        With overlapped parameter gathers a replica holds, after a step, only its own share of the new parameters.
        """
        super()._settle_parameters()
        for wrapper in self._lagging:
            wrapper.start_param_sync(force_sync=True)


def _without_table(config: Path | str | Mapping[str, object]) -> str | None:
    """Architecture of a config, where no family table has it; None too for a config that names none."""
    try:
        named = named_architecture(_read_config(config))
    except SourceError:
        return None  # said on every rank by the source itself
    return named if named not in FAMILIES else None


def _served(config: Path | str | Mapping[str, object]) -> Path | Mapping[str, Any]:
    return config if isinstance(config, Mapping) else folder_of(config)


def folder_of(config: Path | str) -> Path:
    """Folder of a config's checkpoint: `config` itself, or the folder of its ``config.json``."""
    path = Path(config)
    return path if path.is_dir() else path.parent


def describe_chunks(
    model_chunks: nn.Module | Sequence[nn.Module],
    hf_config: Path | str | Mapping[str, object],
    dtype: torch.dtype | None,
    holder: int,
    *,
    vocab_divisible_by: int | None = None,
) -> RankShards:
    """Find and check every parameter of a rank. Raises a `SourceError` for a parameter that cannot be served."""
    stored = stored_names(hf_config)
    described = HFModel.parse(_read_config(hf_config), stored)
    chunks = [ModelChunk(chunk, described) for chunk in chunks_of(model_chunks)]
    if not chunks:
        raise UnsupportedModel("no model chunks: pass the model of this rank")
    model = chunks[0].model
    matched = [(chunk, found, parameter) for chunk in chunks for found, parameter in chunk.parameters()]
    _check_once(matched)
    parameters = tuple(parameter for _, _, parameter in matched)
    served = _served_dtype(dtype, model, parameters)
    dtypes = TensorDtypes(dtype or DTYPES[served], _checkpoint(hf_config))
    tensors = tuple(
        msgspec.structs.replace(spec, dtype=dtypes.of(spec.name, spec.dtype)) for spec in hf_tensors(model, served)
    )
    rows: list[Shard] = []
    for storage, (chunk, found, parameter) in enumerate(matched):
        if found.rule.fusion is Fusion.VOCABULARY:
            rows_of_all = parameter.shape[0] * chunk.groups.tensor.ranks
            check_padding(found.name, rows_of_all, model.sizes["vocab"], chunk.groups.tensor.ranks, vocab_divisible_by)
        rows.extend(_shards(chunk, found, storage, parameter, served))
    groups = chunks[0].groups
    facts: dict[str, object] = {
        **msgspec.structs.asdict(model),
        "dtype": served,
        "dtypes of tensors": sha256(repr([spec.dtype for spec in tensors]).encode()).hexdigest()[:16],
        "tp": groups.tensor.ranks,
        "etp": groups.expert_tensor.ranks,
        "ep": groups.expert.ranks,
        "pp": groups.pipeline.ranks,
    }
    return RankShards(
        model=model.architecture,
        left=() if stored else untrained(described, (spec.name for spec in tensors)),
        tensors=tensors,
        shards=Shards.of(tensors, rows, holder),
        parameters=parameters,
        facts=lambda: {key: repr(value) for key, value in facts.items()},
        identity=ParameterIdentity(lambda: _read(chunks)),
        head_dim=model.sizes["head_dim"],
        stages=tuple(chunk.stage(index) for index, chunk in enumerate(chunks)),
    )


def _check_once(matched: Sequence[tuple[ModelChunk, ParameterMatch, torch.Tensor]]) -> None:
    """Raise `LayoutMismatch` for two parameters of this rank that map to one Hugging Face tensor.

    Two parameters of the same name in different chunks are allowed, because they are replicas: the embedding, where a
    later chunk of the rank predicts further tokens.
    """
    seen: dict[tuple[str, str, int | None], tuple[ModelChunk, str]] = {}
    for chunk, found, _ in matched:
        served = found.rule.targets[0].name
        at = (found.prefix, served, found.expert)
        if at in seen and (seen[at][0] is chunk or seen[at][1] != found.name):
            raise LayoutMismatch(
                f"both {seen[at][1]!r} and {found.name!r} would be served as {found.prefix + served!r}: remove the one "
                f"that the model does not compute with"
            )
        seen[at] = (chunk, found.name)


def _read(chunks: Sequence[ModelChunk]) -> dict[str, torch.Tensor]:
    """The parameters as they are now, by Megatron's names, which chunks of one rank share."""
    several = len(chunks) > 1
    return {
        f"chunk {index}: {name}" if several else name: tensor
        for index, chunk in enumerate(chunks)
        for name, tensor in chunk.read()
    }


def _shards(
    chunk: ModelChunk, place: ParameterMatch, storage: int, parameter: torch.Tensor, dtype: str
) -> Iterator[Shard]:
    """Shards of Hugging Face tensors in one parameter of a chunk."""
    kept = str(parameter.dtype).removeprefix("torch.")
    local = LocalParameter(place.name, storage, tuple(parameter.shape), tuple(parameter.stride()), kept)
    model, targets = chunk.model, place.rule.targets
    specs = [model.spec(target, place.prefix, dtype, place.expert) for target in targets]
    shifts = [model.shift_of(target, zero_centred=chunk.zero_centred) for target in targets]
    share = chunk.groups.tensor if place.expert is None else chunk.groups.expert_tensor
    return shards_of(place.rule, local, specs, shifts, sizes=model.sizes, share=share, expert=place.expert)


def _served_dtype(wanted: torch.dtype | None, model: HFModel, parameters: Sequence[torch.Tensor]) -> str:
    if wanted is not None:
        name = str(wanted).removeprefix("torch.")
        check_dtype(name, "dtype=")
        return name
    if model.dtype is not None:
        return model.dtype
    found = {str(each.dtype).removeprefix("torch.") for each in parameters if isinstance(each, nn.Parameter)}
    if len(found) != 1:
        raise LayoutMismatch(f"the parameters have dtypes {sorted(found)} and the config names none: pass dtype=")
    return found.pop()


def _checkpoint(config: Path | str | Mapping[str, object]) -> Path | None:
    """The folder of the served checkpoint, where its files are beside its config."""
    if isinstance(config, Mapping):
        return None
    folder = folder_of(config)
    return folder if has_files(folder) else None


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


def stored_names(source: Path | str | Mapping[str, object]) -> Collection[str]:
    """Names of the tensors in the checkpoint of a config; none where only the config is at hand."""
    if isinstance(source, Mapping):
        return ()
    try:
        return stored_tensors(folder_of(source)).keys()
    except ManifestError as error:
        raise LayoutMismatch(str(error)) from error


def roots_of(layouts: Sequence[RankLayout], shards: Shards) -> tuple[int, ...]:
    """First rank of the pipeline stage that each tensor of `shards` is read from; `shards` hold every element once.

    The stage is that of the lowest holder: replicas in other stages, such as tied embeddings, are not read.
    """
    first: dict[int, int] = {}
    stages = [layout.stages[0].pipeline_rank if layout.stages else 0 for layout in layouts]
    for rank, stage in enumerate(stages):
        first.setdefault(stage, rank)
    lowest = np.full(len(shards.tensors), len(layouts), np.int64)
    np.minimum.at(lowest, shards.boxes.space, shards.rank)
    holders: list[int] = lowest.tolist()
    return tuple(first[stages[holder]] for holder in holders)


def check_order(layouts: Sequence[RankLayout]) -> None:
    """Raise `RanksDisagree` unless the stages of all ranks follow each other along the pipeline.

    Ranks of one stage, which are replicas or shards of each other, must hold the same layers.
    """
    holders: dict[tuple[int, int], tuple[int, PipelineStage]] = {}
    for rank, layout in enumerate(layouts):
        for stage in layout.stages:
            first, known = holders.setdefault((stage.chunk, stage.pipeline_rank), (rank, stage))
            if known != stage:
                raise RanksDisagree(
                    f"{_shown(stage, rank)}; rank {first}, which is in the same place, {_layers(known)}: {_ADVICE}"
                )
    following = 1
    for _, (rank, stage) in sorted(holders.items()):
        if stage.count and stage.first != following:
            raise RanksDisagree(
                f"{_shown(stage, rank)}; layer {following} is expected to be its first, because the stages before it "
                f"hold {following - 1} layers: {_ADVICE}"
            )
        following += stage.count


def _shown(stage: PipelineStage, rank: int) -> str:
    return f"rank {rank}, at place {stage.pipeline_rank} of the pipeline with its chunk {stage.chunk}, {_layers(stage)}"


def _layers(stage: PipelineStage) -> str:
    return f"holds layers {stage.first} to {stage.first + stage.count - 1}" if stage.count else "holds no layers"


NOT_READ: Final = ("gtp_remat", "expt_gtp_remat")
"""Groups along which weights are cut further, since Megatron-core 0.19."""
_EMBEDDING: Final = "embedding.word_embeddings.weight"
_OUTPUT: Final = "output_layer.weight"
_ATTENTION_SYMBOLS: Final = "*G+D"
_MLP_SYMBOLS: Final = "-E"
_ADVICE: Final = "build the model with its own specs and stages, and change no layer_number afterwards"


class LaggingWrapper(Protocol):
    """The method of a DistributedDataParallel with overlapped parameter gathers that is called."""

    def start_param_sync(self, *, force_sync: bool) -> None:
        """Gather the parameters that the optimizer left for later."""
        ...


class ParallelGroups(msgspec.Struct, frozen=True):
    """This rank's place in the parallel groups."""

    tensor: ParallelRank
    expert_tensor: ParallelRank
    expert: ParallelRank
    pipeline: ParallelRank


def chunks_of(chunks: nn.Module | Sequence[nn.Module]) -> Sequence[nn.Module]:
    """The model of a rank as a list of its chunks."""
    return [chunks] if isinstance(chunks, nn.Module) else chunks


def lagging_wrappers(chunk: nn.Module) -> list[LaggingWrapper]:
    """The wrappers that gather new parameters as late as in the next forward pass."""
    return [
        cast("LaggingWrapper", layer)
        for layer in _wrappers(chunk)
        if getattr(getattr(layer, "ddp_config", None), "overlap_param_gather", False)
    ]


class ModelChunk:
    """One chunk: its parameters, matched with mapping rules."""

    def __init__(self, wrapped: nn.Module, model: HFModel) -> None:
        """Raises `UnsupportedModel` or `LayoutMismatch` for a model that is not the served one."""
        *_, self._outer = _wrappers(wrapped)
        inside = model.family.megatron_prefix.removesuffix(".")
        inner: object = self._outer
        for part in inside.split(".") if inside else ():
            inner = getattr(inner, part, None)
        # The language model may be trained by itself.
        self._module = inner if isinstance(inner, nn.Module) else self._outer
        config: object = getattr(self._module, "config", None)
        predicted = getattr(config, "mtp_num_layers", None) or 0
        if predicted not in {0, model.predictions}:
            raise LayoutMismatch(
                f"the trained model has mtp_num_layers={predicted}, the Hugging Face config has {model.predictions}: "
                f"train as many as are served, or none"
            )
        # Prediction layers that are not trained are not served: engines keep their own.
        self.model = msgspec.structs.replace(model, predictions=predicted)
        """The Hugging Face model, with as many prediction layers as are trained."""
        check_config(config, model)
        check_tied(bool(getattr(self._module, "share_embeddings_and_output_weights", False)), model)
        self._served_layers = self._layers(config)
        self.zero_centred = bool(getattr(config, "layernorm_zero_centered_gamma", False))
        self.groups = _groups(self._module, model)
        self._buffers: set[str] = set()
        self._numbers = self._numbered("decoder")
        check_numbers(self._numbers)

    def stage(self, index: int) -> PipelineStage:
        """The chunk's layers. `index` is the chunk's position on its rank, used when the chunk has no `vp_stage`."""
        chunk: object = getattr(self._module, "vp_stage", None)
        first = self._numbers[0] if self._numbers else 0
        at = chunk if isinstance(chunk, int) else index
        return PipelineStage(at, self.groups.pipeline.rank, first, len(self._numbers))

    def parameters(self) -> Iterator[tuple[ParameterMatch, torch.Tensor]]:
        """Every parameter and buffer that is served, with its rule. Raises `UnknownParameter` for any other."""
        self._check_left_out()
        self._check_output()
        for name, parameter in self._trained():
            found = self._find(name, parameter, _attributes(parameter))
            if type(parameter) is not nn.Parameter:
                advice = unreadable_reason(parameter, rounded=True) or "only plain tensors are read"
                if isinstance(parameter, DTensor):
                    advice = "only plain tensors are read: train without FSDP, or through ExportedSource"
                kind = f"a {type(parameter).__name__}, {_attributes(parameter)}"
                raise UnknownParameter(found.name, parameter.shape, kind, advice)
            if advice := unreadable_reason(parameter, rounded=True):
                raise UnknownParameter(found.name, parameter.shape, _attributes(parameter), advice)
            yield found, parameter
        persistent = self._module.state_dict(keep_vars=True)
        for name, buffer in self._module.named_buffers():
            if name in persistent and not name.endswith(TRAINING_ONLY):
                self._buffers.add(name)
                yield self._find(name, buffer, "a persistent buffer"), buffer

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of `parameters` as they are now, with any parameter added since. No checks."""
        yield from self._trained()
        yield from ((name, buffer) for name, buffer in self._module.named_buffers() if name in self._buffers)

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        tied = "tied" in self.model.switches
        for name, parameter in self._module.named_parameters():
            if tied and name == _OUTPUT:
                continue  # the last stage's duplicate of the embedding, kept equal by megatron's own all-reduce
            yield name, parameter

    def _find(self, name: str, tensor: torch.Tensor, detail: str) -> ParameterMatch:
        found = match_parameter(name, self.model, self._layer, self._expert, self._prediction)
        if found is None:
            shown = _with_layer(name, self._layer)
            raise UnknownParameter(shown, tensor.shape, detail, advice_for(name, self.model))
        return found

    def _check_left_out(self) -> None:
        """Raise `UnknownParameter` for one beside the language model that the family's table does not leave out."""
        if self._module is self._outer:
            return
        family = self.model.family
        for name, parameter in self._outer.named_parameters():
            if not name.startswith((family.megatron_prefix, *family.left_out)):
                advice = f"neither {family.megatron_prefix!r} nor left out by name ({', '.join(family.left_out)})"
                raise UnknownParameter(name, parameter.shape, _attributes(parameter), advice)

    def _check_output(self) -> None:
        """Raise `LayoutMismatch` when a tied model has another output layer on its first stage.

        Megatron itself keeps the copy of a later stage equal.
        """
        module = self._module
        if "tied" not in self.model.switches or not getattr(module, "pre_process", True):
            return
        named = dict(module.named_parameters(remove_duplicate=False))
        first, output = named.get(_EMBEDDING), named.get(_OUTPUT)
        if first is None or output is None or output is first:
            return
        if output.shape != first.shape or output.data_ptr() != first.data_ptr():
            raise LayoutMismatch(
                f"the Hugging Face config ties {_OUTPUT!r} to {_EMBEDDING!r}, the trained model has two tensors: make "
                f"them one parameter, or train with share_embeddings_and_output_weights=False and serve such a config"
            )

    def _expert(self, local: int) -> int:
        share = self.groups.expert
        return share.rank * (self.model.sizes["experts"] // share.ranks) + local

    def _layer(self, local: int) -> int:
        """Global index of a layer: names count from 0 in every chunk, `layer_number` from 1 over the model."""
        return self._served_layers(self._numbers[local] - 1)

    def _prediction(self, local: int) -> int:
        """Global index of a prediction layer: these may be spread over stages, too."""
        number: object = getattr(self._module.get_submodule(f"mtp.layers.{local}"), "layer_number", None)
        return number - 1 if isinstance(number, int) else local

    def _numbered(self, block: str) -> list[int]:
        """`layer_number` of each layer, checked against that of its attention and MLP."""
        layers = getattr(getattr(self._module, block, None), "layers", ())
        numbers: list[int] = []
        for local, layer in enumerate(cast("Iterable[nn.Module]", layers)):
            number = getattr(layer, "layer_number", None)
            if not isinstance(number, int):
                raise UnsupportedModel(
                    f"layer {local} ({type(layer).__name__}) has no layer_number: a Megatron-core decoder has"
                )
            for part, inner in layer.named_children():
                check_part(f"{block}.layers.{local}", number, part, getattr(inner, "layer_number", number))
            numbers.append(number)
        return numbers

    def _layers(self, config: object) -> Callable[[int], int]:
        """The mapping from Megatron's layers to Hugging Face layers; two layers of a HybridModel make one."""
        pattern = getattr(self._module, "hybrid_layer_pattern", None)
        trained, served = getattr(config, "num_layers", None), len(self.model.layers)
        if pattern is None:
            _check_layers(trained, served)
            return lambda number: number
        _check_layers(trained, 2 * served)
        _check_pattern(str(pattern), self.model)
        return lambda number: number // 2


def _check_layers(trained: object, expected: int) -> None:
    if trained not in {None, expected}:
        raise LayoutMismatch(
            f"the trained model has num_layers={trained}, the Hugging Face config gives {expected}: "
            f"build the source with the config of the model that is being trained"
        )


def _check_pattern(pattern: str, model: HFModel) -> None:
    """A hybrid model must alternate an attention block and an MLP block, of the kinds that the served layers have."""
    blocks = pattern.split("/", maxsplit=1)[0].replace("|", "")
    for number, symbol in enumerate(blocks):
        known = _MLP_SYMBOLS if number % 2 else _ATTENTION_SYMBOLS
        layer = model.layers[number // 2] if number // 2 < len(model.layers) else None
        if layer is None or symbol not in known:
            raise UnsupportedModel(
                f"hybrid_layer_pattern={pattern!r}: block {number} is {symbol!r}, one of {known!r} is expected "
                f"for {len(model.layers)} layers of attention and MLP in turn"
            )
        if (layer.experts if number % 2 else layer.linear) != (symbol in "EG"):
            raise LayoutMismatch(
                f"hybrid_layer_pattern={pattern!r}: block {number} is {symbol!r}, the Hugging Face config has a layer "
                f"{number // 2} of another kind: build the source with the config of the model that is being trained"
            )


def _wrappers(module: nn.Module) -> Iterator[nn.Module]:
    """The module, what it wraps, and so on: DistributedDataParallel and Float16Module call that `module`."""
    yield module
    while isinstance(inner := getattr(module, "module", None), nn.Module):
        module = inner
        yield module


def _groups(module: nn.Module, model: HFModel) -> ParallelGroups:
    carried: object = getattr(module, "pg_collection", None)
    check_axes({axis: _size(getattr(carried, axis, None)) for axis in NOT_READ})
    experts = bool(model.family.experts)
    alone = ParallelRank(0, 1)
    return ParallelGroups(
        tensor=_share(carried, "tp", "get_tensor_model_parallel_group"),
        expert_tensor=_share(carried, "expt_tp", "get_expert_tensor_parallel_group") if experts else alone,
        expert=_share(carried, "ep", "get_expert_model_parallel_group") if experts else alone,
        pipeline=_share(carried, "pp", "get_pipeline_model_parallel_group"),
    )


def _size(group: object) -> int:
    return dist.get_world_size(group) if isinstance(group, dist.ProcessGroup) else 1


def _share(carried: object, name: str, accessor: str) -> ParallelRank:
    group: object = getattr(carried, name, None)
    if not isinstance(group, dist.ProcessGroup):
        # Imported here: only models built before process group collections need it.
        from megatron.core import parallel_state  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

        ask = cast("Mapping[str, Callable[[], dist.ProcessGroup]]", vars(parallel_state))
        group = ask[accessor]()
    return ParallelRank(dist.get_rank(group), _size(group))


def _with_layer(name: str, layer_of: Callable[[int], int]) -> str:
    parts = name.split(".")
    if name.startswith("decoder.layers.") and parts[2].isdigit():
        parts[2] = str(layer_of(int(parts[2])))
    return ".".join(parts)


def _attributes(parameter: torch.Tensor) -> str:
    names = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce", "shared")
    marks = [f"{name}={getattr(parameter, name)}" for name in names if hasattr(parameter, name)]
    return ", ".join([str(parameter.dtype), *marks])


def check_numbers(numbers: Sequence[int]) -> None:
    """Raise `LayoutMismatch` unless the layers of a chunk, in their places, are numbered one after another."""
    for at, number in enumerate(numbers):
        if number != numbers[0] + at:
            raise LayoutMismatch(
                f"decoder.layers.{at} has layer_number={number}, {numbers[0] + at} is expected where decoder.layers.0 "
                f"has {numbers[0]}: {_ADVICE}"
            )


def check_part(layer: str, number: int, part: str, found: int) -> None:
    """Raise `LayoutMismatch` unless a part of a layer, which is numbered too, has the layer's number."""
    if found != number:
        raise LayoutMismatch(f"{layer} has layer_number={number}, its {part} has {found}: {_ADVICE}")
