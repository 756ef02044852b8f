"""Records the server's loader before a round needs it: an exchange with its workers in which no weights move.

A worker keeps its load trace, which is used for a version of exactly these tensors, by any transport
(worker_exchange.py, `Record`). Nothing is written to the model by it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as FutureTimeout
from dataclasses import replace
from operator import is_
from pathlib import Path
from typing import Final

import numpy as np

from ..errors import DataplaneError, ManifestError, NotTraceable, TransferFailed
from ..memory import ExportedTensor, ExportMap, Region
from ..processes import Deadline, FrameListener, open_runtime_dir
from ..reshard import (
    LoadTrace,
    PlanReader,
    Verification,
    make_plan,
    make_send_schedule,
    make_verification,
    pair_bytes_for,
    staging_layout,
)
from ..tensors import TensorSpec, tensor_positions
from . import worker_exchange as worker_wire
from .interface import EngineServer
from .worker_exchange import RETURN_S, Workers

_MOST: Final = 4
"""Models of one server: the one that it serves, and its draft models."""


class PrerecordedTraces:
    """Of one server. Used from one thread."""

    def __init__(self) -> None:
        self._kept: list[tuple[tuple[LoadTrace, ...], Verification]] = []

    def keep(self, recordings: Sequence[LoadTrace], proof: Verification) -> None:
        """The recordings of all workers of one model, and what they will report of it."""
        self._kept = [*self._kept, (tuple(recordings), proof)][-_MOST:]

    def recordings(self, tensors: tuple[TensorSpec, ...]) -> dict[str, LoadTrace]:
        """By digest, those of just these tensors in this order."""
        return {each.digest(): each for known, _ in self._kept for each in known if each.tensors == tensors}

    def proof(self, recordings: Sequence[LoadTrace]) -> Verification:
        """What the workers with these recordings report. Raises `NotTraceable`."""
        tensors = recordings[0].tensors
        for known, proof in self._kept:
            if len(known) == len(recordings) and all(map(is_, known, recordings)):
                return proof
            try:
                places = tensor_positions(tensors, known[0].tensors)
            except ManifestError:
                continue
            if len(known) == len(recordings) and all(
                each.renumbered(tensors, places).same(found) for each, found in zip(known, recordings, strict=True)
            ):
                return proof.renumbered(tensors, places)
        return make_verification(recordings)


_LAYOUT: Final = "rehearsed"
"""In place of a manifest's digest: no version has it."""
_COMING_S: Final = 15.0
"""For the server to call our loader. A worker imports it then, for the first time."""


class Prerecording:
    """One. `close` may be called from another thread, and ends it."""

    def __init__(self, runtime_dir: Path, *, sent: bool = False, ahead: PrerecordedTraces | None = None) -> None:
        """`sent`: versions may be sent to the workers. What is worked out is kept in `ahead`."""
        self._runtime_dir = runtime_dir
        self._ahead = ahead if ahead is not None else PrerecordedTraces()
        self._sent = sent
        self.unproven = ""
        """Why nothing but the recording is there ahead; empty where the rest is, too."""
        self._listener: FrameListener | None = None
        self._workers = Workers()
        self._closed = False
        self._coming = Deadline(_COMING_S)
        """For the server's workers to come."""
        self.pending = False
        """`record` has given up, and the server has not come to its call yet: nothing takes that back."""

    def record(self, tensors: Sequence[TensorSpec], engine: str, server: EngineServer, deadline_s: float) -> int:
        """Have every worker record each of its models with `tensors`; the number of models, once the server is back.

        Then they bind what they will have to report of it, and load what a first version would wait for.

        Raises `NotTraceable`, `TransferFailed`, and what the server's call raises. A server that does not come to our
        loader soon is not waited for: when it does, its workers find no sidecar and return.
        """
        deadline = Deadline(deadline_s)
        self._wait()
        open_runtime_dir(self._runtime_dir)
        listener = self._listener = FrameListener(self._runtime_dir / f"{engine}-{os.getpid()}-r.sock")
        caller = ThreadPoolExecutor(1, "weightbus-rehearsal")
        call = caller.submit(server.load_direct, os.fspath(listener.path), deadline.left())
        self._coming = Deadline(_COMING_S)
        models = 0
        first: list[LoadTrace] = []
        try:
            for model in itertools.count() if server.drafts else (0,):
                if not self._workers.gather(listener, call, server.tp, model == 0, deadline, self._wait):
                    break
                self._coming = deadline  # the server has let us in
                asked = self._workers.ask_to_record(_LAYOUT, tuple(tensors), {}, deadline)
                made = self._workers.recorded(asked, tuple(tensors), deadline)
                recordings = [made[digest] for digest in self._workers.recordings]
                self._prove(recordings, deadline)
                first = first or recordings
                self._workers.let_go(worker_wire.Done())
                self._workers.close()
                models += 1
        except Exception as error:
            self._workers.let_go(worker_wire.Failed(reason=f"{type(error).__name__}: {error}"[:2048]))
            raise
        finally:
            came = models or len(self._workers)
            self.close()
            self.pending = not _returned(call, min(deadline.left(), RETURN_S) if came else 0.0)
            caller.shutdown(wait=False)
        call.result(0)
        if not self.unproven:
            self._plan(first[0])
        return models

    def _prove(self, recordings: Sequence[LoadTrace], deadline: Deadline) -> None:
        """Whatever speaks against it is found again in the first round, and is that round's."""
        try:
            needed = [staging_layout(recording.tensors, recording.staged)[1] for recording in recordings]
            proof = make_verification(recordings)
            self._workers.prove(proof.ranks, needed, deadline, sent=self._sent)
            self._ahead.keep(recordings, proof)
        except (NotTraceable, TransferFailed) as error:
            self.unproven = str(error)

    def _plan(self, recording: LoadTrace) -> None:
        """The server is back: it stands still for nothing that needs no worker."""
        try:
            _plan_once(recording)
        except DataplaneError as error:
            self.unproven = str(error)

    def close(self) -> None:
        """Let the workers return to their server."""
        self._closed = True
        self._workers.close()
        if self._listener is not None:
            self._listener.close()

    def _wait(self) -> None:
        """Before the server is called, and while workers are waited for.

        A server that is busy lets its requests end before it calls any loader.
        """
        if self._closed:
            raise TransferFailed("nobody wants a recording any more")
        self._coming.check("the server to call our loader: it has requests")


def _plan_once(recording: LoadTrace) -> None:
    """Plan for a trainer that holds each tensor whole: the first plan of a process takes twice as long as others."""
    tensors = recording.tensors
    whole, nbytes = staging_layout(tensors, range(len(tensors)))
    places = tuple(ExportedTensor(0, at) for at in whole.storage.tolist())
    shards = replace(whole, storage=np.arange(len(whole)))
    export = ExportMap(0, "", (Region(nbytes, "cpu"),), places)
    plan = make_plan(shards, [export], recording, PlanReader(recording.rank, "", "cpu"))
    make_send_schedule(plan, len(recording.targets), pair_bytes_for(1)).digest()


def _returned(call: Future[None], seconds: float) -> bool:
    """Whether the server has answered within so many seconds, however it did."""
    try:
        call.exception(seconds)
    except FutureTimeout:
        return False
    return True
