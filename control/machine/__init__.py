"""The coordinator's decisions: `Coordinator.handle(event, now) -> effects`, pure.

A coordinator has channels (channel.py), each with a lease, at most one round (round.py, participants.py) and a registry
of its engines. `Channel.make_current` is where a version becomes current.
"""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import routing as routing, status as status
    from .channel import (
        MAX_HISTORY as MAX_HISTORY,
        MAX_ROUND_REPLIES as MAX_ROUND_REPLIES,
        Channel as Channel,
        ChannelOwner as ChannelOwner,
        PastRound as PastRound,
        PastVersion as PastVersion,
        Publisher as Publisher,
        Restored as Restored,
        RoundReply as RoundReply,
        history_with as history_with,
        round_reply_of as round_reply_of,
    )
    from .coordinator import HEARTBEAT_KEY as HEARTBEAT_KEY, Coordinator as Coordinator
    from .effects import (
        ANY_CHANNEL as ANY_CHANNEL,
        Acknowledge as Acknowledge,
        AgentJoined as AgentJoined,
        AgentLeft as AgentLeft,
        AnyEffect as AnyEffect,
        AnyEvent as AnyEvent,
        AnyObservation as AnyObservation,
        AnyRecord as AnyRecord,
        Burst as Burst,
        ChannelForgotten as ChannelForgotten,
        Committed as Committed,
        ConnectionLost as ConnectionLost,
        EngineAhead as EngineAhead,
        EngineFailed as EngineFailed,
        EpochRaised as EpochRaised,
        EpochTaken as EpochTaken,
        Evict as Evict,
        JournalChanged as JournalChanged,
        LeaseEnded as LeaseEnded,
        LeaseGranted as LeaseGranted,
        MessageReceived as MessageReceived,
        Observe as Observe,
        Peer as Peer,
        Persist as Persist,
        Persisted as Persisted,
        PersistFailed as PersistFailed,
        Principal as Principal,
        Probe as Probe,
        ReadinessChanged as ReadinessChanged,
        Refusal as Refusal,
        RoundClosed as RoundClosed,
        RoundEnded as RoundEnded,
        RoundReadiness as RoundReadiness,
        SendTo as SendTo,
        SendToAll as SendToAll,
        StateEntered as StateEntered,
        StopRequested as StopRequested,
        Tick as Tick,
        Token as Token,
        TransferRetried as TransferRetried,
        TrustLost as TrustLost,
        Unsent as Unsent,
    )
    from .engine_registry import EngineRecord as EngineRecord
    from .membership import Agent as Agent, Membership as Membership
    from .routing import (
        IN_PLACE as IN_PLACE,
        PREFERRED as PREFERRED,
        Router as Router,
        choose as choose,
        without_gpu_conflicts as without_gpu_conflicts,
    )
    from .states import (
        WATCHDOG_S as WATCHDOG_S,
        EnginePhase as EnginePhase,
        Limits as Limits,
        RoundState as RoundState,
        Route as Route,
        TransferEnds as TransferEnds,
        earlier as earlier,
    )
    from .status import (
        LENT as LENT,
        STARTING as STARTING,
        ChannelView as ChannelView,
        EngineView as EngineView,
        PastStatus as PastStatus,
        RoundView as RoundView,
        StandbyView as StandbyView,
        StatusView as StatusView,
        TrainerView as TrainerView,
        parse as parse,
        refuse_standby as refuse_standby,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
