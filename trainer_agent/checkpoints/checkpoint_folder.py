"""Complete checkpoints in folders: whether they are complete, their tensors, and a `Source` over one after another.

A safetensors checkpoint is complete when every shard of its index exists and is exactly as long as its own header says.
A torch DCP checkpoint is complete when its ``.metadata``, which is written last, exists, and every file that it names
is long enough. Neither proves that the trainer has stopped writing: the watcher waits until nothing changes. Looking at
a folder reads headers, never weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, cast

import msgspec
import torch

from weightbus.control.protocol import MAX_VERSION, ConfigurationError
from weightbus.dataplane.tensors import ITEM_BYTES, Manifest, TensorSpec
from weightbus.dataplane.transports.disk import DTYPES

from ..machine import BadCheckpoint, UnfinishedCheckpoint
from ..source import AssemblyFailed, LayoutMismatch
from ..sources import CollectiveSource, SingleRank, head_dim_in
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

    def unread(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            seen.append(f"{error.filename}\0{error.errno}")

    for at, _, files in os.walk(folder, onerror=unread):
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
    except FileNotFoundError as error:
        raise UnfinishedCheckpoint(path, "it is gone") from error


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


class CorruptCheckpoint(AssemblyFailed):
    """The content of the files is no checkpoint: reading again cannot help. Not raised for unreadable files."""


class Checkpoint(Protocol):
    """One complete checkpoint. Its files stay readable until `close`, also when the folder is deleted."""

    @property
    def model(self) -> str:
        """Architecture that its config names."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """Its ``config.json``."""
        ...

    @property
    def tensors(self) -> Sequence[TensorSpec]:
        """Its tensors by Hugging Face names, in an order in which they are read quickly."""
        ...

    def read(self, wanted: Sequence[TensorSpec], out: torch.Tensor) -> None:
        """Pack tensors into `out`, host memory of exactly their bytes.

        Raises `AssemblyFailed`, or `CorruptCheckpoint` when reading it again cannot help.
        """
        ...

    def check(self) -> None:
        """Raise `AssemblyFailed` when a file was written to since it was opened: two versions may be mixed."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class SafetensorsFiles:
    """A Hugging Face checkpoint. Satisfies `Checkpoint`."""

    def __init__(self, model: str, config: Mapping[str, Any], places: Sequence[TensorPlace]) -> None:
        self.model = model
        self.config = config
        self.tensors = tuple(place.spec for place in places)
        self._places = {place.spec.name: place for place in places}
        self._open = contextlib.ExitStack()
        self._files: dict[Path, int] = {}
        try:
            for path in sorted({place.path for place in places}):
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._open.callback(os.close, self._files[path])
            self._opened = {path: _written(os.fstat(file)) for path, file in self._files.items()}
            _check_sizes(self._opened, places)
        except BaseException:
            self.close()
            raise

    def read(self, wanted: Sequence[TensorSpec], out: torch.Tensor) -> None:
        """Read without mapping the files: a file cut short under a mapping would kill the process."""
        memory = memoryview(cast("bytearray", out.numpy())).cast("B")
        at = 0
        for spec in wanted:
            place = self._places[spec.name]
            _read_into(self._files[place.path], place, memory[at : at + spec.nbytes])
            at += spec.nbytes

    def check(self) -> None:
        """Compare size and time of the open files, which deleting the folder does not change."""
        for path, file in self._files.items():
            if _written(os.fstat(file)) != self._opened[path]:
                raise AssemblyFailed(changed(path))

    def close(self) -> None:
        """Close the files."""
        self._open.close()


def changed(path: Path) -> str:
    """Message for a file that was written to while it was read."""
    return f"{path} was written to while it was read: save every checkpoint into a folder of its own, once"


def _written(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


def _check_sizes(opened: Mapping[Path, tuple[int, int]], places: Sequence[TensorPlace]) -> None:
    """Raise `UnfinishedCheckpoint` for a file that is not the one whose header was read."""
    for path, (size, _) in opened.items():
        if size != max(place.offset + place.spec.nbytes for place in places if place.path == path):
            raise UnfinishedCheckpoint(path.parent, f"{path.name} changed while it was looked into")


def staging_device(name: str) -> torch.device:
    """The device named by the setting `device`. Raises `ConfigurationError` when this machine does not have it."""
    device = torch.device(name)
    if device.type != "cpu" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise ConfigurationError(f"device = {name!r}: torch sees {count} GPUs here; name one of them, or cpu")
    return device


def open_checkpoint(
    folder: Path, marker: str, config_dir: Path | None, *, dcp: bool, dcp_prefix: str = ""
) -> Checkpoint:
    """Open the complete checkpoint in `folder`.

    Args:
        folder: the checkpoint.
        marker: name of a file that must exist in it; empty for none.
        config_dir: folder of the config, for checkpoints without one.
        dcp: allow torch DCP, whose metadata is a pickle.
        dcp_prefix: prefix of the model's names in a DCP checkpoint of several models.

    Raises:
        UnfinishedCheckpoint: a part is missing and may still come.
        BadCheckpoint: the folder can never be published.
        OSError: a file went away or cannot be read.
    """
    if marker and not (folder / marker).exists():
        raise UnfinishedCheckpoint(folder, f"there is no {marker}")
    try:
        checkpoint = _opened(folder, config_dir, dcp=dcp, dcp_prefix=dcp_prefix)
        try:
            Manifest.of(checkpoint.model, checkpoint.tensors).encode()
        except BaseException:
            checkpoint.close()
            raise
    except (BadCheckpoint, OSError):
        raise
    except Exception as error:  # the writer is unknown: any error is about the checkpoint
        raise BadCheckpoint(folder, f"it cannot be published: {type(error).__name__}: {error}") from error
    return checkpoint


def _opened(folder: Path, config_dir: Path | None, *, dcp: bool, dcp_prefix: str) -> Checkpoint:
    if (folder / INDEX).is_file() or (folder / SINGLE).is_file():
        places = safetensors(folder)
        config = read_config(folder, config_dir)
        return SafetensorsFiles(architecture(folder, config), config, places)
    if dcp:
        from .dcp_files import DcpFiles  # noqa: PLC0415  # torch's checkpointing, only where DCP folders are read

        config = read_config(folder, config_dir)
        return DcpFiles(folder, architecture(folder, config), config, dcp_prefix)
    if any(folder.glob("*.distcp")):
        raise BadCheckpoint(folder, "it is a torch DCP checkpoint, whose metadata is a pickle: allow it with --dcp")
    raise UnfinishedCheckpoint(folder, f"there is no {INDEX} and no {SINGLE}")


def _read_into(file: int, place: TensorPlace, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        count = os.preadv(file, [memory[done:]], place.offset + done)
        if count == 0:
            raise AssemblyFailed(
                f"{place.path} ends inside of {place.spec.name!r}: it was changed after it was finished"
            )
        done += count


class CheckpointSource(CollectiveSource):
    """The tensors of the checkpoint that was opened last, on one process. Satisfies `Source`."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        super().__init__(SingleRank())
        self._checkpoint = checkpoint
        self.model = checkpoint.model
        """Architecture that the config names."""
        self.device = device
        """Device of the buckets."""
        self._scratch: torch.Tensor | None = None

    def open(self, checkpoint: Checkpoint) -> None:
        """Switch to another checkpoint with the same tensors, and close the previous one."""
        if not self.fits(checkpoint):
            raise LayoutMismatch("the checkpoint holds other tensors than the one before: connect a new agent")
        previous, self._checkpoint = self._checkpoint, checkpoint
        if previous is not checkpoint:
            previous.close()

    def fits(self, checkpoint: Checkpoint) -> bool:
        """True if `checkpoint` has the same model and tensors as the open one."""
        return checkpoint.model == self.model and tuple(checkpoint.tensors) == tuple(self.tensors())

    @property
    def head_dim(self) -> int | None:
        """Elements of one attention head; None when the config does not tell."""
        return head_dim_in(self._checkpoint.config.get)

    def tensors(self) -> Sequence[TensorSpec]:
        """Tensors that are served, in the order of the files."""
        return self._checkpoint.tensors

    def assemble(self, manifest: Manifest, index: int, out: torch.Tensor | None) -> None:
        """Read bucket `index` into `out`. The last bucket also checks that no file was written to meanwhile."""
        if out is None:
            raise ValueError("the root gives a buffer")
        nbytes = manifest.buckets[index].nbytes
        host = out[:nbytes] if out.device.type == "cpu" else self._host(manifest)[:nbytes]
        self._checkpoint.read(manifest.tensors_of(index), host)
        if index == len(manifest.buckets) - 1:
            self._checkpoint.check()
        if host.device != out.device:
            out[:nbytes].copy_(host)

    def close(self) -> None:
        """Close the files."""
        self._checkpoint.close()

    def _host(self, manifest: Manifest) -> torch.Tensor:
        if self._scratch is None or self._scratch.numel() < manifest.largest_bucket:
            self._scratch = torch.empty(manifest.largest_bucket, dtype=torch.uint8, pin_memory=True)
        return self._scratch
