"""Engine workers copy out of the trainer's exported memory."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .transport import TRANSPORT as TRANSPORT
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
