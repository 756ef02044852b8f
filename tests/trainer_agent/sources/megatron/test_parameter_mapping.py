"""Which boxes a shard holds: by hand on small cases, and against whole-tensor arithmetic on random ones."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from weightbus.dataplane.tensors.shards import Box, Shard, contiguous_strides
from weightbus.trainer_agent.source import LayoutMismatch
from weightbus.trainer_agent.sources.megatron.hf_model import HFModel, hf_tensors, match_parameter
from weightbus.trainer_agent.sources.megatron.parameter_mapping import LocalParameter, ParallelRank, shards_of

Array = npt.NDArray[np.int64]
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
NORM = "decoder.layers.0.input_layernorm.weight"
EMBEDDING = "embedding.word_embeddings.weight"
ATTENTION = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"
MOE = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_experts": 4,
    "moe_intermediate_size": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 4,
}
DELTA = MOE | {
    "architectures": ["Qwen3NextForCausalLM"],
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 2,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 3,
    "linear_conv_kernel_dim": 2,
}
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": 4,
    "kv_lora_rank": 3,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 1,
    "v_head_dim": 2,
    "n_routed_experts": 2,
    "moe_intermediate_size": 4,
    "first_k_dense_replace": 1,
}


SIZES = {
    "hidden_size": 6,
    "intermediate_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 1,
    "num_hidden_layers": 1,
    "vocab_size": 10,
    "rms_norm_eps": 1e-6,
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": True,
}


def model(**changes: object) -> HFModel:
    return HFModel.parse(SIZES | changes)


def pieces(
    name: str, shape: Sequence[int], of: HFModel, share: ParallelRank, *, expert: int = 0, zero_centred: bool = False
) -> Iterator[Shard]:
    found = match_parameter(name, of, lambda layer: layer, lambda local: expert + local, lambda index: index)
    assert found is not None, name
    specs = [of.spec(target, found.prefix, "float32", found.expert) for target in found.rule.targets]
    shifts = [of.shift_of(target, zero_centred=zero_centred) for target in found.rule.targets]
    local = LocalParameter(found.name, 3, tuple(shape), contiguous_strides(shape), "float32")
    return shards_of(found.rule, local, specs, shifts, sizes=of.sizes, share=share, expert=found.expert)


def shard(name: str, shape: tuple[int, ...], rank: int, ranks: int, **changes: object) -> list[tuple[str, int, Box]]:
    """What a shard holds: tensor, first element of it in the shard, box."""
    found = pieces(name, shape, model(**changes), ParallelRank(rank, ranks))
    return [(piece.tensor, piece.view.offset, piece.box) for piece in found]


def test_qkv_is_taken_apart_by_group() -> None:
    """Two groups of two query heads: q q k v, q q k v."""
    q, k, v = (f"{ATTENTION}.{part}_proj.weight" for part in "qkv")
    assert shard(QKV, (8, 6), 0, 1) == [
        (q, 0, Box((0, 0), (2, 6))),
        (k, 12, Box((0, 0), (1, 6))),
        (v, 18, Box((0, 0), (1, 6))),
        (q, 24, Box((2, 0), (4, 6))),
        (k, 36, Box((1, 0), (2, 6))),
        (v, 42, Box((1, 0), (2, 6))),
    ]


def test_an_expert_is_one_index_of_a_tensor_that_holds_all() -> None:
    """Expert 2 of 4 on rank 1 of 2: the second half of gate, then that of up; and the second half of down's columns."""
    of = model(architectures=["Qwen3_5MoeForConditionalGeneration"], text_config=DELTA | SIZES)
    body, share = "model.language_model.layers.0.mlp.experts", ParallelRank(1, 2)
    experts = "decoder.layers.0.mlp.experts"
    (gate, up) = pieces(f"{experts}.linear_fc1.weight2", (4, 6), of, share)
    assert (gate.tensor, gate.box, gate.view.offset) == (f"{body}.gate_up_proj", Box((2, 2, 0), (3, 4, 6)), 0)
    assert (up.tensor, up.box, up.view.offset) == (f"{body}.gate_up_proj", Box((2, 6, 0), (3, 8, 6)), 12)
    assert up.view.strides[1:] == (6, 1)
    (down,) = pieces(f"{experts}.linear_fc2.weight2", (6, 2), of, share)
    assert (down.tensor, down.box, down.view.offset) == (f"{body}.down_proj", Box((2, 0, 2), (3, 6, 4)), 0)


def test_a_delta_net_served_in_four_tensors() -> None:
    """q, k and v are rows of one, z, b and a tensors of their own: on rank 1 of 2 the second half of each."""
    of = model(**{**DELTA, "linear_num_key_heads": 2, "architectures": ["Qwen3_5ForCausalLM"]})
    found = pieces("decoder.layers.0.self_attention.in_proj.weight", (12, 6), of, ParallelRank(1, 2))
    at = "model.layers.0.linear_attn.in_proj_"
    assert [
        (piece.tensor.removeprefix(at), piece.view.offset // 6, piece.box.start[0], piece.box.stop[0])
        for piece in found
    ] == [
        ("qkv.weight", 0, 2, 4),
        ("qkv.weight", 2, 6, 8),
        ("qkv.weight", 4, 11, 14),
        ("z.weight", 7, 3, 6),
        ("b.weight", 10, 1, 2),
        ("a.weight", 11, 1, 2),
    ]


def test_qkv_on_more_ranks_than_groups_is_cut_inside_a_group() -> None:
    """Four ranks, two groups: rank 2 holds the second group's queries, rank 3 its key and value."""
    assert shard(QKV, (2, 6), 2, 4) == [(f"{ATTENTION}.q_proj.weight", 0, Box((2, 0), (4, 6)))]
    assert shard(QKV, (2, 6), 3, 4) == [
        (f"{ATTENTION}.k_proj.weight", 0, Box((1, 0), (2, 6))),
        (f"{ATTENTION}.v_proj.weight", 6, Box((1, 0), (2, 6))),
    ]


def test_gate_and_up_are_cut_separately() -> None:
    """Rank 1 of 2 holds the second half of gate above the second half of up."""
    assert shard(FC1, (8, 6), 1, 2) == [
        (f"{MLP}.gate_proj.weight", 0, Box((4, 0), (8, 6))),
        (f"{MLP}.up_proj.weight", 24, Box((4, 0), (8, 6))),
    ]


def test_a_stacked_gate_and_up_are_one_tensor() -> None:
    """GLM4 serves one above the other, whole: rank 1's halves go to the second quarter and to the last."""
    name = f"{MLP}.gate_up_proj.weight"
    held = shard(FC1, (8, 6), 1, 2, architectures=["Glm4ForCausalLM"])
    assert held == [(name, 0, Box((4, 0), (8, 6))), (name, 24, Box((12, 0), (16, 6)))]


def test_a_row_parallel_layer_is_cut_by_columns() -> None:
    """Rank 1 of 2 holds the right half of every row."""
    assert shard(FC2, (6, 4), 1, 2) == [(f"{MLP}.down_proj.weight", 0, Box((0, 4), (6, 8)))]


def test_a_norm_is_whole_on_every_rank() -> None:
    """A vector has one axis."""
    assert shard(NORM, (6,), 1, 2) == [("model.layers.0.input_layernorm.weight", 0, Box((0,), (6,)))]


def test_padding_of_the_vocabulary_is_not_served() -> None:
    """Ten words padded to sixteen over four ranks: the third rank holds two of them, the last none."""
    held = [[box.shape[0] for _, _, box in shard(EMBEDDING, (4, 6), rank, 4)] for rank in range(4)]
    assert held == [[4], [4], [2], []]


@pytest.mark.parametrize(
    ("name", "shape", "ranks"),
    [
        (QKV, (9, 6), 1),
        (QKV, (8, 7), 1),
        (QKV, (4, 6), 1),
        (FC1, (8, 6), 1),
        (FC2, (6, 8), 2),
        (NORM, (3,), 2),
        (NORM, (6, 1), 1),
        (EMBEDDING, (4, 6), 2),
    ],
)
def test_a_shard_of_another_model_is_refused(name: str, shape: tuple[int, ...], ranks: int) -> None:
    """Sizes that the served model does not have are named instead of cut somehow."""
    with pytest.raises(LayoutMismatch, match=name):
        shard(name, shape, 0, ranks)


def test_sizes_that_ranks_cannot_share_are_refused() -> None:
    """Seven rows of gate over two ranks of four rows each: padding that was never promised."""
    with pytest.raises(LayoutMismatch, match=r"2 shards of \(8, 6\)"):
        shard(FC1, (8, 6), 0, 2, intermediate_size=7)


def collect(name: str, cuts: Sequence[Array], of: HFModel, *, expert: int = 0) -> dict[str, Array]:
    """Put the pieces of all `cuts` together, each element once."""
    found = {spec.name: np.full(spec.shape, -1, dtype=np.int64) for spec in hf_tensors(of, "float32")}
    for rank, cut in enumerate(cuts):
        flat = np.ascontiguousarray(cut).reshape(-1)
        for piece in pieces(name, cut.shape, of, ParallelRank(rank, len(cuts)), expert=expert):
            box = tuple(slice(start, stop) for start, stop in zip(piece.box.start, piece.box.stop, strict=True))
            steps = [stride * flat.itemsize for stride in piece.view.strides]
            part = np.lib.stride_tricks.as_strided(flat[piece.view.offset :], piece.box.shape, steps)
            assert (found[piece.tensor][box] == -1).all(), "an element is written twice"
            found[piece.tensor][box] = part
    return {key: value for key, value in found.items() if (value != -1).any()}


@st.composite
def heads(draw: st.DrawFn) -> tuple[int, int, int, int]:
    """Groups, query heads per group, head size, ranks; as Megatron allows them: one divides the other."""
    groups = draw(st.sampled_from([1, 2, 4, 6]))
    ranks = draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if groups % n == 0 or n % groups == 0]))
    per_group = draw(st.integers(1, 4)) * max(1, ranks // groups)
    return groups, per_group, draw(st.sampled_from([1, 2, 8])), ranks


@given(heads(), st.booleans())
def test_qkv_of_any_shape_comes_back_whole(shape: tuple[int, int, int, int], bias: bool) -> None:
    """Shards of a fused QKV, cut anywhere, make exactly the tensors that de-interleaving the whole would make."""
    groups, per_group, size, ranks = shape
    of = model(num_attention_heads=groups * per_group, num_key_value_heads=groups, head_dim=size, hidden_size=3)
    rows = groups * (per_group + 2) * size
    if rows % ranks:
        return
    full = np.arange(rows * (1 if bias else 3)).reshape(rows) if bias else np.arange(rows * 3).reshape(rows, 3)
    by_group = full.reshape(groups, per_group + 2, size, *full.shape[1:])
    name = QKV.replace("weight", "bias") if bias else QKV
    found = collect(name, np.split(full, ranks), of)
    kind = "bias" if bias else "weight"
    expected = {"q": by_group[:, :per_group], "k": by_group[:, per_group], "v": by_group[:, per_group + 1]}
    assert found.keys() == {f"{ATTENTION}.{part}_proj.{kind}" for part in expected}
    for part, value in expected.items():
        assert (found[f"{ATTENTION}.{part}_proj.{kind}"] == value.reshape(-1, *full.shape[1:])).all()


@given(st.sampled_from([1, 2, 4, 8]), st.integers(1, 5), st.integers(1, 4))
def test_a_gated_mlp_of_any_size_comes_back_whole(ranks: int, share: int, hidden: int) -> None:
    """Gate and up, cut separately and stacked on every rank, and down, cut by columns."""
    of = model(intermediate_size=ranks * share, hidden_size=hidden)
    gate = np.arange(ranks * share * hidden).reshape(-1, hidden)
    up = gate + 10_000
    cuts = [np.concatenate(pair) for pair in zip(np.split(gate, ranks), np.split(up, ranks), strict=True)]
    found = collect(FC1, cuts, of)
    assert (found[f"{MLP}.gate_proj.weight"] == gate).all()
    assert (found[f"{MLP}.up_proj.weight"] == up).all()
    down = np.ascontiguousarray(gate.T)
    assert (collect(FC2, np.split(down, ranks, axis=1), of)[f"{MLP}.down_proj.weight"] == down).all()


@given(st.sampled_from([1, 2, 4]), st.integers(0, 9))
def test_a_vocabulary_with_any_padding_comes_back_trimmed(ranks: int, padding: int) -> None:
    """Whatever the trainer padded to, the served rows are those of the vocabulary."""
    of = model(hidden_size=2)
    rows = -(-(10 + padding) // ranks) * ranks
    full = np.arange(rows * 2).reshape(rows, 2)
    assert (collect(EMBEDDING, np.split(full, ranks), of)["model.embed_tokens.weight"] == full[:10]).all()


@pytest.mark.parametrize("name", ["local_experts.1.linear_fc1.weight", "linear_fc1.weight1"])
@given(ranks=st.sampled_from([1, 2, 4]))
def test_an_expert_is_found_by_its_rank_whatever_its_name(name: str, ranks: int) -> None:
    """Sequential or grouped, local expert 1 of the ranks that begin at expert 2 is expert 3, gate and up cut apart."""
    gate = np.arange(24).reshape(4, 6)
    up = gate + 100
    cuts = [np.concatenate(pair) for pair in zip(np.split(gate, ranks), np.split(up, ranks), strict=True)]
    found = collect(f"decoder.layers.0.mlp.experts.{name}", cuts, model(**MOE), expert=2)
    assert found.keys() == {f"{MLP}.experts.3.gate_proj.weight", f"{MLP}.experts.3.up_proj.weight"}
    assert (found[f"{MLP}.experts.3.gate_proj.weight"] == gate).all()
    assert (found[f"{MLP}.experts.3.up_proj.weight"] == up).all()


@given(st.sampled_from([1, 2, 4]))
def test_a_down_projection_is_cut_or_not(ranks: int) -> None:
    """Local linears cut MLA's down projection, Transformer Engine's hold all of it on every rank: its shape tells."""
    of = model(**LATENT)
    full = np.arange(24).reshape(4, 6)
    name = "decoder.layers.0.self_attention.linear_q_down_proj.weight"
    assert (collect(name, np.split(full, ranks), of)[f"{ATTENTION}.q_a_proj.weight"] == full).all()
    for rank in range(ranks):
        assert [piece.box for piece in pieces(name, (4, 6), of, ParallelRank(rank, ranks))] == [Box((0, 0), (4, 6))]


def test_wide_norms_of_few_heads_are_shared_by_ranks() -> None:
    """MiniMax: two key heads on four ranks; ranks 0 and 1 hold the first head's norm, ranks 2 and 3 the second's."""
    of = model(architectures=["MiniMaxM2ForCausalLM"], num_local_experts=2, head_dim=3)
    name = "decoder.layers.0.self_attention.k_layernorm.weight"
    held = [[piece.box for piece in pieces(name, (3,), of, ParallelRank(rank, 4))] for rank in range(4)]
    assert held == [[Box((0,), (3,))], [Box((0,), (3,))], [Box((3,), (6,))], [Box((3,), (6,))]]


def test_swapped_halves_are_swapped_back() -> None:
    """MiMo's prediction layer takes the hidden state first, Megatron's the embedding."""
    of = model(architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    full = np.arange(72).reshape(6, 12)
    found = collect("mtp.layers.0.eh_proj.weight", np.split(full, 2), of)
    assert (found["model.mtp_layers.0.input_proj.weight"] == np.concatenate([full[:, 6:], full[:, :6]], 1)).all()


@pytest.mark.parametrize(
    ("architecture", "name", "zero_centred", "shift"),
    [
        ("LlamaForCausalLM", NORM, False, 0),
        ("LlamaForCausalLM", NORM, True, 1),
        ("Qwen3NextForCausalLM", NORM, True, 0),
        ("Qwen3NextForCausalLM", NORM, False, -1),
        ("Qwen3NextForCausalLM", "decoder.layers.0.self_attention.out_norm.weight", True, 1),
        ("LlamaForCausalLM", FC2, True, 0),
    ],
)
def test_norms_are_served_around_what_the_family_says(
    architecture: str, name: str, zero_centred: bool, shift: int
) -> None:
    """A norm trained around zero is served around one, unless the family serves it around zero; nothing else moves."""
    of = model(**DELTA | {"architectures": [architecture]})
    shape = {NORM: (6,), FC2: (6, 8)}.get(name, (3,))
    assert {piece.shift for piece in pieces(name, shape, of, ParallelRank(0, 1), zero_centred=zero_centred)} == {shift}


@given(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_a_gated_delta_net_comes_back_whole(ranks: int, values: int, key_dim: int, value_dim: int) -> None:
    """q, k, v, z, b and a, each cut by itself and stacked on every rank, make the tensors grouped by key head."""
    keys = 4
    of = model(
        **DELTA
        | {
            "linear_num_key_heads": keys,
            "linear_key_head_dim": key_dim,
            "linear_num_value_heads": keys * values,
            "linear_value_head_dim": value_dim,
        }
    )
    widths = [key_dim, key_dim, values * value_dim, values * value_dim]
    qkvz = np.arange(keys * sum(widths) * 6).reshape(keys, -1, 6)
    ba = np.arange(keys * 2 * values * 6).reshape(keys, -1, 6) + 10_000
    parts = [*np.split(qkvz, np.cumsum(widths)[:-1], 1), *np.split(ba, 2, 1)]
    sections = [np.split(part.reshape(-1, 6), ranks) for part in parts]
    cuts = [np.concatenate([section[rank] for section in sections]) for rank in range(ranks)]
    found = collect("decoder.layers.0.self_attention.in_proj.weight", cuts, of)
    assert (found["model.layers.0.linear_attn.in_proj_qkvz.weight"] == qkvz.reshape(-1, 6)).all()
    assert (found["model.layers.0.linear_attn.in_proj_ba.weight"] == ba.reshape(-1, 6)).all()


@given(st.sampled_from([1, 2]), st.integers(1, 3))
def test_output_gates_are_served_with_their_heads(ranks: int, size: int) -> None:
    """Megatron: queries of a group, their gates, key, value. Served: each head's query, then its gate."""
    of = model(**DELTA | {"full_attention_interval": 1, "head_dim": size})
    q = np.arange(4 * 2 * size * 6).reshape(2, 2, 2, size, 6)  # group, head, query or gate
    k, v = (np.arange(2 * size * 6).reshape(2, size, 6) + start for start in (10_000, 20_000))
    full = np.concatenate([np.concatenate([*q[g, :, 0], *q[g, :, 1], k[g], v[g]]) for g in range(2)])
    found = collect(QKV, np.split(full, ranks), of)
    assert (found[f"{ATTENTION}.q_proj.weight"] == q.reshape(-1, 6)).all()
    assert (found[f"{ATTENTION}.k_proj.weight"] == k.reshape(-1, 6)).all()
    assert (found[f"{ATTENTION}.v_proj.weight"] == v.reshape(-1, 6)).all()
