"""Straight from the trainer's memory into the engine's parameters: the sidecar's half.

It moves no bytes itself: workers copy, led through one exchange (plan_exchange.py). `receive` is done when they hold
the version, `returned` when the server may be asked for what has to come after. A digest table that follows is heard
while they copy, and waited for then.

A server that speculates calls the loader for one model after another, in an order of its own: the one it serves, and
its draft models. Each is an exchange of its own within the one call, and takes from the version what its loader asks
for.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from ...errors import PeerLost, TransferFailed
from ...processes import Deadline, Frames
from ...tensors import DigestTable
from .. import plan_exchange as wire, worker_exchange as worker_wire
from ..interface import Address, EngineServer, Exporting, Receipt, Tabled, TransferSession
from ..plan_exchange import Agreement, Attempt, PlanExchange, PlanReceiver, PrerecordedTraces, models_of
from ..sessions import reason_of, shake_hands

_COPIED_S: Final = 30.0
"""For workers to copy a version and to prove it, besides what its bytes take."""
_LEAST_BYTES_S: Final = 1e9
"""Far below what any bus carries; also of what a trainer uploads while it is copied."""


def copied_s(nbytes: int) -> float:
    """Seconds that workers may take to copy a version of `nbytes` and to prove it; beyond, they make no progress."""
    return _COPIED_S + nbytes / _LEAST_BYTES_S


class DirectReceiver(PlanReceiver):
    """Implements `Receiver` and `Remarking` for one engine."""

    def __init__(self, runtime_dir: Path, ahead: PrerecordedTraces | None = None) -> None:
        """`ahead` has the load traces from before any version."""
        super().__init__(PlanExchange(runtime_dir, ahead))
        self._connection: Frames | None = None
        self._coming: Future[Tabled] | None = None
        """The digest table of a session that was begun without, once it was asked for."""
        self.remark = ""
        """Why the last copies were slower than they could be."""

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
        exchange = self._exchange
        self.close()
        self.touched, self._coming, exchange.seconds = False, None, {}
        deadline = Deadline(deadline_s)
        with exchange.timed("meet"):
            connection = self._connection = Frames.connect(address.address, deadline)
        attempt = Attempt(session, connection, engine, deadline)
        try:
            with exchange.timed("meet"):
                exporters = self._shake_hands(attempt)
            with exchange.timed("held"), exchange.called(engine, server, deadline):
                for model in models_of(server):
                    if not exchange.gather(server, model, deadline):
                        break
                    agreement = exchange.plan(attempt, model)
                    exchange.install(attempt, agreement)
                    exchange.agree(attempt, model, agreement)
                    self._ask_table(attempt)
                    executed = self._copy(attempt, exporters, agreement)
                    exchange.prove(agreement, executed, lambda: self._table_of(session))
            attempt.finished()
        except Exception as error:
            attempt.failed(error)
            raise
        finally:
            self.close()
        tabled = self._coming.result() if self._coming is not None else None
        return Receipt(session.manifest.nbytes, len(session.manifest.buckets), checked=True, tabled=tabled)

    def close(self) -> None:
        """Hang up. Workers that wait for us return from their call."""
        self._exchange.close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def shutdown(self) -> None:
        """Let go of everything."""
        self.close()
        self._exchange.shutdown()

    @staticmethod
    def _shake_hands(attempt: Attempt) -> tuple[Exporting, ...]:
        """Raises `StaleSession`, `PeerLost`."""
        hello = wire.Hello(channel=attempt.session.channel, epoch=attempt.session.epoch, engine=attempt.engine)
        welcome = shake_hands(
            wire.RECEIVER, attempt.connection, hello, attempt.session.epoch, wire.Welcome, attempt.deadline
        )
        attempt.layout = welcome.layout
        return welcome.exporters

    def _copy(
        self, attempt: Attempt, exporters: Sequence[Exporting], agreement: Agreement
    ) -> list[worker_wire.PlanExecuted]:
        exchange, session = self._exchange, attempt.session
        copied = Deadline(min(attempt.deadline.left(), copied_s(session.manifest.nbytes)))
        executed = self._execute(
            lambda: exchange.workers.replay(
                session.epoch, session.version, exporters, exchange.made, agreement.reads, copied
            )
        )
        self.remark = next((each.remark for each in executed if each.remark), "")
        if any(each.round for each in exporters):
            exchange.add("wait", max(executed, key=lambda each: each.wait_s + each.copy_s).wait_s)
        return executed

    def _ask_table(self, attempt: Attempt) -> None:
        """Have a digest table that follows heard by a thread of its own, while the workers copy."""
        if attempt.session.table is None and self._coming is None:
            wire.RECEIVER.say(attempt.connection, wire.GiveTable(), attempt.deadline)
            self._coming = self._exchange.aside.submit(_hear_table, attempt)

    def _table_of(self, session: TransferSession) -> DigestTable:
        """What the workers have to hold; waited for where it follows. Raises `PeerLost`, `DeadlineExceeded`."""
        if self._coming is None:
            return session.known
        with self._exchange.timed("table"):
            return self._coming.result().table  # its thread hears under the session's deadline


def _hear_table(attempt: Attempt) -> Tabled:
    """The digest table of a session that was begun without. Raises `PeerLost`, `DeadlineExceeded`, `ManifestError`."""
    session = attempt.session
    reply = wire.RECEIVER.hear(attempt.connection, attempt.deadline, "the digest table")
    if not isinstance(reply, wire.ExpectedTable):
        raise PeerLost(f"the sender gave no digest table: {reason_of(reply)}")
    if len(reply.table) > wire.MOST_TABLE_BYTES or len(reply.seal) > wire.MOST_SEAL_BYTES:
        sizes = f"a digest table of {len(reply.table)} bytes with a seal of {len(reply.seal)} bytes"
        raise PeerLost(f"{sizes} is larger than any")
    table = DigestTable.decode(reply.table, session.manifest)
    if table.version != session.version:
        raise TransferFailed(f"the digest table is of version {table.version}, this session of {session.version}")
    return Tabled(table, reply.seal)
