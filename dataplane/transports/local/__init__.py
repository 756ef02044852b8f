"""Buckets in shared memory or on a GPU of the same host."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .transport import TRANSPORT as TRANSPORT
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
