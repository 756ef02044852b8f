"""How many rows of an embedding are padding: what is cut off, and what may not be. Pure, no torch.

Megatron pads a vocabulary up to a multiple of ``make_vocab_size_divisible_by`` times the tensor-parallel ranks, 128
unless its trainer says otherwise. The rows beyond the served vocabulary are cut without a trace, so a config with too
small a ``vocab_size`` would lose tokens that were trained. No model carries the setting; what can be told without it is
whether any value up to the usual one pads so far.
"""

from __future__ import annotations

from typing import Final

from ...source import LayoutMismatch, UnsupportedModel

USUAL: Final = 128
"""Megatron's own default of ``make_vocab_size_divisible_by``."""


def check_padding(name: str, rows: int, vocabulary: int, ranks: int, divisible_by: int | None) -> None:
    """Raise `LayoutMismatch` unless `rows`, of all tensor-parallel `ranks` together, may be `vocabulary` with padding.

    `divisible_by` is the trainer's ``make_vocab_size_divisible_by`` where the caller knows it: then the padding must be
    exactly what that gives, or none.
    """
    if divisible_by is not None and divisible_by < 1:
        raise UnsupportedModel(f"vocab_divisible_by={divisible_by}: a positive number is expected")
    padding = rows - vocabulary
    if padding <= 0:  # none; or too few rows, which the shapes tell
        return
    known = divisible_by is not None
    multiple = ranks * (divisible_by or _largest_divisor(rows // ranks))
    if padding < multiple and rows % multiple == 0:
        return
    found = f"{name!r} has {rows} rows on {ranks} tensor-parallel ranks, the Hugging Face config says vocab_size="
    expected = (
        f"vocab_divisible_by={divisible_by} pads that to {-(-vocabulary // multiple) * multiple}"
        if known
        else f"no make_vocab_size_divisible_by up to {USUAL} pads that so far"
    )
    raise LayoutMismatch(
        f"{found}{vocabulary}, which leaves {padding} rows as padding; {expected}: build the source with the config of "
        f"the model that is being trained, or with vocab_divisible_by=N where the trainer pads to another multiple"
    )


def _largest_divisor(rows: int) -> int:
    """The largest setting up to the usual one that gives each rank so many rows."""
    return next(number for number in range(min(USUAL, rows), 0, -1) if rows % number == 0)
