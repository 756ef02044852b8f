"""Takes a channel back to a version that was committed in it before, from the checkpoint that holds it.

The coordinator knows the committed versions and keeps none of their tensors, so a rollback brings a checkpoint. The
rest is a round like any other: a lease, a new epoch, verification, and a record that is marked as a rollback.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from weightbus.control.machine import MAX_HISTORY, PastStatus
from weightbus.control.protocol import ConfigurationError
from weightbus.dataplane.transports.disk import SavedVersion

from ..checkpoints import (
    ArchivedVersion,
    Checkpoint,
    CheckpointSource,
    check_notes,
    kept_in,
    open_checkpoint,
    staging_device,
)
from ..machine import BadCheckpoint, PublishReport, RollbackRefused
from ..publish import TrainerAgent
from .commands import RollbackSettings


def refusal(version: int, history: Sequence[PastStatus], kept: SavedVersion | None = None) -> str:
    """The reason why a channel cannot go back to `version`; empty when it can.

    `history` lists its committed versions, oldest first, as many as the coordinator remembers; the last one is another
    than `version`. An older version is proven by `kept`: files get their name once their version is committed.
    """
    if not history:
        return "nothing was committed in it, as far as the coordinator remembers"
    current = history[-1].version
    if version > current:
        return f"committed is {current}, which is below: publish it, without going back"
    known = sorted({past.version for past in history if past.version < current})
    if version in known:
        return ""
    if len(history) >= MAX_HISTORY:
        numbers = [past.version for past in history]
        if kept is not None and kept.notes.epoch < history[0].epoch:
            return ""
        return (
            f"it is not among the last {len(history)} committed versions, which the coordinator remembers"
            f" ({min(numbers)} to {max(numbers)}), and its folder has no notes of an earlier epoch that prove its"
            " commit: name the folder of versions that a trainer kept with --save-dir"
        )
    names = ", ".join(map(str, known)) or "none"
    return f"it was never committed there; below the committed {current} there were: {names}"


def other_version(found: SavedVersion | None, version: int, history: Sequence[PastStatus]) -> str:
    """The reason why files that were kept as `version` are not what was committed last under that number, or empty.

    After a rollback a channel uses its numbers again, and not every version is kept, so files may be of an earlier
    version of that number. Epochs grow with every attempt and tell them apart.
    """
    last = max((past.epoch for past in history if past.version == version and not past.rollback), default=0)
    if found is None or found.notes.epoch >= last:
        return ""
    return (
        f"{found.path} holds it as it was committed in epoch {found.notes.epoch}; the channel went back since and had"
        f" another version {version}, in epoch {last}, of which no files were kept: name a folder with --checkpoint to"
        " take either"
    )


def roll_back(settings: RollbackSettings, version: int) -> PublishReport | None:
    """Publish `version` again over a higher one; None when it is the committed one already.

    Raises `BadCheckpoint` when the folder does not hold a finished checkpoint, or says that it is another version's;
    `ConfigurationError` when none is named, `RollbackRefused`, and what connecting and publishing raise: `SourceFailed`
    where files that a trainer kept are not what was committed. Asked again after it was done, it does nothing.
    """
    settings = msgspec.structs.replace(settings, run="")  # an operator's: the channel stays its run's
    device, folder = staging_device(settings.device), _folder(settings, version)
    check_notes(folder, settings.channel, version)
    kept = SavedVersion.read(folder)
    source = CheckpointSource(_opened(settings, folder, kept), device)
    try:
        with TrainerAgent.connect(source, settings=settings) as agent:
            history = agent.history()
            if history and history[-1].version == version:
                return None
            reason = refusal(version, history, kept)
            if not reason and settings.checkpoint is None:
                reason = other_version(kept, version, history)
            if reason:
                raise RollbackRefused(settings.channel, version, reason)
            return agent.publish(version, rollback=True)
    finally:
        source.close()


def _opened(settings: RollbackSettings, folder: Path, kept: SavedVersion | None) -> Checkpoint:
    """The checkpoint in `folder`; compared, as it is read, with what was `kept` beside it, where that is."""
    if kept is None and settings.checkpoint is None:
        raise BadCheckpoint(
            folder, "the digest table that was kept with it is missing or damaged: nothing says what it holds"
        )
    checkpoint = open_checkpoint(
        folder,
        settings.marker,
        settings.hf_config_dir,
        dcp=settings.dcp,
        dcp_prefix=settings.dcp_prefix,
    )
    try:
        return ArchivedVersion(checkpoint, kept) if kept else checkpoint
    except BaseException:
        checkpoint.close()
        raise


def _folder(settings: RollbackSettings, version: int) -> Path:
    if settings.checkpoint is not None:
        return settings.checkpoint
    if settings.save_dir is not None:
        return kept_in(settings.save_dir, settings.channel, version)
    raise ConfigurationError(
        f"nothing says where version {version} is kept: name its folder with --checkpoint, or the folder of all"
        " versions that a trainer saved with --save-dir"
    )
