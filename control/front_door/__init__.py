"""weightbus: moves the weights of a model in training into the engines that serve it, while they serve.

What a user may import stands here, and nowhere else. Everything below, ``weightbus.control`` to
``weightbus.engine_agent``, is private by convention: it may change in any release. The one exception is a name that
stands in launch flags of servers, ``weightbus.engine_agent.worker_loader.load``.

This folder is packaged as ``weightbus`` itself (pyproject.toml). Names are loaded when they are asked for, so
``import weightbus`` imports no torch.
"""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from weightbus.trainer_agent import (
        ExportedSource as ExportedSource,
        FSDPSource as FSDPSource,
        FullTensorSource as FullTensorSource,
        HFModuleSource as HFModuleSource,
        Lineage as Lineage,
        MegatronSource as MegatronSource,
        PublishHandle as PublishHandle,
        PublishReport as PublishReport,
        Source as Source,
        Staleness as Staleness,
        TrainerAgent as TrainerAgent,
        TrainerSettings as TrainerSettings,
        bridge_exporter as bridge_exporter,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
