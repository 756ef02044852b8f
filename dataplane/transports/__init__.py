"""Transports: the interface of one, the registry, and what several share (worker exchange, order of broadcasts)."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import registry as registry, worker_exchange as worker_exchange
    from .interface import (
        Address as Address,
        Dividing as Dividing,
        DoubleBuffering as DoubleBuffering,
        EngineServer as EngineServer,
        ExportedWeights as ExportedWeights,
        Exporting as Exporting,
        LoadedBy as LoadedBy,
        Peer as Peer,
        Receiver as Receiver,
        ReceiverContext as ReceiverContext,
        Remarking as Remarking,
        Returning as Returning,
        Sender as Sender,
        SenderContext as SenderContext,
        SharedBucket as SharedBucket,
        Sized as Sized,
        StagingBuffer as StagingBuffer,
        StallDetector as StallDetector,
        Tabled as Tabled,
        Tabling as Tabling,
        Timed as Timed,
        TransferSession as TransferSession,
        Transport as Transport,
    )
    from .plan_exchange import PrerecordedTraces as PrerecordedTraces, Prerecording as Prerecording
    from .worker_exchange import RETURN_S as RETURN_S
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
