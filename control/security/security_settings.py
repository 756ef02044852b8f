"""Security settings of every process: a folder of keys, or the explicit ``insecure_loopback``.

There is no third way. Keys are looked for in one folder, so that on one host ``weightbus keygen`` and ``weightbus trust
add`` suffice. Without keys a process binds and connects to the loopback only (bus/router.py, bus/dealer.py), and only
with the explicit setting.
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
    """Folder of this user's persistent state, the same from any working directory."""
    given = Path(os.environ.get("XDG_STATE_HOME", ""))
    if given.is_absolute():  # the specification of XDG wants others ignored
        return given / "weightbus"
    try:
        return Path.home() / ".local/state/weightbus"
    except RuntimeError:  # a user without a home, as in some containers
        return Path("/var/lib/weightbus")


def keys_folder(keys: Path | None) -> Path:
    """`keys`, or the default folder of keys for None."""
    return state_folder() / "keys" if keys is None else keys


def _keys_in_use(settings: object) -> str:
    """Folder of keys that `settings` without `keys` use; empty with ``insecure_loopback``."""
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
    """Raise `ValueError` if both a folder of keys and ``insecure_loopback`` are set."""
    if insecure_loopback and keys is not None:
        raise ValueError(f"insecure_loopback = true, but keys = {keys} as well: choose one")


def allow_list_path(keys: Path | None) -> Path:
    """Path of the allow-list: the coordinator's, and a copy of it at every engine agent."""
    return keys_folder(keys) / ALLOW_LIST_FILE


def agent_key_files(keys: Path | None, agent: str, *, insecure_loopback: bool) -> CurveFiles | None:
    """Key files of `agent`; None with ``insecure_loopback``."""
    return None if insecure_loopback else CurveFiles.of(keys_folder(keys), agent)
