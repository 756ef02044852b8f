"""A light SGLang server as a process: `server.py CHECKPOINT PORT`. As slow as it takes for a fault to find a round.

tests/kit/fake_sglang.py is under the same contract tests as the real server.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.kit.fake_sglang import FakeSGLang

SLOW_S = {"/update_weights_from_tensor": 0.05, "/pause_generation": 0.03, "/continue_generation": 0.03}
SLOW_S |= {"/weights_checker": 0.03, "/update_weight_version": 0.03, "/flush_cache": 0.02}


class SlowServer(FakeSGLang):
    """Takes its time for what changes weights."""

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Any:
        """As the light server, later."""
        time.sleep(SLOW_S.get(path, 0.0))
        return super().answer(method, path, body)


def main() -> None:
    """Serve until killed."""
    server = SlowServer(Path(sys.argv[1]), token_s=0.002)
    server.port = int(sys.argv[2])
    server.start()
    signal.pause()


if __name__ == "__main__":
    main()
