"""What a version leaves as the engine's launch checkpoint has it: names and prefixes, each with a reason. Pure data.

A checkpoint is often more than what is trained: a frozen vision tower, a prediction layer. A manifest declares such
tensors (`Manifest.left`), and what is sent and what is left are together exactly the served checkpoint: nothing is
missing by accident, and no tensor is both.

A prediction layer that is not trained may hold copies of tensors that are (GLM-4.5 and DeepSeek-V3: the embedding and
the output layer). They do not travel either, and have the values of what is sent (`Manifest.copies`).
"""

import enum
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final

import msgspec

from ..errors import ManifestError

_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,255}")
_SHOWN: Final = 4


class LeftReason(enum.StrEnum):
    """Why tensors are left."""

    FROZEN = "frozen"
    """The trainer holds them, and changes none."""
    NOT_TRAINED = "not_trained"
    """The trainer does not hold them."""
    NOT_SERVED = "not_served"
    """Engines do not load them, though the checkpoint's files have them."""


class Left(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One tensor by its name, or all whose names begin with a prefix that ends in a dot."""

    name: str
    reason: LeftReason = LeftReason.NOT_TRAINED


class Copy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A tensor of the served checkpoint that does not travel, and always has the value of one that is sent."""

    name: str
    of: str
    """The tensor that is sent."""


def covering(left: Collection[str], name: str) -> str:
    """The entry of `left` (names, and prefixes that end in a dot) that covers `name`; empty if none does."""
    if name in left:
        return name
    return next((prefix for prefix in _prefixes(name) if prefix in left), "")


def check_left(left: Sequence[Left], sent: Iterable[str]) -> None:
    """Raise `ManifestError` for an entry that is no name, or covers another entry or a tensor that is sent."""
    names = {each.name for each in left}
    for each in left:
        if not _NAME.fullmatch(each.name):
            raise ManifestError(f"left: {each.name!r} is not a tensor's name, nor a prefix that ends in '.'")
        above = next((prefix for prefix in _prefixes(each.name) if prefix != each.name and prefix in names), "")
        if above:
            raise ManifestError(f"left: {each.name!r} is covered by {above!r}, too: name one of them")
    if len(names) < len(left):
        raise ManifestError("left: an entry stands twice: name each once")
    both = [f"{name} (by {entry!r})" for name in sent if (entry := covering(names, name))] if left else []
    if both:
        raise ManifestError(
            f"left: {len(both)} tensors that are sent are covered too: {', '.join(both[:_SHOWN])}; name a longer prefix"
        )


def check_copies(copies: Sequence[Copy], sent: Collection[str]) -> None:
    """Raise `ManifestError` for a copy that is sent itself, of a tensor that is not sent, or named twice."""
    names = {each.name for each in copies}
    for each in copies:
        if not _NAME.fullmatch(each.name) or each.name.endswith("."):
            raise ManifestError(f"copies: {each.name!r} is not a tensor's name")
        if each.name in sent:
            raise ManifestError(f"copies: {each.name!r} is sent: it is no copy of {each.of!r} then")
        if each.of not in sent:
            raise ManifestError(f"copies: {each.name!r} is to follow {each.of!r}, which is not sent")
    if len(names) < len(copies):
        raise ManifestError("copies: a tensor stands twice: name each once")


def shortest_prefixes(left: Iterable[str], sent: Iterable[str]) -> tuple[str, ...]:
    """The fewest entries that cover the names `left` and none of `sent`: the shortest prefixes, else the names."""
    taken = {prefix for name in sent for prefix in _prefixes(name)}
    entries = (next((prefix for prefix in _prefixes(name) if prefix not in taken), name) for name in left)
    return tuple(dict.fromkeys(entries))


def _prefixes(name: str) -> Iterator[str]:
    """Prefixes of `name` that end in a dot, shortest first."""
    at = name.find(".")
    while at >= 0:
        yield name[: at + 1]
        at = name.find(".", at + 1)
