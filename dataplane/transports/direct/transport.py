"""The direct transport: engine workers copy out of the memory that the trainer's ranks export. One host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...errors import Unsupported
from ...processes import default_runtime_dir
from ..interface import LoadedBy, ReceiverContext, SenderContext, Transport

if TYPE_CHECKING:
    from ..interface import Receiver, Sender


def _sender(context: SenderContext) -> Sender:
    from .sender import DirectSender  # noqa: PLC0415  costs the import of torch

    if context.expose is None:
        raise Unsupported("this trainer's source cannot expose its memory: choose the local transport")
    return DirectSender(context.runtime_dir or default_runtime_dir(), context.channel, context.expose)


def _receiver(context: ReceiverContext) -> Receiver:
    from .receiver import DirectReceiver  # noqa: PLC0415  costs the import of torch

    return DirectReceiver(context.runtime_dir or default_runtime_dir(), context.ahead)


TRANSPORT: Final[Transport] = Transport(
    name="direct", sender=_sender, receiver=_receiver, loaded_by=LoadedBy.LOADER, reads_memory=True
)
