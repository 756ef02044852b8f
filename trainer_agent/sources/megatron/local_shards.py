"""Describes one rank's part of a Megatron-core model as shards of Hugging Face tensors. Calls no other rank."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
import torch
from torch import nn

from weightbus.dataplane.tensors import Shard, Shards

from ...source import LayoutMismatch, UnsupportedModel, check_dtype
from ..collective_source import RankShards
from ..parameter_identity import ParameterIdentity
from .config_checks import check_padding
from .hf_model import HFModel, hf_tensors
from .model_chunks import ModelChunk, chunks_of
from .parameter_mapping import Fusion, LocalParameter, shards_of
from .parameter_names import ParameterMatch


def describe_chunks(
    model_chunks: nn.Module | Sequence[nn.Module],
    hf_config: Path | str | Mapping[str, object],
    dtype: torch.dtype | None,
    holder: int,
    *,
    vocab_divisible_by: int | None = None,
) -> RankShards:
    """Find and check every parameter of a rank. Raises a `SourceError` for a parameter that cannot be served."""
    described = HFModel.parse(_read_config(hf_config))
    chunks = [ModelChunk(chunk, described) for chunk in chunks_of(model_chunks)]
    if not chunks:
        raise UnsupportedModel("no model chunks: pass the model of this rank")
    model = chunks[0].model
    matched = [(chunk, found, parameter) for chunk in chunks for found, parameter in chunk.parameters()]
    _check_once(matched)
    parameters = tuple(parameter for _, _, parameter in matched)
    served = _served_dtype(dtype, model, parameters)
    tensors = hf_tensors(model, served)
    rows: list[Shard] = []
    for storage, (chunk, found, parameter) in enumerate(matched):
        if found.rule.fusion is Fusion.VOCABULARY:
            rows_of_all = parameter.shape[0] * chunk.groups.tensor.ranks
            check_padding(found.name, rows_of_all, model.sizes["vocab"], chunk.groups.tensor.ranks, vocab_divisible_by)
        rows.extend(_shards(chunk, found, _local(found.name, storage, parameter), served))
    groups = chunks[0].groups
    facts: dict[str, object] = {
        **msgspec.structs.asdict(model),
        "dtype": served,
        "tp": groups.tensor.ranks,
        "etp": groups.expert_tensor.ranks,
        "ep": groups.expert.ranks,
        "pp": groups.pipeline.ranks,
    }
    return RankShards(
        model=model.architecture,
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


def _shards(chunk: ModelChunk, place: ParameterMatch, local: LocalParameter, dtype: str) -> list[Shard]:
    """Shards of Hugging Face tensors in one parameter of a chunk."""
    model = chunk.model
    targets = place.rule.targets
    specs = [model.spec(target, place.prefix, dtype, place.expert) for target in targets]
    shifts = [model.shift_of(target, zero_centred=chunk.zero_centred) for target in targets]
    share = chunk.groups.tensor if place.expert is None else chunk.groups.expert_tensor
    return list(shards_of(place.rule, local, specs, shifts, heads=model.heads, share=share))


def _local(name: str, storage: int, parameter: torch.Tensor) -> LocalParameter:
    dtype = str(parameter.dtype).removeprefix("torch.")
    return LocalParameter(name, storage, tuple(parameter.shape), tuple(parameter.stride()), dtype)


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


def folder_of(config: Path | str) -> Path:
    """Folder of a config's checkpoint: `config` itself, or the folder of its ``config.json``."""
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
