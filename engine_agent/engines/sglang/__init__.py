"""SGLang as an engine: the only folder that knows its HTTP interface, its loader, its checksums."""

from typing import TYPE_CHECKING

from weightbus.lazy_face import lazy_face

if TYPE_CHECKING:
    from . import checkpoint_spec as checkpoint_spec, compatibility as compatibility
    from .api_versions import Dialect as Dialect
    from .checkpoint_spec import Expected as Expected
    from .compatibility import lacking as lacking, transports_of as transports_of
    from .http_client import Keys as Keys
    from .memory_occupation import MemoryOccupation as MemoryOccupation
    from .preflight import tell as tell
    from .server_identity import (
        ServerFacts as ServerFacts,
        environment_of as environment_of,
        layout_of as layout_of,
        start_time as start_time,
        workers_of as workers_of,
    )
    from .sglang_server import CALL_S as CALL_S, SGLangServer as SGLangServer
    from .worker_health import VERIFY_S as VERIFY_S, WorkerHealth as WorkerHealth, proof_s as proof_s
else:
    __getattr__, __dir__ = lazy_face(__name__, __file__)
