"""What a publication decides and how it ends, pure: machine, report, errors, handle."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import events as events, publication as publication
    from .errors import (
        AgentClosed as AgentClosed,
        BadCheckpoint as BadCheckpoint,
        ChannelTaken as ChannelTaken,
        ConnectFailed as ConnectFailed,
        CoordinatorLost as CoordinatorLost,
        EnginesMissing as EnginesMissing,
        LeaseBusy as LeaseBusy,
        PublishFailed as PublishFailed,
        PublishHandle as PublishHandle,
        PublishRefused as PublishRefused,
        ReplicasDiffer as ReplicasDiffer,
        RollbackRefused as RollbackRefused,
        RoundAborted as RoundAborted,
        SourceFailed as SourceFailed,
        Superseded as Superseded,
        TooFarAhead as TooFarAhead,
        TrainerError as TrainerError,
        TrainerNotTrusted as TrainerNotTrusted,
        UnfinishedCheckpoint as UnfinishedCheckpoint,
        WeightsChanged as WeightsChanged,
        WeightsNotFinite as WeightsNotFinite,
        failure_of as failure_of,
    )
    from .events import EndReason as EndReason
    from .findings import (
        DifferingReplicas as DifferingReplicas,
        NonFinite as NonFinite,
        OnDifference as OnDifference,
        OnNonFinite as OnNonFinite,
        ReplicasCompared as ReplicasCompared,
    )
    from .publication import (
        NO_ENGINE as NO_ENGINE,
        Mode as Mode,
        PublicationEnd as PublicationEnd,
        PublicationResult as PublicationResult,
        PublishLimits as PublishLimits,
        PublishReport as PublishReport,
        count_engines as count_engines,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
