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
    from weightbus.trainer_agent import ExportedSource as ExportedSource
    from weightbus.trainer_agent import FSDPSource as FSDPSource
    from weightbus.trainer_agent import FullTensorSource as FullTensorSource
    from weightbus.trainer_agent import HFModuleSource as HFModuleSource
    from weightbus.trainer_agent import Lineage as Lineage
    from weightbus.trainer_agent import MegatronSource as MegatronSource
    from weightbus.trainer_agent import PublishHandle as PublishHandle
    from weightbus.trainer_agent import PublishReport as PublishReport
    from weightbus.trainer_agent import Source as Source
    from weightbus.trainer_agent import Staleness as Staleness
    from weightbus.trainer_agent import TrainerAgent as TrainerAgent
    from weightbus.trainer_agent import TrainerSettings as TrainerSettings
    from weightbus.trainer_agent import bridge_exporter as bridge_exporter
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
