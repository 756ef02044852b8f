"""Buckets broadcast in groups of trainer ranks and engine ranks."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .source_rank import SourceRank as SourceRank
    from .store_proxy import StoreProxy as StoreProxy
    from .transport import TRANSPORT as TRANSPORT
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
