"""The part of weightbus that runs inside the engine's workers, whichever engine they belong to.

The engine's own loader (worker_loader.py) calls `serve_sidecar` in every worker, on the thread that
generates. The worker connects to the sidecar's socket and carries out its messages until the sidecar lets it go
(dataplane/transports/worker_exchange.py). Nothing is generated meanwhile.

An exception here would end the whole server, so none leaves `serve_sidecar`: the sidecar is told, or notices that the
connection broke, and keeps the server paused. Imports torch and nothing of an engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import torch

from weightbus.dataplane.errors import DataplaneError, NotTraceable
from weightbus.dataplane.processes import Deadline, Frames, gc_paused
from weightbus.dataplane.transports import worker_exchange as wire

from .worker_state import WorkerState

_PATIENCE_S: Final = 120.0
"""How long the server is held for a silent sidecar: it may be planning, for the first time."""
_LOOK_S: Final = 2.0
"""Between two looks, between rounds, whether a trainer is gone."""

_log = logging.getLogger(__name__)
_states: Final[dict[torch.nn.Module, WorkerState]] = {}
_watch: threading.Thread | None = None


def serve_sidecar(model: torch.nn.Module, socket: str) -> None:
    """Carry out the messages of the sidecar that listens at the path `socket`, for `model`. Never raises."""
    try:
        with gc_paused():
            _exchange(model, socket)
    except (DataplaneError, OSError, ValueError) as error:
        _log.error("weightbus: the exchange with the sidecar broke off: %s", error)
    except Exception:  # noqa: BLE001 - see above
        _log.exception("weightbus: the exchange with the sidecar failed unforeseen")


def forget() -> None:
    """Let go of all memory of trainers; it is opened, and the loader traced, again when needed."""
    for state in _states.values():
        with state.busy:
            state.forget()
    _states.clear()


def _keep_watch() -> None:
    """Release the memory of trainers that are gone: between rounds no message tells it."""
    while True:
        time.sleep(_LOOK_S)
        for state in tuple(_states.values()):
            if state.busy.acquire(blocking=False):
                try:
                    state.release()
                except Exception:  # noqa: BLE001 - the server goes on without this
                    _log.exception("weightbus: memory of a trainer that is gone could not be released")
                finally:
                    state.busy.release()


def _exchange(model: torch.nn.Module, socket: str) -> None:
    global _watch  # noqa: PLW0603 - one for the process
    if _watch is None:
        _watch = threading.Thread(target=_keep_watch, name="weightbus-leases", daemon=True)
        _watch.start()
    state = _states.get(model)
    if state is None:
        state = _states[model] = WorkerState(model)
    with state.busy:
        _follow(state, socket)


def _follow(state: WorkerState, path: str) -> None:
    """Carry out the sidecar's messages until it lets go."""
    frames = Frames.connect(path, Deadline(_PATIENCE_S))
    try:
        state.set_in_loader(in_loader=True)
        wire.WORKER.say(frames, state.hello(_rank()), Deadline(_PATIENCE_S))
        while True:
            message = wire.WORKER.hear(frames, Deadline(_PATIENCE_S), "the sidecar")
            if isinstance(message, wire.Done | wire.Failed):
                return
            wire.WORKER.say(frames, _obey(state, message, frames.readable), Deadline(_PATIENCE_S))
    finally:
        state.set_in_loader(in_loader=False)
        state.call_off()
        frames.close()


def _obey(state: WorkerState, message: wire.ToWorker, called_off: Callable[[], bool]) -> wire.ToSidecar:
    """Carry out one message and return the reply, failures too. `called_off` tells that the sidecar has cancelled."""
    began = time.perf_counter()
    try:
        match message:
            case wire.RecordTrace():
                trace = state.trace_load(message, _rank())
                return wire.TraceRecorded(recording=trace.encode(), seconds=time.perf_counter() - began)
            case wire.ExecutePlan():
                return state.execute_plan(message, called_off)
            case wire.Swap():
                return state.swap()
            case wire.FormGroup():
                state.form_group(message)
            case wire.Prove():
                state.warm(message)
            case wire.InstallPlan():
                state.install_plan(message)
            case wire.Expect():
                state.expect(message, _rank())
            case _:
                return wire.Failed(reason=f"{message.kind} is not for the loader", touched=state.touched)
        return wire.PlanInstalled(seconds=time.perf_counter() - began)
    except Exception as error:  # noqa: BLE001 - see above
        _log.exception("weightbus: %s failed", message.kind)
        reason = f"{type(error).__name__}: {error}"[:2048]
        return wire.Failed(reason=reason, touched=state.touched, unrecordable=isinstance(error, NotTraceable))


def _rank() -> int:
    """Among all workers of the server."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
