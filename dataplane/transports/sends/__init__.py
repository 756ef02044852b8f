"""Trainer ranks send each engine worker what it stores (gloo, NCCL, NIXL)."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .group_transfer import GroupCache as GroupCache, GroupForming as GroupForming, GroupTransfer as GroupTransfer
    from .message_queues import QueuePair as QueuePair, ReceiveQueue as ReceiveQueue, beside_bytes as beside_bytes
    from .p2p_group import warm as warm
    from .rank_sender import RankSender as RankSender
    from .transport import TRANSPORT as TRANSPORT
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
