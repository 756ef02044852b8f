"""One engine of a round: where it stands, and what the trainer is told of it."""

from __future__ import annotations

from typing import Final

import msgspec

from ..protocol import AgentId, EngineInfo, EngineReport, Epoch, Outcome, TransportKind, Version, clip_each
from .states import EnginePhase

_DOWN: Final = frozenset({EnginePhase.RESUMING, EnginePhase.LEAVING, EnginePhase.QUARANTINED})


class Participant(msgspec.Struct, kw_only=True):
    """One engine of the round."""

    name: AgentId
    info: EngineInfo
    phase: EnginePhase
    epoch: Epoch
    transport: TransportKind | None
    redrives_left: int = 0
    """How often it may still be sent everything again after a failure that it, or bytes under way, took part in."""
    reason: str = ""
    seconds: dict[str, float] = {}
    bytes: int = 0
    buckets: int = 0
    verified_by: str = ""
    proven: str = ""
    """The digest table that it says it holds, since it is verified."""
    shares: bool = False
    """A worker of it is on a GPU of the trainer's."""
    gpus: tuple[str, ...] = ()
    """Of its workers, where they are members of a group: none of them may be in it twice."""
    rank_offset: int = 0
    missed: bool = False
    """While it does not serve: it did when the round began, or a round of the same version made it stop."""
    paused: bool = False
    """The round told it to stand still."""
    spared: bool = False
    """Nothing was sent to it in the last attempt, only because another engine failed: it is not at fault."""

    @property
    def fallen(self) -> bool:
        """It served, stood still for the round, and has not come back from that, or is about to."""
        return self.paused and self.missed and self.phase in _DOWN

    @property
    def outcome(self) -> Outcome:
        """How the round ended for this engine, or would if it ended now."""
        if self.phase is EnginePhase.SERVING:
            return Outcome.COMMITTED
        if self.phase is EnginePhase.LEFT:
            return Outcome.ABORTED
        return Outcome.LOST if self.phase is EnginePhase.LOST else Outcome.QUARANTINED

    def report(self, version: Version, told: int) -> EngineReport:
        """For the trainer, who published `version`, and is given as many reasons as `told` at once."""
        held = self.info.held.version if self.info.held else None
        serves = {Outcome.COMMITTED: version, Outcome.ABORTED: held}
        return EngineReport(
            engine=self.name,
            outcome=self.outcome,
            transport=self.transport,
            version=serves.get(self.outcome),
            bytes=self.bytes,
            buckets=self.buckets,
            seconds=dict(self.seconds),
            verified_by=self.verified_by,
            reason=clip_each(self.reason, told),
        )
