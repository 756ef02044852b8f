"""One rank's part of a Qwen3 mixture of experts as Megatron-core lays it out (TP and EP over all ranks, ETP 1).

Plain descriptions: a global name, the local shard, and the rule by which it was cut. The published procedures read
them as Megatron's parameters, ours as pieces: both see the same tensors.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch

from weightbus.dataplane.tensors.manifest import TensorSpec
from weightbus.dataplane.tensors.shards import Box, Shard, ShardView


class Shape(NamedTuple):
    """Sizes by the words of the Hugging Face config."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    experts: int
    ffn: int
    vocab: int


SHAPES = {
    "tiny": Shape(layers=2, hidden=64, heads=8, groups=4, head_dim=16, experts=8, ffn=48, vocab=256),
    "qwen3-30b-a3b": Shape(
        layers=48, hidden=2048, heads=32, groups=4, head_dim=128, experts=128, ffn=768, vocab=151936
    ),
}
"""Qwen3-30B-A3B: the sizes of its published config; 61 GB in bfloat16."""


class Rule(enum.Enum):
    """How a full parameter was cut."""

    COPY = "every rank holds all of it"
    ROWS = "rank r holds the r-th run of rows"
    COLUMNS = "rank r holds the r-th run of columns"
    EXPERT = "one rank holds all of it"


class Param(NamedTuple):
    """A parameter of this rank by its global Megatron name."""

    name: str
    data: torch.Tensor
    rule: Rule


_RULES = {
    "word_embeddings": Rule.ROWS,
    "output_layer": Rule.ROWS,
    "linear_qkv.weight": Rule.ROWS,
    "linear_proj.weight": Rule.COLUMNS,
    ".mlp.experts.": Rule.EXPERT,
}


def rule_of(name: str) -> Rule:
    """How a parameter is cut, by its Megatron name."""
    return next((rule for part, rule in _RULES.items() if part in name), Rule.COPY)


def params(shape: Shape, rank: int, ranks: int, device: torch.device) -> list[Param]:
    """Random weights, made on the device. Copies are the same on every rank; so is nothing else."""
    generator = torch.Generator(device).manual_seed(1000 + rank)
    shared = torch.Generator(device).manual_seed(1)
    found: list[Param] = []

    def add(name: str, full: tuple[int, ...]) -> None:
        local, rule = list(full), rule_of(name)
        if rule in (Rule.ROWS, Rule.COLUMNS):
            local[rule is Rule.COLUMNS] //= ranks
        source = shared if rule is Rule.COPY else generator
        found.append(Param(name, torch.randn(local, generator=source, device=device).to(torch.bfloat16), rule))

    fused = (shape.heads + 2 * shape.groups) * shape.head_dim
    mine = range(rank * shape.experts // ranks, (rank + 1) * shape.experts // ranks)
    add("embedding.word_embeddings.weight", (shape.vocab, shape.hidden))
    for index in range(shape.layers):
        at = f"decoder.layers.{index}."
        add(at + "self_attention.linear_qkv.layer_norm_weight", (shape.hidden,))
        add(at + "self_attention.linear_qkv.weight", (fused, shape.hidden))
        add(at + "self_attention.q_layernorm.weight", (shape.head_dim,))
        add(at + "self_attention.k_layernorm.weight", (shape.head_dim,))
        add(at + "self_attention.linear_proj.weight", (shape.hidden, shape.heads * shape.head_dim))
        add(at + "pre_mlp_layernorm.weight", (shape.hidden,))
        add(at + "mlp.router.weight", (shape.experts, shape.hidden))
        for expert in mine:
            add(at + f"mlp.experts.linear_fc1.weight{expert}", (2 * shape.ffn, shape.hidden))
            add(at + f"mlp.experts.linear_fc2.weight{expert}", (shape.hidden, shape.ffn))
    add("decoder.final_layernorm.weight", (shape.hidden,))
    add("output_layer.weight", (shape.vocab, shape.hidden))
    return found


_WHOLE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


def served_names(name: str) -> tuple[str, ...]:
    """The Hugging Face tensors of a Megatron parameter, in the order of their rows."""
    prefix, local = "", name
    if name.startswith("decoder.layers."):
        _, _, index, local = name.split(".", 3)
        prefix = f"model.layers.{index}."
    if local in _WHOLE:
        return (prefix + _WHOLE[local],)
    if local == "self_attention.linear_qkv.weight":
        return tuple(f"{prefix}self_attn.{part}_proj.weight" for part in "qkv")
    kind, _, expert = local.removeprefix("mlp.experts.").partition(".weight")
    parts = ("gate", "up") if kind == "linear_fc1" else ("down",)
    return tuple(f"{prefix}mlp.experts.{expert}.{part}_proj.weight" for part in parts)


def to_served(name: str, full: torch.Tensor, shape: Shape) -> list[tuple[str, torch.Tensor]]:
    """A whole Megatron parameter as Hugging Face tensors: views where it can be, as convert_to_hf does it."""
    names = served_names(name)
    if len(names) == 1:
        return [(names[0], full)]
    if len(names) == 2:
        gate, up = full.chunk(2, dim=0)
        return [(names[0], gate), (names[1], up)]
    per_group = shape.heads // shape.groups
    grouped = full.view(shape.groups, -1, shape.head_dim, shape.hidden)
    query, key, value = torch.split(grouped, [per_group, 1, 1], dim=1)
    return [
        (names[0], query.reshape(-1, shape.hidden)),
        (names[1], key.reshape(-1, shape.hidden)),
        (names[2], value.reshape(-1, shape.hidden)),
    ]


def served(shape: Shape) -> list[TensorSpec]:
    """Every tensor of the checkpoint."""
    q, kv = shape.heads * shape.head_dim, shape.groups * shape.head_dim
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for index in range(shape.layers):
        at = f"model.layers.{index}."
        sizes |= {
            at + "input_layernorm.weight": (shape.hidden,),
            at + "self_attn.q_proj.weight": (q, shape.hidden),
            at + "self_attn.k_proj.weight": (kv, shape.hidden),
            at + "self_attn.v_proj.weight": (kv, shape.hidden),
            at + "self_attn.q_norm.weight": (shape.head_dim,),
            at + "self_attn.k_norm.weight": (shape.head_dim,),
            at + "self_attn.o_proj.weight": (shape.hidden, q),
            at + "post_attention_layernorm.weight": (shape.hidden,),
            at + "mlp.gate.weight": (shape.experts, shape.hidden),
        }
        for expert in range(shape.experts):
            sizes |= {
                at + f"mlp.experts.{expert}.gate_proj.weight": (shape.ffn, shape.hidden),
                at + f"mlp.experts.{expert}.up_proj.weight": (shape.ffn, shape.hidden),
                at + f"mlp.experts.{expert}.down_proj.weight": (shape.hidden, shape.ffn),
            }
    sizes |= {"model.norm.weight": (shape.hidden,), "lm_head.weight": (shape.vocab, shape.hidden)}
    return [TensorSpec(name, "bfloat16", size) for name, size in sizes.items()]


def pieces(held: list[Param], shape: Shape, rank: int, ranks: int) -> Iterator[Shard]:
    """What this rank holds, as boxes of the checkpoint's tensors and views of its parameters."""
    for storage, param in enumerate(held):
        strides = tuple(param.data.stride())
        for name, start, row, rows in _runs(param, shape, rank, ranks):
            size = (rows, *param.data.shape[1:])
            at = [row] + [0] * (len(size) - 1)
            if param.rule is Rule.COLUMNS:
                at[1] = rank * size[1]
            box = Box(tuple(at), tuple(a + n for a, n in zip(at, size, strict=True)))
            yield Shard(name, box, "bfloat16", ShardView(storage, start * prod(size[1:]), strides))


def _runs(param: Param, shape: Shape, rank: int, ranks: int) -> Iterator[tuple[str, int, int, int]]:
    """Served tensor, first row here, first row there, rows."""
    names, rows = served_names(param.name), param.data.shape[0]
    if len(names) == 1:
        yield names[0], 0, rank * rows if param.rule is Rule.ROWS else 0, rows
    elif len(names) == 2:
        yield names[0], 0, 0, rows // 2
        yield names[1], rows // 2, 0, rows // 2
    else:
        sizes = (shape.heads // shape.groups * shape.head_dim, shape.head_dim, shape.head_dim)
        local = shape.groups // ranks
        for group in range(local):
            at = group * sum(sizes)
            for name, size in zip(names, sizes, strict=True):
                yield name, at, (rank * local + group) * size, size
                at += size
