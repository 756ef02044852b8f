"""What a round tells its agents, built from the `Publish` that began it. Pure; `PendingCommands` repeats it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
from .participant import Participant


class RoundCommands:
    """The commands of one round. What several engines are told alike is one object: the bus encodes it once."""

    def __init__(self, publish: Publish, limits: Limits) -> None:
        self._publish = publish
        self._limits = limits
        self._given: dict[tuple[object, ...], ToEngine] = {}

    def prepare(self, member: Participant) -> ToEngine:
        """Compare the manifest with the server."""
        return self._once(
            (Prepare, member.epoch, member.transport),
            lambda: Prepare(
                channel=self._publish.channel,
                epoch=member.epoch,
                version=self._publish.version,
                manifest=self._publish.manifest,
                table=self._publish.table,
                transport=member.transport or TransportKind.DISK,
                policy=self._publish.policy,
                deadline_s=self._limits.prepare_s,
                publication_signature=self._publish.publication_signature,
                rollback=self._publish.rollback,
            ),
        )

    def pause(self, member: Participant) -> ToEngine:
        """Stop generating."""
        return self._once(
            (Pause, member.epoch),
            lambda: Pause(
                channel=self._publish.channel,
                epoch=member.epoch,
                mode=self._publish.policy.pause,
                lease_s=self._limits.lease_s,
                deadline_s=self._limits.pause_s,
            ),
        )

    def send(self, epoch: Epoch, members: Sequence[Participant]) -> Send:
        """Open the transports for `members`, whose ranks in a collective group are counted here: 0 is the trainer's."""
        receivers: list[ReceivingEngine] = []
        rank = 1
        for member in members:
            if member.transport is TransportKind.DISTRIBUTED:
                member.rank_offset = rank
                rank += member.info.tp
            transport = member.transport or TransportKind.DISK
            told = not self._publish.table or transport is TransportKind.DISTRIBUTED
            receiver = ReceivingEngine(
                engine=member.name,
                transport=transport,
                tp=member.info.tp,
                url=member.info.url,
                shares=member.shares and told,
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
        """Wait for these no longer."""
        engines = {name: clip_each(reason, len(out)) for name, reason in out.items()}
        return Withdraw(channel=self._publish.channel, epoch=epoch, engines=engines)

    def transfer(self, member: Participant, offer: Endpoint) -> ToEngine:
        """Take the tensors."""
        return self._once(
            (Transfer, member.epoch, offer.transport, member.rank_offset),
            lambda: Transfer(
                channel=self._publish.channel,
                epoch=member.epoch,
                version=self._publish.version,
                manifest=self._publish.manifest,
                table=self._publish.table,
                offer=offer,
                rank_offset=member.rank_offset,
                deadline_s=self._publish.policy.transfer_timeout_s,
            ),
        )

    def commit(self, member: Participant, table: Digest) -> ToEngine:
        """The version is durable: serve it."""
        return self._once(
            (Commit, member.epoch),
            lambda: Commit(
                channel=self._publish.channel,
                epoch=member.epoch,
                version=self._publish.version,
                table=table,
                flush=self._publish.policy.flush,
                deadline_s=self._limits.resume_s,
            ),
        )

    def abort(self, member: Participant, reason: str) -> ToEngine:
        """Stop what the round began."""
        channel, deadline_s = self._publish.channel, self._limits.abort_s
        return self._once(
            (Abort, member.epoch, reason),
            lambda: Abort(channel=channel, epoch=member.epoch, reason=reason, deadline_s=deadline_s),
        )

    def _once(self, key: tuple[object, ...], make: Callable[[], ToEngine]) -> ToEngine:
        known = self._given.get(key)
        if known is None:
            known = self._given[key] = make()
        return known
