"""What a training loop uses to publish its weights: `TrainerAgent`, and a source for its framework.

agent         TrainerAgent: connect, publish, close, on every rank
report        PublishReport: what publish returns; errors: what it raises
settings      everything that can be set; its environment variables begin with WEIGHTBUS_TRAINER_
source        the seam to a training framework; megatron, fsdp, full_tensor, hf_module and exported are sources
background    publishes snapshots behind the training loop; watcher publishes checkpoints of a folder
publication   the machine that decides; leader, drive, staging, delivery carry it out on the root rank
live          what engines must report of their parameters after a load
lag           how far training may be ahead of what engines serve
lineage       which version wrote each token of a response, and whether to learn from it
quantized     another source's weights, quantized on their way; archive keeps versions as files

The names below are loaded when they are asked for: the command line passes through here without torch.
"""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .machine import PublishHandle as PublishHandle, PublishReport as PublishReport
    from .publish import TrainerAgent as TrainerAgent
    from .settings import TrainerSettings as TrainerSettings
    from .source import Source as Source
    from .sources import (
        ExportedSource as ExportedSource,
        FSDPSource as FSDPSource,
        FullTensorSource as FullTensorSource,
        HFModuleSource as HFModuleSource,
        bridge_exporter as bridge_exporter,
    )
    from .sources.megatron import MegatronSource as MegatronSource
    from .staleness import Lineage as Lineage, Staleness as Staleness
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
