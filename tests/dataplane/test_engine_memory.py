"""Memory that SGLang's workers map through torch's shared memory manager."""

from __future__ import annotations

import os
from pathlib import Path

from weightbus.dataplane.deadline import Deadline
from weightbus.dataplane.engine_memory import _MAX_PATH, EngineMemory


def test_a_deep_runtime_dir_does_not_break_the_managers_socket(tmp_path: Path) -> None:
    """Its name would not fit a socket's; torch would only say "no such file" in the middle of a transfer."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    memory = EngineMemory(deep, slots=1)
    memory.reserve(1000, 1, Deadline(10.0))

    assert memory._manager is not None
    assert len(memory._manager.handle) <= _MAX_PATH
    assert os.fsencode(deep) not in memory._manager.handle
    memory.close()
