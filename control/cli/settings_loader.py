"""Settings: one frozen Struct per process, read once at the edge.

Every value comes from the first of these that has it::

    command line flag  >  WEIGHTBUS_<SECTION>_<FIELD>  >  TOML file, [section]  >  the default in the Struct

The file is the one named by ``--config``, else by ``WEIGHTBUS_CONFIG``; there is no other. Unknown keys are errors
wherever they stand, with the nearest valid name suggested. One file may serve several processes: each reads its own
section. Describe a field with ``Annotated[int, msgspec.Meta(description="...", ge=0)]``; mark a secret with
``extra={"secret": True}``, so that it is never printed, and has no flag, which everybody could read in ``ps``; give one
that may be left open ``extra={"in_use": ...}``, so that what is used instead is printed with it. Where `kind` has a
``__post_init__`` that raises ValueError, its message becomes a `ConfigurationError`.

A command uses two calls: `configure` gives its parser one flag for each field, `from_args` reads what was given.
"""

from __future__ import annotations

import argparse
import difflib
import enum
import os
import stat
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from ..protocol import ConfigurationError
from .settings_fields import SettingField, fields_of

SECTIONS: Final = (
    "coordinator",
    "status",
    "forget_channel",
    "keygen",
    "trust",
    "version",
    "engine_agent",
    "trainer",
    "watch",
    "demo",
    "simulate_fleet",
)
"""Every section a file may hold. No name is the beginning of another, because environment variables start with them."""

S = TypeVar("S", bound=msgspec.Struct)


class SettingSource(enum.StrEnum):
    """Where a value came from."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


class SettingOrigin(msgspec.Struct, frozen=True):
    """Where one value came from, exactly: the flag, the variable, or the file and key."""

    source: SettingSource
    where: str = ""
    file: Path | None = None

    def __str__(self) -> str:
        return f"{self.source.value} {self.where}".rstrip()


class ResolvedSettings(msgspec.Struct, Generic[S], frozen=True):
    """The settings, and where each value came from."""

    section: str
    value: S
    origins: dict[str, SettingOrigin]

    def render(self) -> str:
        """One line for each setting: what ``--check-config`` prints. Valid TOML; secrets are not shown."""
        lines = [(f"{f.name} = {f.show(getattr(self.value, f.name))}", self._origin(f)) for f in self._fields()]
        width = max((len(text) for text, _ in lines), default=0)
        return "\n".join([f"[{self.section}]", *(f"{text:<{width}}  # {origin}" for text, origin in lines)])

    def exposed(self) -> list[str]:
        """Secrets in a settings file that others than its owner can read: what was found, and what to do."""
        found: list[str] = []
        for name in (field.name for field in self._fields() if field.secret and getattr(self.value, field.name)):
            file = self.origins[name].file
            if file is not None and (mode := stat.S_IMODE(file.stat().st_mode)) & (stat.S_IRWXG | stat.S_IRWXO):
                found.append(f"{name} stands in {file}, which others may read (mode {mode:04o}): chmod 600 {file}")
        return found

    def _origin(self, field: SettingField) -> str:
        """Where its value came from and, for one that was left open, what is used."""
        left_open = getattr(self.value, field.name) is None
        used = field.in_use(self.value) if field.in_use and left_open else ""
        return f"{self.origins[field.name]}: {used} is used" if used else str(self.origins[field.name])

    def _fields(self) -> tuple[SettingField, ...]:
        return fields_of(type(self.value))


def load(
    kind: type[S],
    section: str,
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> ResolvedSettings[S]:
    """Settings of `kind`. `flags` maps field names to what the command line gave, None where it gave nothing."""
    environ = environ or {}
    if file is None and environ.get("WEIGHTBUS_CONFIG"):
        file = Path(environ["WEIGHTBUS_CONFIG"])
    known = {field.name: field for field in fields_of(kind)}
    values: dict[str, Any] = {}
    origins = {name: SettingOrigin(SettingSource.DEFAULT) for name in known}
    layers = (_from_file(known, section, file), _from_environ(known, section, environ), _from_flags(known, flags or {}))
    for layer in layers:
        for name, (raw, origin) in layer.items():
            values[name] = known[name].parse(raw, str(origin))
            origins[name] = origin
    missing = [name for name, field in known.items() if field.required and name not in values]
    if missing:
        raise ConfigurationError("; ".join(_ask_for(section, known[name]) for name in missing))
    try:
        return ResolvedSettings(section, kind(**values), origins)
    except ValueError as problem:
        raise ConfigurationError(f"[{section}] {problem}") from problem


def configure(parser: argparse.ArgumentParser, kind: type[msgspec.Struct]) -> None:
    """Give `parser` one flag for each setting of `kind`, and ``--config`` and ``--check-config``."""
    for field in fields_of(kind):
        field.add_to(parser)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file (default: $WEIGHTBUS_CONFIG)")
    parser.add_argument(
        "--check-config", action="store_true", help="print each setting and where it came from, then leave"
    )


def from_args(kind: type[S], section: str, args: argparse.Namespace) -> ResolvedSettings[S]:
    """Settings of `kind` from the flags that `configure` made, the process environment and the file."""
    given = vars(args)
    flags = {field.name: given.get(field.name) for field in fields_of(kind)}
    return load(kind, section, file=given.get("config"), environ=os.environ, flags=flags)


_Layer = dict[str, tuple[object, SettingOrigin]]


def _from_file(known: Mapping[str, SettingField], section: str, file: Path | None) -> _Layer:
    if file is None:
        return {}
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise ConfigurationError(f"configuration file {file} cannot be read: {problem.strerror}") from problem
    except ValueError as problem:  # bad TOML or bad UTF-8
        raise ConfigurationError(f"configuration file {file} is not TOML: {problem}") from problem
    for name, table in document.items():
        if name not in SECTIONS:
            raise ConfigurationError(f"{file}: no section [{name}] is known{_nearest(name, SECTIONS)}")
        if not isinstance(table, dict):
            raise ConfigurationError(f"{file}: {name} must be a section, [{name}], not a value")
    table = document.get(section, {})
    for key in table:
        if key not in known:
            raise ConfigurationError(f"{file}: [{section}] has no setting {key!r}{_nearest(key, known)}")
    return {key: (raw, SettingOrigin(SettingSource.FILE, f"{file} [{section}]", file)) for key, raw in table.items()}


def _from_environ(known: Mapping[str, SettingField], section: str, environ: Mapping[str, str]) -> _Layer:
    prefix = f"WEIGHTBUS_{section.upper()}_"
    layer: _Layer = {}
    for variable, raw in environ.items():
        if not variable.startswith(prefix):
            continue
        name = variable.removeprefix(prefix).lower()
        if name not in known or variable != prefix + name.upper():
            advice = _nearest(name.upper(), [each.upper() for each in known])
            raise ConfigurationError(f"environment variable {variable}: section {section} has no such setting{advice}")
        layer[name] = (raw, SettingOrigin(SettingSource.ENVIRONMENT, variable))
    return layer


def _from_flags(known: Mapping[str, SettingField], flags: Mapping[str, object]) -> _Layer:
    layer: _Layer = {}
    for name, raw in flags.items():
        if raw is None:
            continue
        if name not in known:
            raise ConfigurationError(f"no setting {name!r} is known{_nearest(name, known)}")
        layer[name] = (raw, SettingOrigin(SettingSource.FLAG, known[name].flag))
    return layer


def _ask_for(section: str, field: SettingField) -> str:
    variable = f"WEIGHTBUS_{section.upper()}_{field.name.upper()}"
    return f"{field.name} is needed: give {field.flag}, or set {variable}, or write it under [{section}] in the file"


def _nearest(name: str, valid: Iterable[str]) -> str:
    names = sorted(valid)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
