"""Settings: one frozen Struct per process, read once at the edge.

Each value comes from the first of these sources that has one::

    command line flag  >  WEIGHTBUS_<SECTION>_<FIELD>  >  TOML file, [section]  >  the default in the Struct

The file is the one named by ``--config``, else by ``WEIGHTBUS_CONFIG``; there is no other. Unknown keys are errors in
every source, with the nearest valid name suggested. One file may serve several processes: each reads its own section.

A field is described by ``Annotated[int, msgspec.Meta(description="...", ge=0)]``. ``extra={"secret": True}`` marks a
secret: it is never printed, and has no flag, because ``ps`` shows flags. ``extra={"in_use": ...}`` computes the value
that is in effect while the field is None, for ``--check-config``. A ``ValueError`` raised by the Struct's
``__post_init__`` becomes a `ConfigurationError`. Supported types: bool, int, float, str, Path, enums, tuples of these
(comma-separated in text) and Optional (``none`` or empty in text).

A command uses two calls: `add_settings_flags` adds one flag for each field to its parser, and `settings_from_args`
loads the settings. `SettingsCommand` makes both.
"""

from __future__ import annotations

import argparse
import difflib
import enum
import json
import os
import stat
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Generic, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from ..protocol import ConfigurationError

_TRUE: Final = frozenset({"true", "yes", "on", "1"})
_FALSE: Final = frozenset({"false", "no", "off", "0"})
_NONE: Final = frozenset({"", "none"})
_STARS: Final = "******"


class SettingField(msgspec.Struct, frozen=True):
    """One setting."""

    name: str
    annotation: Any
    """Type as declared, bounds included."""
    type: Any
    """Type without bounds and without Optional."""
    optional: bool
    required: bool
    default: Any
    description: str
    secret: bool
    in_use: Callable[[object], str] | None = None
    """Value in effect if this setting is None, computed from the settings; empty for none."""

    @property
    def flag(self) -> str:
        """``--field-name``."""
        return "--" + self.name.replace("_", "-")

    def parse(self, raw: object, where: str) -> Any:
        """Value of `raw`: text from a flag or a variable, or a TOML value. Raises `ConfigurationError`."""
        try:
            if self.secret and raw == _STARS:
                raise ValueError("this is what stands for a secret that is not shown: give the secret itself")  # noqa: TRY301
            plain = self._from_text(raw) if isinstance(raw, str) else raw
            return msgspec.convert(plain, self.annotation, dec_hook=_make_path)
        except ValueError as problem:
            shown = _STARS if self.secret else repr(raw)
            raise ConfigurationError(f"{self.name} = {shown} ({where}): {problem}{self._choices()}") from problem

    def show(self, value: object) -> str:
        """`value` as TOML; stars for a secret that is set, ``"none"`` for None."""
        if self.secret and value:
            return f'"{_STARS}"'
        return _toml("none" if value is None else value)

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add this setting's flag to `parser`. A flag that is not given is None, so that other sources count.

        A secret has no flag: command lines are visible in the list of processes.
        """
        if self.secret:
            return
        default = "needed" if self.required else f"default: {self.show(self.default)}"
        text = f"{self.description} ({default})".strip().replace("%", "%%")
        if self.type is bool:
            parser.add_argument(self.flag, dest=self.name, action=argparse.BooleanOptionalAction, help=text)
            return
        choices = f"{{{','.join(str(each.value) for each in self.type)}}}" if _is_enum(self.type) else None
        parser.add_argument(self.flag, dest=self.name, metavar=choices or _metavar(self.type), help=text)

    def _choices(self) -> str:
        """The valid words of an enum, for an error."""
        kind = get_args(self.type)[0] if get_origin(self.type) is tuple else self.type
        return f"; expected one of {', '.join(str(each.value) for each in kind)}" if _is_enum(kind) else ""

    def _from_text(self, text: str) -> object:
        if self.optional and text.strip().lower() in _NONE:
            return None
        return _parse(text, self.type)


@cache
def fields_of(kind: type[msgspec.Struct]) -> tuple[SettingField, ...]:
    """Settings of `kind`, in the order of the Struct."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(_field(each, hints[each.name]) for each in msgspec.structs.fields(kind))


def _field(info: msgspec.structs.FieldInfo, annotation: Any) -> SettingField:
    metas = [meta for meta in _metadata(annotation) if isinstance(meta, msgspec.Meta)]
    extras = [cast("Mapping[str, object]", meta.extra or {}) for meta in metas]
    bare, optional = _strip(annotation)
    default = info.default_factory() if info.default_factory is not msgspec.NODEFAULT else info.default
    return SettingField(
        name=info.name,
        annotation=annotation,
        type=bare,
        optional=optional,
        required=info.required,
        default=default,
        description=next((meta.description for meta in metas if meta.description), ""),
        secret=any(extra.get("secret") is True for extra in extras),
        in_use=next((cast("Callable[[object], str]", extra["in_use"]) for extra in extras if "in_use" in extra), None),
    )


def _metadata(annotation: Any) -> list[Any]:
    """Metadata of `annotation` and, below it, of the members of an Optional; outermost first."""
    if get_origin(annotation) is Annotated:
        return [*reversed(annotation.__metadata__), *_metadata(annotation.__origin__)]
    if _is_union(annotation):
        return [meta for member in get_args(annotation) for meta in _metadata(member)]
    return []


def _strip(annotation: Any) -> tuple[Any, bool]:
    """The type without bounds, NewTypes and None; True if None was among its members."""
    if get_origin(annotation) is Annotated:
        return _strip(annotation.__origin__)
    if hasattr(annotation, "__supertype__"):
        return _strip(annotation.__supertype__)
    if not _is_union(annotation):
        return annotation, False
    members = [member for member in get_args(annotation) if member is not type(None)]
    if len(members) != 1:
        raise TypeError(f"a setting has one type, or one and None; not {annotation}")
    return _strip(members[0])[0], True


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in {Union, types.UnionType}


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, enum.Enum)


def _parse(text: str, kind: Any) -> object:
    kind, _ = _strip(kind)
    if kind is bool:
        return _parse_bool(text)
    if get_origin(kind) is tuple:
        member = get_args(kind)[0]
        return [_parse(part.strip(), member) for part in text.split(",") if part.strip()]
    if kind is int:
        return _parse_number(text, int, "a whole number")
    if kind is float:
        return _parse_number(text, float, "a number")
    return text


def _parse_number(text: str, kind: type[int | float], expected: str) -> int | float:
    try:
        return kind(text.replace("_", ""))
    except ValueError:
        raise ValueError(f"expected {expected}") from None


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError("expected true or false")


def _make_path(kind: type, raw: object) -> object:
    if kind is Path and isinstance(raw, str | Path):
        return Path(raw).expanduser()
    raise ValueError(f"expected {kind.__name__}, found {type(raw).__name__}")


def _metavar(kind: Any) -> str:
    return "LIST" if get_origin(kind) is tuple else {int: "N", float: "X", Path: "PATH"}.get(kind, "TEXT")


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return _toml(value.value)
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(each) for each in cast("list[object]", value)) + "]"
    return json.dumps(str(value), ensure_ascii=False)


SECTIONS: Final = (
    "coordinator",
    "status",
    "plan",
    "check",
    "forget_channel",
    "forget_engine",
    "keygen",
    "trust",
    "version",
    "engine_agent",
    "trainer",
    "watch",
    "rollback",
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
        if name not in SECTIONS and not isinstance(table, dict):
            raise ConfigurationError(f"{file}: {name!r} stands outside of a section: write it below [{section}]")
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
