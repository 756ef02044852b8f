"""What one rank of a Megatron-core model holds, as pieces of the served model. Speaks with no other rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import msgspec
import torch
from torch import nn

from weightbus.dataplane.tensors import Shard, Shards, TensorSpec

from ...source import LayoutMismatch, UnsupportedModel, check_served
from ..parameter_identity import ParameterIdentity
from ..rank_layout import PipelineStage
from .hf_model import Model, served_tensors
from .model_chunks import Chunk, chunks_of
from .parameter_mapping import Fusion, LocalParameter, pieces_of
from .parameter_names import Found
from .vocabulary_padding import check_padding


class Description(NamedTuple):
    """One rank's part of a served model."""

    model: Model
    tensors: tuple[TensorSpec, ...]
    """All of the model's, in the order of its layers: the same on every rank."""
    pieces: Shards
    """What this rank holds of them; a storage is an index of `parameters`."""
    parameters: tuple[torch.Tensor, ...]
    facts: dict[str, str]
    """What must be the same on every rank."""
    kept: ParameterIdentity
    """Whether the chunks still hold `parameters`."""
    stages: tuple[PipelineStage, ...]
    """Which layers the rank holds, chunk by chunk."""


def describe(
    model_chunks: nn.Module | Sequence[nn.Module],
    hf_config: Path | str | Mapping[str, object],
    dtype: torch.dtype | None,
    holder: int,
    *,
    vocab_divisible_by: int | None = None,
) -> Description:
    """Find and check every parameter of a rank. Raises `SourceError` for whatever cannot be served."""
    described = Model.parse(_read_config(hf_config))
    chunks = [Chunk(chunk, described) for chunk in chunks_of(model_chunks)]
    if not chunks:
        raise UnsupportedModel("no model chunks: pass the model of this rank")
    model = chunks[0].model
    held = [(chunk, found, parameter) for chunk in chunks for found, parameter in chunk.parameters()]
    _check_once(held)
    parameters = tuple(parameter for _, _, parameter in held)
    served = _served_dtype(dtype, model, parameters)
    tensors = served_tensors(model, served)
    rows: list[Shard] = []
    for storage, (chunk, found, parameter) in enumerate(held):
        if found.rule.fusion is Fusion.VOCABULARY:
            rows_of_all = parameter.shape[0] * chunk.groups.tensor.ranks
            check_padding(found.name, rows_of_all, model.sizes["vocab"], chunk.groups.tensor.ranks, vocab_divisible_by)
        rows.extend(_pieces(chunk, found, _local(found.name, storage, parameter), served))
    groups = chunks[0].groups
    facts: dict[str, object] = {
        **msgspec.structs.asdict(model),
        "dtype": served,
        "tp": groups.tensor.ranks,
        "etp": groups.expert_tensor.ranks,
        "ep": groups.expert.ranks,
        "pp": groups.pipeline.ranks,
    }
    described_facts = {key: repr(value) for key, value in facts.items()}
    pieces = Shards.of(tensors, rows, holder)
    stages = tuple(chunk.stage(index) for index, chunk in enumerate(chunks))
    return Description(
        model, tensors, pieces, parameters, described_facts, ParameterIdentity(lambda: _now(chunks)), stages
    )


def _check_once(held: Sequence[tuple[Chunk, Found, torch.Tensor]]) -> None:
    """Raise `LayoutMismatch` for two parameters of this rank that would be one served tensor.

    Of replicas one is read, and these are none. A parameter of the same name in another chunk is one: the embedding,
    where a later chunk of the rank predicts further tokens.
    """
    seen: dict[tuple[str, str, int | None], tuple[Chunk, str]] = {}
    for chunk, found, _ in held:
        served = found.rule.served[0].name
        at = (found.prefix, served, found.expert)
        if at in seen and (seen[at][0] is chunk or seen[at][1] != found.name):
            raise LayoutMismatch(
                f"both {seen[at][1]!r} and {found.name!r} would be served as {found.prefix + served!r}: remove the one "
                f"that the model does not compute with"
            )
        seen[at] = (chunk, found.name)


def _now(chunks: Sequence[Chunk]) -> dict[str, torch.Tensor]:
    """What `Description.parameters` are now, by Megatron's names; chunks of one rank have the same ones."""
    several = len(chunks) > 1
    return {
        f"chunk {index}: {name}" if several else name: tensor
        for index, chunk in enumerate(chunks)
        for name, tensor in chunk.read()
    }


def _pieces(chunk: Chunk, place: Found, local: LocalParameter, dtype: str) -> list[Shard]:
    """What one parameter of a chunk holds of the served tensors."""
    model = chunk.model
    targets = place.rule.served
    specs = [model.spec(target, place.prefix, dtype, place.expert) for target in targets]
    shifts = [model.shift_of(target, zero_centred=chunk.zero_centred) for target in targets]
    share = chunk.groups.tensor if place.expert is None else chunk.groups.expert_tensor
    return list(pieces_of(place.rule, local, specs, shifts, heads=model.heads, share=share))


def _local(name: str, storage: int, parameter: torch.Tensor) -> LocalParameter:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return LocalParameter(name, storage, tuple(parameter.shape), tuple(parameter.stride()), dtype)


def _served_dtype(wanted: torch.dtype | None, model: Model, parameters: Sequence[torch.Tensor]) -> str:
    if wanted is not None:
        name = str(wanted).removeprefix("torch.")
        check_served(name, "dtype=")
        return name
    if model.dtype is not None:
        return model.dtype
    found = {str(each.dtype).removeprefix("torch.") for each in parameters if isinstance(each, nn.Parameter)}
    if len(found) != 1:
        raise LayoutMismatch(f"the parameters have dtypes {sorted(found)} and the config names none: pass dtype=")
    return found.pop()


def folder_of(config: Path | str) -> Path:
    """Where the checkpoint of a config is: the folder itself, or that of its ``config.json``."""
    path = Path(config)
    return path if path.is_dir() else path.parent


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
