"""Checkpoints on a file system that both sides see."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import saved_version as saved_version
    from .checkpoint_files import DTYPES as DTYPES, NOTES as NOTES, CheckpointWriter as CheckpointWriter, Notes as Notes
    from .saved_version import (
        SavedReceiver as SavedReceiver,
        SavedVersion as SavedVersion,
        leaving as leaving,
        place_of as place_of,
    )
    from .transport import TRANSPORT as TRANSPORT
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
