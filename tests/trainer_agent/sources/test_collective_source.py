"""One rank's failure is everybody's, whatever it raised."""

from collections.abc import Callable
from typing import cast

import pytest

from weightbus.trainer_agent.source import LayoutMismatch, RanksDisagree, SourceError
from weightbus.trainer_agent.sources.collective_source import (
    LayoutRefusal,
    RankGroup,
    RankLayout,
    check_on_all_ranks,
    encode,
    on_all_ranks,
)


class Two:
    """Rank 0 of two; rank 1 says what it is told to."""

    rank = 0

    def __init__(self, other: RankLayout | LayoutRefusal) -> None:
        self.other = encode(other)
        self.said: list[bytes] = []

    def gather(self, blob: bytes) -> list[bytes]:
        self.said.append(blob)
        return [blob, self.other]


FINE = RankLayout({"layers": "1"}, b"")


def raises(error: Exception) -> Callable[[], tuple[RankLayout, int]]:
    def attempt() -> tuple[RankLayout, int]:
        raise error

    return attempt


def test_what_all_found_is_returned() -> None:
    """With what is this rank's own."""
    assert on_all_ranks(cast(RankGroup, Two(FINE)), lambda: (FINE, 7)) == ((FINE, FINE), 7)


@pytest.mark.parametrize(
    "error", [KeyError("v_head_dim"), AttributeError("no such thing"), RuntimeError(), MemoryError()]
)
def test_an_error_that_is_nobodys_is_told_to_the_others_before_it_is_raised(error: Exception) -> None:
    """As a source's error, with what it was: they would wait for their timeout."""
    ranks = Two(FINE)
    with pytest.raises(SourceError, match=type(error).__name__) as told:
        on_all_ranks(cast(RankGroup, ranks), raises(error))
    assert told.value.__cause__ is error
    assert ranks.said == [encode(LayoutRefusal(f"SourceError: {told.value}"))]


def test_a_sources_error_is_raised_as_it_is() -> None:
    """And told by its name."""
    ranks, error = Two(FINE), LayoutMismatch("another model")
    with pytest.raises(LayoutMismatch) as told:
        on_all_ranks(cast(RankGroup, ranks), raises(error))
    assert told.value is error
    assert ranks.said == [encode(LayoutRefusal("LayoutMismatch: another model"))]


def test_what_the_other_rank_could_not_do_is_raised_here() -> None:
    """Whether anything is found or only checked."""
    other = LayoutRefusal("LayoutMismatch: replaced")
    with pytest.raises(RanksDisagree, match="rank 1 cannot serve its part: LayoutMismatch: replaced"):
        on_all_ranks(cast(RankGroup, Two(other)), lambda: (FINE, 7))
    with pytest.raises(RanksDisagree, match="replaced"):
        check_on_all_ranks(cast(RankGroup, Two(other)), lambda: None)
