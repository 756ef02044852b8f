"""How our groups are made, as far as that shows without a GPU."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from weightbus.dataplane import backends

SETTINGS = {
    "TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}  # fmt: skip


def test_torch_s_watchdog_is_kept_out_of_our_groups_and_of_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch reads the settings while a group is made; those of the process's other groups are as they were."""
    seen: dict[str, str | None] = {}

    class Group:
        Options = SimpleNamespace

        def __init__(self, *_: Any) -> None:
            seen.update({name: os.environ.get(name) for name in SETTINGS})

    monkeypatch.setattr(backends.c10d, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    before = dict(os.environ)
    backends.nccl(SimpleNamespace(), 0, 2)  # type: ignore[arg-type]
    assert seen == SETTINGS
    assert dict(os.environ) == before


def test_an_abort_that_does_not_return_is_not_waited_for() -> None:
    """The driver may hold it; nor does one that fails matter."""
    over = threading.Event()
    began = time.monotonic()
    backends.abort_nccl(SimpleNamespace(abort=lambda: over.wait(30)), 0.1)
    assert time.monotonic() - began < 10
    over.set()

    def fails() -> None:
        raise RuntimeError("it was broken before")

    backends.abort_nccl(SimpleNamespace(abort=fails), 10)
