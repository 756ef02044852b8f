"""Transports: the interface of one, the registry, and what several share (worker exchange, order of broadcasts)."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import registry as registry, worker_messages as worker_messages
    from .broadcast_order import Sources as Sources, cut as cut
    from .description import (
        LoadedBy as LoadedBy,
        ReceiverContext as ReceiverContext,
        SenderContext as SenderContext,
        Transport as Transport,
    )
    from .exported_weights import ExportedWeights as ExportedWeights
    from .interface import (
        Address as Address,
        Dividing as Dividing,
        EngineServer as EngineServer,
        Exporting as Exporting,
        Minding as Minding,
        Peer as Peer,
        Receiver as Receiver,
        Remarking as Remarking,
        Returning as Returning,
        Sender as Sender,
        SharedBucket as SharedBucket,
        Sized as Sized,
        Slot as Slot,
        Stager as Stager,
        Tabled as Tabled,
        Tabling as Tabling,
        Timed as Timed,
        TransferSession as TransferSession,
    )
    from .prerecorded_traces import PrerecordedTraces as PrerecordedTraces
    from .prerecording import Prerecording as Prerecording
    from .worker_exchange import RETURN_S as RETURN_S
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
