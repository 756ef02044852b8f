"""Straight from the trainer's memory into the engine's parameters: the sidecar's half.

It moves no bytes itself. It has the server call our loader in every worker, and leads the workers that then connect
through one exchange (worker_wire.py): record and plan where something is new, copy, and say what they hold. It compares
that with the digest table before it lets them return.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from . import direct_wire, worker_wire
from .copy_engine import Lanes
from .copy_table import CopyTable
from .deadline import Deadline
from .direct_wire import Welcome
from .errors import DataplaneError, DeadlineExceeded, PeerLost, StaleSession, TransferFailed
from .exports import ExportMap
from .frames import FrameListener, Frames
from .host import host_identity
from .local import open_runtime_dir
from .manifest import Manifest
from .pieces import Pieces
from .plan import Plan, Reader, make_plan
from .proof import Proof, make_proof, provable
from .recording import Recording
from .transport import Address, EngineServer, Receipt, Session

_LOOK_S: Final = 0.2
"""How often the server's call is looked at while workers are waited for."""
_RETURN_S: Final = 30.0
"""For workers to return from the call once they were told how it ended."""


@dataclass(frozen=True, eq=False)
class Layout:
    """What the trainer's ranks hold, as it was last heard."""

    digest: str
    pieces: Pieces
    exports: tuple[ExportMap, ...]


@dataclass(frozen=True, eq=False)
class Agreement:
    """What was worked out for one trainer layout and one set of recordings."""

    layout: str
    recordings: tuple[str, ...]
    readers: tuple[Reader, ...]
    plans: tuple[Plan, ...]
    proof: Proof

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """Of the plans."""
        return tuple(plan.digest() for plan in self.plans)


@dataclass(slots=True, eq=False)
class Worker:
    """One that is held in the loader."""

    frames: Frames
    hello: worker_wire.Hello


class DirectReceiver:
    """Implements `Receiver` for one engine."""

    def __init__(self, runtime_dir: Path) -> None:
        self._runtime_dir = runtime_dir
        self._touched = False
        self._connection: Frames | None = None
        self._listener: FrameListener | None = None
        self._workers: list[Worker] = []
        self._layout: Layout | None = None
        self._recordings: dict[str, Recording] = {}
        self._agreement: Agreement | None = None
        self._caller: ThreadPoolExecutor | None = None
        self.seconds: dict[str, float] = {}
        """Where the time of the last round went; `copy` and `verify` are of the slowest worker. Implements `Timed`."""

    @property
    def touched(self) -> bool:
        """Workers were told to copy."""
        return self._touched

    def receive(  # noqa: PLR0917
        self, session: Session, address: Address, engine: str, rank_offset: int, server: EngineServer, deadline_s: float
    ) -> Receipt:
        """Have every worker take the version, and prove it."""
        del rank_offset  # there is no group here
        self.close()
        self._touched = False
        self.seconds = {}
        deadline = Deadline(deadline_s)
        connection = self._connection = self._connect(address, deadline)
        try:
            welcome = self._shake_hands(connection, session, engine, deadline)
            layout = self._layout_of(connection, welcome, session.manifest, deadline)
            with self._timed("held"):
                self._exchange(connection, session, welcome, layout, engine, server, deadline)
            direct_wire.say(connection, direct_wire.Finished(), deadline)
        except Exception as error:
            self._tell_sender(connection, f"{type(error).__name__}: {error}")
            raise
        finally:
            self.close()
        return Receipt(session.manifest.nbytes, len(session.manifest.buckets), checked=True)

    def close(self) -> None:
        """Hang up. Workers that wait for us return from their call."""
        for worker in self._workers:
            worker.frames.close()
        self._workers = []
        for each in (self._connection, self._listener):
            if each is not None:
                each.close()
        self._connection = self._listener = None

    def shutdown(self) -> None:
        """Let go of everything."""
        self.close()
        if self._caller is not None:
            self._caller.shutdown(wait=False)
            self._caller = None

    # -- the trainer --------------------------------------------------------------------------------------------------

    def _connect(self, address: Address, deadline: Deadline) -> Frames:
        return Frames.connect(address.address, deadline)

    def _reader(self, worker: Worker) -> Reader:
        """What plans are made for."""
        hello = worker.hello
        return Reader(hello.rank, host_identity(), hello.device, hello.peers)

    def _shake_hands(self, connection: Frames, session: Session, engine: str, deadline: Deadline) -> Welcome:
        hello = direct_wire.Hello(channel=session.channel, epoch=session.epoch, engine=engine)
        direct_wire.say(connection, hello, deadline)
        reply = direct_wire.hear_sender(connection, deadline, "the sender's welcome")
        if isinstance(reply, direct_wire.Refused | Welcome) and reply.epoch != session.epoch:
            raise StaleSession(reply.epoch, session.epoch)
        if not isinstance(reply, Welcome):
            raise PeerLost(f"the sender refused this engine: {_reason(reply)}")
        return reply

    def _layout_of(self, connection: Frames, welcome: Welcome, manifest: Manifest, deadline: Deadline) -> Layout:
        if self._layout is not None and self._layout.digest == welcome.layout:
            return self._layout
        direct_wire.say(connection, direct_wire.GiveLayout(), deadline)
        reply = direct_wire.hear_sender(connection, deadline, "the trainer's layout")
        if not isinstance(reply, direct_wire.Layout):
            raise PeerLost(f"the sender gave no layout: {_reason(reply)}")
        exports = tuple(ExportMap.decode(each) for each in reply.exports)
        pieces = Pieces.decode([reply.pieces], manifest.tensors)
        self._layout = Layout(welcome.layout, pieces, exports)
        return self._layout

    def _agree(self, connection: Frames, agreement: Agreement, deadline: Deadline) -> None:
        """Have the trainer make the same plans."""
        plans = tuple(
            direct_wire.Proposal(reader=reader, recording=self._recordings[digest].encode(), plan=plan)
            for reader, digest, plan in zip(agreement.readers, agreement.recordings, agreement.digests, strict=True)
        )
        direct_wire.say(connection, direct_wire.Propose(plans=plans), deadline)
        reply = direct_wire.hear_sender(connection, deadline, "the trainer to make the same plan")
        if not isinstance(reply, direct_wire.Agreed):
            raise TransferFailed(f"the trainer does not agree to the plan: {_reason(reply)}")

    # -- the workers --------------------------------------------------------------------------------------------------

    def _exchange(  # noqa: PLR0917
        self,
        connection: Frames,
        session: Session,
        welcome: Welcome,
        layout: Layout,
        engine: str,
        server: EngineServer,
        deadline: Deadline,
    ) -> None:
        """From the server's call to its return."""
        open_runtime_dir(self._runtime_dir)
        listener = self._listener = FrameListener(self._runtime_dir / f"{engine}-{os.getpid()}-w.sock")
        if self._caller is None:
            self._caller = ThreadPoolExecutor(1, "weightbus-direct")
        call = self._caller.submit(server.load_direct, os.fspath(listener.path), deadline.left())
        try:
            with self._timed("gather"):
                self._gather(listener, call, server.tp, deadline)
            agreement = self._prepared(connection, session.manifest, layout, deadline)
            self._touched = True
            with self._timed("replay"):
                replayed = self._replay(session, welcome, agreement, deadline)
            lanes = [_lanes(each.lanes) for each in replayed]
            with self._timed("compare"):
                agreement.proof.check(session.table, lanes, [each.odd for each in replayed])
            self._let_go(worker_wire.Done())
        except Exception as error:
            self._let_go(worker_wire.Failed(reason=f"{type(error).__name__}: {error}"))
            raise
        finally:
            listener.close()
            with self._timed("return"):
                _wait(call, min(deadline.left(), _RETURN_S))
        _returned(call, deadline)

    @contextlib.contextmanager
    def _timed(self, what: str) -> Generator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[what] = time.monotonic() - began

    def _gather(self, listener: FrameListener, call: Future[None], count: int, deadline: Deadline) -> None:
        """Wait for the workers, in the order of their ranks. An answer of the server before they came is a failure."""
        while len(self._workers) < count:
            if call.done():
                call.result()
                raise PeerLost(f"the server returned before its {count} workers had come: was our loader called?")
            try:
                frames = listener.accept(Deadline(min(_LOOK_S, deadline.check("the server's workers"))), "a worker")
            except DeadlineExceeded:
                continue
            self._workers.append(Worker(frames, _introduced(frames, deadline)))
        self._workers.sort(key=lambda worker: worker.hello.rank)

    def _prepared(self, connection: Frames, manifest: Manifest, layout: Layout, deadline: Deadline) -> Agreement:
        """Recordings and plans for this round; those of the last one if nothing changed."""
        with self._timed("record"):
            recordings = tuple(self._recorded(manifest, deadline))
        readers = tuple(self._reader(worker) for worker in self._workers)
        known = self._agreement
        if known is None or (known.layout, known.recordings, known.readers) != (layout.digest, recordings, readers):
            found = [self._recordings[digest] for digest in recordings]
            with self._timed("plan"):
                plans = tuple(
                    make_plan(layout.pieces, layout.exports, recording, reader)
                    for recording, reader in zip(found, readers, strict=True)
                )
                known = Agreement(layout.digest, recordings, readers, plans, make_proof(found, plans))
            with self._timed("agree"):
                self._agree(connection, known, deadline)
            self._agreement = known
        with self._timed("adopt"):
            self._adopt(known, deadline)
        return known

    def _recorded(self, manifest: Manifest, deadline: Deadline) -> Sequence[str]:
        """The digest of each worker's recording; those that have none of this layout make one, all at a time."""
        layout = manifest.digest()
        without = [
            worker
            for worker in self._workers
            if worker.hello.layout != layout or worker.hello.recording not in self._recordings
        ]
        for worker in without:
            worker_wire.say(worker.frames, worker_wire.Record(layout=layout, tensors=manifest.tensors), deadline)
        made: dict[int, str] = {}
        for worker in without:
            reply = worker_wire.hear_worker(worker.frames, deadline, f"worker {worker.hello.rank} to record its loader")
            if not isinstance(reply, worker_wire.Recorded):
                raise TransferFailed(f"worker {worker.hello.rank} could not record its loader: {_said(reply)}")
            recording = provable(Recording.decode(reply.recording, manifest.tensors))
            made[worker.hello.rank] = digest = recording.digest()
            # Whoever records has let go of its plan, also where the same one will be made again.
            worker.hello = msgspec.structs.replace(worker.hello, plan="")
            self._recordings[digest] = recording
        kept = [made.get(worker.hello.rank, worker.hello.recording) for worker in self._workers]
        self._recordings = {digest: self._recordings[digest] for digest in kept}
        return kept

    def _adopt(self, agreement: Agreement, deadline: Deadline) -> None:
        for worker, digest, plan, proof in zip(
            self._workers, agreement.digests, agreement.plans, agreement.proof.ranks, strict=True
        ):
            if worker.hello.plan == digest:
                continue
            copies, staging = self._tables(plan)
            adopt = worker_wire.Adopt(
                plan=digest,
                recording=plan.recording,
                sources=tuple((source.holder, source.region) for source in plan.sources),
                copies=copies.encode(),
                staging=staging.encode(),
                staged=plan.staged,
                staging_bytes=plan.staging_bytes,
                proof=proof.table.encode(),
                groups=proof.table.groups,
                odd=proof.odd.encode(),
                odd_bytes=proof.odd_bytes,
            )
            worker_wire.say(worker.frames, adopt, deadline)
            reply = worker_wire.hear_worker(worker.frames, deadline, f"worker {worker.hello.rank} to take its plan")
            if not isinstance(reply, worker_wire.Adopted):
                raise TransferFailed(f"worker {worker.hello.rank} did not take its plan: {_said(reply)}")

    def _tables(self, plan: Plan) -> tuple[CopyTable, CopyTable]:
        """What the workers carry out by themselves: into the parameters, and into the buffer for the loader."""
        return plan.copies, plan.staging

    def _replay(
        self, session: Session, welcome: Welcome, agreement: Agreement, deadline: Deadline
    ) -> list[worker_wire.Replayed]:
        """All workers copy at a time."""
        for worker, plan in zip(self._workers, agreement.plans, strict=True):
            exports = tuple(
                worker_wire.Exports(
                    holder=each.holder,
                    address=each.address,
                    generation=each.generation,
                    regions=tuple(source.region for source in plan.sources if source.holder == each.holder),
                )
                for each in welcome.exporters
            )
            replay = worker_wire.Replay(
                epoch=session.epoch, version=session.version, exports=tuple(each for each in exports if each.regions)
            )
            worker_wire.say(worker.frames, replay, deadline)
        return self._replayed(deadline)

    def _replayed(self, deadline: Deadline) -> list[worker_wire.Replayed]:
        """What every worker holds now."""
        replies = [
            worker_wire.hear_worker(worker.frames, deadline, f"worker {worker.hello.rank} to copy")
            for worker in self._workers
        ]
        replayed = [reply for reply in replies if isinstance(reply, worker_wire.Replayed)]
        if len(replayed) < len(replies):
            # Every worker has answered: if none of them began to write, the engine holds what it held.
            self._touched = any(not isinstance(reply, worker_wire.Failed) or reply.touched for reply in replies)
            reasons = "; ".join(
                f"worker {worker.hello.rank} could not copy: {_said(reply)}"
                for worker, reply in zip(self._workers, replies, strict=True)
                if not isinstance(reply, worker_wire.Replayed)
            )
            raise TransferFailed(reasons)
        self.seconds["copy"] = max(each.copy_s for each in replayed)
        self.seconds["verify"] = max(each.verify_s for each in replayed)
        return replayed

    def _let_go(self, message: worker_wire.Done | worker_wire.Failed) -> None:
        """Let the workers return. Who is gone needs no telling, and the server's answer says so."""
        for worker in self._workers:
            try:
                worker_wire.say(worker.frames, message, Deadline(_RETURN_S))
            except DataplaneError:
                continue

    def _tell_sender(self, connection: Frames, reason: str) -> None:
        try:
            direct_wire.say(connection, direct_wire.Failed(reason=reason[:2048]), Deadline(1.0))
        except DataplaneError:
            return  # it is gone; what happened here is raised anyway


def _lanes(blob: bytes) -> Lanes:
    found: Lanes = np.frombuffer(blob, "<u8").astype(np.uint64).reshape(2, -1)
    return found


def _introduced(frames: Frames, deadline: Deadline) -> worker_wire.Hello:
    """Who has connected. Hangs up on anybody who does not say so."""
    try:
        hello = worker_wire.hear_worker(frames, deadline, "a worker's first words")
    except BaseException:
        frames.close()
        raise
    if not isinstance(hello, worker_wire.Hello):
        frames.close()
        raise PeerLost(f"a worker began with {_said(hello)}")
    return hello


def _wait(call: Future[None], seconds: float) -> None:
    """Until the server has answered: only then nothing of the exchange is under way in it."""
    try:
        call.exception(seconds)
    except FutureTimeout:
        return


def _returned(call: Future[None], deadline: Deadline) -> None:
    if not call.done():
        raise DeadlineExceeded("the server to return from our loader", deadline.seconds)
    call.result()


def _reason(message: direct_wire.ToReceiver) -> str:
    return message.reason if isinstance(message, direct_wire.Refused | direct_wire.Failed) else type(message).__name__


def _said(message: worker_wire.ToSidecar) -> str:
    return message.reason if isinstance(message, worker_wire.Failed) else type(message).__name__
