"""Replies of one engine to the coordinator, kept so that a repeated command gets the same reply."""

from typing import Final

from weightbus.control.protocol import (
    Channel,
    EngineHealth,
    EngineMessage,
    Epoch,
    Failed,
    Pause,
    Paused,
    Prepare,
    Prepared,
    RequestId,
    Serving,
    Step,
    ToEngine,
    Transfer,
    Transferred,
    Verified,
    Version,
)

from .events import Answer, Received, VerificationPassed

_REASON: Final = 2000


class PendingReplies:
    """Makes the replies of one engine, each under a key of its own, and remembers those of the current epoch."""

    def __init__(self, channel: Channel, incarnation: str) -> None:
        self._channel = channel
        self._generation = incarnation
        self._keys = 0
        self._given: dict[type[ToEngine], tuple[EngineMessage, ...]] = {}

    def forget(self) -> None:
        """Drop all replies: none of them answers a command that comes from now on."""
        self._given.clear()

    def gave(self, kind: type[ToEngine], epoch: Epoch) -> bool:
        """Whether a command of this kind got a reply at `epoch`."""
        return any(message.epoch == epoch for message in self._given.get(kind, ()))

    def again(self, command: ToEngine) -> tuple[Answer, ...]:
        """The earlier replies to `command`; empty when it has to be carried out."""
        given = self._given.get(type(command), ())
        return tuple(Answer(message) for message in given if message.epoch == command.epoch)

    def prepared(self, command: ToEngine, seconds: float) -> Answer:
        """Reply that the manifest fits."""
        message = Prepared(request=self._key(), channel=self._channel, epoch=command.epoch, seconds=seconds)
        return self._give(command, message)

    def paused(self, command: ToEngine, seconds: float) -> Answer:
        """Reply that the server is paused."""
        message = Paused(request=self._key(), channel=self._channel, epoch=command.epoch, seconds=seconds)
        return self._give(command, message)

    def transferred(self, command: Transfer, received: Received, seconds: float) -> Answer:
        """Reply that every bucket was loaded."""
        message = Transferred(
            request=self._key(),
            channel=self._channel,
            epoch=command.epoch,
            bytes=received.bytes,
            buckets=received.buckets,
            seconds=seconds,
        )
        return self._give(command, message)

    def verified(self, command: Transfer, proven: VerificationPassed, seconds: float) -> Answer:
        """Reply that the weights are the version. Sent after `transferred`, and repeated together with it."""
        message = Verified(
            request=self._key(),
            channel=self._channel,
            epoch=command.epoch,
            version=command.version,
            table=command.table,
            verified_by=proven.verified_by,
            seconds=seconds,
        )
        return self._give(command, message, after=self._given.get(Transfer, ()))

    def serving(self, command: ToEngine, version: Version | None, seconds: float, paused_s: float) -> Answer:
        """Reply which version is served. Made anew each time: it is a fact of now, not of the first command."""
        message = Serving(
            request=self._key(),
            channel=self._channel,
            epoch=command.epoch,
            version=version,
            seconds=seconds,
            paused_s=paused_s,
        )
        return Answer(message)

    def failed(self, command: ToEngine, step: Step, health: EngineHealth, reason: str) -> Answer:
        """Reply that `step` of `command` failed, and the server is `health` now."""
        lost = self.lost(command.epoch, step, health, reason)
        if isinstance(command, Prepare | Pause | Transfer):
            earlier = self._given.get(type(command), ()) if step is Step.VERIFY else ()
            return self._give(command, lost.message, after=earlier)
        return lost

    def lost(self, epoch: Epoch, step: Step, health: EngineHealth, reason: str) -> Answer:
        """Report a failure between two commands. Not repeated: the next command finds the server as it is then."""
        message = Failed(
            request=self._key(),
            channel=self._channel,
            epoch=epoch,
            step=step,
            health=health,
            reason=reason[:_REASON],
        )
        return Answer(message)

    def _give(self, command: ToEngine, message: EngineMessage, after: tuple[EngineMessage, ...] = ()) -> Answer:
        self._given[type(command)] = (*after, message)
        return Answer(message)

    def _key(self) -> RequestId:
        self._keys += 1
        return RequestId(f"{self._generation}-{self._keys}")
