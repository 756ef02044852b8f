"""SGLang as an engine: the only folder that knows its HTTP interface, its loader, its checksums."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .weight_loader import load as load
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
