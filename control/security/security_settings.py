"""Keys, or the explicit word that there are none: what every process is told about its own safety.

There is no third way. Keys are looked for in one folder, so that on one host ``weightbus keygen`` and ``weightbus trust
add`` are all it takes. Without keys a process keeps to the loopback (router.py sees to that), and only when it was told
to.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

from msgspec import Meta

from .allow_list import ALLOW_LIST_FILE
from .curve_keys import CurveFiles

InsecureLoopback = Annotated[
    bool, Meta(description="no keys: any process of this machine may publish weights; loopback only")
]


def state_folder() -> Path:
    """Where this user's programs keep what must survive them, wherever they are started from."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    if given.is_absolute():  # the specification of XDG wants others ignored
        return given / "weightbus"
    try:
        return Path.home() / ".local/state/weightbus"
    except RuntimeError:  # a user without a home, as in some containers
        return Path("/var/lib/weightbus")


def keys_folder(keys: Path | None) -> Path:
    """Where the keys are."""
    return state_folder() / "keys" if keys is None else keys


def _keys_in_use(settings: object) -> str:
    """Where settings that name no folder find their keys; empty for those that do without."""
    return "" if getattr(settings, "insecure_loopback", False) else str(keys_folder(None))


KeysFolder = Annotated[
    Path | None,
    Meta(
        description="folder of the keys; none: `keys` in the folder where this user's state is kept",
        extra={"in_use": _keys_in_use},
    ),
]


def check_endpoints(setting: str, text: str) -> None:
    """Raise `ValueError` unless `text` is one bus endpoint, or several between commas."""
    for each in text.split(","):
        check_endpoint(setting, each.strip())


def check_endpoint(setting: str, text: str) -> None:
    """Raise `ValueError` unless `text` is one bus endpoint."""
    found = urlsplit(text)
    if found.scheme != "tcp" or not found.hostname or not _port(found) or found.path:
        raise ValueError(f"{setting} = {text!r}: expected tcp://HOST:PORT")


def check_url(setting: str, text: str) -> None:
    """Raise `ValueError` unless `text` is the address of an HTTP server."""
    found = urlsplit(text)
    if found.scheme not in {"http", "https"} or not found.hostname or _port(found) == 0:
        raise ValueError(f"{setting} = {text!r}: expected http://HOST:PORT")


def _port(found: SplitResult) -> int | None:
    try:
        return found.port
    except ValueError:
        return 0


def check_key_settings(keys: Path | None, *, insecure_loopback: bool) -> None:
    """Raise `ValueError` for settings that say both."""
    if insecure_loopback and keys is not None:
        raise ValueError(f"insecure_loopback = true, but keys = {keys} as well: choose one")


def allow_list_path(keys: Path | None) -> Path:
    """The allow-list: the coordinator's, and a copy of it at every engine agent."""
    return keys_folder(keys) / ALLOW_LIST_FILE


def agent_key_files(keys: Path | None, agent: str, *, insecure_loopback: bool) -> CurveFiles | None:
    """The files with which `agent` speaks to its coordinator; None if it was told to do without."""
    return None if insecure_loopback else CurveFiles.of(keys_folder(keys), agent)
