"""Counts elements that are no finite numbers, in the 64-bit words of which digests are made.

An element of a binary floating-point format is an infinity or NaN exactly if all bits of its exponent are ones; in
float8_e4m3fn, which has no infinity, NaN is the number whose exponent and mantissa are all ones. So each format has one
*mask*, the bits below the sign that are all ones in such an element, repeated over a word. Adding the lowest of them to
what the mask leaves of an element carries into its sign, and never beyond, exactly if all of them are ones::

    odd = ((word & mask) + lowest) & sign           a bit for each such element of the word

The mask of formats without such elements, integers, is 0, and finds none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..tensors import Column

Words = npt.NDArray[np.uint64]

_BITS: Final[dict[str, tuple[int, int]]] = {
    "float64": (64, 0x7FF0000000000000),
    "float32": (32, 0x7F800000),
    "bfloat16": (16, 0x7F80),
    "float16": (16, 0x7C00),
    "float8_e4m3fn": (8, 0x7F),
    "float8_e5m2": (8, 0x7C),
}
"""Bits of an element, and those that are all ones in one that is not finite."""
_ONE: Final = np.uint64(1)


def _repeated(bits: int, pattern: int) -> int:
    return sum(pattern << at for at in range(0, 64, bits))


_MASKS: Final = {name: _repeated(*each) for name, each in _BITS.items()}
_VIEWS: Final[dict[int, tuple[type[np.signedinteger], type[np.unsignedinteger], int]]] = {
    _MASKS[name]: (getattr(np, f"int{bits}"), getattr(np, f"uint{bits}"), pattern)
    for name, (bits, pattern) in _BITS.items()
}
"""By mask: elements as integers with and without a sign, and the least that is not finite and positive."""


def masks_of(dtypes: Sequence[str]) -> Words:
    """(tensors,): the mask of each tensor's dtype, by torch's names; 0 for one that has finite numbers only."""
    return np.array([_MASKS.get(dtype, 0) for dtype in dtypes], np.uint64)


def add_counts(words: Words, cuts: Column, masks: Words, counts: Column) -> None:
    """Add to `counts`, (tensors,), the elements of each tensor that are not finite.

    `cuts`, (tensors,), are the indexes in `words` at which tensors begin, the first of them 0; `masks`, (tensors,), are
    those of their dtypes. In words of one dtype without such elements, the rule, the bits that any word has tell, or
    the largest elements as integers: one to three passes of many bytes a cycle.
    """
    mask: int = int(masks[0])
    if len(masks) == 1 or bool((masks == masks[0]).all()):
        if not mask or not _any(words, mask):
            return
        each = masks[0]
    else:
        each = np.repeat(masks, np.diff(cuts, append=len(words)))
    found = odd_bits(words, each)
    if found.any():
        ones: Column = np.count_nonzero(found.view(np.uint8).reshape(-1, 8), axis=1)
        counts += np.add.reduceat(ones, cuts)


def odd_bits(words: Words, mask: Words | np.uint64) -> Words:
    """A bit for each element that is not finite, in the place of its sign."""
    lowest, sign = mask & ~(mask << _ONE), (mask << _ONE) & ~mask
    found: Words = ((words & mask) + lowest) & sign
    return found


def _any(words: Words, mask: int) -> bool:
    signed, unsigned, least = _VIEWS[mask]
    # Weights below 2 leave the highest bit of the exponent free: one pass. Those in eight bits fill their range.
    if signed is not np.int8 and not odd_bits(np.bitwise_or.reduce(words)[None], np.uint64(mask))[0]:
        return False
    # Above the finite ones are, of elements as integers with a sign, the positive odd ones; without, the negative ones.
    positive, negative = words.view(signed).max(), words.view(unsigned).max()
    return int(positive) >= least or int(negative) >= least | (np.iinfo(unsigned).max // 2 + 1)
