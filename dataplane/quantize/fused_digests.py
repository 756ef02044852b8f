"""Which quantized elements are summed for their digest while they are made, instead of being read again. Pure.

A program of the FP8 kernel holds whole rows of its tile when it stores them: eight elements are a word of the packed
tensor, if rows and boxes begin and end on one, and the order of a sum's words does not matter (box_digests.py).
Everything else, scales among it, is read again in place: scales are four bytes, half a word, and a part in sixteen
thousand of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from ..tensors import Box, Column, Shards, intersect, volumes
from .schemes import Element, Scheme

WORD: Final = 8
"""FP8 elements in a word."""
_MOST: Final = 1 << 31
"""Words of a tensor that the kernel's table has room for."""


class WordLayout(NamedTuple):
    """The words of a box in its packed tensor."""

    at: int
    """Index of the first word."""
    step: int
    """Words from one row to the next."""


@dataclass(frozen=True, eq=False)
class FusedDigests:
    """The sums of one rank that were made while quantizing."""

    shards: Shards
    """All shards in the sums."""
    tensor: Column
    """(sums,): the tensor of each sum, all different."""


def word_layout(scheme: Scheme, box: Box, shape: Sequence[int]) -> WordLayout | None:
    """The words of `box`, of a weight of `shape` that `scheme` quantizes; None if they are read again.

    That is: for anything but FP8 with a scale for a block or a row; where a row of the tensor, of the box or of a block
    is no whole number of words; and for a tensor of 16 GiB or more.
    """
    if scheme.element is not Element.E4M3 or scheme.flat is not None or scheme.scale_dtype == "uint8":
        return None
    rows, columns = shape
    block = scheme.block[1] or columns
    if columns % WORD or block % WORD or box.start[1] % WORD or box.stop[1] % WORD or rows * columns >= _MOST * WORD:
        return None
    return WordLayout((box.start[0] * columns + box.start[1]) // WORD, columns // WORD)


def fully_summed_tensors(chosen: Shards, summed: Shards) -> Column:
    """The tensors whose share in `chosen` is exactly `summed`, disjoint shards of one rank; ascending.

    Both are of the same tensors, in the same order.
    """
    count = len(chosen.tensors)
    both = volumes(intersect(chosen.boxes, summed.boxes)[2], count)
    same = (both == volumes(chosen.boxes, count)) & (both == volumes(summed.boxes, count))
    return np.flatnonzero(same & (both > 0))
