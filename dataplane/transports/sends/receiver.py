"""The half of the sidecar where weights are sent: it leads its workers through a round, and moves no bytes itself.

As over the direct transport it has the server call our loader in every worker, records and plans where something is
new, and compares what the workers hold with the digest table. What differs is how bytes come: each worker has a thread
of its own (engine_agent/worker/receive_thread.py) that stays connected between rounds, joins the group of the epoch and
receives. From the second round on that can happen while the server generates (`stage`); the server is paused for the
flip only.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from ...copy import CopyTable
from ...errors import DataplaneError, PeerLost, StaleSession, TransferFailed, Unsupported, WorkerDied
from ...processes import Deadline, Frames, MacFrames
from ...reshard import PlanReader, ReshardPlan, SendSchedule, make_send_schedule
from ...tensors import Manifest
from .. import worker_messages as worker_wire
from ..direct import Agreement, DirectReceiver, ReadLayout, Welcome, read_layout
from ..interface import Address, EngineServer, Group, Receipt, TransferSession
from ..prerecorded_traces import PrerecordedTraces
from ..worker_exchange import ReplayFailed
from . import messages as sends_wire
from .worker_receivers import LeadSession, NotReceived, WorkerReceivers, WorkerStalled

_SAY_S: Final = 10.0
_MODEL: Final = 0
"""Servers of several models are not sent to."""


class SendsReceiver(DirectReceiver):
    """Implements `Receiver` for one engine, and `transport.Stager`."""

    def __init__(self, runtime_dir: Path, ahead: PrerecordedTraces | None = None, *, beside: bool = True) -> None:
        """`beside`: versions may be taken while the server generates, where there is memory for it."""
        super().__init__(runtime_dir, ahead)
        self._beside = beside
        self._cut = (0, 0)
        """How the sender cuts schedules: bytes of a pair in a turn, and of a row that is a message of its own."""
        self._agreed: frozenset[str] = frozenset()
        """Plans that the sender has made too."""
        self._schedules: tuple[str, tuple[SendSchedule, ...]] = ("", ())
        """With the plans that they were made from."""
        self._takers = WorkerReceivers(runtime_dir)
        self._early: Group | None = None
        """The group that the workers may begin to join."""
        self._forming = ""
        """The one that they did begin to join."""
        self._seats: tuple[str, ...] = ()
        """Of the workers that have plans."""
        self._staged: tuple[str, int] | None = None
        """Channel and epoch of what the workers have taken beside their parameters."""
        self._met: tuple[tuple[str, int], Frames, Welcome] | None = None
        """The sender of this channel and epoch, where a version could not be taken beside after all."""
        self._at_hand: tuple[Frames, Welcome] | None = None
        """The same, for the round that begins."""
        self._reading: Future[ReadLayout] | None = None
        """The trainer's layout, which was asked for."""
        self.mode = ""
        """How the last version was taken: ``beside`` or ``paused``; and why."""

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
        if server.drafts:
            raise Unsupported("a server with draft models is not sent to: let it take the direct or local transport")
        if self._staged != (session.channel, session.epoch):
            self._staged = None
            self.mode = self.mode if self.mode.startswith("paused") else "paused"
            self._touched = False
            self._takers.require_moving()
            met, self._met = self._met, None
            if met is not None and met[0] == (session.channel, session.epoch):
                self._at_hand = met[1:]
            elif met is not None:
                met[1].close()
            try:
                return super().receive(session, address, engine, rank_offset, server, deadline_s)
            except Exception:
                if self._forming:
                    self._takers.tell("the attempt is over")
                raise
        connection = self._connection
        assert connection is not None
        assert self._layout is not None
        self._touched = False
        welcome = Welcome(epoch=session.epoch, layout=self._layout.digest, exporters=())
        try:
            with self._timed("held"):
                self._exchange(connection, session, welcome, engine, server, Deadline(deadline_s))
            self._say_finished(connection)
        except Exception as error:
            self._tell_sender(connection, f"{type(error).__name__}: {error}")
            raise
        finally:
            self.close()
        return Receipt(session.manifest.nbytes, len(session.manifest.buckets), checked=True)

    def require_moving(self) -> None:
        """Raise `WorkerStalled` while a worker that stood still has said nothing since."""
        self._takers.require_moving()

    def can_stage(self, manifest: Manifest) -> bool:
        """The workers know what they will be sent, if the trainer's layout is what it was, and have room for it.

        Raises `WorkerStalled`: then the engine takes no part at all.
        """
        self._takers.require_moving()
        objection = self._objection(manifest)
        self.mode = f"paused: {objection}" if objection else "beside"
        return not objection

    def stage(self, session: TransferSession, address: Address, engine: str, deadline_s: float) -> bool:
        """Take the version beside the parameters, while the server generates; False when it has to stand still.

        Changes nothing that is served. Raises `TransferFailed`.
        """
        self.close()
        self._touched = False
        self.seconds = {}
        self._takers.require_alive()
        self._takers.require_moving()
        if not self.can_stage(session.manifest):
            return False
        deadline = Deadline(deadline_s)
        connection = self._connection = self._connect(address, deadline)
        try:
            welcome = self._shake_hands(connection, session, engine, deadline)
            known = self._agreements[_MODEL]
            if (known.layout, self._schedules[0]) != (welcome.layout, _named(known, self._cut)):
                new = "the trainer's layout is" if known.layout != welcome.layout else "the schedules are"
                self.mode = f"paused: {new} new"
                # To a sender that has seen us, coming a second time would be somebody else.
                self._met, self._connection = ((session.channel, session.epoch), connection, welcome), None
                return False
            self._take(connection, known, deadline, beside=True)
        except Exception as error:
            self._tell_sender(connection, f"{type(error).__name__}: {error}")
            dead = self._takers.dead
            self.close()
            if dead is not None:
                raise WorkerDied(dead) from error
            raise
        self._staged, self.mode = (session.channel, session.epoch), "beside"
        return True

    def close(self) -> None:
        """Hang up. Workers that wait for us return from their call; their threads stay, and forget what they took."""
        if self._staged is not None:
            self._staged = None
            self._takers.tell("the round is over")
        met, self._met = self._met, None
        if met is not None:
            met[1].close()
        super().close()

    def shutdown(self) -> None:
        """Let go of everything."""
        super().shutdown()
        self._takers.close()

    # -- the trainer --------------------------------------------------------------------------------------------------

    def _connect(self, address: Address, deadline: Deadline) -> Frames:
        if self._at_hand is not None:
            return self._at_hand[0]
        return MacFrames.reach(address.address, address.token, deadline)

    def _readers(self) -> tuple[PlanReader, ...]:
        return tuple(msgspec.structs.replace(reader, sent_to=True) for reader in super()._readers())

    def _shake_hands(self, connection: Frames, session: TransferSession, engine: str, deadline: Deadline) -> Welcome:
        at_hand, self._at_hand = self._at_hand, None
        if at_hand is not None:
            return at_hand[1]
        group = self._takers.group
        hello = sends_wire.Hello(channel=session.channel, epoch=session.epoch, engine=engine, group=group)
        sends_wire.RECEIVER.say(connection, hello, deadline)
        reply = sends_wire.RECEIVER.hear(connection, deadline, "the sender's invitation")
        if isinstance(reply, sends_wire.Refused | sends_wire.Invited) and reply.epoch != session.epoch:
            raise StaleSession(reply.epoch, session.epoch)
        if not isinstance(reply, sends_wire.Invited):
            raise PeerLost(f"the sender refused this engine: {_reason(reply)}")
        self._cut, self._agreed = (reply.pair_bytes, reply.alone_bytes), frozenset(reply.plans)
        self._early, self._forming = reply.form, ""
        return Welcome(epoch=reply.epoch, layout=reply.layout, exporters=())

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
        """A layout that is new is read by a thread of its own, from the moment that the server is called."""
        self._reading = None
        if self._staged is None and not self._knows(welcome.layout):
            sends_wire.RECEIVER.say(connection, sends_wire.GiveLayout(), deadline)
            arguments = connection, welcome.layout, session.manifest, deadline
            self._reading = self._aside.submit(read_layout, *arguments)
        super()._exchange(connection, session, welcome, engine, server, deadline)

    def _hear_layout(self, connection: Frames, layout: str, manifest: Manifest, deadline: Deadline) -> None:
        reading, self._reading = self._reading, None
        if reading is None:
            return super()._hear_layout(connection, layout, manifest, deadline)
        with self._timed("layout"):
            self._learn(reading.result())  # its thread reads under the session's deadline
        return None

    def _carried(self, plans: tuple[ReshardPlan, ...]) -> tuple[ReshardPlan, ...]:
        """None of it: their threads receive."""
        return tuple(replace(plan, copies=CopyTable.empty(), staging=CopyTable.empty()) for plan in plans)

    def _prepared(
        self, connection: Frames, manifest: Manifest, layout: str, model: int, deadline: Deadline
    ) -> Agreement:
        if self._staged is not None:
            known = self._agreements[model]
            if self._workers.plans != known.digests:
                raise TransferFailed("a worker's tensors were replaced while it took the version: take it again")
            return known
        early, self._early = self._early, None
        if early is not None and self._workers.form(early, deadline):
            self._forming = early.name
            sends_wire.RECEIVER.say(connection, sends_wire.Forms(), deadline)
        known = super()._prepared(connection, manifest, layout, model, deadline)
        self._seats = self._workers.seats
        with self._timed("expect"):
            self._takers.expect(self._workers, self._schedules[1], deadline)
        return known

    def _ask_table(self, connection: Frames, session: TransferSession, deadline: Deadline) -> None:
        """Raises `TransferFailed`: what is sent is proven with a table that is known."""
        del connection, deadline
        assert session.known is not None

    def _hear_agreement(self, connection: Frames, agreement: Agreement, deadline: Deadline) -> None:
        super()._hear_agreement(connection, agreement, deadline)
        self._agreed |= frozenset(agreement.digests)

    def _work_out(self, known: Agreement) -> None:
        """What every worker will be sent."""
        name = _named(known, self._cut)
        if self._schedules[0] != name:
            targets = [len(self._recordings[digest].targets) for digest in known.recordings]
            made = [
                make_send_schedule(plan, count, *self._cut) for plan, count in zip(known.plans, targets, strict=True)
            ]
            self._schedules = name, tuple(made)
        for each in self._schedules[1]:
            each.digest()

    def _replay(
        self, session: TransferSession, welcome: Welcome, agreement: Agreement, deadline: Deadline
    ) -> list[worker_wire.PlanExecuted]:
        """Take everything now, unless it was taken before; then all workers put it into place at a time."""
        del welcome
        if self._staged is None:
            assert self._connection is not None
            with self._timed("take"):
                self._take(self._connection, agreement, deadline, beside=False)
        touched, self._touched = self._touched, True
        try:
            replayed = self._workers.flip(session.epoch, session.version, deadline, self._pulse)
        except ReplayFailed as failed:
            self._touched = touched or failed.touched
            raise
        self._add("copy", max(each.copy_s for each in replayed))
        self._add("verify", max(each.verify_s for each in replayed))
        return replayed

    def _pulse(self) -> None:
        """While workers are waited for: the trainer hears of one that stands still before the server answers."""
        try:
            self._takers.pulse()
        except WorkerStalled as still:
            if self._connection is not None:
                self._tell_sender(self._connection, str(still))
            raise

    @property
    def _dead(self) -> int | None:
        found = super()._dead
        return self._takers.dead if found is None else found

    def _patience_s(self, deadline: Deadline) -> float:
        """Not for a worker that stands still: the call ends when it goes on, and touches nothing that is served."""
        return 0.0 if self._takers.stands_still else super()._patience_s(deadline)

    def _take(self, connection: Frames, agreement: Agreement, deadline: Deadline, *, beside: bool) -> None:
        """From the word that all are prepared to the last byte."""
        digests = tuple(each.digest() for each in self._schedules[1])
        if not self._agreed.issuperset(agreement.digests):
            self._propose(connection, agreement.readers, agreement.recordings, agreement.digests, deadline)
            self._hear_agreement(connection, agreement, deadline)
        prepared = sends_wire.Prepared(
            plans=agreement.digests, schedules=digests, group=self._forming or self._takers.group, seats=self._seats
        )
        sends_wire.RECEIVER.say(connection, prepared, deadline)
        begin = sends_wire.RECEIVER.hear(connection, deadline, "the sender to begin")
        if not isinstance(begin, sends_wire.BeginSends):
            raise PeerLost(f"the sender did not begin: {_reason(begin)}")
        began = time.monotonic()
        self._touched = not beside
        leader = LeadSession(
            beat=lambda: _beat(connection),
            over=lambda: _over(connection),
            failed=lambda reason, less: self._tell_sender(connection, reason, less=less),
        )
        try:
            taken = self._takers.take(begin.group, leader, deadline, beside=beside)
        except NotReceived as failed:
            self._touched = failed.touched
            raise
        self.seconds["wire"] = max(each.seconds for each in taken)
        through = sends_wire.BarrierReached(seconds=time.monotonic() - began, nbytes=sum(each.nbytes for each in taken))
        sends_wire.RECEIVER.say(connection, through, deadline)

    def _objection(self, manifest: Manifest) -> str:
        """Why the version cannot be taken while the server generates; empty when it can."""
        known = self._agreements.get(_MODEL)
        if not self._beside:
            return "it is not to be taken beside the weights that are served"
        if known is None or len(self._takers) != len(known.plans):
            return "the workers know no plan yet"
        if known.layout and self._layout is not None and self._layout.pieces.tensors != manifest.tensors:
            return "the manifest is new"
        return self._takers.room()


def _named(agreement: Agreement, cut: tuple[int, int]) -> str:
    return "-".join((*agreement.digests, *map(str, cut)))


def _beat(connection: Frames) -> None:
    try:
        sends_wire.RECEIVER.say(connection, sends_wire.GroupBeat(), Deadline(_SAY_S))
    except (DataplaneError, OSError):
        return  # the sender is gone: that is heard of next


def _over(connection: Frames) -> str:
    """The sender says nothing while the group moves, unless it is over. A connection may be closed under our hands."""
    try:
        if not connection.readable():
            return ""
        return _reason(sends_wire.RECEIVER.hear(connection, Deadline(_SAY_S), "the sender"))
    except (TransferFailed, OSError, ValueError) as error:
        return f"the sender is gone: {error}"


def _reason(message: sends_wire.ToReceiver) -> str:
    return message.reason if isinstance(message, sends_wire.Refused | sends_wire.Failed) else message.kind
