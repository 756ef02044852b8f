"""Settings: one frozen Struct per process, read once at the edge.

Each value comes from the first of these sources that has one::

    command line flag  >  WEIGHTBUS_<SECTION>_<FIELD>  >  TOML file, [section]  >  the default in the Struct

The file is the one named by ``--config``, else by ``WEIGHTBUS_CONFIG``; there is no other. Unknown keys are errors in
every source, with the nearest valid name suggested. One file may serve several processes: each reads its own section.

A field is described by ``Annotated[int, msgspec.Meta(description="...", ge=0)]``. ``extra={"secret": True}`` marks a
secret: it is never printed, and has no flag, because ``ps`` shows flags. ``extra={"in_use": ...}`` computes the value
that is in effect while the field is None, for ``--check-config``. A ``ValueError`` raised by the Struct's
``__post_init__`` becomes a `ConfigurationError`.

A command uses two calls: `add_settings_flags` adds one flag for each field to its parser, and `settings_from_args`
loads the settings. `SettingsCommand` makes both.
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
"""Valid sections of a file. No name is a prefix of another, because environment variables start with them."""

S = TypeVar("S", bound=msgspec.Struct)


class SettingSource(enum.StrEnum):
    """Kind of source of a value."""

    FLAG = "flag"
    ENVIRONMENT = "environment"
    FILE = "file"
    DEFAULT = "default"


class SettingOrigin(msgspec.Struct, frozen=True):
    """Origin of one value: the flag, the variable, or the file and section."""

    source: SettingSource
    where: str = ""
    file: Path | None = None

    def __str__(self) -> str:
        return f"{self.source.value} {self.where}".rstrip()


class ResolvedSettings(msgspec.Struct, Generic[S], frozen=True):
    """Loaded settings with the origin of each value."""

    section: str
    value: S
    origins: dict[str, SettingOrigin]

    def render(self) -> str:
        """The output of ``--check-config``: valid TOML, one line for each setting; secrets are not shown."""
        lines = [(f"{f.name} = {f.show(getattr(self.value, f.name))}", self._origin(f)) for f in self._fields()]
        width = max((len(text) for text, _ in lines), default=0)
        return "\n".join([f"[{self.section}]", *(f"{text:<{width}}  # {origin}" for text, origin in lines)])

    def exposed(self) -> list[str]:
        """Warnings for secrets in a file that other users can read, with advice."""
        found: list[str] = []
        for name in (field.name for field in self._fields() if field.secret and getattr(self.value, field.name)):
            file = self.origins[name].file
            if file is not None and (mode := stat.S_IMODE(file.stat().st_mode)) & (stat.S_IRWXG | stat.S_IRWXO):
                found.append(f"{name} stands in {file}, which others may read (mode {mode:04o}): chmod 600 {file}")
        return found

    def _origin(self, field: SettingField) -> str:
        """Origin of the field's value and, if the value is None, the value in effect."""
        left_open = getattr(self.value, field.name) is None
        used = field.in_use(self.value) if field.in_use and left_open else ""
        return f"{self.origins[field.name]}: {used} is used" if used else str(self.origins[field.name])

    def _fields(self) -> tuple[SettingField, ...]:
        return fields_of(type(self.value))


def load_settings(
    kind: type[S],
    section: str,
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> ResolvedSettings[S]:
    """Load settings of `kind`. `flags`: values of the command line by field name, None where not given.

    Raises `ConfigurationError`, which names the value found, its origin and what was expected.
    """
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


def add_settings_flags(parser: argparse.ArgumentParser, kind: type[msgspec.Struct]) -> None:
    """Add one flag for each setting of `kind` to `parser`, and ``--config`` and ``--check-config``."""
    for field in fields_of(kind):
        field.add_to(parser)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file (default: $WEIGHTBUS_CONFIG)")
    parser.add_argument(
        "--check-config", action="store_true", help="print each setting and where it came from, then leave"
    )


def settings_from_args(kind: type[S], section: str, args: argparse.Namespace) -> ResolvedSettings[S]:
    """Load settings of `kind` from the flags of `add_settings_flags`, the process environment and the file."""
    given = vars(args)
    flags = {field.name: given.get(field.name) for field in fields_of(kind)}
    return load_settings(kind, section, file=given.get("config"), environ=os.environ, flags=flags)


class SettingsCommand(Generic[S]):
    """Base of a subcommand with one settings Struct. Implements ``--check-config``."""

    help: str
    section: str
    kind: type[S]

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add one flag for each setting."""
        add_settings_flags(parser, self.kind)

    def run(self, args: argparse.Namespace) -> int:
        """Load the settings, then print them (``--check-config``) or run the command."""
        resolved = settings_from_args(self.kind, self.section, args)
        if args.check_config:
            print(resolved.render())  # noqa: T201
            self.check(resolved.value)
            return 0
        return self.do(resolved.value)

    def check(self, given: S) -> None:
        """Raise the `ConfigurationError` that a start would raise, as far as local files tell."""

    def do(self, given: S) -> int:
        """Run the command; returns the exit code."""
        raise NotImplementedError


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
