"""What a round tells its agents, built from the `Publish` that began it. Pure; `Duties` repeats it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .ids import Epoch
from .limits import Limits
from .member import Member
from .messages import (
    Abort,
    Commit,
    Offer,
    Pause,
    Prepare,
    Publish,
    Receiver,
    Send,
    Transfer,
    TransportKind,
    Withdraw,
)


class Orders:
    """The commands of one round."""

    def __init__(self, publish: Publish, limits: Limits) -> None:
        self._publish = publish
        self._limits = limits

    def prepare(self, member: Member) -> Prepare:
        """Compare the manifest with the server."""
        return Prepare(
            channel=self._publish.channel,
            epoch=member.epoch,
            version=self._publish.version,
            manifest=self._publish.manifest,
            table=self._publish.table,
            transport=member.transport or TransportKind.DISK,
            policy=self._publish.policy,
            deadline_s=self._limits.prepare_s,
        )

    def pause(self, member: Member) -> Pause:
        """Stop generating."""
        return Pause(
            channel=self._publish.channel,
            epoch=member.epoch,
            mode=self._publish.policy.pause,
            lease_s=self._limits.lease_s,
            deadline_s=self._limits.pause_s,
        )

    def send(self, epoch: Epoch, members: Sequence[Member]) -> Send:
        """Open the transports for `members`, whose ranks in a collective group are counted here: 0 is the trainer's."""
        receivers: list[Receiver] = []
        rank = 1
        for member in members:
            if member.transport is TransportKind.DISTRIBUTED:
                member.rank_offset = rank
                rank += member.info.tp
            transport = member.transport or TransportKind.DISK
            receivers.append(Receiver(engine=member.name, transport=transport, tp=member.info.tp, url=member.info.url))
        return Send(
            channel=self._publish.channel,
            epoch=epoch,
            version=self._publish.version,
            receivers=tuple(receivers),
            deadline_s=self._publish.policy.transfer_timeout_s,
        )

    def withdraw(self, epoch: Epoch, out: Mapping[str, str]) -> Withdraw:
        """Wait for these no longer."""
        return Withdraw(channel=self._publish.channel, epoch=epoch, engines=dict(out))

    def transfer(self, member: Member, offer: Offer) -> Transfer:
        """Take the tensors."""
        return Transfer(
            channel=self._publish.channel,
            epoch=member.epoch,
            version=self._publish.version,
            manifest=self._publish.manifest,
            table=self._publish.table,
            offer=offer,
            rank_offset=member.rank_offset,
            deadline_s=self._publish.policy.transfer_timeout_s,
        )

    def commit(self, member: Member) -> Commit:
        """The version is durable: serve it."""
        return Commit(
            channel=self._publish.channel,
            epoch=member.epoch,
            version=self._publish.version,
            table=self._publish.table,
            flush=self._publish.policy.flush,
            deadline_s=self._limits.resume_s,
        )

    def abort(self, member: Member, reason: str) -> Abort:
        """Stop what the round began."""
        return Abort(channel=self._publish.channel, epoch=member.epoch, reason=reason, deadline_s=self._limits.abort_s)
