"""The checksums that SGLang's weights_checker must give of its parameters on a GPU, from their parts. Pure numpy.

SGLang hashes the live parameter (``gpu_tensor_hash``, kernels/ops/memory/gpu_tensor_hash.py, the same arithmetic from
0.5.12 to 0.5.23): every 32-bit word is mixed with its position in two lanes, lanes are summed over tiles of 8192 words,
every tile is finished with the number of bytes, and the sum of the tiles is finished again. Sums commute, so parts
may come in any order from any bucket; a publisher predicts the checksum without ever holding the fused parameter.

Parts are *segments*: rows of (first byte in the bucket, words, first word in the parameter, first tile of the
parameter), each a contiguous run within one tile. `segments` makes them once per bucket; `accumulate` adds them up on
the host, and digest_triton.py on the device.

Which parts of which Hugging Face tensors make one parameter is known for dense models: SGLang fuses q, k and v, and
gate and up, cuts every parameter among its tensor-parallel ranks and pads the vocabulary. `served_layout` says it as
plain data: for each parameter and rank a list of boxes in Hugging Face index space which, packed one after another, are
the parameter's bytes. The rules are those of models/{llama,qwen2,qwen3}.py, layers/linear.py and
layers/vocab_parallel_embedding.py of SGLang 0.5.11 to 0.5.23. A model, a tensor or a shape that they do not cover gives
None: better no prediction than a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from ..tensors import ITEM_BYTES, TensorSpec

ALGORITHM: Final = "sglang-fmix32-8"
TILE_WORDS: Final = 8192
WORD_BYTES: Final = 4

SEED_A: Final = 0x243F6A88
SEED_B: Final = ((SEED_A * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF
POSITION_A: Final = 0x27D4EB2D
POSITION_B: Final = 0x165667B1
FMIX_1: Final = 0x85EBCA6B
FMIX_2: Final = 0xC2B2AE35

Words = npt.NDArray[np.uint32]
SegmentTable = npt.NDArray[np.int64]


class ChecksumLanes:
    """The layout of all parameters' tiles in one array of lanes, and the checksums that follow from the lanes.

    Args:
        sizes: bytes of every parameter. Must be multiples of four: others cannot be cut at words.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        if any(size % WORD_BYTES for size in sizes):
            raise ValueError("a parameter whose bytes are no multiple of four has no lanes")
        self._nbytes = np.asarray(sizes, dtype=np.int64)
        tiles = -(-self._nbytes // (TILE_WORDS * WORD_BYTES))
        self.first = np.concatenate([[0], np.cumsum(tiles)])[:-1]
        """First tile of every parameter."""
        self.tiles = int(tiles.sum())
        self._owner = np.repeat(np.arange(len(sizes)), tiles)

    def zeros(self) -> Words:
        """Lanes before anything was added, [tiles, 2]."""
        return np.zeros((self.tiles, 2), dtype=np.uint32)

    def finish(self, lanes: Words) -> list[str]:
        """The checksum of every parameter, sixteen hexadecimal digits each. `lanes` is left as it was."""
        size = (self._nbytes[self._owner] & 0xFFFFFFFF).astype(np.uint32)
        done = _fmix(lanes ^ size[:, None]).astype(np.uint64)
        values = (done[:, 0] << np.uint64(32)) | done[:, 1]
        sums = np.zeros(len(self._nbytes), dtype=np.uint64)
        np.add.at(sums, self._owner, values)
        return [f"{_splitmix(int(value)):016x}" for value in sums]


def segments(source: int, row_bytes: int, stride: int, rows: int, *, word: int, tile: int) -> SegmentTable:
    """The segments of `rows` runs of `row_bytes`, `stride` bytes apart in the bucket, packed in the parameter.

    Args:
        source: first byte of the first run in the bucket.
        row_bytes: of one run; as `source` and `stride` a multiple of four.
        stride: bytes from one run to the next.
        rows: how many.
        word: position of the first run in the parameter, in words.
        tile: first tile of the parameter.
    """
    if stride == row_bytes:
        row_bytes, rows = row_bytes * rows, 1
    row_words = row_bytes // WORD_BYTES
    starts = np.arange(rows, dtype=np.int64) * row_words + word
    first_tile, last_tile = starts // TILE_WORDS, (starts + row_words - 1) // TILE_WORDS
    counts = last_tile - first_tile + 1
    row = np.repeat(np.arange(rows, dtype=np.int64), counts)
    nth = np.arange(len(row), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = np.maximum(starts[row], (first_tile[row] + nth) * TILE_WORDS)
    end = np.minimum(starts[row] + row_words, (first_tile[row] + nth + 1) * TILE_WORDS)
    offset = source + row * stride + (begin - starts[row]) * WORD_BYTES
    return np.stack([offset, end - begin, begin, np.full(len(row), tile)], axis=1)


def join(tables: Iterable[SegmentTable]) -> SegmentTable:
    """Several tables as one."""
    return np.concatenate([np.zeros((0, 4), dtype=np.int64), *tables])


def accumulate(memory: npt.NDArray[np.uint8], table: SegmentTable, lanes: Words) -> None:
    """Add every segment of `table`, read from `memory`, to `lanes`."""
    for offset, count, begin, tile in table.tolist():
        words = np.frombuffer(memory[offset : offset + count * WORD_BYTES].tobytes(), dtype="<u4")
        lanes[tile + begin // TILE_WORDS] += _sums(words, begin)


def accumulate_zeros(count: int, begin: int, tile: int, lanes: Words) -> None:
    """Add `count` words of zeros from word `begin` on: padding counts, because positions do."""
    end = begin + count
    while begin < end:
        stop = min(end, (begin // TILE_WORDS + 1) * TILE_WORDS)
        lanes[tile + begin // TILE_WORDS] += _sums(np.zeros(stop - begin, dtype=np.uint32), begin)
        begin = stop


def _sums(words: Words, begin: int) -> Words:
    position = np.arange(begin, begin + len(words), dtype=np.int64).astype(np.uint32)
    mixed_a = (position * np.uint32(POSITION_A) + np.uint32(SEED_A)) ^ _rotate(position, 15)
    mixed_b = (position * np.uint32(POSITION_B) + np.uint32(SEED_B)) ^ _rotate(position, 13)
    sums = [_fmix(words ^ mixed).sum(dtype=np.uint32) for mixed in (mixed_a, mixed_b)]
    return np.array(sums, dtype=np.uint32)


def _rotate(x: Words, by: int) -> Words:
    return (x << np.uint32(by)) | (x >> np.uint32(32 - by))


def _fmix(x: Words) -> Words:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(FMIX_1)
    x = x ^ (x >> np.uint32(13))
    x = x * np.uint32(FMIX_2)
    return x ^ (x >> np.uint32(16))


def _splitmix(x: int) -> int:
    mask = (1 << 64) - 1
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & mask
    x ^= x >> 27
    x = (x * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


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


def parameters_with(model: str, tensors: Sequence[TensorSpec], names: Collection[str]) -> frozenset[str] | None:
    """Names of the engine's parameters that tensors called `names` are a part of; None where that is not known."""
    layout = served_layout(model, tensors, 1)
    if layout is None:
        return None
    return frozenset(each.name for each in layout if any(tensors[box.tensor].name in names for box in each.boxes))


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
