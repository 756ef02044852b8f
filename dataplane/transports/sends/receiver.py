"""The sidecar's half where weights are sent: it leads its workers through a round, and moves no bytes itself.

Plans and proof are those of plan_exchange.py. Bytes come to a thread in each worker (`WorkerReceivers`) that stays
connected between rounds, joins the group of the epoch and receives. From the second round on that can happen while the
server generates (`stage`); the server is paused for the swap only.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec

from ...errors import DataplaneError, DeadlineExceeded, PeerLost, TransferFailed, Unsupported, WorkerDied
from ...processes import Deadline, FrameListener, Frames, MacFrames, find_ended_peer, open_runtime_dir
from ...reshard import SendSchedule, make_send_schedule
from ...tensors import Manifest
from .. import worker_exchange as worker_wire
from ..interface import Address, EngineServer, Group, Receipt, TransferSession
from ..plan_exchange import Agreement, Attempt, PlanExchange, PlanReceiver, PrerecordedTraces, ReadLayout
from ..sessions import reason_of, shake_hands
from ..worker_exchange import Workers
from . import messages as wire

_SAY_S: Final = 10.0
_MODEL: Final = 0
"""Servers of several models are not sent to."""


class SendsReceiver(PlanReceiver):
    """Implements `DoubleBuffering` for one engine."""

    def __init__(self, runtime_dir: Path, ahead: PrerecordedTraces | None = None, *, beside: bool = True) -> None:
        """`beside`: versions may be received while the server generates, where there is memory for it."""
        self._threads = WorkerReceivers(runtime_dir)
        super().__init__(PlanExchange(runtime_dir, ahead, self._threads, sent=True))
        self._beside = beside
        self._attempt: Attempt | None = None
        """The session that runs, or that was received beside the served weights and waits for its swap."""
        self._staged = False
        """The workers have received all of `_attempt`."""
        self._met: Attempt | None = None
        """A session that could not be received beside after all; its connection serves the paused attempt."""
        self._cut = (0, 0)
        """How the sender cuts schedules: bytes of a pair in a chunk, and of a row that is a message of its own."""
        self._agreed: frozenset[str] = frozenset()
        """Plans that the sender has made too."""
        self._schedules: tuple[str, tuple[SendSchedule, ...]] = ("", ())
        """Of every worker, and the name of the plans and the cut that they were made from."""
        self._early: Group | None = None
        """The group that the workers may begin to join before it is known whether it is used."""
        self._forming = ""
        """Name of the group that they did begin to join."""
        self._gpu_ids: tuple[str, ...] = ()
        """Of the workers that have plans."""
        self.mode = ""
        """How the last version was received: ``beside`` or ``paused``; and why."""

    def receive(  # noqa: PLR0917
        self,
        session: TransferSession,
        address: Address,
        engine: str,
        rank_offset: int,
        server: EngineServer,
        deadline_s: float,
    ) -> Receipt:
        """Have every worker take the version, or put into place what `stage` took, and prove it."""
        del rank_offset  # the sender numbers the workers
        if server.drafts:
            raise Unsupported("a server with draft models is not sent to: let it take the direct or local transport")
        exchange, deadline, self.touched = self._exchange, Deadline(deadline_s), False
        staged = self._staged and self._attempt is not None and _same(self._attempt.session, session)
        if staged and self._attempt is not None:
            attempt = replace(self._attempt, session=session, deadline=deadline)
        else:
            attempt = self._paused(session, address, engine, deadline)
        try:
            if not attempt.layout:
                with exchange.timed("meet"):
                    self._shake_hands(attempt)
            reading = None if staged else exchange.read_aside(attempt)
            with exchange.timed("held"), exchange.called(engine, server, deadline), _stall_reported(attempt):
                exchange.gather(server, _MODEL, deadline)
                agreement = self._taken() if staged else self._prepare(attempt, reading)
                assert session.known is not None  # what is sent is proven with a table that is known
                if not staged:
                    with exchange.timed("replay"), exchange.timed("take"):
                        self._take(attempt, agreement, beside=False)
                executed = self._execute(
                    lambda: exchange.workers.swap(session.epoch, session.version, deadline, exchange.pulse)
                )
                exchange.prove(agreement, executed, lambda: session.known)
            attempt.finished()
        except Exception as error:
            attempt.failed(error)
            if self._forming and not staged:
                self._threads.tell("the attempt is over")
            raise
        finally:
            self.close()
        return Receipt(session.manifest.nbytes, len(session.manifest.buckets), checked=True)

    def require_moving(self) -> None:
        """Raise `WorkerStalled` while a worker that was stalled has said nothing since."""
        self._threads.require_moving()

    def can_stage(self, manifest: Manifest) -> bool:
        """The workers know what they will be sent, if the trainer's layout is what it was, and have room for it.

        Raises `WorkerStalled`: then the engine takes no part at all.
        """
        self._threads.require_moving()
        objection = self._objection(manifest)
        self.mode = f"paused: {objection}" if objection else "beside"
        return not objection

    def stage(self, session: TransferSession, address: Address, engine: str, deadline_s: float) -> bool:
        """Receive the version beside the parameters, while the server generates; False when it has to be paused.

        Changes nothing that is served. Raises `TransferFailed`.
        """
        self.close()
        self.touched, self._exchange.seconds = False, {}
        self._threads.require_alive()
        self._threads.require_moving()
        if not self.can_stage(session.manifest):
            return False
        attempt = self._attempt = self._connect(session, address, engine, Deadline(deadline_s))
        try:
            self._shake_hands(attempt)
            known = self._exchange.agreements[_MODEL]
            if (known.layout, self._schedules[0]) != (attempt.layout, _named(known, self._cut)):
                new = "the trainer's layout is" if known.layout != attempt.layout else "the schedules are"
                self.mode = f"paused: {new} new"
                # A sender that has seen this engine refuses a second connection.
                self._met, self._attempt = attempt, None
                return False
            self._take(attempt, known, beside=True)
        except Exception as error:
            attempt.failed(error)
            dead = self._threads.dead
            self.close()
            if dead is not None:
                raise WorkerDied(dead) from error
            raise
        self._staged, self.mode = True, "beside"
        return True

    def close(self) -> None:
        """Hang up. Workers that wait for us return from their call; their threads stay, and forget what they took."""
        if self._staged:
            self._staged = False
            self._threads.tell("the round is over")
        self._exchange.close()
        for each in (self._met, self._attempt):
            if each is not None:
                each.connection.close()
        self._met = self._attempt = None

    def shutdown(self) -> None:
        """Let go of everything."""
        self.close()
        self._exchange.shutdown()
        self._threads.close()

    # -- the trainer --------------------------------------------------------------------------------------------------

    def _paused(self, session: TransferSession, address: Address, engine: str, deadline: Deadline) -> Attempt:
        """An attempt in which the server is paused from the first byte on; its connection may be there from `stage`."""
        self._staged = False
        self.mode = self.mode if self.mode.startswith("paused") else "paused"
        self._threads.require_moving()
        met, self._met = self._met, None
        self.close()
        self._exchange.seconds = {}
        if met is not None and _same(met.session, session):
            self._attempt = replace(met, session=session, deadline=deadline)
            return self._attempt
        if met is not None:
            met.connection.close()
        with self._exchange.timed("meet"):
            self._attempt = self._connect(session, address, engine, deadline)
        return self._attempt

    @staticmethod
    def _connect(session: TransferSession, address: Address, engine: str, deadline: Deadline) -> Attempt:
        return Attempt(session, MacFrames.reach(address.address, address.token, deadline), engine, deadline)

    def _shake_hands(self, attempt: Attempt) -> None:
        """Raises `StaleSession`, `PeerLost`."""
        session = attempt.session
        hello = wire.Hello(
            channel=session.channel, epoch=session.epoch, engine=attempt.engine, group=self._threads.group
        )
        reply = shake_hands(wire.RECEIVER, attempt.connection, hello, session.epoch, wire.Invited, attempt.deadline)
        self._cut, self._agreed = (reply.pair_bytes, reply.alone_bytes), frozenset(reply.plans)
        self._early, self._forming = reply.form, ""
        attempt.layout = reply.layout

    # -- the workers --------------------------------------------------------------------------------------------------

    def _taken(self) -> Agreement:
        """The plans along which the workers received the version. Raises `TransferFailed` where they have others."""
        known = self._exchange.agreements[_MODEL]
        if self._exchange.workers.plans != known.digests:
            raise TransferFailed("a worker's tensors were replaced while it took the version: take it again")
        return known

    def _prepare(self, attempt: Attempt, reading: Future[ReadLayout] | None) -> Agreement:
        """Plans and schedules for this round, with all threads connected and the trainer agreed."""
        exchange = self._exchange
        early, self._early = self._early, None
        if early is not None and exchange.workers.form(early, attempt.deadline):
            self._forming = early.name
            wire.RECEIVER.say(attempt.connection, wire.Forms(), attempt.deadline)
        agreement = exchange.plan(attempt, _MODEL, reading)
        exchange.install(attempt, agreement, lambda: self._make_schedules(agreement))
        self._gpu_ids = exchange.workers.nccl_gpu_ids
        with exchange.timed("expect"):
            self._threads.expect(exchange.workers, self._schedules[1], attempt.deadline)
        if exchange.agree(attempt, _MODEL, agreement):
            self._agreed |= frozenset(agreement.digests)
        return agreement

    def _make_schedules(self, known: Agreement) -> None:
        """What every worker will be sent."""
        name = _named(known, self._cut)
        if self._schedules[0] != name:
            targets = [len(self._exchange.traces[digest].targets) for digest in known.recordings]
            plans = zip(known.plans, targets, strict=True)
            self._schedules = name, tuple(make_send_schedule(plan, count, *self._cut) for plan, count in plans)
        for each in self._schedules[1]:
            each.digest()

    def _take(self, attempt: Attempt, agreement: Agreement, *, beside: bool) -> None:
        """From the word that all are prepared to the last byte."""
        exchange, connection, deadline = self._exchange, attempt.connection, attempt.deadline
        if not self._agreed.issuperset(agreement.digests):
            exchange.propose(attempt, agreement.readers, agreement.recordings, agreement.digests)
            exchange.hear_agreed(attempt)
            self._agreed |= frozenset(agreement.digests)
        schedules = tuple(each.digest() for each in self._schedules[1])
        prepared = wire.Prepared(
            plans=agreement.digests,
            schedules=schedules,
            group=self._forming or self._threads.group,
            nccl_gpu_ids=self._gpu_ids,
        )
        wire.RECEIVER.say(connection, prepared, deadline)
        begin = wire.RECEIVER.hear(connection, deadline, "the sender to begin")
        if not isinstance(begin, wire.BeginSends):
            raise PeerLost(f"the sender did not begin: {reason_of(begin)}")
        began = time.monotonic()
        self.touched = not beside
        leader = LeadSession(
            beat=lambda: wire.beat(connection),
            over=lambda: wire.over(connection),
            failed=lambda reason, less: attempt.failed(reason, less=less),
        )
        try:
            taken = self._threads.take(begin.group, leader, deadline, beside=beside)
        except NotReceived as failed:
            self.touched = failed.touched
            raise
        exchange.seconds["wire"] = max(each.seconds for each in taken)
        reached = wire.BarrierReached(seconds=time.monotonic() - began, nbytes=sum(each.nbytes for each in taken))
        wire.RECEIVER.say(connection, reached, deadline)

    def _objection(self, manifest: Manifest) -> str:
        """Why the version cannot be received while the server generates; empty when it can."""
        known, layout = self._exchange.agreements.get(_MODEL), self._exchange.layout
        if not self._beside:
            return "it is not to be taken beside the weights that are served"
        if known is None or len(self._threads) != len(known.plans):
            return "the workers know no plan yet"
        if known.layout and layout is not None and layout.shards.tensors != manifest.tensors:
            return "the manifest is new"
        return self._threads.room()


@contextlib.contextmanager
def _stall_reported(attempt: Attempt) -> Generator[None]:
    """The sender hears of a stalled worker at once, and not only when the other workers have been let go."""
    try:
        yield
    except WorkerStalled as stalled:
        attempt.failed(str(stalled))
        raise


def _same(one: TransferSession, other: TransferSession) -> bool:
    return (one.channel, one.epoch) == (other.channel, other.epoch)


def _named(agreement: Agreement, cut: tuple[int, int]) -> str:
    return "-".join((*agreement.digests, *map(str, cut)))


_LOOK_S: Final = 0.02
_END_S: Final = 5.0
"""For workers to answer once it is over for another reason. One that stands still does not."""
_CONNECT_S: Final = 60.0
"""For workers whose thread was told to connect."""
_VOUCHED_S: Final = 2 * wire.BEAT_S
"""How long a worker that has said nothing is believed to move."""
_SPARE: Final = 1.1
"""Room for what is taken beside the parameters, as a multiple of it."""


class WorkerStalled(TransferFailed):
    """A worker of the server says nothing any more."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"worker {rank} of the server stands still: nothing was heard of it for {wire.SILENT_S:.1f} s")


@dataclass(frozen=True, slots=True)
class LeadSession:
    """What a transfer needs of the sidecar's connection to the trainer."""

    beat: Callable[[], None]
    """This engine does not stand still."""
    over: Callable[[], str]
    """Why the attempt is over there; empty while it is not."""
    failed: Callable[[str, bool], None]
    """It is over here, and why; whether less at a time may do."""


class WorkerReceivers:
    """The workers' threads that receive: connections that outlive rounds. Used from one thread, but for `close`.

    A worker whose thread answers is there, whatever its scheduler does; one that says nothing for `SILENT_S` is
    stalled: its process was stopped, or is stuck. It is remembered, so that no later attempt waits for it: until it
    says something, every round is refused at once, before others begin.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self._runtime_dir = runtime_dir
        self._listener: FrameListener | None = None
        self._closed = False
        self._threads: dict[int, Frames] = {}
        """By the worker's rank."""
        self._still: dict[int, tuple[Frames, float]] = {}
        """Stalled workers' connections by rank, and when each was heard last. What comes later belongs to no round."""
        self._asked: dict[int, float] = {}
        """Ranks that `pulse` has asked and that have not answered, since when."""
        self._ask_at = float("inf")
        self._group: tuple[str, float, tuple[Frames, ...]] = ("", 0.0, ())
        """The group of the last transfer, until when it may be used again, and its members."""

    def __len__(self) -> int:
        return len(self._threads)

    def expect(self, workers: Workers, schedules: Sequence[SendSchedule], deadline: Deadline) -> None:
        """Tell every worker what it will be sent, unless it knows, and have its thread connect."""
        self._calm()
        listener = self._listening()
        there = {rank for rank, frames in self._threads.items() if not frames.readable()}
        new = workers.expect(schedules, there, os.fspath(listener.path), deadline)
        known = (there - new) & set(range(len(schedules)))  # not those of a server that was, and had more workers
        for rank in set(self._threads) - known:
            self._threads.pop(rank).close()
        told = {rank: each.digest() for rank, each in enumerate(schedules) if rank in new}
        coming = Deadline(min(deadline.left(), _CONNECT_S))
        while new - set(self._threads):
            frames = listener.accept(coming, "the workers' threads")
            try:
                self._take_in(frames, told, coming)
                self._listening()
            except DataplaneError:
                frames.close()
                raise

    def _listening(self) -> FrameListener:
        """The socket that threads connect to. Raises `PeerLost` after `close`, which closes it."""
        if self._listener is None:
            open_runtime_dir(self._runtime_dir)
            self._listener = FrameListener(self._runtime_dir / f"t-{os.getpid()}-{id(self):x}.sock")
        if self._closed:
            self._listener.close()
            raise PeerLost("the sidecar ends")
        return self._listener

    def _take_in(self, frames: Frames, told: Mapping[int, str], deadline: Deadline) -> None:
        """Keep a thread that was `told` this schedule, by rank. Raises `PeerLost`, `DeadlineExceeded`.

        Others are hung up on: one that comes so late may have been told by an attempt that is over.
        """
        hello = worker_wire.SIDECAR.hear(frames, deadline, "a worker's thread")
        if not isinstance(hello, worker_wire.Expecting):
            raise PeerLost(f"a worker's thread began with {reason_of(hello)}")
        if told.get(hello.rank) != hello.schedule:
            return frames.close()
        if (before := self._threads.pop(hello.rank, None)) is not None:
            before.close()
        self._threads[hello.rank] = frames
        return None

    # -- are they there -----------------------------------------------------------------------------------------------

    @property
    def stalled(self) -> bool:
        """A worker makes no progress, as far as is known."""
        return bool(self._still)

    def require_alive(self) -> None:
        """Raise `WorkerDied` when a worker has.

        Its server ends too, but takes seconds for it, in which it would have to be paused.
        """
        dead = [rank for rank, frames in self._threads.items() if frames.peer_ended()]
        if dead:
            raise WorkerDied(dead[0])

    @property
    def dead(self) -> int | None:
        """The rank of a worker whose process has ended; None where none is known to have."""
        return find_ended_peer(self._threads.items())

    def require_moving(self) -> None:
        """Raise `WorkerStalled` when a worker that stood still has said nothing since."""
        self._calm()
        for rank, (frames, heard_at) in sorted(self._still.items()):
            if not frames.readable(max(0.0, heard_at + wire.SILENT_S - time.monotonic())):
                raise WorkerStalled(rank)
            self._still.pop(rank)[0].close()  # its thread begins anew, with a schedule; or it has died

    def pulse(self) -> None:
        """Called often while workers are waited for that need not say anything. Raises `WorkerStalled`."""
        now = time.monotonic()
        if self._ask_at == float("inf"):
            self._ask_at = now + wire.BEAT_S
        for rank in [rank for rank in self._asked if self._threads[rank].readable()]:
            try:
                worker_wire.SIDECAR.hear(self._threads[rank], Deadline(_SAY_S), f"worker {rank}")
            except DataplaneError:  # the exchange with its scheduler hears of it
                self._threads.pop(rank).close()
            del self._asked[rank]
        for rank, asked_at in self._asked.items():
            if now - asked_at > wire.SILENT_S:
                self._stands(rank, asked_at)
                raise WorkerStalled(rank)
        if now < self._ask_at:
            return
        self._ask_at = now + wire.BEAT_S
        for rank in set(self._threads) - set(self._asked):
            self._ask(rank, now)

    def _calm(self) -> None:
        """Hear the answers that `pulse` still waits for; it is not called any more."""
        for rank, asked_at in tuple(self._asked.items()):
            try:
                worker_wire.SIDECAR.hear(self._threads[rank], Deadline(_END_S), f"worker {rank}")
            except DeadlineExceeded:
                self._stands(rank, asked_at)
            except DataplaneError:
                self._threads.pop(rank).close()
        self._asked.clear()
        self._ask_at = float("inf")

    def room(self) -> str:
        """Why the version cannot be taken beside what is served, empty when it can. Raises `WorkerStalled`."""
        self._calm()
        for rank, frames in sorted(self._threads.items()):
            began = time.monotonic()
            try:
                if frames.readable():
                    raise PeerLost("it is gone")
                worker_wire.SIDECAR.say(frames, worker_wire.Weigh(), Deadline(_SAY_S))
                room = worker_wire.SIDECAR.hear(frames, Deadline(wire.SILENT_S), f"worker {rank}")
            except DeadlineExceeded as error:
                self._stands(rank, began)
                raise WorkerStalled(rank) from error
            except DataplaneError as error:
                self._threads.pop(rank).close()
                return f"worker {rank}: {error}"
            if not isinstance(room, worker_wire.Room) or room.free < room.needed * _SPARE:
                found = (
                    f"{room.needed} bytes are needed, {room.free} free" if isinstance(room, worker_wire.Room) else "?"
                )
                return f"worker {rank} has no room beside its weights: {found}"
        return ""

    # -- a transfer ---------------------------------------------------------------------------------------------------

    def take(self, group: Group, leader: LeadSession, deadline: Deadline, *, beside: bool) -> list[worker_wire.Taken]:
        """Have all of them join `group`, from its rank on, and receive everything.

        The first failure, here or elsewhere, ends it for all. Raises `NotReceived`.
        """
        self._calm()
        for at, rank in enumerate(sorted(self._threads)):
            mine = msgspec.structs.replace(group, rank=group.rank + at)
            worker_wire.SIDECAR.say(self._threads[rank], worker_wire.Take(group=mine, beside=beside), deadline)
        members, self._group = tuple(self._threads.values()), ("", 0.0, ())
        taken = _Transfer(self._threads, leader, beside=beside).outcomes(deadline, self._stands)
        self._group = group.name, time.monotonic() + group.keep_s, members
        return taken

    @property
    def group(self) -> str:
        """The one that all workers still have from the last transfer; empty when there is none."""
        name, until, members = self._group
        there = members == tuple(self._threads.values()) and not any(each.readable() for each in members)
        return name if there and time.monotonic() < until else ""

    def tell(self, reason: str) -> None:
        """Call it off. Workers that are gone are skipped."""
        _tell(dict(self._threads), reason)

    def close(self) -> None:
        """Let go of all of them, for good."""
        self._closed = True  # first: `expect` in another thread finds out by it
        for frames in (*self._threads.values(), *(frames for frames, _ in self._still.values())):
            frames.close()
        self._threads, self._still, self._asked = {}, {}, {}
        if self._listener is not None:
            self._listener.close()

    def _ask(self, rank: int, now: float) -> None:
        try:
            worker_wire.SIDECAR.say(self._threads[rank], worker_wire.Weigh(), Deadline(_SAY_S))
            self._asked[rank] = now
        except DataplaneError:
            self._threads.pop(rank).close()

    def _stands(self, rank: int, heard_at: float) -> None:
        self._asked.pop(rank, None)
        frames = self._threads.pop(rank, None)
        if frames is not None:  # or all were let go of meanwhile
            self._still[rank] = frames, heard_at


class NotReceived(TransferFailed):
    """At least one worker did not receive everything."""

    def __init__(self, detail: str, touched: bool) -> None:
        super().__init__(detail)
        self.touched = touched
        """Parameters may have been changed."""


class _Transfer:
    """From `Take` to the last answer."""

    def __init__(self, threads: dict[int, Frames], leader: LeadSession, *, beside: bool) -> None:
        self._threads, self._leader, self._beside = dict(threads), leader, beside
        self._found: dict[int, worker_wire.ToSidecar] = {}
        self._heard = dict.fromkeys(threads, time.monotonic())
        self._reason = ""
        self._over: Deadline | None = None

    def outcomes(self, deadline: Deadline, stands: Callable[[int, float], None]) -> list[worker_wire.Taken]:
        """How it ended for every worker; ranks that did not say are given to `stands`."""
        beat_at = 0.0
        with selectors.DefaultSelector() as selector:
            for rank, frames in self._threads.items():
                selector.register(frames, selectors.EVENT_READ, rank)
            while self._waits:
                deadline.check("the workers to take everything")
                if time.monotonic() >= beat_at and not self._reason:
                    beat_at = time.monotonic() + wire.BEAT_S
                    self._vouch()
                for key, _ in selector.select(_LOOK_S):
                    if self._hear(key.data):
                        selector.unregister(self._threads[key.data])
                self._look()
        if not self._reason:
            return [each for each in self._found.values() if isinstance(each, worker_wire.Taken)]
        silent = [rank for rank in self._threads if rank not in self._found]
        for rank in silent:
            stands(rank, self._heard[rank])
        changed = any(not isinstance(each, worker_wire.Failed) or each.touched for each in self._found.values())
        raise NotReceived(self._reason, not self._beside and (bool(silent) or changed))

    @property
    def _waits(self) -> bool:
        return len(self._found) < len(self._threads) and not (self._over and not self._over.left())

    def _hear(self, rank: int) -> bool:
        """Take what a worker said; whether it was its last word."""
        try:
            said = worker_wire.SIDECAR.hear(self._threads[rank], Deadline(_SAY_S), f"worker {rank}")
        except DataplaneError as error:
            said = worker_wire.Failed(reason=str(error), touched=not self._beside)
        self._heard[rank] = time.monotonic()
        if isinstance(said, worker_wire.Moving):
            return False
        self._found[rank] = said
        if not isinstance(said, worker_wire.Taken):
            self._end(f"worker {rank}: {reason_of(said)}", isinstance(said, worker_wire.Failed) and said.less)
        return True

    def _vouch(self) -> None:
        """Say that this engine does not stand still, unless a worker may: others that wait for it are no slow link."""
        late = time.monotonic() - _VOUCHED_S
        if all(heard_at >= late for rank, heard_at in self._heard.items() if rank not in self._found):
            self._leader.beat()

    def _look(self) -> None:
        """End it for a stalled worker, or for what the trainer said."""
        if self._reason:
            return
        late = time.monotonic() - wire.SILENT_S
        still = [rank for rank, heard_at in self._heard.items() if rank not in self._found and heard_at < late]
        self._end(str(WorkerStalled(still[0])) if still else self._leader.over())

    def _end(self, reason: str, less: bool = False) -> None:
        if not reason or self._reason:
            return
        self._reason, self._over = reason, Deadline(_END_S)
        self._leader.failed(reason, less)
        _tell({rank: frames for rank, frames in self._threads.items() if rank not in self._found}, reason)


def _tell(threads: dict[int, Frames], reason: str) -> None:
    for frames in threads.values():
        try:
            worker_wire.SIDECAR.say(frames, worker_wire.Failed(reason=reason[:2048]), Deadline(_SAY_S))
        except DataplaneError:
            continue
