"""The disk transport: a safetensors checkpoint in a folder that trainer and engines both see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ...errors import Unsupported
from ..interface import LoadedBy, ReceiverContext, SenderContext, Transport

if TYPE_CHECKING:
    from ..interface import Receiver, Sender


def _sender(context: SenderContext) -> Sender:
    from .checkpoint_transport import DiskSender  # noqa: PLC0415  costs the import of torch

    if context.checkpoint_dir is None:
        raise Unsupported("the disk transport needs checkpoint_dir, a folder that trainer and engines both see")
    return DiskSender(context.checkpoint_dir, context.channel, context.hf_config_dir)


def _receiver(context: ReceiverContext) -> Receiver:
    from .checkpoint_transport import DiskReceiver  # noqa: PLC0415  costs the import of torch

    del context
    return DiskReceiver()


TRANSPORT: Final[Transport] = Transport(name="disk", sender=_sender, receiver=_receiver, loaded_by=LoadedBy.FILES)
