"""The commands of a round to its agents, built from its `Publish`. Pure; `PendingCommands` repeats them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..protocol import (
    Abort,
    Commit,
    Digest,
    Endpoint,
    Epoch,
    Pause,
    Prepare,
    Publish,
    ReceivingEngine,
    Send,
    ToEngine,
    Transfer,
    TransportKind,
    Withdraw,
    clip_each,
)
from .limits import Limits

if TYPE_CHECKING:
    from .participants import Participant


class RoundCommands:
    """Builds the commands of one round. Equal commands are one object, which the bus encodes once."""

    def __init__(self, publish: Publish, limits: Limits) -> None:
        self._publish = publish
        self._limits = limits
        self._built: dict[tuple[object, ...], ToEngine] = {}

    def prepare(self, participant: Participant) -> ToEngine:
        """Compare the manifest with the server."""
        return self._once(
            (Prepare, participant.epoch, participant.transport),
            lambda: Prepare(
                channel=self._publish.channel,
                epoch=participant.epoch,
                version=self._publish.version,
                manifest=self._publish.manifest,
                table=self._publish.table,
                transport=participant.transport or TransportKind.DISK,
                policy=self._publish.policy,
                deadline_s=self._limits.prepare_s,
                publication_signature=self._publish.publication_signature,
                rollback=self._publish.rollback,
            ),
        )

    def pause(self, participant: Participant) -> ToEngine:
        """Stop generating."""
        return self._once(
            (Pause, participant.epoch),
            lambda: Pause(
                channel=self._publish.channel,
                epoch=participant.epoch,
                mode=self._publish.policy.pause,
                lease_s=self._limits.lease_s,
                deadline_s=self._limits.pause_s,
            ),
        )

    def send(self, epoch: Epoch, participants: Sequence[Participant]) -> Send:
        """Open the transports for `participants`. Assigns their ranks in a collective group; the trainer has rank 0."""
        receivers: list[ReceivingEngine] = []
        rank = 1
        for participant in participants:
            if participant.transport is TransportKind.DISTRIBUTED:
                participant.rank_offset = rank
                rank += participant.info.tp
            transport = participant.transport or TransportKind.DISK
            told = not self._publish.table or transport is TransportKind.DISTRIBUTED
            receiver = ReceivingEngine(
                engine=participant.name,
                transport=transport,
                tp=participant.info.tp,
                url=participant.info.url,
                shares=participant.shares_gpu and told,
            )
            receivers.append(receiver)
        return Send(
            channel=self._publish.channel,
            epoch=epoch,
            version=self._publish.version,
            receivers=tuple(receivers),
            deadline_s=self._publish.policy.transfer_timeout_s,
        )

    def withdraw(self, epoch: Epoch, out: Mapping[str, str]) -> Withdraw:
        """Stop waiting for the engines in `out`, each with its reason."""
        engines = {name: clip_each(reason, len(out)) for name, reason in out.items()}
        return Withdraw(channel=self._publish.channel, epoch=epoch, engines=engines)

    def transfer(self, participant: Participant, offer: Endpoint) -> ToEngine:
        """Take the tensors."""
        return self._once(
            (Transfer, participant.epoch, offer.transport, participant.rank_offset),
            lambda: Transfer(
                channel=self._publish.channel,
                epoch=participant.epoch,
                version=self._publish.version,
                manifest=self._publish.manifest,
                table=self._publish.table,
                offer=offer,
                rank_offset=participant.rank_offset,
                deadline_s=self._publish.policy.transfer_timeout_s,
            ),
        )

    def commit(self, participant: Participant, table: Digest) -> ToEngine:
        """The version is durable: serve it."""
        return self._once(
            (Commit, participant.epoch),
            lambda: Commit(
                channel=self._publish.channel,
                epoch=participant.epoch,
                version=self._publish.version,
                table=table,
                flush=self._publish.policy.flush,
                deadline_s=self._limits.resume_s,
            ),
        )

    def abort(self, participant: Participant, reason: str) -> ToEngine:
        """Stop what the round began."""
        channel, deadline_s = self._publish.channel, self._limits.abort_s
        return self._once(
            (Abort, participant.epoch, reason),
            lambda: Abort(channel=channel, epoch=participant.epoch, reason=reason, deadline_s=deadline_s),
        )

    def _once(self, key: tuple[object, ...], make: Callable[[], ToEngine]) -> ToEngine:
        known = self._built.get(key)
        if known is None:
            known = self._built[key] = make()
        return known
