"""Kinds of engines by name, and how one is connected to: the only module that names an implementation.

An implementation is imported when it is asked for. Another one is a line in `KINDS`, or a call of `register`. Settings
are read with this module, so it imports no torch.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from weightbus.control.protocol import ConfigurationError

if TYPE_CHECKING:
    from .interface import Engine


from pathlib import Path

import msgspec


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


def open_engine(kind: str, connection: EngineConnection) -> Engine:
    """The engine behind `connection`; asks it nothing yet. Raises `ConfigurationError` for an unknown kind."""
    if kind not in KINDS:
        raise ConfigurationError(f"there is no engine {kind!r}: choose one of {', '.join(sorted(KINDS))}")
    function = cast("Callable[[EngineConnection], Engine]", pkgutil.resolve_name(KINDS[kind]))
    return function(connection)
