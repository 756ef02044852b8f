"""What the leader tells the other ranks of its group, step by step, through `Source.agree`.

Every collective of a publication is announced by an order, so that all ranks make the same calls whatever the
coordinator says. A rank that waits hears something every few seconds, so that its group's timeout is about dead leaders
and not about long rounds.
"""

from __future__ import annotations

from typing import Final, assert_never

import msgspec

from ..machine import PublicationResult, PublishReport
from ..source import Source


class RankCommand(msgspec.Struct, frozen=True, tag=True):
    """Root of what the leader says."""


class RankZeroReady(RankCommand, frozen=True, tag="Ready"):
    """The leader stands; `publish` may be called."""


class RankZeroFailed(RankCommand, frozen=True, tag="NotReady"):
    """The leader could not be started."""

    reason: str


class AssembleBucket(RankCommand, frozen=True, tag="Assemble"):
    """Take part in assembling bucket `index`."""

    index: int


class PrepareExport(RankCommand, frozen=True, tag="Make"):
    """Begin to make what this rank lets others read, from its weights as they are now; with `digests`, to digest it."""

    digests: bool
    ready_flags: bool = msgspec.field(default=False, name="parts")
    """True if all readers know ready flags."""


class ExportMemory(RankCommand, frozen=True, tag="Expose"):
    """Make this rank's memory readable as it is now; digest its share of the model if `digests`."""

    digests: bool
    prepared: bool = msgspec.field(default=False, name="made")
    """`PrepareExport` was said in this publication: nothing is begun anew."""
    ready_flags: bool = msgspec.field(default=False, name="parts")
    """As of `PrepareExport`."""


class DigestExported(RankCommand, frozen=True, tag="Digest"):
    """Digest this rank's share of what it has exposed."""


class JoinSends(RankCommand, frozen=True, tag="Join"):
    """Take part in sending `epoch`, by a thread of this rank's own, to whoever comes to `address`."""

    address: str
    token: str
    epoch: int
    deadline_s: float


class ReadStage(RankCommand, frozen=True, tag="Read"):
    """Read and digest the buckets of this rank's stage, and what of `wanted` engines report of them."""

    wanted: tuple[tuple[str, int], ...]


class RefillStage(RankCommand, frozen=True, tag="Refill"):
    """Read buckets `first` to `last`, exclusive, once more; each on its stage, which sends it."""

    first: int
    last: int


class JoinBroadcast(RankCommand, frozen=True, tag="Broadcast"):
    """Where this rank is a source, have it meet the engines of `epoch`."""

    address: str
    group: str
    backend: str
    world_size: int
    token: str
    epoch: int
    deadline_s: float
    whole: bool
    """What was read last is all there; otherwise each bucket is read again."""


class KeepWaiting(RankCommand, frozen=True, tag="Beat"):
    """Nothing to do; the leader is alive."""


class SnapshotTaken(RankCommand, frozen=True, tag="Taken"):
    """The snapshot of `version` is taken; nobody is needed for the rest."""

    version: int
    stood_s: float = 0.0
    """How long training stood still for engines to catch up, or for a buffer."""
    ahead: str = ""
    """Why training must not go on from it, though its publication does."""


class Finish(RankCommand, frozen=True, tag="Finish"):
    """The publication is over."""

    result: PublicationResult = msgspec.field(name="verdict")
    report: PublishReport


PipelineCommand = ReadStage | RefillStage | JoinBroadcast
"""What `stages.Stages` carries out."""
AnyRankCommand = (
    RankZeroReady
    | RankZeroFailed
    | AssembleBucket
    | PrepareExport
    | ExportMemory
    | DigestExported
    | JoinSends
    | PipelineCommand
    | KeepWaiting
    | SnapshotTaken
    | Finish
)

_DECODER: Final[msgspec.msgpack.Decoder[AnyRankCommand]] = msgspec.msgpack.Decoder(AnyRankCommand)


class CommandedRanks:
    """The group of one source, as the leader and the others speak in it."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def tell(self, command: AnyRankCommand) -> None:
        """Root only: give `command` to every rank. Collective."""
        self._source.agree(msgspec.msgpack.encode(command))

    def hear(self) -> AnyRankCommand:
        """Others only: the leader's next order. Collective."""
        return _DECODER.decode(self._source.agree(None))


def unexpected_command(command: AnyRankCommand, expected: str) -> RuntimeError:  # noqa: C901  one line for each order
    """The error of a rank that is not where the leader believes it to be."""
    match command:
        case RankZeroReady() | RankZeroFailed():
            told = "that the leader stands"
        case AssembleBucket():
            told = f"to assemble bucket {command.index}"
        case PrepareExport():
            told = "to make what it exposes"
        case ExportMemory():
            told = "to expose its memory"
        case DigestExported():
            told = "to digest its share"
        case JoinSends():
            told = f"to send epoch {command.epoch}"
        case ReadStage() | RefillStage() | JoinBroadcast():
            told = "to read or broadcast its stage"
        case KeepWaiting():
            told = "to wait"
        case SnapshotTaken():
            told = f"that the snapshot of version {command.version} is taken"
        case Finish():
            told = f"that version {command.report.version} is over"
        case _:  # pragma: no cover
            assert_never(command)
    return RuntimeError(f"this rank was told {told}, expected {expected}: call connect and publish on all ranks alike")
