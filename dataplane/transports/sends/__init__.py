"""Trainer ranks send each engine worker what it stores (gloo, NCCL, NIXL)."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import nixl_group as nixl_group
    from .group_cache import GroupCache as GroupCache
    from .group_forming import GroupForming as GroupForming
    from .group_transfer import GroupTransfer as GroupTransfer
    from .p2p_group import warm as warm
    from .rank_sender import RankSender as RankSender
    from .receive_queue import ReceiveQueue as ReceiveQueue, beside_bytes as beside_bytes
    from .send_queue import QueuePair as QueuePair
    from .transport import TRANSPORT as TRANSPORT
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
