"""A `Source` over complete checkpoints on a disk, one after another, on one process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from weightbus.control.protocol import ConfigurationError
from weightbus.dataplane.tensors import Manifest, TensorSpec

from ..machine import BadCheckpoint, UnfinishedCheckpoint
from ..source import AssemblyFailed, LayoutMismatch
from . import checkpoint_folder as folders
from .checkpoint_folder import TensorPlace


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
    if (folder / folders.INDEX).is_file() or (folder / folders.SINGLE).is_file():
        places = folders.safetensors(folder)
        config = folders.read_config(folder, config_dir)
        return SafetensorsFiles(folders.architecture(folder, config), config, places)
    if dcp:
        from .dcp_files import DcpFiles  # noqa: PLC0415  # torch's checkpointing, only where DCP folders are read

        config = folders.read_config(folder, config_dir)
        return DcpFiles(folder, folders.architecture(folder, config), config, dcp_prefix)
    if any(folder.glob("*.distcp")):
        raise BadCheckpoint(folder, "it is a torch DCP checkpoint, whose metadata is a pickle: allow it with --dcp")
    raise UnfinishedCheckpoint(folder, f"there is no {folders.INDEX} and no {folders.SINGLE}")


def _read_into(file: int, place: TensorPlace, memory: memoryview) -> None:
    done = 0
    while done < len(memory):
        count = os.preadv(file, [memory[done:]], place.offset + done)
        if count == 0:
            raise AssemblyFailed(
                f"{place.path} ends inside of {place.spec.name!r}: it was changed after it was finished"
            )
        done += count


class CheckpointSource:
    """The tensors of the checkpoint that was opened last. Satisfies `Source`."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._device = device
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
    def model(self) -> str:
        """Architecture that the config names."""
        return self._checkpoint.model

    @property
    def root(self) -> bool:
        """True: there is one process."""
        return True

    @property
    def device(self) -> torch.device:
        """Device of the buckets."""
        return self._device

    @property
    def head_dim(self) -> int | None:
        """Elements of one attention head; None when the config does not tell."""
        config = self._checkpoint.config
        head_dim, hidden, heads = (config.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
        if isinstance(head_dim, int):
            return head_dim
        return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None

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

    def agree(self, blob: bytes | None) -> bytes:
        """Return `blob`: there is one process."""
        if blob is None:
            raise ValueError("the root gives what is agreed")
        return blob

    def close(self) -> None:
        """Close the files."""
        self._checkpoint.close()

    def _host(self, manifest: Manifest) -> torch.Tensor:
        if self._scratch is None or self._scratch.numel() < manifest.largest_bucket:
            self._scratch = torch.empty(manifest.largest_bucket, dtype=torch.uint8, pin_memory=True)
        return self._scratch
