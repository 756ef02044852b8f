"""Rows of an embedding beyond the served vocabulary: padding that Megatron makes, or tokens that would be lost."""

from __future__ import annotations

import pytest

from weightbus.trainer_agent.source import LayoutMismatch, UnsupportedModel
from weightbus.trainer_agent.sources.megatron.vocabulary_padding import check_padding

NAME = "embedding.word_embeddings.weight"


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("divisible_by", [1, 2, 7, 100, 128])
@pytest.mark.parametrize("vocabulary", [250, 50257, 151936, 151669])
def test_what_megatron_pads_is_padding(vocabulary: int, divisible_by: int, ranks: int) -> None:
    """By any setting up to its usual one, known or not, on any number of ranks."""
    multiple = divisible_by * ranks
    rows = -(-vocabulary // multiple) * multiple
    check_padding(NAME, rows, vocabulary, ranks, None)
    check_padding(NAME, rows, vocabulary, ranks, divisible_by)


@pytest.mark.parametrize(
    ("rows", "vocabulary", "ranks"),
    [
        (152064, 151669, 2),  # the config of another model of the family
        (152064, 128256, 8),
        (151936, 151936 - 128, 1),
        (251, 250, 1),  # a prime: no setting gives one row of padding
    ],
)
def test_more_than_megatron_pads_is_refused(rows: int, vocabulary: int, ranks: int) -> None:
    """Tokens that were trained would not be served. The message says both numbers and what to do."""
    with pytest.raises(LayoutMismatch, match=f"has {rows} rows on {ranks} .* vocab_size={vocabulary}, .*config of the"):
        check_padding(NAME, rows, vocabulary, ranks, None)


def test_a_trainer_that_pads_further_says_so() -> None:
    """The padding must then be what its setting gives, to the row."""
    check_padding(NAME, 2048, 1100, 2, 1024)
    check_padding(NAME, 1100, 1100, 2, 1024)
    with pytest.raises(LayoutMismatch, match="vocab_divisible_by=1024 pads that to 2048"):
        check_padding(NAME, 4096, 1100, 2, 1024)
    with pytest.raises(LayoutMismatch, match="vocab_divisible_by=64 pads that to 1152"):
        check_padding(NAME, 1280, 1100, 2, 64)
    with pytest.raises(UnsupportedModel, match="vocab_divisible_by=0"):
        check_padding(NAME, 1280, 1100, 2, 0)
