"""The distributed transport: whole buckets broadcast in collective groups of trainer ranks and engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...processes import default_runtime_dir
from ..interface import LoadedBy, ReceiverContext, SenderContext, Transport

if TYPE_CHECKING:
    from ..interface import Receiver, Sender


def _sender(context: SenderContext) -> Sender:
    import torch  # noqa: PLC0415  costs the import of torch

    from .sender import DistributedSender  # noqa: PLC0415  costs the import of torch.distributed

    return DistributedSender(context.host, context.channel, torch.device(context.device))


def _receiver(context: ReceiverContext) -> Receiver:
    from ...processes import warm_up_name_resolution  # noqa: PLC0415  costs the import of torch
    from .receiver import DistributedReceiver  # noqa: PLC0415  costs the import of torch.distributed

    warm_up_name_resolution()
    return DistributedReceiver(context.runtime_dir or default_runtime_dir(), hands_on=context.hands_on)


TRANSPORT: Final[Transport] = Transport(
    name="distributed", sender=_sender, receiver=_receiver, loaded_by=LoadedBy.GROUP, divides=True
)
