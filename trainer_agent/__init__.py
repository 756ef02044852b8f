"""What a training loop uses to publish its weights: `TrainerAgent`, and a source for its framework.

agent         TrainerAgent: connect, publish, close, on every rank
report        PublishReport: what publish returns; errors: what it raises
settings      everything that can be set; its environment variables begin with WEIGHTBUS_TRAINER_
source        the seam to a training framework; megatron and hf_module are sources
background    publishes snapshots behind the training loop; watcher publishes checkpoints of a folder
publication   the machine that decides; leader, drive, staging, delivery carry it out on the root rank
live          what engines must report of their parameters after a load

The names below are loaded when they are asked for: the command line passes through here without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .agent import TrainerAgent as TrainerAgent
    from .handle import PublishHandle as PublishHandle
    from .hf_module import HFModuleSource as HFModuleSource
    from .megatron import MegatronSource as MegatronSource
    from .report import PublishReport as PublishReport
    from .settings import TrainerSettings as TrainerSettings
    from .source import Source as Source

_HOMES: Final = {
    "HFModuleSource": ".hf_module",
    "MegatronSource": ".megatron",
    "PublishHandle": ".handle",
    "PublishReport": ".report",
    "Source": ".source",
    "TrainerAgent": ".agent",
    "TrainerSettings": ".settings",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name], __name__), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
