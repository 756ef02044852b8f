"""Inside a test's server: copies stop half-way while a test wants them to, and the rest of them is never done.

SGLang imports what SGLANG_EXTERNAL_MODEL_PACKAGE names in every worker, as a package of more models; this one has none.
While the file that HELD_COPIES names is there, a copy that begins does its first half, leaves a file named after its
process beside it, and waits until the first one is gone.
"""

import os
import time
from pathlib import Path

from weightbus.dataplane.copy.copy_engine import TorchCopies

LONGEST_S = 120.0
_whole = TorchCopies.launch
_hold = Path(os.environ["HELD_COPIES"])


def _launch(copies: TorchCopies, *ready: object) -> None:
    if len(copies._to) < 2 or not _hold.exists():
        return _whole(copies, *ready)
    half = len(copies._to) // 2
    for target, source in zip(copies._to[:half], copies._from[:half], strict=True):
        target.copy_(source)
    _hold.with_name(f"{_hold.name}.{os.getpid()}").touch()
    until = time.monotonic() + LONGEST_S
    while _hold.exists() and time.monotonic() < until:
        time.sleep(0.01)
    return None


TorchCopies.launch = _launch
