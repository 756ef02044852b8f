"""Kinds of engines by name, and how one is connected to: the only module that names an implementation.

An implementation is imported when it is asked for. Another one is a line in `KINDS`, or a call of `register`. Settings
are read with this module, so it imports no torch.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import msgspec

from weightbus.control.protocol import ConfigurationError

if TYPE_CHECKING:
    from .interface import Engine


class Keys(msgspec.Struct, frozen=True):
    """API keys that the server asks for; empty where it asks for none."""

    api: str = ""
    admin: str = ""


class EngineConnection(msgspec.Struct, frozen=True):
    """Address, keys and dialect of one server."""

    url: str
    keys: Keys = Keys()
    dialect: str = ""
    """Version as which an unknown version of the server is treated; empty for its own."""
    memory_file: Path | None = None
    """File in which released memory is remembered across restarts of the sidecar; None: nowhere."""


DEFAULT: Final = "sglang"
KINDS: Final = {DEFAULT: f"{__package__}.sglang.sglang_server:open_engine"}
"""Of each kind the dotted path of a function from `EngineConnection` to `Engine`."""


def register(kind: str, function: str) -> None:
    """Add a kind of engine; `function` is ``package.module:name``."""
    KINDS[kind] = function


def require_known(kind: str) -> None:
    """Raise `ValueError`, as settings do, for a kind that is not registered."""
    if kind not in KINDS:
        raise ValueError(f"there is no engine {kind!r}: choose one of {', '.join(sorted(KINDS))}")


def open_engine(kind: str, connection: EngineConnection) -> Engine:
    """The engine behind `connection`; asks it nothing yet. Raises `ConfigurationError` for an unknown kind."""
    try:
        require_known(kind)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    function = cast("Callable[[EngineConnection], Engine]", pkgutil.resolve_name(KINDS[kind]))
    return function(connection)
