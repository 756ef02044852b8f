"""Straight from the trainer's memory into the engine's parameters: the sidecar's half.

It moves no bytes itself. It has the server call our loader in every worker, and leads the workers that then connect
through one exchange (worker_messages.py): record and plan where something is new, copy, and say what they hold. It
compares that with the digest table while they return, to a server that is paused and stays so: `receive` is done when
that is right, and `returned` when the server is to be asked for something that has to come after. A table that follows
is heard while they copy, and waited for then.

A server that speculates calls the loader for one model after another, in an order of its own: the one it serves, and
its draft models. Each is an exchange of its own within the one call, and takes from the version what its loader asks
for.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from ...copy import Lanes
from ...errors import DataplaneError, DeadlineExceeded, PeerLost, StaleSession, TransferFailed, WorkerDied
from ...memory import ArenaRegion, ExportMap
from ...processes import Deadline, FrameListener, Frames, open_runtime_dir
from ...reshard import LoadTrace, PlanReader, ReshardPlan, Verification, make_plan
from ...tensors import DigestTable, Manifest, Shards
from .. import worker_messages as worker_wire
from ..exported_weights import Layout
from ..interface import Address, EngineServer, Receipt, Tabled, TransferSession
from ..prerecorded_traces import PrerecordedTraces
from ..worker_exchange import RETURN_S, ReplayFailed, Workers, regions_read
from . import messages as direct_wire
from .messages import Welcome

_SAY_S: Final = 10.0
"""For one message to a sender that may stand still."""
_COPIED_S: Final = 30.0
"""For workers to copy a version and to prove it, besides what its bytes take."""
_LEAST_BYTES_S: Final = 1e9
"""Far below what any bus carries; also of what a trainer uploads while it is copied."""


@dataclass(frozen=True, eq=False)
class ReadLayout:
    """What the trainer's ranks hold, as it was last heard."""

    digest: str
    pieces: Shards
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
    def widest(self) -> int:
        """Bytes that the worker with most of them takes in a round."""
        return max(int(plan.copies.target_bytes.sum()) + plan.staging_bytes for plan in self.plans)


def copied_s(nbytes: int) -> float:
    """How long workers may take to copy a version of `nbytes` and to prove it: who takes longer stands still."""
    return _COPIED_S + nbytes / _LEAST_BYTES_S


class DirectReceiver:
    """Implements `Receiver` for one engine."""

    def __init__(self, runtime_dir: Path, ahead: PrerecordedTraces | None = None) -> None:
        """`ahead` has what was worked out before any version came."""
        self._runtime_dir = runtime_dir
        self._ahead = ahead if ahead is not None else PrerecordedTraces()
        self._touched = False
        self._connection: Frames | None = None
        self._listener: FrameListener | None = None
        self._workers = Workers()
        self._layout: ReadLayout | None = None
        self._made: dict[int, ArenaRegion] = {}
        """By holder: what of `_layout` is made part by part."""
        self._recordings: dict[str, LoadTrace] = {}
        self._agreements: dict[int, Agreement] = {}
        """By the model, in the order in which the server calls the loader."""
        self._caller: ThreadPoolExecutor | None = None
        self._returning: Future[None] | None = None
        """The server's call in which the last version was taken."""
        self._hearer: ThreadPoolExecutor | None = None
        self._coming: Future[Tabled] | None = None
        """The digest table of a session that was begun without, once it was asked for."""
        self.devices: tuple[str, ...] = ()
        """Of the workers, as they said it themselves. Another object whenever they have come."""
        self.remark = ""
        """Why the last copies were slower than they could be."""
        self.seconds: dict[str, float] = {}
        """Where the time of the last round went, all models together. `copy`, `wait` (for
        what was still made, while nothing was copied) and `verify` are of the slowest worker.

        Implements `Timed`.
        """

    @property
    def widest(self) -> int:
        """Bytes of a round that the worker with most of them takes, of all its models."""
        return sum(agreement.widest for agreement in tuple(self._agreements.values()))

    @property
    def touched(self) -> bool:
        """Workers were told to copy."""
        return self._touched

    def receive(  # noqa: PLR0917
        self,
        session: TransferSession,
        address: Address,
        engine: str,
        rank_offset: int,
        server: EngineServer,
        deadline_s: float,
    ) -> Receipt:
        """Have every worker take the version, and prove it. The server may still have to return: see `returned`."""
        del rank_offset  # there is no group here
        self.close()
        self._touched = False
        self.seconds = {}
        self._coming = None
        deadline = Deadline(deadline_s)
        with self._timed("meet"):
            connection = self._connection = self._connect(address, deadline)
        try:
            with self._timed("meet"):
                welcome = self._shake_hands(connection, session, engine, deadline)
            with self._timed("held"):
                self._exchange(connection, session, welcome, engine, server, deadline)
            self._say_finished(connection)
        except Exception as error:
            self._tell_sender(connection, f"{type(error).__name__}: {error}")
            raise
        finally:
            self.close()
        tabled = self._coming.result() if self._coming is not None else None
        return Receipt(session.manifest.nbytes, len(session.manifest.buckets), checked=True, tabled=tabled)

    def returned(self, deadline_s: float) -> None:
        """Implements `Returning`."""
        if self._returning is not None:
            _wait(self._returning, deadline_s)
            _returned(self._returning, deadline_s)

    def close(self) -> None:
        """Hang up. Workers that wait for us return from their call."""
        self._workers.close()
        for each in (self._connection, self._listener):
            if each is not None:
                each.close()
        self._connection = self._listener = None

    def shutdown(self) -> None:
        """Let go of everything."""
        self.close()
        for each in (self._caller, self._hearer):
            if each is not None:
                each.shutdown(wait=False)
        self._caller = self._hearer = None

    # -- the trainer --------------------------------------------------------------------------------------------------

    def _connect(self, address: Address, deadline: Deadline) -> Frames:
        return Frames.connect(address.address, deadline)

    def _shake_hands(self, connection: Frames, session: TransferSession, engine: str, deadline: Deadline) -> Welcome:
        hello = direct_wire.Hello(channel=session.channel, epoch=session.epoch, engine=engine)
        direct_wire.RECEIVER.say(connection, hello, deadline)
        reply = direct_wire.RECEIVER.hear(connection, deadline, "the sender's welcome")
        if isinstance(reply, direct_wire.Refused | Welcome) and reply.epoch != session.epoch:
            raise StaleSession(reply.epoch, session.epoch)
        if not isinstance(reply, Welcome):
            raise PeerLost(f"the sender refused this engine: {_reason(reply)}")
        return reply

    def _knows(self, layout: str) -> bool:
        return self._layout is not None and self._layout.digest == layout

    def _hear_layout(self, connection: Frames, layout: str, manifest: Manifest, deadline: Deadline) -> None:
        """Unless it is known. Raises `PeerLost`, `ManifestError`.

        It is asked for when it is read: a large one that nobody reads holds up the sender.
        """
        if self._knows(layout):
            return
        with self._timed("layout"):
            direct_wire.RECEIVER.say(connection, direct_wire.GiveLayout(), deadline)
            self._learn(read_layout(connection, layout, manifest, deadline))

    def _learn(self, layout: ReadLayout) -> None:
        self._layout = layout
        self._made = {each.rank: made for each in layout.exports if (made := each.made) is not None}

    def _propose(
        self,
        connection: Frames,
        readers: Sequence[PlanReader],
        recordings: Sequence[str],
        digests: Sequence[str],
        deadline: Deadline,
    ) -> None:
        """Have the trainer make the same plans. `_hear_agreement` waits for it."""
        plans = tuple(
            direct_wire.Proposal(reader=reader, recording=self._recordings[digest].encode(), plan=plan)
            for reader, digest, plan in zip(readers, recordings, digests, strict=True)
        )
        direct_wire.RECEIVER.say(connection, direct_wire.Propose(plans=plans), deadline)

    def _hear_agreement(self, connection: Frames, agreement: Agreement, deadline: Deadline) -> None:
        """Raises `TransferFailed` where the trainer made other plans than those of `agreement`."""
        del agreement
        reply = direct_wire.RECEIVER.hear(connection, deadline, "the trainer to make the same plan")
        if not isinstance(reply, direct_wire.Agreed):
            raise TransferFailed(f"the trainer does not agree to the plan: {_reason(reply)}")

    def _ask_table(self, connection: Frames, session: TransferSession, deadline: Deadline) -> None:
        """Have a digest table that follows heard by a thread of its own, while the workers copy."""
        if session.table is not None or self._coming is not None:
            return
        direct_wire.RECEIVER.say(connection, direct_wire.GiveTable(), deadline)
        self._coming = self._aside.submit(_hear_table, connection, session, deadline)

    @property
    def _aside(self) -> ThreadPoolExecutor:
        """A thread that hears the sender while this one does something else. Both may not hear at a time."""
        if self._hearer is None:
            self._hearer = ThreadPoolExecutor(1, "weightbus-hearer")
        return self._hearer

    def _table_of(self, session: TransferSession) -> DigestTable:
        """What the workers have to hold; waited for where it follows. Raises `PeerLost`, `DeadlineExceeded`."""
        if self._coming is None:
            return session.known
        with self._timed("table"):
            return self._coming.result().table  # its thread hears under the session's deadline

    # -- the workers --------------------------------------------------------------------------------------------------

    def _exchange(  # noqa: PLR0917
        self,
        connection: Frames,
        session: TransferSession,
        welcome: Welcome,
        engine: str,
        server: EngineServer,
        deadline: Deadline,
    ) -> None:
        """From the server's call to the proof. Where that fails, or there are draft models, to its return."""
        open_runtime_dir(self._runtime_dir)
        listener = self._listener = FrameListener(self._runtime_dir / f"{engine}-{os.getpid()}-w.sock")
        if self._caller is None:
            self._caller = ThreadPoolExecutor(1, "weightbus-direct")
        call = self._returning = self._caller.submit(server.load_direct, os.fspath(listener.path), deadline.left())
        try:
            for model in itertools.count() if server.drafts else (0,):
                with self._timed("gather"):
                    came = self._workers.gather(listener, call, server.tp, model == 0, deadline, self._pulse)
                if not came:
                    break
                agreement = self._prepared(connection, session.manifest, welcome.layout, model, deadline)
                if self._agreements.get(model) is not agreement:
                    with self._timed("agree"):
                        self._hear_agreement(connection, agreement, deadline)
                    self._agreements[model] = agreement
                self._ask_table(connection, session, deadline)
                with self._timed("replay"):
                    replayed = self._replay(session, welcome, agreement, deadline)
                # They have said what they hold, and the server stands still until somebody commits: while it returns,
                # it is found out whether that is the version.
                self._workers.let_go(worker_wire.Done())
                self._workers.close()
                lanes = [_lanes(each.lanes) for each in replayed]
                table = self._table_of(session)
                with self._timed("compare"):
                    agreement.proof.verify(table, lanes, [each.odd for each in replayed])
        except Exception as error:
            dead = self._dead
            self._workers.let_go(worker_wire.Failed(reason=f"{type(error).__name__}: {error}"))
            listener.close()
            if dead is not None:
                raise WorkerDied(dead) from error
            with self._timed("return"):
                _wait(call, self._patience_s(deadline))
            raise
        listener.close()

    @property
    def _dead(self) -> int | None:
        """The rank of a worker that has died."""
        return self._workers.dead

    def _pulse(self) -> None:
        """Called often while workers are waited for: raises `TransferFailed` where that is in vain."""

    def _patience_s(self, deadline: Deadline) -> float:
        """How long the server may take to return from the call once it is known how it ended."""
        return min(deadline.left(), RETURN_S)

    @contextlib.contextmanager
    def _timed(self, what: str) -> Generator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._add(what, time.monotonic() - began)

    def _add(self, what: str, seconds: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    def _prepared(
        self, connection: Frames, manifest: Manifest, layout: str, model: int, deadline: Deadline
    ) -> Agreement:
        """Recordings and plans for this round; those of the last one if nothing changed. New ones were proposed.

        A layout that is new is heard while the workers record.
        """
        with self._timed("record"):
            self._recordings = self._recordings or self._ahead.recordings(manifest.tensors)
            without = self._workers.ask_to_record(manifest.digest(), manifest.tensors, self._recordings, deadline)
        self._hear_layout(connection, layout, manifest, deadline)
        with self._timed("record"):
            made = self._workers.recorded(without, manifest.tensors, deadline)
            recordings = self._workers.recordings
        in_use = {digest for agreement in self._agreements.values() for digest in agreement.recordings}
        self._recordings = {
            digest: recording
            for digest, recording in {**self._recordings, **made}.items()
            if digest in in_use.union(recordings)
        }
        readers = self._readers()
        self.devices = tuple([reader.device for reader in readers])
        known = self._agreements.get(model)
        if known is None or (known.layout, known.recordings, known.readers) != (layout, recordings, readers):
            assert self._layout is not None
            found = [self._recordings[digest] for digest in recordings]
            with self._timed("plan"):
                plans = tuple(
                    make_plan(self._layout.pieces, self._layout.exports, recording, reader)
                    for recording, reader in zip(found, readers, strict=True)
                )
                # While the trainer makes the same ones, everything else is done that follows from them.
                digests = tuple(plan.digest() for plan in plans)
                self._propose(connection, readers, recordings, digests, deadline)
                known = Agreement(layout, recordings, readers, plans, digests, self._ahead.proof(found))
        with self._timed("adopt"):
            new = self._workers.ask_to_adopt(known.digests, self._carried(known.plans), known.proof.ranks, deadline)
            self._work_out(known)
            self._workers.adopted(new, deadline)
        return known

    def _work_out(self, known: Agreement) -> None:
        """What else follows from an agreement, while workers bind their plans."""

    def _readers(self) -> tuple[PlanReader, ...]:
        """Whom plans are made for."""
        return self._workers.readers

    def _carried(self, plans: tuple[ReshardPlan, ...]) -> tuple[ReshardPlan, ...]:
        """What of the plans the workers carry out by themselves: all of it."""
        return plans

    def _replay(
        self, session: TransferSession, welcome: Welcome, agreement: Agreement, deadline: Deadline
    ) -> list[worker_wire.PlanExecuted]:
        """Copy, with `touched` kept true to what the workers say."""
        touched, self._touched = self._touched, True
        copied = Deadline(min(deadline.left(), copied_s(session.manifest.nbytes)))
        try:
            replayed = self._workers.replay(
                session.epoch, session.version, welcome.exporters, self._made, agreement.reads, copied
            )
        except ReplayFailed as failed:
            # Every worker has answered: if none of them began to write, the engine holds what it held.
            self._touched = touched or failed.touched
            raise
        self.remark = next((each.remark for each in replayed if each.remark), "")
        slowest = max(replayed, key=lambda each: each.wait_s + each.copy_s)
        if any(each.round for each in welcome.exporters):
            self._add("wait", slowest.wait_s)
        self._add("copy", slowest.copy_s)
        self._add("verify", max(each.verify_s for each in replayed))
        return replayed

    def _say_finished(self, connection: Frames) -> None:
        """The version is proven, whoever hears of it: a sender that is gone takes nothing of that back."""
        try:
            direct_wire.RECEIVER.say(connection, direct_wire.Finished(), Deadline(_SAY_S))
        except DataplaneError:
            return

    def _tell_sender(self, connection: Frames, reason: str, *, less: bool = False) -> None:
        try:
            direct_wire.RECEIVER.say(connection, direct_wire.Failed(reason=reason[:2048], less=less), Deadline(1.0))
        except DataplaneError:
            return  # it is gone; what happened here is raised anyway


def _lanes(blob: bytes) -> Lanes:
    found: Lanes = np.frombuffer(blob, "<u8").astype(np.uint64).reshape(2, -1)
    return found


def read_layout(connection: Frames, layout: str, manifest: Manifest, deadline: Deadline) -> ReadLayout:
    """What was asked for. Raises `PeerLost`, `DeadlineExceeded`, `ManifestError`."""
    reply = direct_wire.RECEIVER.hear(connection, deadline, "the trainer's layout")
    if not isinstance(reply, Layout):
        raise PeerLost(f"the sender gave no layout: {_reason(reply)}")
    exports = tuple(ExportMap.decode(each) for each in reply.exports)
    return ReadLayout(layout, Shards.decode([reply.pieces], manifest.tensors), exports)


def _hear_table(connection: Frames, session: TransferSession, deadline: Deadline) -> Tabled:
    """The digest table of a session that was begun without. Raises `PeerLost`, `DeadlineExceeded`, `ManifestError`."""
    reply = direct_wire.RECEIVER.hear(connection, deadline, "the digest table")
    if not isinstance(reply, direct_wire.Table):
        raise PeerLost(f"the sender gave no digest table: {_reason(reply)}")
    if len(reply.table) > direct_wire.MOST_TABLE_BYTES or len(reply.seal) > direct_wire.MOST_SEAL_BYTES:
        raise PeerLost(f"a digest table of {len(reply.table)} bytes, sealed by {len(reply.seal)}, is larger than any")
    table = DigestTable.decode(reply.table, session.manifest)
    if table.version != session.version:
        raise TransferFailed(f"the digest table is of version {table.version}, this session of {session.version}")
    return Tabled(table, reply.seal)


def _wait(call: Future[None], seconds: float) -> None:
    """Until the server has answered: only then nothing of the exchange is under way in it."""
    try:
        call.exception(seconds)
    except FutureTimeout:
        return


def _returned(call: Future[None], waited_s: float) -> None:
    if not call.done():
        raise DeadlineExceeded("the server to return from our loader", waited_s)
    call.result()


def _reason(message: direct_wire.ToReceiver) -> str:
    return message.reason if isinstance(message, direct_wire.Refused | direct_wire.Failed) else message.kind
