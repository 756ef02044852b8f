"""Commands of rank 0 to the other ranks of its group, sent through `Source.agree`.

Every collective of a publication is preceded by a command, so that all ranks make the same calls whatever the
coordinator answers. A waiting rank receives `KeepWaiting` every few seconds, so that its group's timeout detects a dead
rank 0 and not a long round.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ..machine import PublicationResult, PublishReport
from ..source import Source


class RankCommand(msgspec.Struct, frozen=True, tag=True):
    """Base class of commands."""


class RankZeroReady(RankCommand, frozen=True, tag="Ready"):
    """Rank 0 has started; `publish` may be called."""


class RankZeroFailed(RankCommand, frozen=True, tag="NotReady"):
    """Rank 0 could not be started."""

    reason: str


class AssembleBucket(RankCommand, frozen=True, tag="Assemble"):
    """Take part in assembling bucket `index`."""

    index: int


class PrepareExport(RankCommand, frozen=True, tag="Make"):
    """Begin to compute the exported memory from the weights as they are now; with `digests`, to digest it."""

    digests: bool
    ready_flags: bool = msgspec.field(default=False, name="parts")
    """True if all readers know ready flags."""


class ExportMemory(RankCommand, frozen=True, tag="Expose"):
    """Make this rank's memory readable as it is now; digest its share of the model if `digests`."""

    digests: bool
    prepared: bool = msgspec.field(default=False, name="made")
    """True if `PrepareExport` was sent in this publication: nothing is begun anew."""
    ready_flags: bool = msgspec.field(default=False, name="parts")
    """As of `PrepareExport`."""


class DigestExported(RankCommand, frozen=True, tag="Digest"):
    """Digest this rank's share of the exported memory."""


class JoinSends(RankCommand, frozen=True, tag="Join"):
    """Take part in sending `epoch` to the engines that connect to `address`, by a thread of this rank's own."""

    address: str
    token: str
    epoch: int
    deadline_s: float


class ReadStage(RankCommand, frozen=True, tag="Read"):
    """Assemble and digest the buckets of this rank's pipeline stage.

    `wanted` are the kinds of engine whose digests are predicted.
    """

    wanted: tuple[tuple[str, int], ...]


class RefillStage(RankCommand, frozen=True, tag="Refill"):
    """Assemble buckets `first` to `last`, exclusive, again; each on its pipeline stage, which sends it."""

    first: int
    last: int


class JoinBroadcast(RankCommand, frozen=True, tag="Broadcast"):
    """If this rank is a source of the broadcast, have it join the group of `epoch`."""

    address: str
    group: str
    backend: str
    world_size: int
    token: str
    epoch: int
    deadline_s: float
    whole: bool
    """True if all buckets are in the staging buffers; otherwise each is assembled again."""


class CompareReplicas(RankCommand, frozen=True, tag="Compare"):
    """Take part in comparing the replicas of parameters."""


class EnginesAwaited(RankCommand, frozen=True, tag="Engines"):
    """The wait for engines is over. `missing` has reasons by engine."""

    there: tuple[str, ...]
    missing: dict[str, str]
    problem: str = ""
    """Why the coordinator could not be asked at last; empty if it could."""


class KeepWaiting(RankCommand, frozen=True, tag="Beat"):
    """Nothing to do; rank 0 is alive."""


class SnapshotTaken(RankCommand, frozen=True, tag="Taken"):
    """The snapshot of `version` is taken; the rest of its publication needs no other rank."""

    version: int
    stood_s: float = 0.0
    """Seconds for which training was blocked: for engines to catch up, or for a buffer."""
    ahead: str = ""
    """Why training must not go on from it although its publication does; empty if it may."""


class Finish(RankCommand, frozen=True, tag="Finish"):
    """The publication has ended."""

    result: PublicationResult = msgspec.field(name="verdict")
    report: PublishReport


PipelineCommand = ReadStage | RefillStage | JoinBroadcast
"""Commands that `PipelineBroadcast` executes."""
AnyRankCommand = (
    RankZeroReady
    | RankZeroFailed
    | AssembleBucket
    | PrepareExport
    | ExportMemory
    | DigestExported
    | JoinSends
    | PipelineCommand
    | CompareReplicas
    | EnginesAwaited
    | KeepWaiting
    | SnapshotTaken
    | Finish
)

_DECODER: Final[msgspec.msgpack.Decoder[AnyRankCommand]] = msgspec.msgpack.Decoder(AnyRankCommand)


class CommandedRanks:
    """The group of one source, as rank 0 and the other ranks speak in it."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def tell(self, command: AnyRankCommand) -> None:
        """Send `command` to every rank. Rank 0 only; collective."""
        self._source.agree(msgspec.msgpack.encode(command))

    def hear(self) -> AnyRankCommand:
        """Receive rank 0's next command. Other ranks only; collective."""
        return _DECODER.decode(self._source.agree(None))


def unexpected_command(command: AnyRankCommand, expected: str) -> RuntimeError:
    """The error of a rank whose calls do not match rank 0's."""
    told = f"that version {command.report.version} is over" if isinstance(command, Finish) else type(command).__name__
    return RuntimeError(f"this rank was told {told}, expected {expected}: call connect and publish on all ranks alike")
