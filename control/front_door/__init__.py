"""weightbus: moves the weights of a model in training into the engines that serve it, while they serve.

The names below are the public interface, documented in trainer_agent/REFERENCE.md. Everything else, from
``weightbus.control`` to ``weightbus.engine_agent``, is private by convention and may change in any release. The one
exception is a name in launch flags of servers, ``weightbus.engine_agent.worker_loader.load``.

This folder is packaged as ``weightbus`` itself (pyproject.toml). Names are loaded when they are used, so ``import
weightbus`` imports no torch.
"""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from weightbus.control.protocol import (
        ConfigurationError as ConfigurationError,
        EngineReport as EngineReport,
        Outcome as Outcome,
        RefusalCode as RefusalCode,
        WeightbusError as WeightbusError,
    )
    from weightbus.trainer_agent import (
        AgentClosed as AgentClosed,
        AssemblyFailed as AssemblyFailed,
        ChannelTaken as ChannelTaken,
        ConnectFailed as ConnectFailed,
        CoordinatorLost as CoordinatorLost,
        EnginesMissing as EnginesMissing,
        ExportedSource as ExportedSource,
        Fleet as Fleet,
        FleetError as FleetError,
        FSDPSource as FSDPSource,
        FullTensorSource as FullTensorSource,
        HFModuleSource as HFModuleSource,
        LayoutMismatch as LayoutMismatch,
        LeaseBusy as LeaseBusy,
        Lineage as Lineage,
        MegatronSource as MegatronSource,
        NoEngineReady as NoEngineReady,
        Progress as Progress,
        PublishFailed as PublishFailed,
        PublishHandle as PublishHandle,
        PublishRefused as PublishRefused,
        PublishReport as PublishReport,
        RanksDisagree as RanksDisagree,
        ReadyEngine as ReadyEngine,
        ReplicasDiffer as ReplicasDiffer,
        Rollout as Rollout,
        RolloutRefused as RolloutRefused,
        RoundAborted as RoundAborted,
        Source as Source,
        SourceError as SourceError,
        SourceFailed as SourceFailed,
        Staleness as Staleness,
        StalenessVerdict as StalenessVerdict,
        Superseded as Superseded,
        TooFarAhead as TooFarAhead,
        TrainerAgent as TrainerAgent,
        TrainerError as TrainerError,
        TrainerNotTrusted as TrainerNotTrusted,
        TrainerSettings as TrainerSettings,
        UnknownLineage as UnknownLineage,
        UnknownParameter as UnknownParameter,
        UnsupportedModel as UnsupportedModel,
        WeightsChanged as WeightsChanged,
        WeightsNotFinite as WeightsNotFinite,
        bridge_exporter as bridge_exporter,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
