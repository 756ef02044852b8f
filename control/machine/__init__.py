"""The coordinator's decisions: `Coordinator.handle(event, now) -> effects`, pure.

A coordinator has channels (channel.py), each with a lease, at most one round (round.py, participants.py) and a registry
of its engines. `Channel.make_current` is where a version becomes current.
"""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import routing as routing, status as status
    from .channel import Channel as Channel, Publisher as Publisher
    from .coordinator import Coordinator as Coordinator
    from .effect_queue import HEARTBEAT_KEY as HEARTBEAT_KEY
    from .effects import (
        Acknowledge as Acknowledge,
        AgentJoined as AgentJoined,
        AgentLeft as AgentLeft,
        AnyEffect as AnyEffect,
        AnyObservation as AnyObservation,
        AnyRecord as AnyRecord,
        ChannelForgotten as ChannelForgotten,
        Committed as Committed,
        EngineAhead as EngineAhead,
        EngineFailed as EngineFailed,
        EpochRaised as EpochRaised,
        EpochTaken as EpochTaken,
        Evict as Evict,
        JournalChanged as JournalChanged,
        LeaseEnded as LeaseEnded,
        LeaseGranted as LeaseGranted,
        Observe as Observe,
        Persist as Persist,
        Probe as Probe,
        ReadinessChanged as ReadinessChanged,
        Refusal as Refusal,
        RoundClosed as RoundClosed,
        RoundEnded as RoundEnded,
        RoundReadiness as RoundReadiness,
        SendTo as SendTo,
        SendToAll as SendToAll,
        StateEntered as StateEntered,
        TransferRetried as TransferRetried,
    )
    from .engine_record import EngineRecord as EngineRecord
    from .events import (
        ANY_CHANNEL as ANY_CHANNEL,
        AnyEvent as AnyEvent,
        Burst as Burst,
        ConnectionLost as ConnectionLost,
        MessageReceived as MessageReceived,
        Peer as Peer,
        Persisted as Persisted,
        PersistFailed as PersistFailed,
        Principal as Principal,
        StopRequested as StopRequested,
        Tick as Tick,
        TrustLost as TrustLost,
        Unsent as Unsent,
    )
    from .limits import WATCHDOG_S as WATCHDOG_S, Limits as Limits, earlier as earlier
    from .membership import Agent as Agent, Membership as Membership
    from .reply_cache import (
        MAX_HISTORY as MAX_HISTORY,
        MAX_ROUND_REPLIES as MAX_ROUND_REPLIES,
        PastVersion as PastVersion,
        Restored as Restored,
        RoundReply as RoundReply,
        history_with as history_with,
        round_reply_of as round_reply_of,
    )
    from .route import Route as Route, TransferEnds as TransferEnds
    from .routing import (
        IN_PLACE as IN_PLACE,
        PREFERRED as PREFERRED,
        Router as Router,
        choose as choose,
        without_gpu_conflicts as without_gpu_conflicts,
    )
    from .states import EnginePhase as EnginePhase, RoundState as RoundState
    from .status import (
        LENT as LENT,
        ChannelView as ChannelView,
        EngineView as EngineView,
        PastStatus as PastStatus,
        StandbyView as StandbyView,
        StatusView as StatusView,
        parse as parse,
        refuse_standby as refuse_standby,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
