"""The server's keys as the agent was given them: from the environment, the settings file, or files of their own."""

import stat
from pathlib import Path
from typing import Final

import msgspec

from ..engines import Keys
from ..errors import KeyFileUnusable
from .settings import EngineAgentSettings

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class ExposedSecret(msgspec.Struct, frozen=True):
    """A key file that others than its owner can read."""

    setting: str
    path: Path
    mode: int

    @property
    def advice(self) -> str:
        """What was found and what to do."""
        return f"others may read it (mode {self.mode:04o}): chmod 600 {self.path}"


def read_keys(settings: EngineAgentSettings) -> tuple[Keys, tuple[ExposedSecret, ...]]:
    """The keys, and which of their files others can read. Raises `KeyFileUnusable`."""
    exposed: list[ExposedSecret] = []
    keys = Keys(
        api=_key("api_key_file", settings.api_key_file, settings.api_key, exposed),
        admin=_key("admin_api_key_file", settings.admin_api_key_file, settings.admin_api_key, exposed),
    )
    return keys, tuple(exposed)


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
