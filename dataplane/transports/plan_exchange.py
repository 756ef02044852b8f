"""One exchange of an in-place transport (direct, sends): from the call of our loader to the proof of the weights.

It has the server call our loader in every worker, leads the workers that then connect (worker_exchange.py), has them
record their loader and install plans where something is new, and compares what they report with the digest table. How
bytes come to the workers is the transport's own, between `agree` and `prove`. Load traces, plans and the trainer's
layout are kept from round to round; `Prerecording` makes traces before the first one.

    receiver                     sender        (direct; sends: sends/messages.py)
      Hello  ------------------->
             <-------------------  Welcome | Refused
      GiveLayout --------------->                       (only when the layout is new)
             <-------------------  Layout
      Propose ------------------>                       (only when the plan is new)
             <-------------------  Agreed
      GiveTable ---------------->                       (only where the digest table follows)
             <-------------------  ExpectedTable         as soon as it is known
      Finished | Failed -------->

Each side says only what the other has asked for, but for Failed: a receiver that copies reads nothing meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property
from operator import is_
from pathlib import Path
from typing import Final, Protocol

import msgspec
import numpy as np

from ..copy import CopyTable, Lanes
from ..errors import (
    DataplaneError,
    DeadlineExceeded,
    ManifestError,
    NotTraceable,
    PeerLost,
    TransferFailed,
    WorkerDied,
)
from ..memory import ArenaRegion, ExportedTensor, ExportMap, Region
from ..processes import Deadline, FrameListener, Frames, WireEnd, WireMessage, open_runtime_dir
from ..reshard import (
    LoadTrace,
    PlanReader,
    ReshardPlan,
    Verification,
    check_ranges,
    make_plan,
    make_send_schedule,
    make_verification,
    pair_bytes_for,
    staging_layout,
)
from ..tensors import DigestTable, Shards, TensorSpec, tensor_positions
from . import worker_exchange as worker_wire
from .interface import EngineServer, Exporting, Layout, TransferSession
from .sessions import reason_of
from .worker_exchange import RETURN_S, ReplayFailed, Workers, regions_read


class Hello(WireMessage, frozen=True, omit_defaults=True, tag="Hello"):
    """Receiver, first: which engine it is, and which session it was told to take."""

    channel: str
    epoch: int
    engine: str
    group: str = ""
    """Sends: the group that all of its workers still have from the last round."""


class Refused(WireMessage, frozen=True, tag="Refused"):
    """Sender: the receiver does not take part."""

    epoch: int
    reason: str


class Welcome(WireMessage, frozen=True, tag="Welcome"):
    """Direct's sender: the receiver takes part."""

    epoch: int
    layout: str
    """Digest of what `Layout` holds."""
    exporters: tuple[Exporting, ...]


class GiveLayout(WireMessage, frozen=True, tag="GiveLayout"):
    """Receiver: the layout that the sender named is new to it."""


class Proposal(WireMessage, frozen=True, tag="Proposal"):
    """One worker's plan, and what it was made from."""

    reader: PlanReader
    recording: bytes
    plan: str


class Propose(WireMessage, frozen=True, tag="Propose"):
    """Receiver: what its workers will do. Nothing is read before the sender has agreed."""

    plans: tuple[Proposal, ...]


class Agreed(WireMessage, frozen=True, tag="Agreed"):
    """Sender: it made the same plans."""


class GiveTable(WireMessage, frozen=True, tag="GiveTable"):
    """Direct's receiver: it is about to copy, and has no digest table yet. Answered once, when there is one."""


class ExpectedTable(WireMessage, frozen=True, tag="Table"):
    """Direct's sender: what is copied has to be this. At most `MOST_TABLE_BYTES` and `MOST_SEAL_BYTES`."""

    table: bytes
    """`DigestTable.encode`."""
    seal: bytes


class Finished(WireMessage, frozen=True, tag="Finished"):
    """Receiver: the engine holds the version, and has proven it."""


class Failed(WireMessage, frozen=True, omit_defaults=True, tag="Failed"):
    """Either side: it gives up."""

    reason: str
    less: bool = False
    """Memory or time did not suffice for what is moved at once: smaller chunks may do."""


ToReceiver = Welcome | Refused | Layout | Agreed | ExpectedTable | Failed
ToSender = Hello | GiveLayout | Propose | GiveTable | Finished | Failed

MOST_TABLE_BYTES: Final = 128 * 1024 * 1024
"""Of a digest table that follows: 16 for each of a million tensors are an eighth of it."""
MOST_SEAL_BYTES: Final = 4096

RECEIVER: Final = WireEnd[ToSender, ToReceiver](ToReceiver)
SENDER: Final = WireEnd[ToReceiver, ToSender](ToSender)


_MOST: Final = 4
"""Models of one server: the one that it serves, and its draft models."""


class PrerecordedTraces:
    """Load traces and proofs of one server from before its first version, for the receiver that takes it.

    What a version's tensors are was foreseen; in which order its manifest names them was not. So traces are given out
    for another order too: none is made again while a server is paused. Used from one thread.
    """

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


_SAY_S: Final = 10.0
"""For the last message to a sender that may stand still."""


@dataclass(frozen=True, eq=False)
class ReadLayout:
    """What the trainer's ranks hold, as it was last heard."""

    digest: str
    shards: Shards
    exports: tuple[ExportMap, ...]


@dataclass(frozen=True, eq=False)
class Agreement:
    """What was worked out for one trainer layout and one set of recordings."""

    layout: str
    recordings: tuple[str, ...]
    readers: tuple[PlanReader, ...]
    plans: tuple[ReshardPlan, ...]
    digests: tuple[str, ...]
    """Of the plans."""
    proof: Verification

    @cached_property
    def reads(self) -> tuple[Mapping[int, tuple[int, ...]], ...]:
        """By plan and holder: the regions that are read."""
        return tuple(regions_read(plan) for plan in self.plans)

    @cached_property
    def most_bytes(self) -> int:
        """Bytes that the worker with most of them takes in a round."""
        return max(int(plan.copies.target_bytes.sum()) + plan.staging_bytes for plan in self.plans)


@dataclass(slots=True, eq=False)
class Attempt:
    """One session as a receiver goes through it, and its connection to the sender."""

    session: TransferSession
    connection: Frames
    engine: str
    deadline: Deadline
    layout: str = ""
    """Digest of the trainer's layout, once the sender has named it."""

    def say(self, message: ToSender) -> None:
        """Raises `PeerLost`, `DeadlineExceeded`."""
        RECEIVER.say(self.connection, message, self.deadline)

    def hear(self, waiting_for: str) -> ToReceiver:
        """Raises `PeerLost`, `DeadlineExceeded`."""
        return RECEIVER.hear(self.connection, self.deadline, waiting_for)

    def finished(self) -> None:
        """The version is proven. A sender that is gone takes nothing of that back."""
        with contextlib.suppress(DataplaneError):
            RECEIVER.say(self.connection, Finished(), Deadline(_SAY_S))

    def failed(self, error: object, *, less: bool = False) -> None:
        """Tell the sender, where it is still there; what happened is raised anyway."""
        reason = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
        with contextlib.suppress(DataplaneError):
            RECEIVER.say(self.connection, Failed(reason=reason[:2048], less=less), Deadline(1.0))


class WorkerMonitor(Protocol):
    """What is known of the workers besides what they say over their exchange."""

    @property
    def dead(self) -> int | None:
        """The rank of a worker that has died."""
        ...

    @property
    def stalled(self) -> bool:
        """A worker makes no progress: the server's call ends when it goes on, and touches nothing that is served."""
        ...

    def pulse(self) -> None:
        """Called often while workers are waited for. Raises `TransferFailed` where that is in vain."""
        ...


class PlanExchange:
    """Of one engine; outlives rounds. Used from one thread, but for `close` and `shutdown`."""

    def __init__(
        self,
        runtime_dir: Path,
        ahead: PrerecordedTraces | None = None,
        monitor: WorkerMonitor | None = None,
        *,
        sent: bool = False,
    ) -> None:
        """`ahead` has the load traces from before any version; with `sent` the workers receive what they take."""
        self._runtime_dir = runtime_dir
        self._ahead = ahead if ahead is not None else PrerecordedTraces()
        self._monitor, self._sent = monitor, sent
        self._listener: FrameListener | None = None
        self._caller: ThreadPoolExecutor | None = None
        self._call: Future[None] | None = None
        """The server's call in which the last version was taken."""
        self._hearer: ThreadPoolExecutor | None = None
        self.workers = Workers()
        self.layout: ReadLayout | None = None
        self.made: dict[int, ArenaRegion] = {}
        """By holder: the part of `layout` that is made part by part."""
        self.traces: dict[str, LoadTrace] = {}
        """By digest."""
        self.agreements: dict[int, Agreement] = {}
        """By the model, in the order in which the server calls the loader."""
        self.devices: tuple[str, ...] = ()
        """Of the workers, as they said themselves. Another object whenever they have come."""
        self.seconds: dict[str, float] = {}
        """By step of the last round, all models together; `copy`, `wait` and `verify` are of the slowest worker."""

    @contextlib.contextmanager
    def timed(self, what: str) -> Generator[None]:
        """Adds what passes inside to `seconds`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(what, time.monotonic() - began)

    def add(self, what: str, seconds: float) -> None:
        """Add to a step of `seconds`."""
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    @property
    def aside(self) -> ThreadPoolExecutor:
        """A thread that hears the sender while the receiver's does something else. Both may not hear at a time."""
        if self._hearer is None:
            self._hearer = ThreadPoolExecutor(1, "weightbus-hearer")
        return self._hearer

    # -- the call -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def called(self, engine: str, server: EngineServer, deadline: Deadline, suffix: str = "-w") -> Generator[None]:
        """Have `server` call our loader in all of its workers. What fails inside is told to them, and ends the call.

        Raises `WorkerDied` where that is the reason. Without a failure the server may still have to return from the
        call: see `returned`.
        """
        open_runtime_dir(self._runtime_dir)
        path = self._runtime_dir / f"{engine}-{os.getpid()}{suffix}.sock"
        listener = self._listener = FrameListener(path)
        if self._caller is None:
            self._caller = ThreadPoolExecutor(1, "weightbus-direct")
        self._call = self._caller.submit(server.load_direct, os.fspath(path), deadline.left())
        try:
            yield
        except Exception as error:
            dead = self.workers.dead
            if dead is None and self._monitor is not None:
                dead = self._monitor.dead
            self.workers.let_go(worker_wire.Failed(reason=f"{type(error).__name__}: {error}"))
            listener.close()
            if dead is not None:
                raise WorkerDied(dead) from error
            stalled = self._monitor is not None and self._monitor.stalled
            with self.timed("return"):
                self.answered(0.0 if stalled else min(deadline.left(), RETURN_S))
            raise
        listener.close()

    def pulse(self) -> None:
        """Called often while workers are waited for. Raises `TransferFailed` where that is in vain."""
        if self._monitor is not None:
            self._monitor.pulse()

    def gather(self, server: EngineServer, model: int, deadline: Deadline) -> bool:
        """Wait for the workers, each with the same model. False where the server has no more models."""
        assert self._listener is not None
        assert self._call is not None
        with self.timed("gather"):
            return self.workers.gather(self._listener, self._call, server.tp, model == 0, deadline, self.pulse)

    def returned(self, deadline_s: float) -> None:
        """Wait until the server has returned from the last call, and raise what it failed with."""
        if self._call is not None:
            if not self.answered(deadline_s):
                raise DeadlineExceeded("the server to return from our loader", deadline_s)
            self._call.result()

    def answered(self, within_s: float) -> bool:
        """Whether the server has returned from the last call, or does in time: only then nothing of it is under way."""
        return self._call is None or bool(wait([self._call], within_s).done)

    # -- the trainer's layout -----------------------------------------------------------------------------------------

    def read_aside(self, attempt: Attempt) -> Future[ReadLayout] | None:
        """Have a layout that is new read by a thread of its own from now on, for `plan`."""
        if self._knows(attempt.layout):
            return None
        attempt.say(GiveLayout())
        return self.aside.submit(read_layout, attempt)

    def _knows(self, layout: str) -> bool:
        return self.layout is not None and self.layout.digest == layout

    def _hear_layout(self, attempt: Attempt, reading: Future[ReadLayout] | None) -> None:
        """Unless it is known. Raises `PeerLost`, `ManifestError`.

        It is asked for when it is read: a large one that no receiver reads holds up the sender.
        """
        if reading is None and self._knows(attempt.layout):
            return
        with self.timed("layout"):
            if reading is None:
                attempt.say(GiveLayout())
            # A thread that reads does it under the session's deadline.
            self.layout = read_layout(attempt) if reading is None else reading.result()
            self.made = {each.rank: made for each in self.layout.exports if (made := each.made) is not None}

    # -- plans --------------------------------------------------------------------------------------------------------

    def plan(self, attempt: Attempt, model: int, reading: Future[ReadLayout] | None = None) -> Agreement:
        """Load traces and plans for this round; those of the last one if nothing changed. New ones are proposed.

        A layout that is new is heard while the workers record.
        """
        manifest, deadline = attempt.session.manifest, attempt.deadline
        with self.timed("record"):
            self.traces = self.traces or self._ahead.recordings(manifest.tensors)
            without = self.workers.ask_to_record(manifest.digest(), manifest.tensors, self.traces, deadline)
        self._hear_layout(attempt, reading)
        with self.timed("record"):
            made = self.workers.recorded(without, manifest.tensors, deadline)
            recordings = self.workers.recordings
        in_use = {digest for agreement in self.agreements.values() for digest in agreement.recordings}
        self.traces = {
            digest: trace for digest, trace in {**self.traces, **made}.items() if digest in in_use.union(recordings)
        }
        readers = self.workers.readers
        if self._sent:
            readers = tuple(msgspec.structs.replace(each, sent_to=True) for each in readers)
        self.devices = tuple([reader.device for reader in readers])
        known = self.agreements.get(model)
        if known is not None and (known.layout, known.recordings, known.readers) == (
            attempt.layout,
            recordings,
            readers,
        ):
            return known
        layout = self.layout
        assert layout is not None
        found = [self.traces[digest] for digest in recordings]
        for trace in found:
            check_ranges(trace)
        with self.timed("plan"):
            plans = tuple(
                make_plan(layout.shards, layout.exports, trace, reader)
                for trace, reader in zip(found, readers, strict=True)
            )
            # While the trainer makes the same ones, everything else is done that follows from them.
            digests = tuple(plan.digest() for plan in plans)
            self.propose(attempt, readers, recordings, digests)
            return Agreement(attempt.layout, recordings, readers, plans, digests, self._ahead.proof(found))

    def install(self, attempt: Attempt, agreement: Agreement, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Give every worker the plan that it has not got yet; they bind them while `meanwhile` runs here."""
        plans = agreement.plans
        if self._sent:  # they receive, and copy nothing by themselves
            plans = tuple(replace(plan, copies=CopyTable.empty(), staging=CopyTable.empty()) for plan in plans)
        with self.timed("adopt"):
            new = self.workers.ask_to_adopt(agreement.digests, plans, agreement.proof.ranks, attempt.deadline)
            meanwhile()
            self.workers.adopted(new, attempt.deadline)

    def propose(
        self, attempt: Attempt, readers: Sequence[PlanReader], recordings: Sequence[str], digests: Sequence[str]
    ) -> None:
        """Have the trainer make the same plans; `hear_agreed` waits for it."""
        plans = tuple(
            Proposal(reader=reader, recording=self.traces[digest].encode(), plan=plan)
            for reader, digest, plan in zip(readers, recordings, digests, strict=True)
        )
        attempt.say(Propose(plans=plans))

    @staticmethod
    def hear_agreed(attempt: Attempt) -> None:
        """Raises `TransferFailed` where the trainer made other plans than the proposed ones."""
        reply = attempt.hear("the trainer to make the same plan")
        if not isinstance(reply, Agreed):
            raise TransferFailed(f"the trainer does not agree to the plan: {reason_of(reply)}")

    def agree(self, attempt: Attempt, model: int, agreement: Agreement) -> bool:
        """Wait until the trainer has made the plans that `plan` proposed; false where there was nothing new."""
        if self.agreements.get(model) is agreement:
            return False
        with self.timed("agree"):
            self.hear_agreed(attempt)
        self.agreements[model] = agreement
        return True

    # -- the proof ----------------------------------------------------------------------------------------------------

    def prove(
        self, agreement: Agreement, executed: Sequence[worker_wire.PlanExecuted], table: Callable[[], DigestTable]
    ) -> None:
        """Let the workers return, and compare what they hold with `table` meanwhile. Raises `DigestMismatch`.

        The server stays paused until the version is committed: while it returns, its workers' reports are compared.
        """
        self.workers.let_go(worker_wire.Done())
        self.workers.close()
        lanes = [_lanes(each.lanes) for each in executed]
        wanted = table()
        with self.timed("compare"):
            agreement.proof.verify(wanted, lanes, [each.odd for each in executed])

    def close(self) -> None:
        """Hang up on the workers, which return from their call."""
        self.workers.close()
        if self._listener is not None:
            self._listener.close()

    def shutdown(self) -> None:
        """Let go of everything."""
        self.close()
        for each in (self._caller, self._hearer):
            if each is not None:
                each.shutdown(wait=False)
        self._caller = self._hearer = None


class PlanReceiver:
    """The part that receivers of in-place transports have in common. Implements `Returning`, `Timed` and `Sized`."""

    def __init__(self, exchange: PlanExchange) -> None:
        self._exchange = exchange
        self.touched = False

    @property
    def most_bytes(self) -> int:
        """Bytes of a round that the worker with most of them takes, of all its models."""
        return sum(agreement.most_bytes for agreement in tuple(self._exchange.agreements.values()))

    @property
    def devices(self) -> tuple[str, ...]:
        """Of the workers, as they said themselves when they came last."""
        return self._exchange.devices

    @property
    def seconds(self) -> Mapping[str, float]:
        """Of the last round, by step; `wait` is for what the trainer still made, while nothing was copied."""
        return self._exchange.seconds

    def returned(self, deadline_s: float) -> None:
        """Implements `Returning`."""
        self._exchange.returned(deadline_s)

    def _execute(self, execute: Callable[[], list[worker_wire.PlanExecuted]]) -> list[worker_wire.PlanExecuted]:
        """Have all workers write their parameters, with `touched` kept true to what they say."""
        touched, self.touched = self.touched, True
        try:
            with self._exchange.timed("replay"):
                executed = execute()
        except ReplayFailed as failed:
            # Every worker has answered: if none of them began to write, the engine holds what it held.
            self.touched = touched or failed.touched
            raise
        slowest = max(executed, key=lambda each: each.wait_s + each.copy_s)
        self._exchange.add("copy", slowest.copy_s)
        self._exchange.add("verify", max(each.verify_s for each in executed))
        return executed


def _lanes(blob: bytes) -> Lanes:
    found: Lanes = np.frombuffer(blob, "<u8").astype(np.uint64).reshape(2, -1)
    return found


def read_layout(attempt: Attempt) -> ReadLayout:
    """The layout that was asked for. Raises `PeerLost`, `DeadlineExceeded`, `ManifestError`."""
    reply = attempt.hear("the trainer's layout")
    if not isinstance(reply, Layout):
        raise PeerLost(f"the sender gave no layout: {reason_of(reply)}")
    exports = tuple(ExportMap.decode(each) for each in reply.exports)
    return ReadLayout(attempt.layout, Shards.decode([reply.shards], attempt.session.manifest.tensors), exports)


_NO_LAYOUT: Final = "rehearsed"
"""In place of a manifest's digest: no version has it."""
_COMING_S: Final = 15.0
"""For the server to call our loader. A worker imports it then, for the first time."""


class Prerecording:
    """An exchange before any version, in which the workers record their loader and no weights move.

    A worker keeps its load trace, for a version of exactly these tensors by any transport. `close` may be called from
    another thread, and ends it. Implements `WorkerMonitor`: no thread receives, and waits end as it says.
    """

    def __init__(self, runtime_dir: Path, *, sent: bool = False, ahead: PrerecordedTraces | None = None) -> None:
        """`sent`: versions may be sent to the workers. What is worked out is kept in `ahead`."""
        self._exchange = PlanExchange(runtime_dir, monitor=self)
        self._ahead = ahead if ahead is not None else PrerecordedTraces()
        self._sent = sent
        self.unproven = ""
        """Why nothing but the recording is there ahead; empty where the rest is, too."""
        self._closed = False
        self._models = 0
        self._coming = Deadline(_COMING_S)
        """For the server's workers to come."""
        self.held_dtypes: Mapping[str, frozenset[str]] = {}
        """By tensor, the dtypes of the parameters that the workers hold it in, of all models."""
        self.used: frozenset[str] = frozenset()
        """Tensors from which a worker loads memory, of any of its models."""
        self.pending = False
        """`record` has given up, and the server has not come to its call yet: nothing takes that back."""
        self.dead: int | None = None

    def record(self, tensors: Sequence[TensorSpec], engine: str, server: EngineServer, deadline_s: float) -> int:
        """Have every worker record each of its models with `tensors`; the number of models, once the server is back.

        Then they bind what they will have to report of it, and load what a first version would wait for.

        Raises `NotTraceable`, `TransferFailed`, and what the server's call raises. A server that does not come to our
        loader soon is not waited for: when it does, its workers find no sidecar and return.
        """
        deadline, exchange, specs = Deadline(deadline_s), self._exchange, tuple(tensors)
        self.pulse()
        self._coming = Deadline(_COMING_S)
        first: list[LoadTrace] = []
        try:
            with exchange.called(engine, server, deadline, "-r"):
                for model in models_of(server):
                    if not exchange.gather(server, model, deadline):
                        break
                    self._coming = deadline  # the server has let us in
                    asked = exchange.workers.ask_to_record(_NO_LAYOUT, specs, {}, deadline)
                    made = exchange.workers.recorded(asked, specs, deadline)
                    recordings = [made[digest] for digest in exchange.workers.recordings]
                    self.held_dtypes = exchange.workers.held_dtypes
                    for each in recordings:
                        self.used |= {spec.name for spec in specs} - each.unused
                    self._prove(recordings, deadline)
                    first = first or recordings
                    exchange.workers.let_go(worker_wire.Done())
                    exchange.workers.close()
                    self._models += 1
        finally:
            within_s = 0.0 if self.stalled else min(deadline.left(), RETURN_S)
            self.close()
            self.pending = not exchange.answered(within_s)
            exchange.shutdown()
        exchange.returned(0.0)
        if not self.unproven:
            try:
                _plan_once(first[0])  # the server is back: it stands still for nothing that needs no worker
            except DataplaneError as error:
                self.unproven = str(error)
        return self._models

    def _prove(self, recordings: Sequence[LoadTrace], deadline: Deadline) -> None:
        """Whatever speaks against it is found again in the first round, and is that round's."""
        try:
            needed = [staging_layout(recording.tensors, recording.staged)[1] for recording in recordings]
            proof = make_verification(recordings)
            self._exchange.workers.prove(proof.ranks, needed, deadline, sent=self._sent)
            self._ahead.keep(recordings, proof)
        except (NotTraceable, TransferFailed) as error:
            self.unproven = str(error)

    def close(self) -> None:
        """Let the workers return to their server."""
        self._closed = True
        self._exchange.close()

    @property
    def stalled(self) -> bool:
        """No worker has come: a server that is busy lets its requests end before it calls any loader."""
        return not self._models and not len(self._exchange.workers)

    def pulse(self) -> None:
        """Raise `TransferFailed` where workers are waited for in vain."""
        if self._closed:
            raise TransferFailed("no recording is wanted any more")
        self._coming.check("the server to call our loader: it has requests")


def models_of(server: EngineServer) -> Iterable[int]:
    """The models of a server, in the order in which it calls the loader: until it has no more, where it speculates."""
    return itertools.count() if server.drafts else (0,)


def _plan_once(recording: LoadTrace) -> None:
    """Plan for a trainer that holds each tensor whole: the first plan of a process takes twice as long as others."""
    tensors = recording.tensors
    whole, nbytes = staging_layout(tensors, range(len(tensors)))
    places = tuple(ExportedTensor(0, at) for at in whole.storage.tolist())
    shards = replace(whole, storage=np.arange(len(whole)))
    export = ExportMap(0, "", (Region(nbytes, "cpu"),), places)
    plan = make_plan(shards, [export], recording, PlanReader(recording.rank, "", "cpu"))
    make_send_schedule(plan, len(recording.targets), pair_bytes_for(1)).digest()
