"""Kinds of engines by name, and the function that connects to one: the only module that names an implementation.

An implementation is imported when it is asked for. Another one is a line in `KINDS`, or a call of `register`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from weightbus.control.protocol import ConfigurationError

if TYPE_CHECKING:
    from .connection import EngineConnection
    from .interface import Engine

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
