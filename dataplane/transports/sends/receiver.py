"""The half of the sidecar where weights are sent: it leads its workers through a round, and moves no bytes itself.

Plans and proof are those of plan_exchange.py. Bytes come to a thread in each worker (worker_receivers.py) that stays
connected between rounds, joins the group of the epoch and receives. From the second round on that can happen while the
server generates (`stage`); the server is paused for the swap only.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Final

from ...errors import DataplaneError, PeerLost, StaleSession, TransferFailed, Unsupported, WorkerDied
from ...processes import Deadline, Frames, MacFrames
from ...reshard import SendSchedule, make_send_schedule
from ...tensors import Manifest
from .. import worker_messages as worker_wire
from ..interface import Address, EngineServer, Group, Receipt, TransferSession
from ..plan_exchange import Agreement, Attempt, PlanExchange, ReadLayout
from ..plan_messages import reason_of
from ..prerecorded_traces import PrerecordedTraces
from ..worker_exchange import ReplayFailed
from . import messages as wire
from .worker_receivers import LeadSession, NotReceived, WorkerReceivers

_SAY_S: Final = 10.0
_MODEL: Final = 0
"""Servers of several models are not sent to."""


class SendsReceiver:
    """Implements `Stager`, `Returning`, `Timed` and `Sized` for one engine."""

    def __init__(self, runtime_dir: Path, ahead: PrerecordedTraces | None = None, *, beside: bool = True) -> None:
        """`beside`: versions may be received while the server generates, where there is memory for it."""
        self._threads = WorkerReceivers(runtime_dir)
        self._exchange = PlanExchange(runtime_dir, ahead, self._threads)
        self._beside = beside
        self._touched = False
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

    @property
    def touched(self) -> bool:
        """Workers were told to write parameters."""
        return self._touched

    @property
    def widest(self) -> int:
        """Bytes of a round that the worker with most of them takes."""
        return self._exchange.widest

    @property
    def devices(self) -> tuple[str, ...]:
        """Of the workers, as they said themselves when they came last."""
        return self._exchange.devices

    @property
    def seconds(self) -> Mapping[str, float]:
        """Of the last round, by step."""
        return self._exchange.seconds

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
        exchange, deadline, self._touched = self._exchange, Deadline(deadline_s), False
        staged = self._staged and self._attempt is not None and _same(self._attempt.session, session)
        if staged and self._attempt is not None:
            attempt = replace(self._attempt, session=session, deadline=deadline)
        else:
            attempt = self._paused(session, address, engine, deadline)
        try:
            if not attempt.layout:
                with exchange.timed("meet"):
                    self._shake_hands(attempt)
            reading = exchange.read_aside(attempt)
            with exchange.timed("held"), exchange.called(attempt, server):
                exchange.gather(attempt, server, _MODEL)
                agreement = self._taken() if staged else self._prepare(attempt, reading)
                assert session.known is not None  # what is sent is proven with a table that is known
                with exchange.timed("replay"):
                    if not staged:
                        with exchange.timed("take"):
                            self._take(attempt, agreement, beside=False)
                    executed = self._swap(attempt)
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
        self._touched, self._exchange.seconds = False, {}
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

    def returned(self, deadline_s: float) -> None:
        """Implements `Returning`."""
        self._exchange.returned(deadline_s)

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
        session, connection, deadline = attempt.session, attempt.connection, attempt.deadline
        group = self._threads.group
        attempt.say(wire.Hello(channel=session.channel, epoch=session.epoch, engine=attempt.engine, group=group))
        reply = wire.RECEIVER.hear(connection, deadline, "the sender's invitation")
        if isinstance(reply, wire.Refused | wire.Invited) and reply.epoch != session.epoch:
            raise StaleSession(reply.epoch, session.epoch)
        if not isinstance(reply, wire.Invited):
            raise PeerLost(f"the sender refused this engine: {reason_of(reply)}")
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

    def _swap(self, attempt: Attempt) -> list[worker_wire.PlanExecuted]:
        """Have all workers put into place what they received, at a time."""
        exchange, session = self._exchange, attempt.session
        touched, self._touched = self._touched, True
        try:
            executed = exchange.workers.swap(session.epoch, session.version, attempt.deadline, exchange.pulse)
        except ReplayFailed as failed:
            self._touched = touched or failed.touched
            raise
        exchange.add("copy", max(each.copy_s for each in executed))
        exchange.add("verify", max(each.verify_s for each in executed))
        return executed

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
            seats=self._gpu_ids,
        )
        wire.RECEIVER.say(connection, prepared, deadline)
        begin = wire.RECEIVER.hear(connection, deadline, "the sender to begin")
        if not isinstance(begin, wire.BeginSends):
            raise PeerLost(f"the sender did not begin: {reason_of(begin)}")
        began = time.monotonic()
        self._touched = not beside
        leader = LeadSession(
            beat=lambda: _beat(connection),
            over=lambda: _over(connection),
            failed=lambda reason, less: attempt.failed(reason, less=less),
        )
        try:
            taken = self._threads.take(begin.group, leader, deadline, beside=beside)
        except NotReceived as failed:
            self._touched = failed.touched
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
        if known.layout and layout is not None and layout.pieces.tensors != manifest.tensors:
            return "the manifest is new"
        return self._threads.room()


def _same(one: TransferSession, other: TransferSession) -> bool:
    return (one.channel, one.epoch) == (other.channel, other.epoch)


def _named(agreement: Agreement, cut: tuple[int, int]) -> str:
    return "-".join((*agreement.digests, *map(str, cut)))


def _beat(connection: Frames) -> None:
    try:
        wire.RECEIVER.say(connection, wire.GroupBeat(), Deadline(_SAY_S))
    except (DataplaneError, OSError):
        return  # the sender is gone: that is heard of next


def _over(connection: Frames) -> str:
    """Why the sender has ended the attempt, and empty while it has not: it says nothing while the group moves.

    The connection may be closed meanwhile, by another thread.
    """
    try:
        if not connection.readable():
            return ""
        return reason_of(wire.RECEIVER.hear(connection, Deadline(_SAY_S), "the sender"))
    except (TransferFailed, OSError, ValueError) as error:
        return f"the sender is gone: {error}"
