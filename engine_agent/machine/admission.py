"""Whether a server may be given a request now, by the versions that the request may begin with. Pure.

A request names bounds on the version that writes its first token. Between its admission and that token a round may
swap in the next version, so while one is under way both versions have to be within the bounds. If the round fails, the
server waits for a later version, and its requests with it: so an upper bound is promised between rounds only. The rest
of a response may be of later versions; the server names the version of each token.
"""

import enum
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from weightbus.control.protocol import MAX_VERSION, Version

from .engine_machine import ServerView

WAITS_S: Final = 30.0
"""Seconds of a pause after which requests are refused. Until then they wait in the server, as in any round."""


class AdmissionVerdict(enum.StrEnum):
    """What becomes of a request."""

    ADMITTED = "admitted"
    """The server may be given it."""
    OUT_OF_BOUNDS = "out_of_bounds"
    """It may begin with a version that its bounds exclude."""
    UNCLEAN = "unclean"
    """No verified, committed version is served, nor about to be."""


class BadBounds(ValueError):
    """Bounds that no version could be compared with."""


class VersionBounds(msgspec.Struct, frozen=True):
    """The versions that a request accepts, both ends included. Weights of a launch are older than every version."""

    least: int | None = None
    most: int | None = None

    @classmethod
    def read(cls, given: Iterable[tuple[str, str]]) -> "VersionBounds":
        """Bounds of (name, value) pairs: ``min``, ``max`` and ``exact``. An empty value is none. Raises `BadBounds`."""
        found: dict[str, int] = {}
        for name, value in given:
            if name not in _NAMES:
                raise BadBounds(f"{name!r} is no bound: {', '.join(_NAMES)} are")
            if not value:
                continue
            if not (value.isascii() and value.isdecimal() and len(value) <= _MOST_DIGITS and int(value) <= MAX_VERSION):
                raise BadBounds(f"{name} is {value[:40]!r}, expected is a version from 0 to {MAX_VERSION}")
            if found.setdefault(name, int(value)) != int(value):
                raise BadBounds(f"{name} is given twice, as {found[name]} and {value}")
        exact = found.get("exact")
        least = max((each for each in (found.get("min"), exact) if each is not None), default=None)
        most = min((each for each in (found.get("max"), exact) if each is not None), default=None)
        if least is not None and most is not None and least > most:
            asked = ", ".join(f"{name} = {value}" for name, value in found.items())
            raise BadBounds(f"no version is within {asked}")
        return cls(least, most)

    def allow(self, version: Version | None) -> bool:
        """Whether a request may begin with `version`; null: the weights of a launch."""
        if version is None:
            return self.least is None
        return (self.least is None or version >= self.least) and (self.most is None or version <= self.most)


_NAMES: Final = ("min", "max", "exact")
_MOST_DIGITS: Final = 32
BOUND_HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {name: f"Weightbus-{name.title()}-Version" for name in _NAMES}
)
"""The header of a request that has the bound of each name."""


class Admission(msgspec.Struct, frozen=True):
    """The verdict about one request, and what it follows from."""

    verdict: AdmissionVerdict
    versions: tuple[Version | None, ...]
    """As in `ServerView.begins_with`."""
    reason: str = ""


def admit(bounds: VersionBounds, view: ServerView, now: float, trouble: str = "") -> Admission:
    """Decide about a request that arrives at `now`. `trouble`: why the server can take no requests, as far as known."""
    found = view.begins_with
    if not found or view.memory_released or trouble:
        return Admission(AdmissionVerdict.UNCLEAN, (), trouble or f"{view.health.value}: {view.reason}")
    if view.paused_at is not None and now >= view.paused_at + WAITS_S:
        waited = f"paused for {now - view.paused_at:.0f} s, {view.doing or view.weights.value}"
        return Admission(AdmissionVerdict.UNCLEAN, (), waited)
    if all(bounds.allow(version) for version in found) and (bounds.most is None or view.settled):
        return Admission(AdmissionVerdict.ADMITTED, found)
    held, *coming = found
    more = f", and version {coming[0]} is coming" if coming else "" if view.settled else ", and is in a round"
    return Admission(AdmissionVerdict.OUT_OF_BOUNDS, found, f"holds {version_name(held)}{more}")


def version_name(version: Version | None) -> str:
    """A version in words."""
    return "the weights of its launch" if version is None else f"version {version}"
