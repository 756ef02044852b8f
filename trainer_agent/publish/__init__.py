"""Publishing a version: `TrainerAgent`, and rank 0's drivers of the publication machine.

From the decision to the bytes: machine/publication.py decides; driver.py carries its effects out; rank_zero.py speaks
with the other ranks (rank_commands.py); bucket_staging.py, in_place_export.py and pipeline_broadcast.py read the
weights; delivery.py sends them.
"""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .agent import TrainerAgent as TrainerAgent
    from .publisher_context import Progress as Progress
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
