"""The sidecar process: driver, threads, records on disk, monitoring."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .settings import ServerSettings as ServerSettings, read_keys as read_keys
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
