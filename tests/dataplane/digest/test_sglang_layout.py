"""Predictions of how SGLang stores a dense model, against a second, independent reading of its loaders."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from weightbus.dataplane.digest.sglang_checksum import ParameterBox, ServedParameter, served_layout
from weightbus.dataplane.tensors.manifest import TensorSpec

HIDDEN, FFN, HEAD_DIM = 12, 24, 4


def dense(heads: int, kv_heads: int, vocabulary: int, *, norms: bool, bias: bool, tied: bool) -> list[TensorSpec]:
    """Tensors of a one-layer dense model."""
    at = "model.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, HIDDEN),
        at + "input_layernorm.weight": (HIDDEN,),
        at + "self_attn.q_proj.weight": (heads * HEAD_DIM, HIDDEN),
        at + "self_attn.k_proj.weight": (kv_heads * HEAD_DIM, HIDDEN),
        at + "self_attn.v_proj.weight": (kv_heads * HEAD_DIM, HIDDEN),
        at + "self_attn.o_proj.weight": (HIDDEN, heads * HEAD_DIM),
        at + "mlp.gate_proj.weight": (FFN, HIDDEN),
        at + "mlp.up_proj.weight": (FFN, HIDDEN),
        at + "mlp.down_proj.weight": (HIDDEN, FFN),
        "model.norm.weight": (HIDDEN,),
    }
    if norms:
        shapes |= {at + "self_attn.q_norm.weight": (HEAD_DIM,), at + "self_attn.k_norm.weight": (HEAD_DIM,)}
    if bias:
        shapes |= {
            f"{at}self_attn.{part}_proj.bias": (count * HEAD_DIM,)
            for part, count in zip("qkv", (heads, kv_heads, kv_heads), strict=True)
        }
        shapes |= {at + "self_attn.o_proj.bias": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (vocabulary, HIDDEN)
    return [TensorSpec(name, "float32", shape) for name, shape in shapes.items()]


def values(specs: list[TensorSpec]) -> dict[str, torch.Tensor]:
    """Every element of every tensor differs from all others."""
    found, at = {}, 1
    for spec in specs:
        count = spec.nbytes // 4
        found[spec.name] = torch.arange(at, at + count, dtype=torch.float32).reshape(spec.shape)
        at += count
    return found


def served(name: str, weights: dict[str, torch.Tensor], tp: int, rank: int) -> torch.Tensor:
    """What SGLang's layers make of the checkpoint on one rank, written as its modules say it."""
    if name in weights:
        whole = weights[name]
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            rows = -(-whole.shape[0] // 64) * 64
            if rows % tp:
                rows = -(-whole.shape[0] // (64 * tp)) * 64 * tp
            padded = torch.zeros(rows, HIDDEN)
            padded[: whole.shape[0]] = whole
            return padded.chunk(tp)[rank]
        return whole.chunk(tp, dim=1)[rank] if name.endswith(("o_proj.weight", "down_proj.weight")) else whole
    fused = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    ((old, new),) = [(old, new) for old, new in fused.items() if old in name]
    return torch.cat([weights[name.replace(old, part)].chunk(tp)[rank] for part in new])


def materialize(parameter: ServedParameter, specs: list[TensorSpec], weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """The elements that the layout says, in its order."""

    def cut(box: ParameterBox) -> torch.Tensor:
        part = weights[specs[box.tensor].name]
        for dim, (start, size) in enumerate(zip(box.start, box.size, strict=True)):
            part = part.narrow(dim, start, size)
        return part.reshape(-1)

    return torch.cat([*map(cut, parameter.boxes), torch.zeros(parameter.zero_bytes // 4)])


@settings(max_examples=120, deadline=None)
@given(
    model=st.sampled_from(["Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM"]),
    tp=st.sampled_from([1, 2, 3, 4, 6]),
    per_rank=st.integers(1, 3),
    groups=st.integers(1, 2),
    vocabulary=st.integers(1, 400),
    bias=st.booleans(),
    tied=st.booleans(),
)
def test_every_parameter_of_every_rank_is_what_the_layers_make(  # noqa: PLR0917  drawn by name
    model: str, tp: int, per_rank: int, groups: int, vocabulary: int, bias: bool, tied: bool
) -> None:
    """Fused, cut, padded and replicated, for any vocabulary and any number of ranks that divides the heads."""
    kv_heads = tp * per_rank
    specs = dense(kv_heads * groups, kv_heads, vocabulary, norms=model.startswith("Qwen3"), bias=bias, tied=tied)
    layout = served_layout(model, specs, tp, HEAD_DIM)
    assert (layout is None) == (FFN % tp != 0)
    if layout is None:
        return
    weights = values(specs)
    for parameter in layout:
        expected = served(parameter.name, weights, tp, parameter.rank).reshape(-1)
        assert torch.equal(materialize(parameter, specs, weights), expected), parameter.name
    names = {parameter.name for parameter in layout}
    assert len(layout) == tp * len(names)
    assert len(names) == len(specs) - 3 - (2 if bias else 0)


@pytest.mark.parametrize(
    ("model", "tp", "head_dim", "extra"),
    [
        ("MixtralForCausalLM", 1, HEAD_DIM, None),
        ("LlamaForCausalLM", 0, HEAD_DIM, None),
        ("LlamaForCausalLM", 2, None, None),
        ("LlamaForCausalLM", 4, HEAD_DIM, None),
        ("LlamaForCausalLM", 1, HEAD_DIM, "model.layers.0.mlp.router.weight"),
        ("LlamaForCausalLM", 1, HEAD_DIM, "visual.patch_embed.weight"),
    ],
)
def test_what_is_not_known_is_not_predicted(model: str, tp: int, head_dim: int | None, extra: str | None) -> None:
    """Other models and tensors, key heads that do not divide, or an unknown head width: no layout, no error."""
    specs = dense(4, 2, 100, norms=False, bias=False, tied=True)
    if extra:
        specs.append(TensorSpec(extra, "float32", (HIDDEN, HIDDEN)))
    assert served_layout(model, specs, tp, head_dim) is None


def test_the_head_width_is_read_from_the_norms_where_there_are_any() -> None:
    """Qwen3 needs no telling."""
    specs = dense(4, 2, 100, norms=True, bias=False, tied=True)
    assert served_layout("Qwen3ForCausalLM", specs, 2) is not None
    assert served_layout("Qwen3ForCausalLM", specs, 4) is None


def test_a_fused_parameter_without_all_of_its_parts_is_not_predicted() -> None:
    """A manifest that lacks v_proj says nothing of qkv_proj."""
    specs = [spec for spec in dense(4, 2, 100, norms=True, bias=False, tied=True) if "v_proj" not in spec.name]
    assert served_layout("Qwen3ForCausalLM", specs, 1) is None
