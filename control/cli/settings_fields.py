"""One field of a settings Struct: its type, its parser, its printed form and its flag.

Supported types: bool, int, float, str, Path, enums, tuples of these (comma-separated in text) and Optional (``none`` or
empty in text). Bounds of ``msgspec.Meta`` hold for every source.
"""

from __future__ import annotations

import argparse
import enum
import json
import types
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Union, cast, get_args, get_origin, get_type_hints

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
