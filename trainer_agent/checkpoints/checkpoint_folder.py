"""Inspects folders of checkpoints: their tensors, and whether they are complete. Reads headers, never weights.

A safetensors checkpoint is complete when every shard of its index exists and is exactly as long as its own header says.
A torch DCP checkpoint is complete when its ``.metadata``, which is written last, exists, and every file that it names
is long enough. Neither proves that the trainer has stopped writing: the watcher waits until nothing changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from weightbus.control.protocol import MAX_VERSION
from weightbus.dataplane.tensors import ITEM_BYTES, TensorSpec
from weightbus.dataplane.transports.disk import DTYPES

from ..machine import BadCheckpoint, UnfinishedCheckpoint
from .watch_machine import Folder

LATEST: Final = "latest_checkpointed_iteration.txt"
"""Marker of Megatron and verl: the last complete step. Later checkpoints are not read."""
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
_LONGEST_HEADER: Final = 100_000_000
"""The bound of the safetensors format."""
_LONGEST_MARKER: Final = 256
_TYPES: Final = {code: name for name, code in DTYPES.items()}


class TensorPlace(msgspec.Struct, frozen=True):
    """A tensor in a safetensors file, from byte `offset` of the file on."""

    spec: TensorSpec
    path: Path
    offset: int


def listing(root: Path, subfolder: str, pattern: re.Pattern[str]) -> Iterator[Folder]:
    """The folders of `root` whose names match `pattern`, hidden and temporary ones left out. No symbolic links."""
    with os.scandir(root) as entries:
        found = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    for name in found:
        match = pattern.fullmatch(name)
        if match and not name.startswith((".", "tmp", "_")):
            yield Folder(name, int(match[1]), fingerprint(root / name / subfolder))


def latest(root: Path) -> int | None:
    """The step in the trainer's own marker; None without one. Raises `BadCheckpoint` for other content."""
    try:
        with (root / LATEST).open("rb") as file:
            text = file.read(_LONGEST_MARKER).decode("ascii", "replace").strip()
    except FileNotFoundError:
        return None
    if not text.isdecimal() or int(text) > MAX_VERSION:
        raise BadCheckpoint(root / LATEST, f"it says {text[:40]!r}, a step number up to {MAX_VERSION} is expected")
    return int(text)


def fingerprint(folder: Path) -> str:
    """A hash that changes whenever a file is added, removed or written."""
    seen: list[str] = []
    for at, _, files in os.walk(folder):
        for name in files:
            path = Path(at) / name
            try:
                stat = path.stat()
            except FileNotFoundError:  # it went this instant: the next look sees that
                continue
            except OSError as error:  # what cannot be looked at is for `Inspect` to say
                seen.append(f"{path.relative_to(folder)}\0{error.errno}")
                continue
            seen.append(f"{path.relative_to(folder)}\0{stat.st_size}\0{stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(sorted(seen)).encode(errors="surrogateescape")).hexdigest()


def read_config(folder: Path, fallback: Path | None) -> dict[str, Any]:
    """The checkpoint's ``config.json``, or that of `fallback`."""
    for place in (folder, fallback):
        if place is not None and (place / "config.json").is_file():
            return _json(place / "config.json")
    raise BadCheckpoint(folder, "it has no config.json: name the folder of one with --hf-config-dir")


def served_config(folder: Path) -> dict[str, Any]:
    """The ``config.json`` of the checkpoint that engines serve."""
    if not (folder / "config.json").is_file():
        raise BadCheckpoint(folder, "there is no config.json: name the folder of the checkpoint that engines serve")
    return read_config(folder, None)


def architecture(folder: Path, config: Mapping[str, Any]) -> str:
    """The model class that the config names."""
    named = config.get("architectures")
    if not isinstance(named, list) or not named or not isinstance(named[0], str) or not named[0].isidentifier():
        raise BadCheckpoint(folder, "its config names no class under architectures")
    return named[0]


def safetensors(folder: Path) -> tuple[TensorPlace, ...]:
    """Every tensor of a finished checkpoint. Raises `UnfinishedCheckpoint` or `BadCheckpoint`."""
    if (folder / INDEX).is_file():
        return _indexed(folder)
    if (folder / SINGLE).is_file():
        return _header(folder / SINGLE)
    raise UnfinishedCheckpoint(folder, f"there is no {INDEX} and no {SINGLE}")


def _indexed(folder: Path) -> tuple[TensorPlace, ...]:
    wanted = _json(folder / INDEX).get("weight_map")
    if not isinstance(wanted, dict) or not wanted:
        raise BadCheckpoint(folder / INDEX, "it has no weight_map")
    try:
        shard_of = msgspec.convert(wanted, dict[str, str])
    except msgspec.ValidationError as error:
        raise BadCheckpoint(folder / INDEX, f"its weight_map does not give a file for each tensor: {error}") from error
    places: list[TensorPlace] = []
    for file in sorted(set(shard_of.values())):
        if Path(file).name != file:
            raise BadCheckpoint(folder / INDEX, f"it names {file!r}, a file of the same folder is expected")
        if not (folder / file).is_file():
            raise UnfinishedCheckpoint(folder, f"{file} is not there")
        places.extend(_header(folder / file))
    found = {place.spec.name: place.path.name for place in places}
    odd = sorted(name for name in found.keys() | shard_of.keys() if found.get(name) != shard_of.get(name))
    if odd or len(found) != len(places):
        names = ", ".join(odd[:3]) or "a tensor in two files"
        raise BadCheckpoint(folder / INDEX, f"index and shards disagree about {len(odd)} tensors ({names})")
    return tuple(places)


def _header(path: Path) -> tuple[TensorPlace, ...]:
    """Tensors in the header of a safetensors file, which must be exactly as long as the header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _LONGEST_HEADER:
            raise BadCheckpoint(path, f"its header would be {length} bytes long: it is no safetensors file")
        if size < 8 + length or size < 8:
            raise UnfinishedCheckpoint(path, f"it is {size} bytes long, its header ends at {8 + length}")
        text = file.read(length)
    entries = _parse(path, text)
    entries.pop("__metadata__", None)
    places = sorted((_place(path, name, entry, 8 + length) for name, entry in entries.items()), key=lambda p: p.offset)
    end = 8 + length
    for place in places:
        if place.offset != end:
            raise BadCheckpoint(path, f"{place.spec.name!r} begins at byte {place.offset}, expected {end}")
        end += place.spec.nbytes
    if size < end:
        raise UnfinishedCheckpoint(path, f"it is {size} bytes long, its header says {end}")
    if size > end:
        raise BadCheckpoint(path, f"it is {size} bytes long, its header says {end}")
    return tuple(places)


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _place(path: Path, name: str, raw: object, data: int) -> TensorPlace:
    try:
        entry = msgspec.convert(raw, _Entry)
    except msgspec.ValidationError as error:
        raise BadCheckpoint(path, f"its header says of {name!r}: {error}") from error
    dtype = _TYPES.get(entry.dtype)
    if dtype is None:
        raise BadCheckpoint(path, f"{name!r} has dtype {entry.dtype}; these can travel: {', '.join(_TYPES)}")
    spec = TensorSpec(name, dtype, entry.shape)
    first, last = entry.data_offsets
    if last - first != spec.nbytes or first % ITEM_BYTES[dtype]:
        raise BadCheckpoint(path, f"{name!r} takes bytes {first} to {last}, its shape {spec.nbytes}")
    return TensorPlace(spec, path, data + first)


def _json(path: Path) -> dict[str, Any]:
    try:
        return _parse(path, path.read_bytes())
    except OSError as error:
        raise UnfinishedCheckpoint(path, f"it cannot be read: {error.strerror}") from error


def _object(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. Raises `BadCheckpoint` for a duplicate name, of which either value could be meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadCheckpoint(path, f"it names {twice!r} twice")
    return found


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        content: object = json.loads(text, object_pairs_hook=lambda pairs: _object(path, pairs))
    except BadCheckpoint:
        raise
    except ValueError as error:  # half a file looks like this too; it is bad only when nothing changes any more
        raise UnfinishedCheckpoint(path, f"it is not JSON: {error}") from error
    except RecursionError as error:
        raise BadCheckpoint(path, "its JSON is nested too deeply to be a checkpoint's") from error
    if not isinstance(content, dict):
        raise BadCheckpoint(path, f"a JSON object is expected, found {type(content).__name__}")
    return cast("dict[str, Any]", content)
