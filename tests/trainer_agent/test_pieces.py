"""Which boxes a shard holds: by hand on small cases, and against whole-tensor arithmetic on random ones."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightbus.dataplane.manifest import TensorSpec
from weightbus.trainer_agent.naming import Dense, served_tensors
from weightbus.trainer_agent.pieces import Piece, pieces
from weightbus.trainer_agent.source import LayoutMismatch

Array = npt.NDArray[np.int64]
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
FC2 = "decoder.layers.0.mlp.linear_fc2.weight"
NORM = "decoder.layers.0.input_layernorm.weight"
EMBEDDING = "embedding.word_embeddings.weight"
ATTENTION = "model.layers.0.self_attn"
MLP = "model.layers.0.mlp"


def model(**changes: int) -> Dense:
    sizes = {
        "hidden_size": 6,
        "intermediate_size": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 1,
    }
    config = sizes | {
        "num_hidden_layers": 1,
        "vocab_size": 10,
        "rms_norm_eps": 1e-6,
        "architectures": ["LlamaForCausalLM"],
    }
    return Dense.parse(config | {"attention_bias": True} | changes)


def served(of: Dense) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in served_tensors(of, "float32")}


def shard(name: str, shape: tuple[int, ...], rank: int, ranks: int) -> tuple[Piece, ...]:
    return pieces(name, shape, served(model()), model(), rank=rank, ranks=ranks)


def test_qkv_is_taken_apart_by_group() -> None:
    """Two groups of two query heads: q q k v, q q k v; equal steps become one piece a tensor."""
    assert shard(QKV, (8, 6), 0, 1) == (
        Piece(f"{ATTENTION}.q_proj.weight", 0, 0, 2, 6, count=2, local_step=4, served_step=2),
        Piece(f"{ATTENTION}.k_proj.weight", 2, 0, 1, 6, count=2, local_step=4, served_step=1),
        Piece(f"{ATTENTION}.v_proj.weight", 3, 0, 1, 6, count=2, local_step=4, served_step=1),
    )


def test_qkv_on_more_ranks_than_groups_is_cut_inside_a_group() -> None:
    """Four ranks, two groups: rank 2 holds the second group's queries, rank 3 its key and value."""
    assert shard(QKV, (2, 6), 2, 4) == (Piece(f"{ATTENTION}.q_proj.weight", 0, 2, 2, 6),)
    assert shard(QKV, (2, 6), 3, 4) == (
        Piece(f"{ATTENTION}.k_proj.weight", 0, 1, 1, 6),
        Piece(f"{ATTENTION}.v_proj.weight", 1, 1, 1, 6),
    )


def test_gate_and_up_are_cut_separately() -> None:
    """Rank 1 of 2 holds the second half of gate above the second half of up."""
    assert shard(FC1, (8, 6), 1, 2) == (
        Piece(f"{MLP}.gate_proj.weight", 0, 4, 4, 6),
        Piece(f"{MLP}.up_proj.weight", 4, 4, 4, 6),
    )


def test_a_row_parallel_layer_is_cut_by_columns() -> None:
    """Rank 1 of 2 holds the right half of every row."""
    assert shard(FC2, (6, 4), 1, 2) == (Piece(f"{MLP}.down_proj.weight", 0, 0, 6, 4, column=4),)


def test_a_norm_is_whole_on_every_rank() -> None:
    """A vector has rows of one element."""
    assert shard(NORM, (6,), 1, 2) == (Piece("model.layers.0.input_layernorm.weight", 0, 0, 6, 1),)


def test_padding_of_the_vocabulary_is_served_by_nobody() -> None:
    """Ten words padded to sixteen over four ranks: the third rank holds two of them, the last none."""
    assert [[piece.rows for piece in shard(EMBEDDING, (4, 6), rank, 4)] for rank in range(4)] == [[4], [4], [2], []]


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
        ("decoder.layers.0.mlp.linear_fc2.bias", (6,), 1),
        ("decoder.layers.1.input_layernorm.weight", (6,), 1),
    ],
)
def test_a_shard_of_another_model_is_refused(name: str, shape: tuple[int, ...], ranks: int) -> None:
    """Sizes that the served model does not have, and tensors that it lacks, are named instead of cut somehow."""
    with pytest.raises(LayoutMismatch, match=name):
        shard(name, shape, 0, ranks)


def test_sizes_that_ranks_cannot_share_are_refused() -> None:
    """Seven rows of gate over two ranks of four rows each: padding that was never promised."""
    odd = model(intermediate_size=7)
    with pytest.raises(LayoutMismatch, match=r"2 shards of \(8, 6\)"):
        pieces(FC1, (8, 6), served(odd), odd, rank=0, ranks=2)


def test_a_name_without_a_rule_is_the_callers_mistake() -> None:
    """Callers ask for the rule first, and refuse the parameter in their own words."""
    with pytest.raises(KeyError):
        shard("decoder.layers.0.mlp.router.weight", (4, 6), 0, 1)


def collect(name: str, cuts: list[Array], of: Dense) -> dict[str, Array]:
    """Put the pieces of all `cuts` together, each element once."""
    specs = served(of)
    found = {spec.name: np.full(spec.shape, -1, dtype=np.int64) for spec in specs.values()}
    for rank, cut in enumerate(cuts):
        for piece in pieces(name, cut.shape, specs, of, rank=rank, ranks=len(cuts)):
            for block in range(piece.count):
                at = piece.local_row + block * piece.local_step
                to = piece.served_row + block * piece.served_step
                target = found[piece.tensor]
                box = (slice(to, to + piece.rows), slice(piece.column, piece.column + piece.columns))[: target.ndim]
                assert (target[box] == -1).all(), "an element is written twice"
                target[box] = cut[at : at + piece.rows]
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
    down = gate.T
    assert (collect(FC2, np.split(down, ranks, axis=1), of)[f"{MLP}.down_proj.weight"] == down).all()


@given(st.sampled_from([1, 2, 4]), st.integers(0, 9))
def test_a_vocabulary_with_any_padding_comes_back_trimmed(ranks: int, padding: int) -> None:
    """Whatever the trainer padded to, the served rows are those of the vocabulary."""
    of = model(hidden_size=2)
    rows = -(-(10 + padding) // ranks) * ranks
    full = np.arange(rows * 2).reshape(rows, 2)
    assert (collect(EMBEDDING, np.split(full, ranks), of)["model.embed_tokens.weight"] == full[:10]).all()
