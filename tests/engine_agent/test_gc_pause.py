"""The collector rests for as long as a server stands in our loader, and is then what it was before."""

from __future__ import annotations

import gc
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from weightbus.control.protocol.messages import PauseMode
from weightbus.control.server.metrics import Metrics, MetricSource
from weightbus.dataplane.processes.threads import gc_paused
from weightbus.engine_agent.errors import ServerError
from weightbus.engine_agent.machine.events import OperationFailed, PauseServer
from weightbus.engine_agent.sidecar.operation_executor import OperationExecutor
from weightbus.engine_agent.worker import loader as worker_loader


@pytest.fixture(autouse=True)
def usual() -> Generator[None]:
    """What this process had is put back, whatever a test does."""
    was_on = gc.isenabled()
    gc.enable()
    yield
    gc.enable() if was_on else gc.disable()


def test_it_rests_until_the_last_one_leaves() -> None:
    """Servers of several models call the loader again before it has returned."""
    one, other = gc_paused(), gc_paused()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert not gc.isenabled()
    other.__exit__(None, None, None)
    assert gc.isenabled()


def test_it_ends_with_an_error_too() -> None:
    with pytest.raises(KeyError), gc_paused():
        raise KeyError
    assert gc.isenabled()


def test_a_server_without_a_collector_does_not_get_one() -> None:
    """Some switch it off, and collect when they like."""
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()


def test_it_rests_in_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the server's call to its return, whatever comes of it."""
    seen: list[bool] = []

    def exchange(*_: object) -> None:
        seen.append(gc.isenabled())
        raise ValueError("no sidecar")

    monkeypatch.setattr(worker_loader, "_exchange", exchange)
    worker_loader.serve_sidecar(torch.nn.Module(), "")
    assert seen == [False]
    assert gc.isenabled()


@pytest.mark.parametrize("fails", [False, True])
def test_it_rests_in_the_sidecar_while_an_operation_is_carried_out(*, fails: bool) -> None:
    """Whatever comes of it."""
    seen: list[bool] = []

    def pause(*_: object) -> None:
        seen.append(gc.isenabled())
        if fails:
            raise ServerError("/pause_generation", "not now")

    server = cast("Any", SimpleNamespace(pin=lambda _: None, pause=pause))
    worker = OperationExecutor("e0", server, cast("Any", None), None, Metrics(MetricSource.ENGINE))
    assert isinstance(worker.perform(PauseServer(PauseMode.IN_PLACE, 1.0)), OperationFailed) is fails
    assert seen == [False]
    assert gc.isenabled()
