"""Engines that can be served from: the interface of one, the registry, what several share, and a folder for each kind.

Other rooms import this face; no module but registry.py names an implementation.
"""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from .interface import (
        CALL_S as CALL_S,
        Engine as Engine,
        EngineFacts as EngineFacts,
        Limitation as Limitation,
        Sight as Sight,
    )
    from .local_process import (
        ProcessesUnread as ProcessesUnread,
        environment_of as environment_of,
        has_ended as has_ended,
        require_unseen as require_unseen,
    )
    from .registry import (
        DEFAULT as DEFAULT,
        EngineConnection as EngineConnection,
        Keys as Keys,
        open_engine as open_engine,
        require_known as require_known,
    )
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
