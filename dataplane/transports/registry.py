"""The transports that this process knows, by name: the built-in ones, installed ones, and those given to `register`.

Another distribution adds a transport by an entry point of the group ``weightbus.transports``, whose name is the
transport's and whose value is a `Transport`. Trainer and sidecar then take it in their settings; the coordinator needs
nothing: it routes a name that it does not know in the trainer's order of preference, where both sides offer it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from ..errors import Unsupported
from .direct import TRANSPORT as DIRECT
from .disk import TRANSPORT as DISK
from .distributed import TRANSPORT as DISTRIBUTED
from .interface import ReceiverContext, Transport
from .local import TRANSPORT as LOCAL
from .sends import TRANSPORT as SENDS

BUILT_IN: Final = (DIRECT, SENDS, LOCAL, DISTRIBUTED, DISK)
_GROUP: Final = "weightbus.transports"

_known: dict[str, Transport] = {each.name: each for each in BUILT_IN}


def register(transport: Transport) -> None:
    """Make `transport` known in this process. Raises `ValueError` where another one has its name."""
    if _known.setdefault(transport.name, transport) is not transport:
        raise ValueError(f"there is a transport {transport.name!r} already")


@cache
def by_name(name: str) -> Transport:
    """The transport of that name, found once. Raises `Unsupported` where this process knows none."""
    if name not in _known and name in _installed():
        try:
            register(_installed()[name].load())
        except (ImportError, AttributeError) as error:
            raise Unsupported(f"the transport {name!r} is installed and cannot be imported: {error}") from error
    if name not in _known:
        raise Unsupported(f"there is no transport '{name!s}'; choose one of {', '.join(names())}")
    return _known[name]


def names() -> tuple[str, ...]:
    """All that can be asked for: the built-in ones first, from the one that moves least to the one that moves most."""
    return tuple(dict.fromkeys((*_known, *_installed())))


def require_known(kinds: Iterable[str]) -> None:
    """Raise `ValueError`, as settings do, unless this process knows all of `kinds`."""
    for kind in kinds:
        try:
            by_name(kind)
        except Unsupported as error:
            raise ValueError(str(error)) from error


def preload(kinds: Iterable[str]) -> None:
    """Import the modules of these transports' receivers, so that no paused server waits for imports.

    A missing module is reported when its transport is asked for.
    """
    for kind in kinds:
        with contextlib.suppress(ImportError, Unsupported):
            by_name(kind).receiver(ReceiverContext())


@cache
def _installed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=_GROUP)}
