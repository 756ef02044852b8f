"""The engine's half of the distributed transport: the member of a group is the sidecar, or the server's workers.

The sidecar is where it can (`sidecar_receiver.py`): it can leave a broken group, and compares what it takes before the
server loads it. Workers join as the field does it (`server_receiver.py`) where the server is elsewhere or
another user's, its GPUs are not known, not seen from here or do not reach each other, or the first of them has no room.
"""

from __future__ import annotations

from pathlib import Path

from ..interface import Address, EngineServer, Receipt, TransferSession
from .server_receiver import ServerReceiver
from .sidecar_receiver import SidecarReceiver


class DistributedReceiver:
    """One engine's."""

    def __init__(self, runtime_dir: Path, *, hands_on: bool = True) -> None:
        """`hands_on`: this process takes part itself, where it can."""
        self._hands_on = hands_on
        self._sidecar_member = SidecarReceiver(runtime_dir)
        self._server_member = ServerReceiver()
        self._used: SidecarReceiver | ServerReceiver = self._server_member
        """In the last session."""
        self._remark = ""
        self._met_at = ""
        """Where the last session was, if it ended well. A trainer that stays keeps that address then."""

    @property
    def touched(self) -> bool:
        """The server was asked to change weights in the last session."""
        return self._used.touched

    @property
    def remark(self) -> str:
        """Why the server's workers take part, where this process should have; for people."""
        return self._remark

    def receive(  # noqa: PLR0917
        self,
        session: TransferSession,
        address: Address,
        engine: str,
        rank_offset: int,
        server: EngineServer,
        deadline_s: float,
    ) -> Receipt:
        """Take every bucket and load it into `server`. Raises `TransferFailed`."""
        if self._met_at not in {"", address.address}:
            self._sidecar_member.forget_rendezvous()
        self._met_at = ""
        reason = self._sidecar_member.why_not(server, session) if self._hands_on else ""
        chosen = self._sidecar_member if self._hands_on and not reason else self._server_member
        self._remark = f"the server's workers take part in the broadcast themselves: {reason}" if reason else ""
        if chosen is not self._used:
            self._used.require_moving()
            self._used.shutdown()
            self._used = chosen
        receipt = chosen.receive(session, address, engine, rank_offset, server, deadline_s)
        self._met_at = address.address
        return receipt

    def require_moving(self) -> None:
        """Raise `TransferFailed` while the server has not returned from what a session that is over asked of it."""
        self._sidecar_member.require_moving()
        self._server_member.require_moving()

    def close(self) -> None:
        """Break off the session that runs, from any thread; groups stay for the next one if it ended well."""
        self._used.close()

    def shutdown(self) -> None:
        """Let go of everything."""
        self._sidecar_member.shutdown()
        self._server_member.shutdown()
