"""`TrainerAgent`, and rank 0 that drives the publication machine."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .agent import TrainerAgent as TrainerAgent
    from .publisher_context import Progress as Progress
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
