"""SGLang as an engine: the only folder that knows its HTTP interface, its loader, its checksums."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .pickle_payload import PREFIX as PREFIX
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
