"""Code inside the engine's workers: loader, load tracing, receive thread. An engine's own loader calls it."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .loader import serve_sidecar as serve_sidecar
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
