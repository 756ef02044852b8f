"""The address and keys of a server. Settings are read with this module, so it imports no torch."""

from __future__ import annotations

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
