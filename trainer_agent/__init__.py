"""The trainer's side: sources of weights, and the agent that publishes them. README.md has the rooms, in order.

The face below is what ``weightbus`` itself offers (REFERENCE.md). Names are loaded when they are used, so the command
line runs without torch.
"""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .machine import (
        AgentClosed as AgentClosed,
        ChannelTaken as ChannelTaken,
        ConnectFailed as ConnectFailed,
        CoordinatorLost as CoordinatorLost,
        EnginesMissing as EnginesMissing,
        LeaseBusy as LeaseBusy,
        PublishFailed as PublishFailed,
        PublishHandle as PublishHandle,
        PublishRefused as PublishRefused,
        PublishReport as PublishReport,
        ReplicasDiffer as ReplicasDiffer,
        RoundAborted as RoundAborted,
        SourceFailed as SourceFailed,
        Superseded as Superseded,
        TooFarAhead as TooFarAhead,
        TrainerError as TrainerError,
        TrainerNotTrusted as TrainerNotTrusted,
        WeightsChanged as WeightsChanged,
        WeightsNotFinite as WeightsNotFinite,
    )
    from .publish import (
        Progress as Progress,
        TrainerAgent as TrainerAgent,
    )
    from .rollouts import (
        Fleet as Fleet,
        FleetError as FleetError,
        NoEngineReady as NoEngineReady,
        ReadyEngine as ReadyEngine,
        Rollout as Rollout,
        RolloutRefused as RolloutRefused,
    )
    from .settings import TrainerSettings as TrainerSettings
    from .source import (
        AssemblyFailed as AssemblyFailed,
        LayoutMismatch as LayoutMismatch,
        RanksDisagree as RanksDisagree,
        Source as Source,
        SourceError as SourceError,
        UnknownParameter as UnknownParameter,
        UnsupportedModel as UnsupportedModel,
    )
    from .sources import (
        ExportedSource as ExportedSource,
        FSDPSource as FSDPSource,
        FullTensorSource as FullTensorSource,
        HFModuleSource as HFModuleSource,
        bridge_exporter as bridge_exporter,
    )
    from .sources.megatron import MegatronSource as MegatronSource
    from .staleness import (
        Lineage as Lineage,
        Staleness as Staleness,
        StalenessVerdict as StalenessVerdict,
        UnknownLineage as UnknownLineage,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
