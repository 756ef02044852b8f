"""Keys of a sidecar: the server's API keys from the settings or files of their own, its key pair, its allow list."""

import stat
from pathlib import Path
from typing import Final

import msgspec

from weightbus.control.bus import check_keys
from weightbus.control.security import allow_list_path, read_allow_list

from ..engines import Keys
from ..errors import KeyFileUnusable
from .settings import EngineAgentSettings

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class ExposedSecret(msgspec.Struct, frozen=True):
    """A key file that is readable by others than its owner."""

    setting: str
    path: Path
    mode: int

    @property
    def advice(self) -> str:
        """The finding and the remedy."""
        return f"others may read it (mode {self.mode:04o}): chmod 600 {self.path}"


def read_keys(settings: EngineAgentSettings) -> tuple[Keys, tuple[ExposedSecret, ...]]:
    """The server's keys, and those of their files that others can read. Raises `KeyFileUnusable`."""
    exposed: list[ExposedSecret] = []
    keys = Keys(
        api=_key("api_key_file", settings.api_key_file, settings.api_key, exposed),
        admin=_key("admin_api_key_file", settings.admin_api_key_file, settings.admin_api_key, exposed),
    )
    return keys, tuple(exposed)


def check_trust(given: EngineAgentSettings) -> None:
    """Raise the `ConfigurationError` that would come up later, before anything is started."""
    check_keys(given.coordinator, given.keys, given.name, insecure_loopback=given.insecure_loopback)
    if not given.insecure_loopback:
        read_allow_list(allow_list_path(given.keys))


def _key(setting: str, path: Path | None, given: str, exposed: list[ExposedSecret]) -> str:
    if path is None:
        return given
    try:
        words = path.read_text(encoding="ascii").split()
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise KeyFileUnusable(setting, path, f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise KeyFileUnusable(setting, path, "does not hold ASCII text") from error
    if len(words) != 1:
        raise KeyFileUnusable(setting, path, f"holds {len(words)} words" if words else "is empty")
    if mode & _OTHERS:
        exposed.append(ExposedSecret(setting, path, mode))
    return words[0]
