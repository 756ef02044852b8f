"""The half of the sidecar where weights are sent: it leads its workers through a round, and moves no bytes itself.

As over the direct transport it has the server call our loader in every worker, records and plans where something is
new, and compares what the workers hold with the digest table. What differs is how bytes come: each worker has a thread
of its own (engine_agent/taker.py) that stays connected between rounds, joins the group of the epoch and receives. From
the second round on that can happen while the server generates (`stage`); the server is paused for the flip only.
"""

from __future__ import annotations

import os
import selectors
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec

from . import sends_wire, worker_wire
from .copy_table import CopyTable
from .deadline import Deadline
from .direct_receiver import Agreement, DirectReceiver, Layout
from .direct_wire import Welcome
from .errors import DataplaneError, PeerLost, StaleSession, TransferFailed, Unsupported
from .frames import FrameListener, Frames
from .local import open_runtime_dir
from .manifest import Manifest
from .plan import Plan, Reader
from .schedule import Schedule, schedule
from .sealed_frames import SealedFrames
from .transport import Address, EngineServer, Receipt, Session
from .workers import ReplayFailed

_LOOK_S: Final = 0.02
_SAY_S: Final = 10.0
_END_S: Final = 5.0
"""For workers to answer once it is over for another reason. One that stands still does not."""
_CONNECT_S: Final = 60.0
"""For workers whose thread was told to connect."""
_MODEL: Final = 0
"""Servers of several models are not sent to."""
_SPARE: Final = 1.1
"""Room for what is taken beside the parameters, as a multiple of it."""


class SendsReceiver(DirectReceiver):
    """Implements `Receiver` for one engine, and `transport.Stager`."""

    def __init__(self, runtime_dir: Path, *, beside: bool = True) -> None:
        """`beside`: versions may be taken while the server generates, where there is memory for it."""
        super().__init__(runtime_dir)
        self._beside = beside
        self._cut = (0, 0)
        """How the sender cuts schedules: bytes of a pair in a turn, and of a row that is a message of its own."""
        self._agreed: frozenset[str] = frozenset()
        """Plans that the sender has made too."""
        self._schedules: tuple[str, tuple[Schedule, ...]] = ("", ())
        """With the plans that they were made from."""
        self._lasting: FrameListener | None = None
        self._takers: dict[int, Frames] = {}
        """Of each worker, by rank: the connection of its thread."""
        self._staged: tuple[str, int] | None = None
        """Channel and epoch of what the workers have taken beside their parameters."""
        self.mode = ""
        """How the last version was taken: ``beside`` or ``paused``; and why."""

    def receive(  # noqa: PLR0917
        self, session: Session, address: Address, engine: str, rank_offset: int, server: EngineServer, deadline_s: float
    ) -> Receipt:
        """Have every worker take the version, or put into place what `stage` took, and prove it."""
        if server.drafts:
            raise Unsupported("a server with draft models is not sent to: let it take the direct or local transport")
        if self._staged != (session.channel, session.epoch):
            self._staged = None
            self.mode = self.mode if self.mode.startswith("paused") else "paused"
            return super().receive(session, address, engine, rank_offset, server, deadline_s)
        connection = self._connection
        assert connection is not None
        assert self._layout is not None
        self._touched = False
        welcome = Welcome(epoch=session.epoch, layout=self._layout.digest, exporters=())
        try:
            with self._timed("held"):
                self._exchange(connection, session, welcome, self._layout, engine, server, Deadline(deadline_s))
            sends_wire.say(connection, sends_wire.Finished(), Deadline(_SAY_S))
        except Exception as error:
            self._tell_sender(connection, f"{type(error).__name__}: {error}")
            raise
        finally:
            self.close()
        return Receipt(session.manifest.nbytes, len(session.manifest.buckets), checked=True)

    def can_stage(self, manifest: Manifest) -> bool:
        """The workers know what they will be sent, if the trainer's layout is what it was, and have room for it."""
        objection = self._objection(manifest)
        self.mode = f"paused: {objection}" if objection else "beside"
        return not objection

    def stage(self, session: Session, address: Address, engine: str, deadline_s: float) -> bool:
        """Take the version beside the parameters, while the server generates; False when it has to stand still.

        Changes nothing that is served. Raises `TransferFailed`.
        """
        self.close()
        self._touched = False
        self.seconds = {}
        dead = [rank for rank, frames in self._takers.items() if frames.ended()]
        if dead:  # its server ends too, but takes seconds for it, in which it would have to be paused
            raise TransferFailed(f"worker {dead[0]} of the server has died")
        if not self.can_stage(session.manifest):
            return False
        deadline = Deadline(deadline_s)
        connection = self._connection = self._connect(address, deadline)
        try:
            welcome = self._shake_hands(connection, session, engine, deadline)
            known = self._agreements[_MODEL]
            if (known.layout, self._schedules[0]) != (welcome.layout, _named(known, self._cut)):
                self.mode = "paused: the trainer's layout is new"
                self.close()
                return False
            self._take(connection, known, deadline, beside=True)
        except Exception as error:
            self._tell_sender(connection, f"{type(error).__name__}: {error}")
            self.close()
            raise
        self._staged, self.mode = (session.channel, session.epoch), "beside"
        return True

    def close(self) -> None:
        """Hang up. Workers that wait for us return from their call; their threads stay, and forget what they took."""
        if self._staged is not None:
            self._staged = None
            self._tell_takers("the round is over")
        super().close()

    def shutdown(self) -> None:
        """Let go of everything."""
        super().shutdown()
        for frames in self._takers.values():
            frames.close()
        self._takers = {}
        if self._lasting is not None:
            self._lasting.close()
            self._lasting = None

    # -- the trainer --------------------------------------------------------------------------------------------------

    def _connect(self, address: Address, deadline: Deadline) -> Frames:
        return SealedFrames.reach(address.address, address.token, deadline)

    def _readers(self) -> tuple[Reader, ...]:
        return tuple(msgspec.structs.replace(reader, sent_to=True) for reader in super()._readers())

    def _shake_hands(self, connection: Frames, session: Session, engine: str, deadline: Deadline) -> Welcome:
        hello = sends_wire.Hello(channel=session.channel, epoch=session.epoch, engine=engine)
        sends_wire.say(connection, hello, deadline)
        reply = sends_wire.hear_sender(connection, deadline, "the sender's invitation")
        if isinstance(reply, sends_wire.Refused | sends_wire.Invited) and reply.epoch != session.epoch:
            raise StaleSession(reply.epoch, session.epoch)
        if not isinstance(reply, sends_wire.Invited):
            raise PeerLost(f"the sender refused this engine: {_reason(reply)}")
        self._cut, self._agreed = (reply.pair_bytes, reply.alone_bytes), frozenset(reply.plans)
        return Welcome(epoch=reply.epoch, layout=reply.layout, exporters=())

    # -- the workers --------------------------------------------------------------------------------------------------

    def _carried(self, plans: tuple[Plan, ...]) -> tuple[Plan, ...]:
        """None of it: their threads receive."""
        return tuple(replace(plan, copies=CopyTable.empty(), staging=CopyTable.empty()) for plan in plans)

    def _prepared(
        self, connection: Frames, manifest: Manifest, layout: Layout, model: int, deadline: Deadline
    ) -> Agreement:
        if self._staged is not None:
            known = self._agreements[model]
            if self._workers.plans != known.digests:
                raise TransferFailed("a worker's tensors were replaced while it took the version: take it again")
            return known
        known = super()._prepared(connection, manifest, layout, model, deadline)
        self._expect(known, deadline)
        return known

    def _agree(self, connection: Frames, agreement: Agreement, deadline: Deadline) -> None:
        super()._agree(connection, agreement, deadline)
        self._agreed |= frozenset(agreement.digests)

    def _expect(self, known: Agreement, deadline: Deadline) -> None:
        """Tell every worker what it will be sent, and have its thread connect."""
        name = _named(known, self._cut)
        if self._schedules[0] != name:
            targets = [len(self._recordings[digest].targets) for digest in known.recordings]
            made = [schedule(plan, count, *self._cut) for plan, count in zip(known.plans, targets, strict=True)]
            self._schedules = name, tuple(made)
        if self._lasting is None:
            open_runtime_dir(self._runtime_dir)
            self._lasting = FrameListener(self._runtime_dir / f"t-{os.getpid()}-{id(self):x}.sock")
        there = {rank for rank, frames in self._takers.items() if not frames.waiting()}
        new = self._workers.expect(self._schedules[1], there, os.fspath(self._lasting.path), deadline)
        for rank in new & set(self._takers):
            self._takers.pop(rank).close()
        coming = Deadline(min(deadline.left(), _CONNECT_S))
        while new - set(self._takers):
            frames = self._lasting.accept(coming, "the workers' threads")
            hello = worker_wire.hear_worker(frames, coming, "a worker's thread")
            if not isinstance(hello, worker_wire.Expecting):
                raise PeerLost(f"a worker's thread began with {_said(hello)}")
            self._takers[hello.rank] = frames

    def _replay(
        self, session: Session, welcome: Welcome, agreement: Agreement, deadline: Deadline
    ) -> list[worker_wire.Replayed]:
        """Take everything now, unless it was taken before; then all workers put it into place at a time."""
        del welcome
        if self._staged is None:
            assert self._connection is not None
            with self._timed("take"):
                self._take(self._connection, agreement, deadline, beside=False)
        touched, self._touched = self._touched, True
        try:
            replayed = self._workers.flip(session.epoch, session.version, deadline)
        except ReplayFailed as failed:
            self._touched = touched or failed.touched
            raise
        self._add("copy", max(each.copy_s for each in replayed))
        self._add("verify", max(each.verify_s for each in replayed))
        return replayed

    def _take(self, connection: Frames, agreement: Agreement, deadline: Deadline, *, beside: bool) -> None:
        """From the word that all are prepared to the last byte."""
        digests = tuple(each.digest() for each in self._schedules[1])
        if not self._agreed.issuperset(agreement.digests):
            self._agree(connection, agreement, deadline)
        sends_wire.say(connection, sends_wire.Prepared(plans=agreement.digests, schedules=digests), deadline)
        begin = sends_wire.hear_sender(connection, deadline, "the sender to begin")
        if not isinstance(begin, sends_wire.Begin):
            raise PeerLost(f"the sender did not begin: {_reason(begin)}")
        began = time.monotonic()
        self._touched = not beside
        for at, rank in enumerate(sorted(self._takers)):
            group = msgspec.structs.replace(begin.group, rank=begin.group.rank + at)
            worker_wire.say(self._takers[rank], worker_wire.Take(group=group, beside=beside), deadline)
        taken = self._outcomes(connection, deadline)
        self.seconds["wire"] = max(each.seconds for each in taken)
        through = sends_wire.Through(seconds=time.monotonic() - began, nbytes=sum(each.nbytes for each in taken))
        sends_wire.say(connection, through, deadline)

    def _outcomes(self, connection: Frames, deadline: Deadline) -> list[worker_wire.Taken]:  # noqa: C901  one loop
        """How it ended for every worker. Whoever fails first, here or elsewhere, ends it for all."""
        found: dict[int, worker_wire.ToSidecar] = {}
        heard = dict.fromkeys(self._takers, time.monotonic())
        beat_at = 0.0
        reasons: list[str] = []
        over: Deadline | None = None

        def ends(reason: str) -> None:
            nonlocal over
            if reason and not reasons:
                over = Deadline(_END_S)
                self._tell_sender(connection, reason)
                self._tell_takers(reason, *(rank for rank in self._takers if rank not in found))
            reasons.extend([reason] if reason else [])

        with selectors.DefaultSelector() as selector:
            for rank, frames in self._takers.items():
                selector.register(frames, selectors.EVENT_READ, rank)
            while len(found) < len(self._takers) and not (over and not over.left()):
                deadline.check("the workers to take everything")
                now = time.monotonic()
                if now >= beat_at and not reasons:
                    beat_at = now + sends_wire.BEAT_S
                    _beat(connection)
                for key, _ in selector.select(_LOOK_S):
                    reply = self._outcome(key.data)
                    heard[key.data] = time.monotonic()
                    if isinstance(reply, worker_wire.Moving):
                        continue
                    found[key.data] = reply
                    selector.unregister(self._takers[key.data])
                    ends("" if isinstance(reply, worker_wire.Taken) else f"worker {key.data}: {_said(reply)}")
                still = [rank for rank in heard if rank not in found and now - heard[rank] > sends_wire.SILENT_S]
                if still and not reasons:
                    ends(f"worker {still[0]} stands still: nothing was heard of it for {sends_wire.SILENT_S:.1f} s")
                if not reasons:
                    ends(_over(connection))
        if reasons:
            silent = [rank for rank in self._takers if rank not in found]
            for rank in silent:  # what it says later belongs to no round
                self._takers.pop(rank).close()
            changed = any(not isinstance(each, worker_wire.Failed) or each.touched for each in found.values())
            self._touched = self._touched and (bool(silent) or changed)
            raise TransferFailed("; ".join(reasons))
        return [each for each in found.values() if isinstance(each, worker_wire.Taken)]

    def _outcome(self, rank: int) -> worker_wire.ToSidecar:
        try:
            return worker_wire.hear_worker(self._takers[rank], Deadline(_SAY_S), f"worker {rank}")
        except DataplaneError as error:
            return worker_wire.Failed(reason=str(error), touched=self._touched)

    def _tell_takers(self, reason: str, *ranks: int) -> None:
        """Call it off. Who is gone needs no telling."""
        for rank in ranks or tuple(self._takers):
            try:
                worker_wire.say(self._takers[rank], worker_wire.Failed(reason=reason[:2048]), Deadline(_SAY_S))
            except DataplaneError:
                continue

    def _objection(self, manifest: Manifest) -> str:
        """Why the version cannot be taken while the server generates; empty when it can."""
        known = self._agreements.get(_MODEL)
        if not self._beside:
            return "it is not to be taken beside the weights that are served"
        if known is None or len(self._takers) != len(known.plans):
            return "the workers know no plan yet"
        if known.layout and self._layout is not None and self._layout.pieces.tensors != manifest.tensors:
            return "the manifest is new"
        for rank, frames in sorted(self._takers.items()):
            try:
                if frames.waiting():
                    raise PeerLost("it is gone")
                worker_wire.say(frames, worker_wire.Weigh(), Deadline(_SAY_S))
                room = worker_wire.hear_worker(frames, Deadline(_SAY_S), f"worker {rank}")
            except DataplaneError as error:
                frames.close()
                self._takers.pop(rank)
                return f"worker {rank}: {error}"
            if not isinstance(room, worker_wire.Room) or room.free < room.needed * _SPARE:
                found = (
                    f"{room.needed} bytes are needed, {room.free} free" if isinstance(room, worker_wire.Room) else "?"
                )
                return f"worker {rank} has no room beside its weights: {found}"
        return ""


def _named(agreement: Agreement, cut: tuple[int, int]) -> str:
    return "-".join((*agreement.digests, *map(str, cut)))


def _beat(connection: Frames) -> None:
    try:
        sends_wire.say(connection, sends_wire.Beat(), Deadline(_SAY_S))
    except (DataplaneError, OSError):
        return  # the sender is gone: that is heard of next


def _over(connection: Frames) -> str:
    """The sender says nothing while the group moves, unless it is over. A connection may be closed under our hands."""
    try:
        if not connection.waiting():
            return ""
        return _reason(sends_wire.hear_sender(connection, Deadline(_SAY_S), "the sender"))
    except (TransferFailed, OSError, ValueError) as error:
        return f"the sender is gone: {error}"


def _reason(message: sends_wire.ToReceiver) -> str:
    return message.reason if isinstance(message, sends_wire.Refused | sends_wire.Failed) else type(message).__name__


def _said(message: worker_wire.ToSidecar) -> str:
    return message.reason if isinstance(message, worker_wire.Failed) else type(message).__name__
