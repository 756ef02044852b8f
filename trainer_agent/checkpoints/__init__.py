"""Checkpoints on disk: kept versions, finished checkpoints as a source, which folder to publish when."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import checkpoint_folder as checkpoint_folder
    from .archive import (
        Archive as Archive,
        ArchivedVersion as ArchivedVersion,
        ArchivePolicy as ArchivePolicy,
        Saving as Saving,
        check_configs as check_configs,
        check_notes as check_notes,
        kept_in as kept_in,
    )
    from .checkpoint_folder import (
        Checkpoint as Checkpoint,
        CheckpointSource as CheckpointSource,
        CorruptCheckpoint as CorruptCheckpoint,
        open_checkpoint as open_checkpoint,
        staging_device as staging_device,
    )
    from .watch_machine import (
        Effect as Effect,
        FolderChanged as FolderChanged,
        FolderResult as FolderResult,
        Inspect as Inspect,
        Inspected as Inspected,
        Listed as Listed,
        PublishEnded as PublishEnded,
        PublishFolder as PublishFolder,
        RejectFolder as RejectFolder,
        Skip as Skip,
        WatchLimits as WatchLimits,
        WatchMachine as WatchMachine,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
