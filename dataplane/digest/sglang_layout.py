"""How SGLang stores the tensors of a dense model: which parts of which Hugging Face tensors make one engine parameter.

SGLang fuses q, k and v, and gate and up, cuts every parameter among its tensor-parallel ranks and pads the vocabulary.
Given a manifest's tensors and the number of ranks, `served_layout` says it as plain data: for each parameter and rank a
list of boxes in Hugging Face index space which, packed one after another, are the parameter's bytes. The publisher
predicts with it what an engine must report of its live parameters; it copies nothing and imports no torch.

The rules are those of models/{llama,qwen2,qwen3}.py, layers/linear.py and layers/vocab_parallel_embedding.py of SGLang
0.5.11 to 0.5.23. A model, a tensor or a shape that they do not cover gives None: better no prediction than a wrong one.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec

from ..tensors import ITEM_BYTES, TensorSpec


class ParameterBox(msgspec.Struct, frozen=True):
    """A rectangular part of one tensor, packed in row-major order."""

    tensor: int
    """Index into the sequence of tensors that the layout was made for."""
    start: tuple[int, ...]
    size: tuple[int, ...]


class ServedParameter(msgspec.Struct, frozen=True):
    """One parameter of an engine, on one of its ranks."""

    name: str
    rank: int
    boxes: tuple[ParameterBox, ...]
    zero_bytes: int = 0
    """Zeros behind the last box: rows that pad the vocabulary."""


MODELS: Final = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
"""Architectures with a known layout. All were compared with real servers."""

_VOCABULARY_PADDING: Final = 64
_LAYER: Final = re.compile(r"^(model\.layers\.\d+\.)(.+)$")
_WHOLE: Final = frozenset(
    {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
        "self_attn.o_proj.bias",
        "mlp.down_proj.bias",
    }
)
_ROWS_CUT: Final = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
_HEADED: Final = frozenset({"q_proj", "k_proj", "v_proj"})
_COLUMNS_CUT: Final = frozenset({"self_attn.o_proj.weight", "mlp.down_proj.weight"})
_VOCABULARY: Final = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


class _UnknownLayoutError(Exception):
    """A tensor or shape that the rules do not cover."""


def served_layout(
    model: str, tensors: Sequence[TensorSpec], tp: int, head_dim: int | None = None
) -> tuple[ServedParameter, ...] | None:
    """Every parameter of every rank of a server with `tp` ranks, or None when that is not known.

    `head_dim` is needed to see that the key heads divide among the ranks. It is read from the shapes where they tell
    (q_norm); without it a grouped-query model has no layout at `tp` above 1.
    """
    if model not in MODELS or tp < 1:
        return None
    try:
        return tuple(_parameters(_Named(tensors, tp, head_dim)))
    except _UnknownLayoutError:
        return None


class _Named:
    """The tensors by name, and what all rules need to know."""

    def __init__(self, tensors: Sequence[TensorSpec], tp: int, head_dim: int | None) -> None:
        self.index = {tensor.name: index for index, tensor in enumerate(tensors)}
        self.tensors = tensors
        self.tp = tp
        self.head_dim = head_dim

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.index:
            raise _UnknownLayoutError(name)
        return self.tensors[self.index[name]].shape

    def cut(self, name: str, dim: int, begin: int, end: int) -> ParameterBox:
        """The whole tensor but for `dim`, which runs from `begin` to `end`."""
        shape = self.shape(name)
        if len(shape) <= dim:
            raise _UnknownLayoutError(name)
        start = tuple(begin if at == dim else 0 for at in range(len(shape)))
        return ParameterBox(self.index[name], start, (*shape[:dim], end - begin, *shape[dim + 1 :]))

    def share(self, name: str, dim: int, rank: int, parts: int) -> ParameterBox:
        """Part `rank` of `parts` equal ones along `dim`."""
        shape = self.shape(name)
        if len(shape) <= dim or shape[dim] % parts:
            raise _UnknownLayoutError(name)
        size = shape[dim] // parts
        return self.cut(name, dim, rank * size, (rank + 1) * size)

    def shares(self, names: Sequence[str], rank: int) -> tuple[ParameterBox, ...]:
        """Rows of `rank` of each of several tensors."""
        return tuple(self.share(name, 0, rank, self.tp) for name in names)


def _parameters(named: _Named) -> list[ServedParameter]:
    """Walk the tensors; a fused parameter is emitted at the first of its parts."""
    found: dict[str, list[ServedParameter]] = {}
    for tensor in named.tensors:
        name, boxes = _rule(tensor.name, named)
        if name not in found:
            found[name] = [_served(name, rank, boxes, named) for rank in range(named.tp)]
    return [parameter for ranks in found.values() for parameter in ranks]


def _served(name: str, rank: int, boxes: Callable[[int], tuple[ParameterBox, ...]], named: _Named) -> ServedParameter:
    if name not in _VOCABULARY:
        return ServedParameter(name, rank, boxes(rank))
    (box,) = boxes(rank)
    spec = named.tensors[box.tensor]
    missing = _vocabulary_rows(spec.shape[0], named.tp) - box.size[0]
    row_bytes = ITEM_BYTES[spec.dtype] * spec.shape[1]
    return ServedParameter(name, rank, (box,) if box.size[0] else (), missing * row_bytes)


def _rule(name: str, named: _Named) -> tuple[str, Callable[[int], tuple[ParameterBox, ...]]]:
    """The engine's name of the parameter that holds tensor `name`, and its boxes by rank."""
    if name in _VOCABULARY:
        return name, lambda rank: (_vocabulary_box(name, named, rank),)
    if name == "model.norm.weight":
        return name, lambda _: (named.share(name, 0, 0, 1),)
    match = _LAYER.match(name)
    if match is None:
        raise _UnknownLayoutError(name)
    layer, rest = match.groups()
    if rest in _WHOLE:
        return name, lambda _: (named.share(name, 0, 0, 1),)
    if rest in _COLUMNS_CUT:
        return name, lambda rank: (named.share(name, 1, rank, named.tp),)
    block, _, tail = rest.partition(".")
    part, _, kind = tail.partition(".")
    for fused, parts in _ROWS_CUT.items():
        if fused.startswith(block + ".") and part in parts and kind in ("weight", "bias"):
            members = tuple(f"{layer}{block}.{member}.{kind}" for member in parts)
            if part in _HEADED:
                _check_heads(named, layer)
            return f"{layer}{fused}.{kind}", partial(named.shares, members)
    raise _UnknownLayoutError(name)


def _check_heads(named: _Named, layer: str) -> None:
    """Key heads must divide among the ranks; else a CPU server pads them and a CUDA server repeats them."""
    if named.tp == 1:
        return
    keys = f"{layer}self_attn.k_proj.weight"
    queries = named.shape(f"{layer}self_attn.q_proj.weight")[0]
    norm = f"{layer}self_attn.q_norm.weight"
    head_dim = named.shape(norm)[0] if norm in named.index else named.head_dim
    if head_dim is None or head_dim < 1:
        # As many key as query heads: what divides the one divides the other, and queries must divide.
        if queries != named.shape(keys)[0]:
            raise _UnknownLayoutError(keys)
        return
    if named.shape(keys)[0] % (head_dim * named.tp) or queries % (head_dim * named.tp):
        raise _UnknownLayoutError(keys)


def _vocabulary_rows(vocabulary: int, tp: int) -> int:
    """Rows of each rank: the vocabulary rounded up to 64, or to 64 for each rank where that does not divide."""
    unit = _VOCABULARY_PADDING
    if -(-vocabulary // unit) * unit % tp:
        unit *= tp
    return -(-vocabulary // unit) * unit // tp


def _vocabulary_box(name: str, named: _Named, rank: int) -> ParameterBox:
    """The rows of the vocabulary that stand on `rank`; none when it holds padding only."""
    shape = named.shape(name)
    if len(shape) != 2:
        raise _UnknownLayoutError(name)
    rows = _vocabulary_rows(shape[0], named.tp)
    begin = min(rank * rows, shape[0])
    return named.cut(name, 0, begin, min(begin + rows, shape[0]))
