"""Memory of all ranks, exported for `direct` and `sends`; the ranks' topology."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .memory_export import Exportable as Exportable, MemoryExport as MemoryExport
    from .topology import location_of as location_of, topology_of as topology_of
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
