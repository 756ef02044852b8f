"""What every rank does on its own before they go on together: one that fails says so, and all of them raise.

Without that the others would wait for it as long as their timeout allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..source import SourceError
from .rank_group import RankGroup
from .rank_layout import LayoutRefusal, RankLayout, check, encode

Own = TypeVar("Own")


def together(ranks: RankGroup, attempt: Callable[[], tuple[RankLayout, Own]]) -> tuple[tuple[RankLayout, ...], Own]:
    """Run `attempt` here, hear what it found on the other ranks, and return both. Collective.

    Raises a `SourceError` on every rank when it failed on any, whatever it raised there, and `RanksDisagree` when
    they found different facts.
    """
    try:
        roster, own = attempt()
    except Exception as error:
        refused = error if isinstance(error, SourceError) else _wrapped(ranks.rank, error)
        ranks.gather(encode(LayoutRefusal(f"{type(refused).__name__}: {refused}")))
        if refused is error:
            raise
        raise refused from error
    return check(ranks.gather(encode(roster))), own


def together_check(ranks: RankGroup, check_here: Callable[[], None]) -> None:
    """Run `check_here` on every rank; a `SourceError` on all of them when it fails on any. Collective."""

    def attempt() -> tuple[RankLayout, None]:
        check_here()
        return RankLayout({}, b""), None

    together(ranks, attempt)


def _wrapped(rank: int, error: Exception) -> SourceError:
    """What was not foreseen: a module of another kind, a config with holes, an exporter's own error."""
    return SourceError(
        f"what rank {rank} was given cannot be read ({type(error).__name__}: {error}): "
        f"give every rank its part of the model, and the config that belongs to it"
    )
