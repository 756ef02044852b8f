"""Reads the chunks of a Megatron-core model on one rank: wrappers, groups, layers, parameters.

Groups are read from the model itself; Megatron's global state is read only for a model that carries no groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol, cast

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from ...assembly import unreadable_reason
from ...source import LayoutMismatch, UnknownParameter, UnsupportedModel
from ..rank_layout import PipelineStage
from .config_checks import check_axes, check_config, check_tied
from .hf_model import HFModel
from .layer_order import check_numbers, check_part
from .parameter_mapping import ParallelRank
from .parameter_names import TRAINING_ONLY, ParameterMatch, advice_for, match_parameter

NOT_READ: Final = ("gtp_remat", "expt_gtp_remat")
"""Groups along which weights are cut further, since Megatron-core 0.19."""

_EMBEDDING: Final = "embedding.word_embeddings.weight"
_OUTPUT: Final = "output_layer.weight"

_ATTENTION_SYMBOLS: Final = "*G+D"
_MLP_SYMBOLS: Final = "-E"


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
        inner = getattr(self._outer, inside, self._outer) if inside else self._outer
        self._module = cast("nn.Module", inner)
        config: object = getattr(self._module, "config", None)
        predicted = getattr(config, "mtp_num_layers", None) or 0
        if predicted not in {0, model.predictions}:
            raise LayoutMismatch(
                f"the trained model has mtp_num_layers={predicted}, the Hugging Face config has {model.predictions}: "
                f"train as many as are served, or none"
            )
        # Prediction layers that are not trained are not served: engines keep their own.
        self._model = msgspec.structs.replace(model, predictions=predicted)
        check_config(config, model)
        check_tied(bool(getattr(self._module, "share_embeddings_and_output_weights", False)), model)
        self._served_layers = self._layers(config)
        self.zero_centred = bool(getattr(config, "layernorm_zero_centered_gamma", False))
        self.groups = _groups(self._module, model)
        self._buffers: set[str] = set()
        self._numbers = self._numbered("decoder")
        check_numbers(self._numbers)

    @property
    def model(self) -> HFModel:
        """The Hugging Face model, with as many prediction layers as are trained."""
        return self._model

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
                advice = "only plain tensors are read: train without FSDP and without quantized parameters"
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
        tied = "tied" in self._model.switches
        for name, parameter in self._module.named_parameters():
            if tied and name == _OUTPUT:
                continue  # the last stage's duplicate of the embedding, kept equal by megatron's own all-reduce
            yield name, parameter

    def _find(self, name: str, tensor: torch.Tensor, detail: str) -> ParameterMatch:
        found = match_parameter(name, self._model, self._layer, self._expert, self._prediction)
        if found is None:
            shown = _with_layer(name, self._layer)
            raise UnknownParameter(shown, tensor.shape, detail, advice_for(name, self._model))
        return found

    def _check_left_out(self) -> None:
        """Raise `UnknownParameter` for one beside the language model that the family's table does not leave out."""
        if self._module is self._outer:
            return
        family = self._model.family
        for name, parameter in self._outer.named_parameters():
            if not name.startswith((family.megatron_prefix, *family.left_out)):
                advice = f"neither {family.megatron_prefix!r} nor left out by name ({', '.join(family.left_out)})"
                raise UnknownParameter(name, parameter.shape, _attributes(parameter), advice)

    def _check_output(self) -> None:
        """Raise `LayoutMismatch` when a tied model has another output layer on its first stage.

        Megatron itself keeps the copy of a later stage equal.
        """
        module = self._module
        if "tied" not in self._model.switches or not getattr(module, "pre_process", True):
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
        return share.rank * (self._model.sizes["experts"] // share.ranks) + local

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
        trained, served = getattr(config, "num_layers", None), len(self._model.layers)
        if pattern is None:
            _check_layers(trained, served)
            return lambda number: number
        _check_layers(trained, 2 * served)
        _check_pattern(str(pattern), self._model)
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
