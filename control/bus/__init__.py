"""ZeroMQ: the sockets of both ends, and an agent's session and client."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .client import BusClient as BusClient, BusSettings as BusSettings, check_keys as check_keys
    from .interface import (
        ConnectionRejected as ConnectionRejected,
        CoordinatorBus as CoordinatorBus,
        Incoming as Incoming,
        Rejected as Rejected,
        SendOutcome as SendOutcome,
        Throttled as Throttled,
        TrustRevoked as TrustRevoked,
        refusal_observation as refusal_observation,
        reply_to_rejected as reply_to_rejected,
    )
    from .session import AckBatcher as AckBatcher
    from .sockets import (
        RouterBus as RouterBus,
        ServerKeys as ServerKeys,
        check_bind as check_bind,
        check_library as check_library,
        libzmq_version as libzmq_version,
        new_keypair as new_keypair,
        public_of as public_of,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
