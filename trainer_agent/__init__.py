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
quantised     another source's weights, quantised on their way; archive keeps versions as files

The names below are loaded when they are asked for: the command line passes through here without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .machine.publish_handle import PublishHandle as PublishHandle
    from .machine.publish_report import PublishReport as PublishReport
    from .publish.agent import TrainerAgent as TrainerAgent
    from .settings import TrainerSettings as TrainerSettings
    from .source import Source as Source
    from .sources.exported import ExportedSource as ExportedSource
    from .sources.exported import bridge_exporter as bridge_exporter
    from .sources.fsdp import FSDPSource as FSDPSource
    from .sources.full_tensor import FullTensorSource as FullTensorSource
    from .sources.hf_module import HFModuleSource as HFModuleSource
    from .sources.megatron.megatron_source import MegatronSource as MegatronSource
    from .staleness import Lineage as Lineage
    from .staleness import Staleness as Staleness

_HOMES: Final = {
    "ExportedSource": ".sources.exported",
    "FSDPSource": ".sources.fsdp",
    "FullTensorSource": ".sources.full_tensor",
    "HFModuleSource": ".sources.hf_module",
    "Lineage": ".staleness",
    "MegatronSource": ".sources.megatron.megatron_source",
    "PublishHandle": ".machine.publish_handle",
    "PublishReport": ".machine.publish_report",
    "Source": ".source",
    "Staleness": ".staleness",
    "TrainerAgent": ".publish.agent",
    "TrainerSettings": ".settings",
    "bridge_exporter": ".sources.exported",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
