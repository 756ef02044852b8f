"""What a publication decides and how it ends, pure: machine, snapshot queue, report, handle, errors."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import events as events, publication as publication
    from .errors import (
        AgentClosed as AgentClosed,
        BadCheckpoint as BadCheckpoint,
        ConnectFailed as ConnectFailed,
        CoordinatorLost as CoordinatorLost,
        LeaseBusy as LeaseBusy,
        PublicationEnd as PublicationEnd,
        PublishFailed as PublishFailed,
        PublishRefused as PublishRefused,
        RollbackRefused as RollbackRefused,
        RoundAborted as RoundAborted,
        SourceFailed as SourceFailed,
        Superseded as Superseded,
        TooFarAhead as TooFarAhead,
        TrainerError as TrainerError,
        UnfinishedCheckpoint as UnfinishedCheckpoint,
        WeightsChanged as WeightsChanged,
        raise_for as raise_for,
    )
    from .events import EndReason as EndReason
    from .publication import PublicationResult as PublicationResult, PublishLimits as PublishLimits
    from .publish_handle import PublishHandle as PublishHandle
    from .publish_report import Mode as Mode, PublishReport as PublishReport, Stopwatch as Stopwatch
    from .snapshot_queue import (
        Overlap as Overlap,
        SnapshotClaim as SnapshotClaim,
        SnapshotMemory as SnapshotMemory,
        SnapshotQueue as SnapshotQueue,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
