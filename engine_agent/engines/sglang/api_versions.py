"""How the versions of SGLang's HTTP interface differ, as data. Read from the wheels 0.5.11 to 0.5.23.

Names, methods and required fields of every endpoint that the agent uses are equal in that range, and unknown JSON
fields are ignored throughout; what differs is listed here. A version outside the range is refused, because a wrong
guess can end the server or leave it with half of the weights.
"""

import re
from typing import Final

import msgspec

from ...errors import EngineAgentError

Release = tuple[int, int, int]


class Dialect(msgspec.Struct, frozen=True):
    """The versions from `first` to `last`, both included."""

    name: str
    first: Release
    last: Release
    sessions: bool
    """begin_weight_update must come before tensors and end_weight_update after; without a session they get 400."""
    exact_unpickler: bool
    """Payload classes are allowed by exact name. Before, by prefix: any client of the endpoint could run code."""
    checksums: bool
    """weights_checker knows the action ``checksum``."""
    cpu_checksums: bool
    """... and it works where there is no GPU."""
    spans: bool
    """Answers carry ``weight_versions``: which token was made by which version."""
    in_place_flush_kills: bool
    """An update with flush_cache while requests are frozen ends the server, not only the call."""


DIALECTS: Final = (
    Dialect(
        name="0.5.11",
        first=(0, 5, 11),
        last=(0, 5, 11),
        sessions=False,
        exact_unpickler=False,
        checksums=False,
        cpu_checksums=False,
        spans=False,
        in_place_flush_kills=True,
    ),
    Dialect(
        name="0.5.12",
        first=(0, 5, 12),
        last=(0, 5, 18),
        sessions=False,
        exact_unpickler=False,
        checksums=True,
        cpu_checksums=False,
        spans=False,
        in_place_flush_kills=True,
    ),
    Dialect(
        name="0.5.19",
        first=(0, 5, 19),
        last=(0, 5, 20),
        sessions=False,
        exact_unpickler=False,
        checksums=True,
        cpu_checksums=False,
        spans=True,
        in_place_flush_kills=True,
    ),
    Dialect(
        name="0.5.21",
        first=(0, 5, 21),
        last=(0, 5, 22),
        sessions=True,
        exact_unpickler=True,
        checksums=True,
        cpu_checksums=False,
        spans=True,
        in_place_flush_kills=True,
    ),
    Dialect(
        name="0.5.23",
        first=(0, 5, 23),
        last=(0, 5, 23),
        sessions=True,
        exact_unpickler=True,
        checksums=True,
        cpu_checksums=True,
        spans=True,
        in_place_flush_kills=False,
    ),
)
KNOWN: Final = "0.5.11 to 0.5.23"


class UnknownDialect(EngineAgentError):
    """The server speaks a version of SGLang's HTTP interface that was never checked."""

    def __init__(self, version: str, known: str) -> None:
        self.version = version
        super().__init__(
            f"SGLang {version!r} is not a version this agent knows ({known}): run one of those, or name the nearest "
            "with --dialect after trying a round on a server that nobody uses"
        )


_RELEASE: Final = re.compile(r"^(\d+)\.(\d+)\.(\d+)(?:\.post\d+)?$")


def dialect_of(version: str, override: str = "") -> Dialect:
    """The dialect that `version` speaks, or the one named `override`. Raises `UnknownDialect`.

    Post releases speak as their release does. Development builds (``0.5.23.dev7``, ``+g1a2b``) are unknown: their
    number does not tell what is in them.
    """
    wanted = override or version
    found = _RELEASE.match(wanted)
    if found:
        release = (int(found[1]), int(found[2]), int(found[3]))
        for dialect in DIALECTS:
            if dialect.first <= release <= dialect.last:
                return dialect
    raise UnknownDialect(wanted, KNOWN)
