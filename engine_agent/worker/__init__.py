"""What runs inside the engine's workers: loader, load tracing, receive thread. Imported by dotted path only."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .loader import load as load
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
