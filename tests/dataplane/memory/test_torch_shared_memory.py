"""Memory that SGLang's workers map through torch's shared memory manager."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from weightbus.dataplane.errors import DataplaneError, DeadlineExceeded
from weightbus.dataplane.memory import torch_shared_memory as engine_memory
from weightbus.dataplane.memory.torch_shared_memory import _MAX_PATH, TorchSharedBuffers
from weightbus.dataplane.processes.connections import Deadline


def test_a_deep_runtime_dir_does_not_break_the_managers_socket(tmp_path: Path) -> None:
    """Its name would not fit a socket's; torch would only say "no such file" in the middle of a transfer."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    memory = TorchSharedBuffers(deep, buffers=1)
    memory.reserve(1000, 1, Deadline(10.0))

    assert memory._manager is not None
    assert len(memory._manager.handle) <= _MAX_PATH
    assert os.fsencode(deep) not in memory._manager.handle
    memory.close()


def test_a_manager_that_cannot_make_its_socket_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at once, for lack of room or of a folder: that is said, and no deadline runs out."""
    monkeypatch.setattr(engine_memory, "_short_enough", lambda folder: folder / "gone")
    with pytest.raises(DataplaneError, match=r"got no socket in .*gone, and said: could not"):
        TorchSharedBuffers(tmp_path).reserve(64, 1, Deadline(60.0))


def test_a_manager_that_stops_in_the_middle_of_a_word_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manager that does not answer within the deadline is an error, and is killed."""
    program = tmp_path / "bin" / "torch_shm_manager"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nprintf /torch\nexec sleep 20\n", encoding="ascii")
    program.chmod(0o700)
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    with pytest.raises(DeadlineExceeded, match="to name its socket"):
        TorchSharedBuffers(tmp_path).reserve(64, 1, Deadline(1.0))
