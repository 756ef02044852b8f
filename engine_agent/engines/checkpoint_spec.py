"""The tensors of the served model, read from the checkpoint that the server was launched with.

Two witnesses: the headers of its safetensors files, which name every tensor of any architecture, and for dense Qwen and
Llama models a table over config.json, for servers launched with random or otherwise stored weights. Only headers and
small JSON files are read, never weights.
"""

import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

import msgspec

from weightbus.dataplane.errors import ManifestError
from weightbus.dataplane.quantize import Quantization, UnknownScheme, schemes as quantization_config
from weightbus.dataplane.tensors import ITEM_BYTES, StoredTensor, stored_files, tensors_in_file

from ..errors import UnfitManifest

_DENSE: Final = frozenset({"Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM"})

_COMPUTED: Final = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
"""Buffers that older checkpoints store, and engines compute from the config (SGLang's loaders skip these names)."""
_CONFIG: Final = "config.json"
_INDEX: Final = "model.safetensors.index.json"

Shape = tuple[int, ...]
_Stamp: TypeAlias = tuple[str, int, int, int, int] | None


class Expected(msgspec.Struct, frozen=True):
    """The tensors that a complete set for the server has. Immutable, and shared by all callers."""

    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, str]
    """By tensor, as the checkpoint stores it; empty when only config.json was there."""
    dtype: str
    """Of the model as a whole, from config.json."""
    optional: frozenset[str]
    """May be missing: tied to another tensor, or computed by the engine."""
    quantization: Quantization | None = None
    folder: str = ""
    """The checkpoint's."""
    files: Mapping[str, str] = MappingProxyType({})
    """By tensor, the file that stores it; empty when only config.json was there."""
    model_type: str = ""


class _Config(msgspec.Struct, frozen=True):
    """The keys of config.json that decide names and shapes."""

    architectures: list[str] = []
    hidden_size: int = 0
    intermediate_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int = 0
    tie_word_embeddings: bool = False
    attention_bias: bool | None = None
    mlp_bias: bool = False
    model_type: str = ""
    torch_dtype: str | None = None
    dtype: str | None = None
    quantization_config: dict[str, object] | None = None
    compression_config: dict[str, object] | None = None
    text_config: dict[str, object] | None = None


def expected(folder: Path) -> Expected:
    """Read `folder`, unless its files are as they were. Raises `UnfitManifest` when they do not tell what is served."""
    return _expected(folder, tuple([_stamp(path) for path in (folder / _CONFIG, *_files(folder))]))


@lru_cache(maxsize=2)
def _expected(folder: Path, stamps: tuple[_Stamp, ...]) -> Expected:
    del stamps
    config = _config(folder)
    quantization = _quantization(folder, config)
    tied = frozenset({"lm_head.weight"}) if config.tie_word_embeddings else frozenset[str]()
    dtype, model_type = _language_model(config)
    stored = _headers(folder)
    if stored:
        shapes = {name: each.spec.shape for name, each in stored.items()}
        dtypes = {name: each.spec.dtype for name, each in stored.items()}
        files = {name: os.fspath(each.path) for name, each in stored.items()}
        optional = tied.union(name for name in stored if _COMPUTED.search(name))
        return Expected(
            MappingProxyType(shapes), MappingProxyType(dtypes), dtype, optional, quantization, os.fspath(folder),
            MappingProxyType(files), model_type,
        )  # fmt: skip
    if quantization is not None:
        raise UnfitManifest(
            f"{folder} is a quantized checkpoint without its safetensors files, and only they say which tensors are"
            " quantized: put them there"
        )
    if config.architectures and config.architectures[0] in _DENSE:
        shapes = _dense(config, config.architectures[0])
        return Expected(
            MappingProxyType(shapes), MappingProxyType({}), dtype, tied, folder=os.fspath(folder), model_type=model_type
        )
    known = ", ".join(sorted(_DENSE))
    raise UnfitManifest(
        f"nothing says which tensors {config.architectures or 'the served model'} has: put its safetensors files into "
        f"{folder}, or serve one of {known}"
    )


def dense(architectures: Sequence[str]) -> bool:
    """Whether it is a model without experts that has a table here."""
    return bool(architectures) and _DENSE.issuperset(architectures)


def _quantization(folder: Path, config: _Config) -> Quantization | None:
    try:
        return quantization_config.read_quantization_config(msgspec.structs.asdict(config))
    except UnknownScheme as error:
        raise UnfitManifest(f"{folder}: {error}") from error


def _config(folder: Path) -> _Config:
    try:
        return msgspec.json.decode((folder / _CONFIG).read_bytes(), type=_Config)
    except OSError as error:
        raise UnfitManifest(
            f"cannot read {folder / _CONFIG} ({error.strerror}): the agent must see the checkpoint that the "
            "server was launched with; name its place on this machine with --model-path"
        ) from error
    except ValueError as error:
        raise UnfitManifest(f"{folder / _CONFIG} is not a model's config: {error}") from error


def _language_model(config: _Config) -> tuple[str, str]:
    """Type of the numbers and of the model, or of the language model in a multimodal one."""
    inner = config.text_config or {}
    named = (config.dtype, config.torch_dtype, inner.get("dtype"), inner.get("torch_dtype"))
    dtype = next((each for each in named if isinstance(each, str) and each), "")
    words = {"half": "float16", "float": "float32"}
    dtype = dtype.removeprefix("torch.")
    return words.get(dtype, dtype), str(inner.get("model_type") or config.model_type)


def _headers(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor in the folder's safetensors files by name; empty when there are none."""
    found: dict[str, StoredTensor] = {}
    for path in _files(folder):
        try:
            stored = tensors_in_file(path)
        except ManifestError as error:
            raise UnfitManifest(str(error)) from error
        for each in stored:
            if each.spec.dtype not in ITEM_BYTES:
                raise UnfitManifest(
                    f"{path}: tensor {each.spec.name!r} has dtype {each.spec.dtype!r}, which cannot travel"
                )
            found[each.spec.name] = each
    return found


def _files(folder: Path) -> list[Path]:
    """The shards that the index names, or else the model's safetensors files. A missing shard makes the set useless.

    Raises `UnfitManifest` for an index that names none.
    """
    try:
        paths = stored_files(folder)
    except OSError as error:
        raise UnfitManifest(f"cannot read {folder / _INDEX} ({error.strerror}): let the agent read it") from error
    except ValueError as error:
        raise UnfitManifest(
            f"{folder / _INDEX} does not say in which files the tensors are: {error}. Put the checkpoint's own index"
            " there, or take it away where all safetensors files of the folder are to count"
        ) from error
    return paths if all(path.exists() for path in paths) else []


def _stamp(path: Path) -> _Stamp:
    """Of a file as it is; another one for another file of that name."""
    try:
        found = path.stat()
    except OSError:
        return None
    return os.fspath(path), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _dense(config: _Config, architecture: str) -> dict[str, Shape]:
    """Names and shapes of a dense model. Qwen2 has biases on q, k and v; Qwen3 norms on q and k; Llama neither."""
    hidden, inner, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    head = config.head_dim or hidden // max(config.num_attention_heads, 1)
    query = config.num_attention_heads * head
    key = (config.num_key_value_heads or config.num_attention_heads) * head
    bias = config.attention_bias if config.attention_bias is not None else architecture == "Qwen2ForCausalLM"
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        for name, rows in (("q", query), ("k", key), ("v", key)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (rows, hidden)
            if bias:
                shapes[f"{at}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{at}.self_attn.o_proj.weight"] = (hidden, query)
        if bias and architecture != "Qwen2ForCausalLM":
            shapes[f"{at}.self_attn.o_proj.bias"] = (hidden,)
        if architecture == "Qwen3ForCausalLM":
            shapes |= {f"{at}.self_attn.{norm}_norm.weight": (head,) for norm in ("q", "k")}
        for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            shapes[f"{at}.mlp.{name}_proj.weight"] = (rows, columns)
            if config.mlp_bias:
                shapes[f"{at}.mlp.{name}_proj.bias"] = (rows,)
    shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes
