"""Publishing a version: `TrainerAgent`, and rank 0's drivers of the publication machine.

From the decision to the bytes: machine/publication.py decides; driver.py carries its effects out; agent.py speaks
with the other ranks (rank_commands.py); bucket_staging.py reads the weights; delivery.py sends
them. background_publisher.py does the same behind the training loop, from snapshots.
"""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .agent import TrainerAgent as TrainerAgent
    from .driver import Progress as Progress
    from .version_plan import (
        PlannedVersion as PlannedVersion,
        SourceKind as SourceKind,
        planned_version as planned_version,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
