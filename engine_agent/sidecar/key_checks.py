"""Whether the keys of a sidecar can be used: its own, its coordinator's, and its list of trainers."""

from __future__ import annotations

from weightbus.control.bus import check_keys
from weightbus.control.security import allow_list_path, read_allow_list

from .settings import EngineAgentSettings


def check_trust(given: EngineAgentSettings) -> None:
    """Raise the `ConfigurationError` that would come up later, before anything is started."""
    check_keys(given.coordinator, given.keys, given.name, insecure_loopback=given.insecure_loopback)
    if not given.insecure_loopback:
        read_allow_list(allow_list_path(given.keys))
