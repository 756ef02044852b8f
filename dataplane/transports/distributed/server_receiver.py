"""The engine agent's half of the distributed transport: brings a server into the groups, and has it take every bucket.

A server is asked for one thing at a time, as SGLang wants it: groups are joined one after the other in the order in
which the sender names them, which is the same for every engine, and buckets are taken in the manifest's order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import msgspec

from ...errors import TransferFailed
from ...processes import Deadline
from ..broadcast_order import EnginePart, GroupSettings
from ..interface import Address, EngineServer, Receipt, TransferSession
from .rendezvous_keys import POLL_S, RendezvousKeys, holding, settled

_RETURN_S: Final = 1.0
"""How long a server may take to return from a broadcast that its source has broken off: else it stands still."""
_LEAVE_S: Final = 5.0
"""How long a server may take to forget groups that are broken anyway."""


class ServerReceiver:
    """Brings one engine's ranks into the group and has them take every bucket."""

    def __init__(self) -> None:
        self._held: tuple[str, ...] = ()
        """The groups the server is in, as far as this process knows."""
        self._doubted = False
        """It may have left them, or be another launch of it."""
        self._server: EngineServer | None = None
        self._launch = ""
        self._thread: ThreadPoolExecutor | None = None
        self._touched = False
        self._asked: Future[None] | None = None
        """The last call that was made of the server."""
        self._joins = False
        """It was to join a group, in the session that runs."""
        self._rendezvous: RendezvousKeys | None = None
        """Of the session that runs."""

    @property
    def touched(self) -> bool:
        """The server was asked to change weights in the last session."""
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
        """Join the group if need be, then take every bucket."""
        deadline = Deadline(deadline_s)
        self._touched = self._joins = False
        if self._server is not server:
            self._held, self._server, self._asked = (), server, None
        self._doubted |= self._launch != server.launch
        self._launch = server.launch
        self._rendezvous = rendezvous = RendezvousKeys(address.address, session.epoch, engine, address.token)
        rendezvous.begin()
        if self._held:
            server.entrust(self._held, used=True)
        reason = ""
        try:
            buckets = len(session.manifest.buckets)
            self.require_moving()
            groups, mine = self._join(rendezvous, address, rank_offset, server, deadline, buckets)
            for index in range(buckets):
                self._touched = True
                tensors, group = session.manifest.tensors_of(index), mine.names[groups.source_of(index)]
                self._call(rendezvous, f"bucket {index}", deadline, server.load_broadcast, group, tensors)
            rendezvous.say("done", "", deadline)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            self._rendezvous = None
            rendezvous.close(reason)
            if reason:
                self._abandon(server)
            self._doubted |= not server.entrust(self._held, used=False)
        return Receipt(session.manifest.nbytes, len(session.manifest.buckets), checked=False)

    def require_moving(self) -> None:
        """Raise `TransferFailed` while the server has not returned from what a session that is over asked of it.

        Nothing that is asked of it then is answered before.
        """
        if not self._returns(0.0):
            raise TransferFailed("the server stands still: it has not returned from the call of a session that is over")

    def close(self) -> None:
        """Break off the session that runs, from any thread; the groups stay for the next one if it ended well."""
        if (rendezvous := self._rendezvous) is not None:
            rendezvous.cancel("the session was called off")

    def shutdown(self) -> None:
        """Have the server leave its groups."""
        if self._held and self._server is not None:
            self._leave(self._server)
            self._server.entrust((), used=False)
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None

    def _join(  # noqa: PLR0917  in one place
        self,
        rendezvous: RendezvousKeys,
        address: Address,
        rank_offset: int,
        server: EngineServer,
        deadline: Deadline,
        buckets: int,
    ) -> tuple[GroupSettings, EnginePart]:
        """Into every group that the sender names, one after the other in its order, which all members follow."""
        rendezvous.say("came", holding(() if self._doubted else self._held), deadline)
        groups = GroupSettings.decode(rendezvous.group(deadline), buckets)
        mine = groups.of_engine(rank_offset, address.world_size)
        if forms := self._doubted or mine.names != self._held:
            for group in self._held:
                self._call(rendezvous, f"the server to leave {group}", deadline, server.leave_group, group)
            self._held, self._doubted = mine.names, False
            server.entrust(self._held, used=True)  # before it waits in them
            self._joins = True
            for group in mine.names:
                where = msgspec.structs.replace(address, group=group, world_size=mine.world_size)
                what = f"the group {group} to form"
                self._call(rendezvous, what, deadline, server.join_group, where, mine.rank_offset)
            self._joins = False
        rendezvous.say("joined", "", deadline)
        if forms and groups.ranks:  # nothing else keeps this engine from its first bucket while another does not join
            rendezvous.formed(deadline)
        return groups, mine

    def _call(
        self,
        rendezvous: RendezvousKeys,
        what: str,
        deadline: Deadline,
        function: Callable[..., None],
        *arguments: object,
    ) -> None:
        """Call the server on another thread, so that a sender that dies or gives up is noticed meanwhile."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "weightbus-engine")
        answer = self._asked = self._thread.submit(function, *arguments, deadline.check(what))
        while not settled(answer, POLL_S):
            rendezvous.check()
            deadline.check(what)
        answer.result()

    def _abandon(self, server: EngineServer) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
        if self._held and (self._joins or self._returns(_RETURN_S)):  # to leave is what ends a join
            self._leave(server)

    def _returns(self, seconds: float) -> bool:
        """Wait until the server has returned from what it was asked last; whether it has."""
        return self._asked is None or settled(self._asked, seconds)

    def _leave(self, server: EngineServer) -> None:
        """Have the server forget its groups, which are broken for all members. It may be dead; that is no news.

        All of them within the time of one: a server that does not answer is not asked again.
        """
        deadline = Deadline(_LEAVE_S)
        with contextlib.suppress(TransferFailed):
            for group in self._held:
                server.leave_group(group, deadline.check("the server to leave its groups"))
        self._held = ()
