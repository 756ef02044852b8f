"""What ranks conclude from each other's rosters."""

import msgspec
import pytest

from weightbus.trainer_agent.naming import Dense, served_tensors
from weightbus.trainer_agent.roster import Refusal, Roster, Shard, check, encode, holdings
from weightbus.trainer_agent.source import RanksDisagree

MODEL = Dense.parse(
    {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": 4,
        "intermediate_size": 6,
        "num_attention_heads": 2,
        "vocab_size": 8,
        "rms_norm_eps": 1e-6,
    }
)
NORM = Shard("decoder.final_layernorm.weight", (4,))


def roster(tp_rank: int = 0, *, tp_ranks: int = 2, dtype: str = "float32", model: Dense = MODEL) -> Roster:
    return Roster(
        model, dtype, tp_rank, tp_ranks, (NORM, Shard("embedding.word_embeddings.weight", (8 // tp_ranks, 4)))
    )


def test_rosters_travel_unchanged() -> None:
    """What a rank said is what the others read."""
    rosters = (roster(0), roster(1))
    assert check([encode(each) for each in rosters]) == rosters


def test_one_refusal_is_everybodys_error() -> None:
    """All ranks learn which rank cannot serve, and why."""
    with pytest.raises(RanksDisagree, match="rank 1 cannot serve its part: UnknownParameter: no rule"):
        check([encode(roster(0)), encode(Refusal("UnknownParameter: no rule"))])


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (roster(1, dtype="bfloat16"), "dtype='bfloat16' .rank 0: 'float32'."),
        (roster(1, tp_ranks=4), "tp=4 .rank 0: 2."),
        (roster(1, model=msgspec.structs.replace(MODEL, layers=2)), "layers=2 .rank 0: 1."),
    ],
)
def test_ranks_of_different_models_are_told_apart(other: Roster, part: str) -> None:
    """The message names the fields that differ, and nothing else."""
    with pytest.raises(RanksDisagree, match=f"rank 1 has {part}: give"):
        check([encode(roster(0)), encode(other)])


def test_copies_are_read_from_the_lowest_rank() -> None:
    """Norms are on every tensor rank and everything on every replica: each element is read once."""
    held = holdings([roster(0), roster(1), roster(0), roster(1)], served_tensors(MODEL, "float32"))
    read = {rank: [(index, piece.tensor, piece.served_row) for index, piece in pieces] for rank, pieces in held.items()}
    assert read == {
        0: [(0, "model.norm.weight", 0), (1, "model.embed_tokens.weight", 0)],
        1: [(1, "model.embed_tokens.weight", 4)],
    }
