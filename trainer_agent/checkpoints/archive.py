"""Keeps versions as files: Hugging Face checkpoints, written in the pass in which a version is digested.

    <save_dir>/<channel>/checkpoint-<version>    appears when the version is committed, complete, by one rename

Buckets are written behind the pass, one after another, while engines still serve: no engine is paused for a disk. A
version that is not committed leaves nothing. The newest `keep_last` versions stay, every `keep_every`-th for good; a
checkpoint that a server is loading stays until a later version is kept. A failed disk costs the checkpoint and not the
version, and is in the report.

    <save_dir>/<channel>/checkpoint-<version>.tmp      being written; of a trainer that was killed, removed by the next
    <save_dir>/<channel>/.checkpoint-<version>.gone    being removed; the same
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Final

import msgspec
import torch

from weightbus.control.log import get_log
from weightbus.control.protocol import ConfigurationError
from weightbus.dataplane.digest import ALGORITHM, DIGEST_BYTES, check_digests
from weightbus.dataplane.errors import DigestMismatch, ManifestError
from weightbus.dataplane.processes import SerialCalls
from weightbus.dataplane.quantize import read_quantization_config
from weightbus.dataplane.tensors import DigestTable, Manifest, TensorSpec
from weightbus.dataplane.transports.disk import NOTES, CheckpointWriter, Notes, SavedVersion, leaving, place_of

from ..machine import BadCheckpoint
from .checkpoint_folder import Checkpoint, CorruptCheckpoint, read_config

_NAME: Final = re.compile(r"checkpoint-(\d+)")
_LEFT_OVER: Final = re.compile(r"checkpoint-\d+\.tmp|\.checkpoint-\d+\.gone")
_BESIDE: Final = 64 * 1024 * 1024
"""Bytes of a checkpoint beside its weights: config, tokenizer, manifest, table."""
HANGS_S: Final = 300.0
"""Seconds that one step of saving may take, beside its bytes at `_LEAST_BYTES_S`, before the disk counts as hung."""
_LEAST_BYTES_S: Final = 26e6
_log = get_log(__name__)


class ArchivePolicy(msgspec.Struct, frozen=True):
    """The versions that are written, and how long they stay."""

    every: int
    """Multiples of this number are written."""
    last: int
    """Number of the newest versions that stay."""
    forever: int = 0
    """Multiples of this number stay for good; 0 for none."""

    def writes(self, version: int) -> bool:
        """True if `version` is written."""
        return version % self.every == 0

    def dropped(self, versions: Iterable[int], current: int) -> tuple[int, ...]:
        """The versions that may be removed, ascending, when `current` was written last.

        Versions above `current` are from before a rollback: they are no part of the channel's history, and stay until
        newer ones replace them.
        """
        past = sorted({version for version in versions if version <= current})
        old = past[: -self.last]
        return tuple(version for version in old if not self.forever or version % self.forever)


class Archive:
    """The folder of one channel. Used by rank 0, for one publication at a time."""

    def __init__(self, save_dir: Path, channel: str, policy: ArchivePolicy, config_dir: Path | None) -> None:
        """Config and tokenizer files come from `config_dir`. Raises `BadCheckpoint` when it has no config.

        Raises `ConfigurationError` when nothing can be written to `save_dir`.
        """
        if config_dir is None or not (config_dir / "config.json").is_file():
            raise BadCheckpoint(
                save_dir,
                "a checkpoint needs a config.json: name the folder of the served one with hf_config_dir or served",
            )
        self._channel, self._policy, self._config_dir = channel, policy, config_dir
        self._root = place_of(save_dir, channel, 0).parent
        _check_writable(save_dir, self._root)
        self._swept = False
        self._last: Saving | None = None

    def keeps(self, version: int) -> bool:
        """True if `version` is kept as files."""
        return self._policy.writes(version)

    def saving(self, version: int, manifest: Manifest) -> Saving | None:
        """The writer of `version`; None for a version that is not kept. Requires the lease: there is one writer."""
        if not self.keeps(version):
            return None
        if not self._swept:
            self._sweep()
            self._swept = True
        writer = CheckpointWriter(self._root / f"checkpoint-{version}", manifest, self._config_dir)
        self._last = Saving(self, writer, version, manifest, self._last)
        return self._last

    def check_name(self, target: Path) -> None:
        """Raise `BadCheckpoint` when `target` exists and was not written by weightbus."""
        if target.exists() and not _is_ours(target):
            raise BadCheckpoint(target, "files of another program are there: name a folder of its own with save_dir")

    def make_room(self, target: Path) -> None:
        """Remove an older checkpoint of the same number, left by a rollback."""
        self.check_name(target)
        if target.exists() and not self._drop(target):
            raise BadCheckpoint(target, "a server is loading what is there: an older version of this number")

    def make_space(self, version: int, nbytes: int) -> None:
        """Remove checkpoints that `version` replaces, oldest first, until its `nbytes` fit on the disk.

        The newest checkpoint stays until the new one is complete: servers are launched from it.
        """
        found = self._kept()
        stays = max((each for each in found if each < version), default=None)
        for each in self._policy.dropped({*found, version}, version):
            if shutil.disk_usage(self._root).free >= nbytes + _BESIDE:
                return
            if each != stays:
                self._prune_one(each, found[each])

    def prune(self, version: int) -> None:
        """Remove checkpoints that the policy does not keep beside `version`. Failed removals are retried next time."""
        found = self._kept()
        for each in self._policy.dropped(found, version):
            self._prune_one(each, found[each])

    def _kept(self) -> dict[int, Path]:
        """Folders of the kept versions."""
        named = ((path, _NAME.fullmatch(path.name)) for path in self._root.glob("*"))
        return {int(match[1]): path for path, match in named if match and _is_ours(path)}

    def _prune_one(self, version: int, path: Path) -> None:
        log = _log.bind(channel=self._channel, version=version)
        try:
            log.info("checkpoint_dropped" if self._drop(path) else "checkpoint_in_use")
        except OSError as error:
            log.warning("checkpoint_not_dropped", reason=str(error))

    def _drop(self, path: Path) -> bool:
        """Remove `path` by a rename, so that no reader finds half of it; False while a server loads it."""
        gone = path.with_name(f".{path.name}.gone")
        with leaving(path) as free:
            if not free:
                return False
            shutil.rmtree(gone, ignore_errors=True)  # what an earlier removal left
            path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)  # what cannot be removed now is a left-over
        return True

    def _sweep(self) -> None:
        """Remove remains of a trainer that was killed while it wrote or removed a checkpoint."""
        for path in self._root.glob("*") if self._root.is_dir() else ():
            if _LEFT_OVER.fullmatch(path.name):
                _log.info("left_over_removed", channel=self._channel, folder=str(path))
                shutil.rmtree(path, ignore_errors=True)


def check_configs(served: Path | None, beside: Path | None) -> None:
    """Raise `ConfigurationError` unless the configs in `served` and `beside` name the same quantization."""
    if served is None or beside is None or not (beside / "config.json").is_file():
        return
    wanted, found = (read_quantization_config(read_config(folder, None)) for folder in (served, beside))
    if found != wanted:
        said = [f"quantized ({each.method})" if each else "not quantized" for each in (wanted, found)]
        raise ConfigurationError(
            f"served = {served} is {said[0]}, hf_config_dir = {beside} is {said[1]}, or otherwise: weights that are"
            " quantized as the one says would lie beside the config of the other; leave hf_config_dir out"
        )


def _check_writable(save_dir: Path, root: Path) -> None:
    """Raise `ConfigurationError` unless `root`, below `save_dir`, can be made and written to, as far as can be seen."""
    there = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ConfigurationError(f"save_dir = {save_dir}: {there} is a file, a folder is expected")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigurationError(f"save_dir = {save_dir}: this user may not write to {there}")


def _is_ours(path: Path) -> bool:
    """True for a checkpoint of weightbus: a trainer's own checkpoints may have such names, too."""
    return (path / NOTES).is_file()


class Saving:
    """Writes one version to the disk. Failures are reported at the end: the round does not depend on them.

    A hung disk is such a failure: its pending step is left to its thread and has no effect.
    """

    def __init__(
        self, archive: Archive, writer: CheckpointWriter, version: int, manifest: Manifest, before: Saving | None
    ) -> None:
        """Begin nothing while the disk hangs in the saving `before`."""
        self._archive = archive
        self._writer = writer
        self._version, self._nbytes = version, manifest.nbytes
        self._patience_s = HANGS_S + manifest.largest_bucket / _LEAST_BYTES_S
        self._calls = SerialCalls("weightbus-save")
        self._writes: list[Future[None]] = []
        self._given_up = before.hangs if before is not None else ""
        self.stuck: Future[None] | None = before.stuck if before is not None and self._given_up else None
        """The step that has not returned; None while the disk answers."""

    @property
    def hangs(self) -> str:
        """The reason why nothing can be written now; empty when the disk answers."""
        return self._given_up if self.stuck is not None and not self.stuck.done() else ""

    def begin(self) -> None:
        """Begin a pass over all buckets, and discard an earlier one."""
        self.settle()
        self._writes = []
        self._do(self._open)

    def take(self, index: int, memory: torch.Tensor) -> None:
        """Write bucket `index`; its bytes must not change until `free` returns."""
        self._do(partial(self._add, index, memory))

    def free(self, index: int) -> None:
        """Block until bucket `index` and all before it are written, or have failed."""
        for write in self._writes[: max(0, index + 2)]:
            self._await(write)

    def settle(self) -> None:
        """Block until all writes have ended."""
        self.free(len(self._writes))

    def finish(self, version: int, notes: Notes, beside: Mapping[str, bytes]) -> tuple[str, str]:
        """Make the checkpoint of the committed version visible. Returns its path, or "" and the reason for none.

        `beside` are further files in it, by name.
        """
        try:
            self._do(partial(self._finish, tuple(self._writes), version, notes, beside))
            self.settle()
            if self._given_up:
                raise TimeoutError(self._given_up)  # noqa: TRY301  reported below, as any other failure
            for write in self._writes:
                write.result()
        except Exception as error:  # noqa: BLE001  the version is served, whatever the disk says; it is in the report
            _log.exception("checkpoint_not_saved", version=version)
            self.discard()
            where = "" if isinstance(error, BadCheckpoint) else f" ({self._writer.target})"
            return "", f"{type(error).__name__}: {error}{where}"
        return str(self._writer.target.absolute()), ""

    def discard(self) -> None:
        """Remove the files of a version that was not committed."""
        self._do(self._writer.discard)
        self.settle()

    def _do(self, step: Callable[[], None]) -> None:
        """Submit a step behind the pending writes."""
        if not self._given_up:
            self._writes.append(self._calls.submit(step))

    def _await(self, write: Future[None]) -> None:
        if self._given_up or wait([write], self._patience_s).done:
            return
        self._given_up = f"the disk did not answer for {self._patience_s:.0f} s: does the file system of save_dir hang?"
        self.stuck = write
        self._calls.give_up()  # a bucket that is half written may change under its hands: it never gets a name
        _log.warning("checkpoint_given_up", version=self._version, reason=self._given_up)

    def _open(self) -> None:
        self._archive.check_name(self._writer.target)
        self._writer.begin()
        self._archive.make_space(self._version, self._nbytes)

    def _add(self, index: int, memory: torch.Tensor) -> None:
        self._writes[0].result()  # without a folder there is nothing to write into
        self._writer.add(index, memory)

    def _finish(self, writes: Sequence[Future[None]], version: int, notes: Notes, beside: Mapping[str, bytes]) -> None:
        for write in writes:
            write.result()
        self._writer.complete(notes, beside)
        if self._given_up:  # the report said that there is none; the next trainer removes it
            return
        self._archive.make_room(self._writer.target)
        self._writer.reveal()
        self._archive.prune(version)


_SHOWN: Final = 8
"""Kept versions that an error names."""


def kept_in(save_dir: Path, channel: str, version: int) -> Path:
    """Folder of the kept `version`. Raises `BadCheckpoint`, which names the kept versions, when it is not there."""
    folder = place_of(save_dir, channel, version)
    if (folder / NOTES).is_file():
        return folder
    there = sorted(
        int(path.parent.name.rpartition("-")[2]) for path in folder.parent.glob(f"checkpoint-[0-9]*/{NOTES}")
    )
    newest = there[-_SHOWN:]
    older = f"{len(there) - len(newest)} older ones and " if newest != there else ""
    found = f"kept there are {older}{', '.join(map(str, newest))}" if there else "no version of this channel is"
    raise BadCheckpoint(folder, f"version {version} is not kept (any more), {found}: name a folder with --checkpoint")


def check_notes(folder: Path, channel: str, version: int) -> None:
    """Raise `BadCheckpoint` when the notes in `folder` name another channel or version."""
    try:
        notes = msgspec.json.decode((folder / NOTES).read_bytes(), type=Notes)
    except FileNotFoundError:
        return
    except ValueError as error:
        raise BadCheckpoint(folder, f"its {NOTES} cannot be read ({error}), so its version is unknown") from error
    if (notes.channel, notes.version) != (channel, version):
        raise BadCheckpoint(
            folder,
            f"by its {NOTES} it is version {notes.version} of channel {notes.channel!r}, expected version {version} of"
            f" {channel!r}: name the folder that was published as that",
        )


class ArchivedVersion:
    """A checkpoint whose tensors are compared with their digest table as they are read. Satisfies `Checkpoint`."""

    def __init__(self, checkpoint: Checkpoint, kept: SavedVersion) -> None:
        """Raises `BadCheckpoint` when the table describes other tensors."""
        self._checkpoint, self._kept = checkpoint, kept
        self.model, self.config, self.tensors = checkpoint.model, checkpoint.config, checkpoint.tensors
        try:
            manifest = Manifest.decode(kept.blobs[kept.notes.manifest])
            table = DigestTable.decode(kept.blobs[kept.notes.table], manifest)
        except ManifestError as error:
            raise BadCheckpoint(kept.path, f"what it is to be compared with cannot be read: {error}") from error
        if table.algorithm != ALGORITHM or set(manifest.tensors) != set(checkpoint.tensors):
            raise BadCheckpoint(kept.path, "its digest table is of other tensors than its files hold")
        starts = range(0, len(table.tensors), DIGEST_BYTES)
        self._digests = {
            spec.name: table.tensors[at : at + DIGEST_BYTES] for spec, at in zip(manifest.tensors, starts, strict=True)
        }

    def read(self, wanted: Sequence[TensorSpec], out: torch.Tensor) -> None:
        """Pack tensors into `out`. Raises `CorruptCheckpoint` unless they are the committed ones."""
        self._checkpoint.read(wanted, out)
        names = [spec.name for spec in wanted]
        offsets = [0, *accumulate(spec.nbytes for spec in wanted)]
        try:
            check_digests(out, offsets, b"".join(self._digests[name] for name in names), names)
        except DigestMismatch as wrong:
            raise CorruptCheckpoint(
                f"{self._kept.path}: tensor {wrong.tensor!r} is not the one that was committed as version"
                f" {self._kept.notes.version} (its digest is {wrong.found}, expected {wrong.expected}): the file was"
                " changed or damaged since"
            ) from wrong

    def check(self) -> None:
        """Raise `AssemblyFailed` when a file was written to since it was opened."""
        self._checkpoint.check()

    def close(self) -> None:
        """Close the files."""
        self._checkpoint.close()
